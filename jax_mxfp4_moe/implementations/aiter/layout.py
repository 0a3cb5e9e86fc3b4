"""The layout "aiter:16x16" of weights, and where aiter keeps scale bytes: each a pair of inverses.

aiter's kernels want both dimensions of both products in multiples of 256, so `shuffle` pads with zeros: D and F of each stack, and
within gate_up the gate rows and the up rows separately. What is padded multiplies by code 0 and adds nothing. The true sizes
are the arrays' lengths and are what `unshuffle` trims to.

  codes   [E, N, K / 2]. Each expert is cut into tiles of 16 rows by 32 bytes; a tile is stored as two halves of 16 bytes a row.
  scales  [E, N, K / 32], in the order of `shuffle_scales`: all rows of all experts are one matrix, cut into tiles of 32 rows by 8
          blocks, in which a lane's four bytes (two rows 16 apart, two blocks 4 apart) are neighbours.

Activations' scales have the second order as well, their rows being the sorted positions (`shuffle_scales` on gathered rows); the
codes of activations stay in the order of tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_mxfp4_moe.mxfp4 import BLOCK, PACKED, SCALE_BIAS, Mxfp4Array
from jax_mxfp4_moe.weights import MoeWeights

TAG = "aiter:16x16"
MULTIPLE = 256
"""aiter's products need this multiple of both dimensions of a weight."""
SCALE_ROWS, SCALE_COLUMNS = 32, 8
"""Rows and blocks of one tile of scales."""


def padded(n: int) -> int:
    """n rounded up to what aiter's products need."""
    return -(-n // MULTIPLE) * MULTIPLE


def shuffle_codes(codes: jax.Array) -> jax.Array:
    """[..., rows, bytes] packed codes to aiter's 16x16 order, shape unchanged; rows a multiple of 16, bytes of 32.

    Law: `unshuffle_codes(shuffle_codes(c)) == c`.
    """
    *lead, rows, size = codes.shape
    tiles = codes.reshape(*lead, rows // 16, 16, size // 32, 2, 16)
    return jnp.moveaxis(tiles, -4, -2).reshape(codes.shape)


def unshuffle_codes(codes: jax.Array) -> jax.Array:
    """The inverse of `shuffle_codes`."""
    *lead, rows, size = codes.shape
    tiles = codes.reshape(*lead, rows // 16, size // 32, 2, 16, 16)
    return jnp.moveaxis(tiles, -2, -4).reshape(codes.shape)


def shuffle_scales(scales: jax.Array) -> jax.Array:
    """[rows, blocks] scale bytes to aiter's order, shape unchanged; rows a multiple of 32, blocks of 8.

    Law: `unshuffle_scales(shuffle_scales(s)) == s`.
    """
    rows, blocks = scales.shape
    tiles = scales.reshape(rows // SCALE_ROWS, 2, 16, blocks // SCALE_COLUMNS, 2, 4)
    return tiles.transpose(0, 3, 5, 2, 4, 1).reshape(rows, blocks)


def unshuffle_scales(scales: jax.Array) -> jax.Array:
    """The inverse of `shuffle_scales`."""
    rows, blocks = scales.shape
    tiles = scales.reshape(rows // SCALE_ROWS, blocks // SCALE_COLUMNS, 4, 16, 2, 2)
    return tiles.transpose(0, 5, 3, 1, 4, 2).reshape(rows, blocks)


def sort_scales(scales: jax.Array, source: jax.Array) -> jax.Array:
    """Scales of activations as stage 1 and 2 read them: row `source[r]` at sorted position r, in the order of `shuffle_scales`.

    Args:
      scales: [rows, blocks] uint8, blocks a multiple of 8.
      source: [positions] int32, the row that lies at each sorted position; what is out of range gives 0, and is not read.

    Returns:
      [positions rounded up to 32, blocks].
    """
    padding = -source.shape[0] % SCALE_ROWS
    source = jnp.pad(source, (0, padding), constant_values=-1)
    valid = (source >= 0) & (source < scales.shape[0])
    return shuffle_scales(jnp.where(valid[:, None], scales[jnp.where(valid, source, 0)], 0))


def unsort_scales(sorted_scales: jax.Array, source: jax.Array, rows: int) -> jax.Array:
    """The inverse of `sort_scales` for those of the `rows` rows that `source` names; 0 for the others."""
    unshuffled = unshuffle_scales(sorted_scales)[: source.shape[0]]
    target = jnp.where((source >= 0) & (source < rows), source, rows)
    return jnp.zeros((rows, sorted_scales.shape[1]), sorted_scales.dtype).at[target].set(unshuffled, mode="drop")


def shuffle(weights: MoeWeights) -> MoeWeights:
    """From "packed" to this layout. Law: `unshuffle(shuffle(w)) == w`; biases stay as they are."""
    return weights.replace(gate_up=_shuffle(weights.gate_up, 2), down=_shuffle(weights.down, 1))


def unshuffle(weights: MoeWeights) -> MoeWeights:
    """From this layout to "packed"."""
    return weights.replace(
        gate_up=_unshuffle(weights.gate_up, 2, weights.intermediate_size),
        down=_unshuffle(weights.down, 1, weights.hidden_size),
    )


@functools.partial(jax.jit, static_argnames="parts")
def _shuffle(a: Mxfp4Array, parts: int) -> Mxfp4Array:
    """One stack, whose rows are `parts` matrices that are padded each."""
    experts, rows, length = a.shape
    rows //= parts

    def pad(bytes_: jax.Array, unit: int, value: int) -> jax.Array:
        split = bytes_.reshape(experts, parts, rows, length // unit)
        widths = ((0, 0), (0, 0), (0, padded(rows) - rows), (0, (padded(length) - length) // unit))
        return jnp.pad(split, widths, constant_values=value).reshape(
            experts, parts * padded(rows), padded(length) // unit
        )

    codes = shuffle_codes(pad(a.codes, 2, 0))
    scales = pad(a.scales, BLOCK, SCALE_BIAS)
    scales = shuffle_scales(scales.reshape(-1, scales.shape[-1])).reshape(scales.shape)
    return Mxfp4Array(codes, scales, length=length, layout=TAG)


@functools.partial(jax.jit, static_argnames=("parts", "rows"))
def _unshuffle(a: Mxfp4Array, parts: int, rows: int) -> Mxfp4Array:
    experts, _, length = a.shape

    def trim(bytes_: jax.Array, unit: int) -> jax.Array:
        split = bytes_.reshape(experts, parts, -1, bytes_.shape[-1])
        return split[:, :, :rows, : length // unit].reshape(experts, parts * rows, length // unit)

    scales = unshuffle_scales(a.scales.reshape(-1, a.scales.shape[-1])).reshape(a.scales.shape)
    return Mxfp4Array(trim(unshuffle_codes(a.codes), 2), trim(scales, BLOCK), length=length, layout=PACKED)
