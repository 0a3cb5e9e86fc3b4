"""The layer in Flax, NNX and Linen side by side, with the same weights and equal answers."""

import jax
import jax.numpy as jnp
from flax import nnx

from jax_mxfp4_moe.layers import Mxfp4Moe

x = jax.random.normal(jax.random.key(1), (2, 5, 128))

# NNX: the layer holds its arrays. Router and biases are nnx.Param; the bytes of the experts are not, so no optimizer sees them.
layer = Mxfp4Moe(128, 256, num_experts=8, num_experts_per_tok=2, num_shared_experts=1, rngs=nnx.Rngs(0))
y = nnx.jit(lambda layer, x: layer(x))(layer, x)
trained = [".".join(path) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))]
print(f"NNX    y {y.shape}, parameters: {trained}")

# Linen: the layer is given its arrays, here those of the NNX layer.
module, variables = layer.to_linen()
y_linen = jax.jit(module.apply)(variables, x)
print(f"Linen  y {y_linen.shape}, collections: { {name: sorted(arrays) for name, arrays in variables.items()} }")

print(f"equal: {bool(jnp.allclose(y, y_linen, atol=1e-6))}")
