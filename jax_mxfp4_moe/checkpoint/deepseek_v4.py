"""DeepSeek-V4 by its own names: codes in I8 bytes, scales in F8_E8M0; w1 is the gate, w3 the up and w2 the down projection.

Its shared experts are float8 in blocks of 128 x 128, which is not MXFP4: they are not read, and asking for them is an error. The model's
own kernels quantize activations to float8 in blocks of 128; here they stay as they are.
"""

from __future__ import annotations

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.config import check_method, word
from jax_mxfp4_moe.checkpoint.experts import APART, Experts, PackedExperts, find
from jax_mxfp4_moe.checkpoint.files import Checkpoint

NAME = "deepseek_v4"


def routed(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The experts of a layer, or None if they do not have the names of this format."""
    place = find(checkpoint, layer, names.DEEPSEEK_V4)
    if place is None:
        return None
    check_method(place.where, checkpoint.config, NAME, "fp8")
    stated = word(checkpoint.config, "expert_dtype")
    if stated not in (None, "fp4"):
        raise ValueError(
            f"load: {place.where} has expert_dtype={stated!r} in its configuration; expected 'fp4'. This package reads no other."
        )
    experts = PackedExperts(place, NAME)
    experts.notes = (
        "The model's own kernels quantize activations to float8 in blocks of 128, which this package does not do: they stay as they are.",
    )
    return experts


def shared(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """None, or a ValueError where the checkpoint has float8 shared experts."""
    place = find(checkpoint, layer, names.shared(names.DEEPSEEK_V4))
    if place is None:
        return None
    weight = place.tensors("gate", "codes")[0]
    raise ValueError(
        f"load: the shared experts are float8 ({weight}); expected MXFP4 to put them beside the routed ones. {APART}"
    )
