"""MXFP4 mixture-of-experts layers inside `jax.jit`, at the speed of the best kernels on the machine.

Start with `mxfp4_moe`. Flax layers are in `jax_mxfp4_moe.layers`, a layer over several devices in `jax_mxfp4_moe.parallel`, the rest
about checkpoints in `jax_mxfp4_moe.checkpoint`.
"""

from jax_mxfp4_moe.checkpoint import load
from jax_mxfp4_moe.moe import mxfp4_moe, prepare, validate
from jax_mxfp4_moe.mxfp4 import Mxfp4Array, dequantize
from jax_mxfp4_moe.quantize import quantize
from jax_mxfp4_moe.route import append_shared_experts, topk_routing
from jax_mxfp4_moe.weights import MoeWeights, quantize_weights

__version__ = "0.1.0"

__all__ = [
    "MoeWeights",
    "Mxfp4Array",
    "append_shared_experts",
    "dequantize",
    "load",
    "mxfp4_moe",
    "prepare",
    "quantize",
    "quantize_weights",
    "topk_routing",
    "validate",
]
