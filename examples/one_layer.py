"""What to paste first: one mixture-of-experts layer in MXFP4, compared with the float layer it was made from."""

import jax
import jax.numpy as jnp

from jax_mxfp4_moe import mxfp4_moe, quantize_weights, topk_routing

experts, hidden, intermediate, tokens = 8, 256, 512, 16
keys = jax.random.split(jax.random.key(0), 4)
gate_up = jax.random.normal(keys[0], (experts, 2 * intermediate, hidden)) * hidden**-0.5
down = jax.random.normal(keys[1], (experts, hidden, intermediate)) * intermediate**-0.5
x = jax.random.normal(keys[2], (tokens, hidden))
router_logits = jax.random.normal(keys[3], (tokens, experts))

weights = quantize_weights(gate_up, down)
topk_weights, topk_ids = topk_routing(router_logits, num_experts_per_tok=2)
y = jax.jit(mxfp4_moe)(x, weights, topk_weights, topk_ids)

gate, up = jnp.split(jnp.einsum("td,efd->tef", x, gate_up), 2, axis=-1)
every_expert = jnp.einsum("tef,edf->ted", jax.nn.silu(gate) * up, down)
exact = (jnp.take_along_axis(every_expert, topk_ids[..., None], axis=1) * topk_weights[..., None]).sum(axis=1)
error = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
print(f"y {y.shape} {y.dtype}; {weights.nbytes:,} bytes of experts instead of {gate_up.nbytes + down.nbytes:,}")
print(f"relative error of 4-bit weights: {error:.3f}")
