"""Expert weights in bfloat16, float16 or float32, quantized to MXFP4 while they are read, some rows at a time.

Most checkpoints have tensors for each expert. Those with all experts in one tensor, `gate_up_proj` and `down_proj`, share their names and
not their order: which it is follows from `model_type` alone, since shapes cannot tell where D = F or D = 2F.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.config import word
from jax_mxfp4_moe.checkpoint.experts import FLOATS, Matrix, NamedExperts, Place, find
from jax_mxfp4_moe.checkpoint.files import Checkpoint, Tensor, expect
from jax_mxfp4_moe.mxfp4 import BLOCK
from jax_mxfp4_moe.quantize import Rounding, ScaleRule, quantize

NAME = "dense"
TABLES = (names.DENSE, names.DENSE_W, names.DENSE_STACKED)
SHARED_TABLES = (names.shared(names.DENSE), names.shared(names.DENSE_W))

INPUT_MAJOR = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
"""Model types whose stacked weights are [E, D, 2F] and [E, F, D]: the contraction axis is not last."""

INTERLEAVED = ("gpt_oss",)
"""Model types whose gate and up alternate; in the others gate comes first."""

OUTPUT_MAJOR = (
    "deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Model types whose stacked weights, as transformers 5 has them, are [E, 2F, D] and [E, D, F]."""

CHUNK_ELEMENTS = 1 << 20
"""Elements that are quantized at a time: they exist in float32 meanwhile."""


def routed(checkpoint: Checkpoint, layer: int) -> DenseExperts | None:
    """The experts of a layer, or None if they do not have the names of this format."""
    return _experts(checkpoint, layer, TABLES)


def shared(checkpoint: Checkpoint, layer: int) -> DenseExperts | None:
    """The shared experts of a layer, as one; None if there are none."""
    return _experts(checkpoint, layer, SHARED_TABLES)


def _experts(checkpoint: Checkpoint, layer: int, tables: tuple[names.NameTable, ...]) -> DenseExperts | None:
    for table in tables:
        place = find(checkpoint, layer, table)
        if place is not None:
            return DenseExperts(place, word(checkpoint.config, "model_type"))
    return None


class DenseExperts(NamedExperts):
    """Experts in floats; `rules` are the quantization rules, which the caller sets."""

    is_dense = True
    rules: dict[str, Any]

    def __init__(self, place: Place, model_type: str | None) -> None:
        super().__init__(place, NAME)
        self.rules = {}
        self.transposed = place.stacked and model_type in INPUT_MAJOR
        first = _float_weight(place.tensors(place.part("gate"), "codes")[0], place)
        if len(first.shape) != (3 if place.stacked else 2):
            raise ValueError(
                f"{first}: found; expected {'[E, rows, columns]' if place.stacked else '[rows, columns]'}."
            )
        if place.stacked and model_type not in INPUT_MAJOR + OUTPUT_MAJOR:
            raise ValueError(
                f"{first}: found, with model_type={model_type!r}; expected one of {', '.join(INPUT_MAJOR + OUTPUT_MAJOR)}, which tell the "
                "order of axes and rows of stacked weights. Set model_type in config.json to one that has this order."
            )
        lead, (rows, hidden) = first.shape[:-2], first.shape[-2:][:: -1 if self.transposed else 1]
        fused = 2 if place.is_gate_up_fused else 1
        if rows % fused:
            raise ValueError(f"{first}: found; expected an even number of rows, gate and up together.")
        self._set_sizes(lead[0] if place.stacked else len(place.ids), hidden, rows // fused)
        if fused == 2 and model_type not in INTERLEAVED:
            f = self.intermediate_size
            self.rows = {"gate": slice(0, f), "up": slice(f, 2 * f)}
        for part in place.table:
            shape = (hidden, self.intermediate_size) if part == "down" else (rows, hidden)
            for tensor in place.tensors(part, "codes"):
                expect(_float_weight(tensor, place), FLOATS, (*lead, *(shape[::-1] if self.transposed else shape)))

    def matrix(self, expert: int, projection: str, part: slice) -> Matrix:
        """Quantizes the part that is wanted."""
        weight = self.place.entry(projection, "codes", expert)
        weight = (weight.T if self.transposed else weight)[self.rows.get(projection, slice(None))]
        return quantize_rows(weight[:, part] if projection == "down" else weight[part], **self.rules)


def _float_weight(tensor: Tensor, place: Place) -> Tensor:
    if tensor.dtype in FLOATS:
        return tensor
    raise ValueError(
        f"{tensor}: found in {place.where}; expected {', '.join(FLOATS)}, or MXFP4 codes in U8 with their scales in one of the formats "
        "that this package reads. float8 and integer weights are not read: convert them to bfloat16 first."
    )


def quantize_rows(weight: np.ndarray, *, scale_rule: ScaleRule = "even", rounding: Rounding = "nearest_even") -> Matrix:
    """Quantizes a float matrix [rows, n], `CHUNK_ELEMENTS` at a time, into NumPy arrays."""
    rows, length = weight.shape
    codes, scales = np.empty((rows, length // 2), np.uint8), np.empty((rows, length // BLOCK), np.uint8)
    step = max(CHUNK_ELEMENTS // max(length, 1), 1)
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        found = _quantize(jnp.asarray(np.ascontiguousarray(weight[chunk])), scale_rule=scale_rule, rounding=rounding)
        codes[chunk], scales[chunk] = found.codes, found.scales
    return codes, scales


@functools.partial(jax.jit, static_argnames=("scale_rule", "rounding"))
def _quantize(x: jax.Array, *, scale_rule: ScaleRule, rounding: Rounding) -> Any:
    return quantize(x, scale_rule=scale_rule, rounding=rounding)
