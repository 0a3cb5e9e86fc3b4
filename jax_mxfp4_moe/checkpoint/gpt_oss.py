"""openai/gpt-oss, with its Hugging Face names and with its original names.

Codes, scales and biases of all experts are stacked, and gate and up rows alternate in all three. Its form in bfloat16 is read by
dense.py, and its export by AMD Quark by quark.py.
"""

from __future__ import annotations

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.config import check_method
from jax_mxfp4_moe.checkpoint.experts import Experts, PackedExperts, find
from jax_mxfp4_moe.checkpoint.files import Checkpoint

NAME = "gpt_oss"
TABLES = (names.GPT_OSS, names.GPT_OSS_ORIGINAL)


def routed(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The experts of a layer, or None if they do not have the names of this format."""
    for table in TABLES:
        place = find(checkpoint, layer, table)
        if place is not None:
            check_method(place.where, checkpoint.config, NAME, "mxfp4")
            return PackedExperts(place, NAME)
    return None


def shared(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """None: gpt-oss has no shared experts."""
    return None
