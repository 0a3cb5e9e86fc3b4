"""Flax modules that own a router and MXFP4 experts and call `mxfp4_moe`: `Mxfp4Moe` (NNX) and `Mxfp4MoeLinen`.

Both have the same fields and hold the same arrays under the same names, D being the hidden size, F the intermediate size and E the
routed and fused shared experts together:

  router/kernel [D, num_experts], router/bias [num_experts]   float
  gate_up_codes [E, 2F, D / 2], gate_up_scales [E, 2F, D / 32]   uint8
  down_codes [E, D, F / 2], down_scales [E, D, F / 32]   uint8
  gate_up_bias [E, 2F], down_bias [E, D]   float
  shared_experts/...   the same six of a separate shared expert, with E = 1 and F = shared_intermediate_size
  shared_gate/kernel [D, 1]   float
  correction_bias [num_experts]   float32
  activation_scale [2]   float32

Floats of the first, third, fourth and fifth line are ordinary parameters: of a quantized layer they are what can still be trained.
The bytes and `activation_scale` (`Quantized`, collection "quantized") and `correction_bias` (`RouterState`, "router_state") stand apart,
so that gradients and optimizers do not see them. All are plain arrays, which every checkpoint library can save. Arrays in the layout of
an implementation carry its tag in their names, so that no checkpoint of one layout fits a layer of another.
"""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ImportError("jax_mxfp4_moe.layers needs flax, which is not installed: pip install 'jax_mxfp4_moe[flax]'")

from jax_mxfp4_moe.layers.linen import Mxfp4MoeLinen
from jax_mxfp4_moe.layers.nnx import Mxfp4Experts, Mxfp4Moe, Quantized, RouterState

__all__ = ["Mxfp4Experts", "Mxfp4Moe", "Mxfp4MoeLinen", "Quantized", "RouterState"]
