"""MXFP4 tensors of GGUF files (type 39): blocks of 17 bytes, the scale first, then 16 bytes of codes.

The bytes of a block hold element j in the low and element j + 16 in the high nibble; here neighbours share a byte, so they are
sorted anew, a matrix at a time. ggml reads scale byte 255 as 2 ** 128; here, as in the OCP specification, it is NaN.
"""

from __future__ import annotations

import numpy as np

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.experts import Experts, Matrix, NamedExperts, Place, find
from jax_mxfp4_moe.checkpoint.files import MXFP4_BLOCKS, Checkpoint, expect
from jax_mxfp4_moe.mxfp4 import BLOCK

NAME = "gguf"


def routed(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The experts of a layer, or None if they do not have the names of this format."""
    return _experts(checkpoint, layer, names.GGUF)


def shared(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The shared experts of a layer, as one; None if there are none."""
    return _experts(checkpoint, layer, names.shared(names.GGUF))


def _experts(checkpoint: Checkpoint, layer: int, table: names.NameTable) -> Experts | None:
    place = find(checkpoint, layer, table)
    return None if place is None else GgufExperts(place)


class GgufExperts(NamedExperts):
    """Experts whose codes and scales share a tensor."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, NAME)
        first = place.tensors("gate", "codes")[0]
        lead: tuple[int | None, ...] = (None,) if place.stacked else ()
        expect(first, (MXFP4_BLOCKS,), (*lead, None, None))
        rows, length = first.shape[-2:]
        self._set_sizes(first.shape[0] if place.stacked else 1, length, rows)
        for part, shape in (("gate", (rows, length)), ("up", (rows, length)), ("down", (length, rows))):
            expect(place.tensors(part, "codes")[0], (MXFP4_BLOCKS,), (*first.shape[: len(lead)], *shape))

    def matrix(self, expert: int, projection: str, part: slice) -> Matrix:
        """Sorts the codes of the part that is wanted."""
        blocks = self.place.entry(projection, "codes", expert)
        blocks = blocks.reshape(len(blocks), -1, 1 + BLOCK // 2)
        if projection == "down":
            blocks = blocks[:, part.start // BLOCK : part.stop // BLOCK]
        else:
            blocks = blocks[part]
        rows, count, _ = blocks.shape
        return merge_nibbles(blocks[..., 1:]).reshape(rows, count * BLOCK // 2), blocks[..., 0]


def merge_nibbles(split: np.ndarray) -> np.ndarray:
    """[..., 16] bytes of elements (j, j + 16) -> [..., 16] bytes of elements (2j, 2j + 1)."""
    codes = np.concatenate([split & 0xF, split >> 4], axis=-1)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
