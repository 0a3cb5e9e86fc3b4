"""The layout "triton:e4m3" of weights, for float8 products: chosen so that a weight costs about one instruction to decode.

For each expert, of N rows and K columns padded to G groups of 128 columns (4 blocks):

  codes    [G, N, 64] bytes. A group's bytes are reordered so that each of four neighbouring threads reads the bytes of one
           block: byte b of chunk i of block j comes to lie at 16 i + 4 j + b. In every four bytes, which hold elements e0 .. e7,
           the magnitudes stay where they are, and the signs move: that of e0 .. e3 to bit 7 of bytes 0 .. 3, that of e4 .. e7 to
           bit 3.
  scales   [G, N, 4] bytes d, then [N] bytes `base`: the scale byte of a block is base + d - 11. d = 12 marks a block of zeros
           whose scale byte is 0.

Rows whose scales lie further apart than 12 binades do not fit, nor do NaN scales; `fits` says so, and such weights stay packed.
The arrays keep the shapes [E, N, Kp / 2] and [E, N, Kp / 32 + 1], of which only the number of bytes has a meaning.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_mxfp4_moe.mxfp4 import BLOCK, PACKED, Mxfp4Array

TAG = "triton:e4m3"
GROUP = 128
FOLD = 11
ZEROS = 12
SCALE_NAN = 255


def padded(n: int) -> int:
    """n rounded up to whole groups."""
    return -(-n // GROUP) * GROUP


@jax.jit
def fits(a: Mxfp4Array) -> jax.Array:
    """Whether `shuffle` can hold a: one bool."""
    return _fold(a)[1].all()


def _fold(a: Mxfp4Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d, whether it is one, and base."""
    scales = a.scales.astype(jnp.int32)
    base = scales.max(axis=-1)
    d = scales - base[..., None] + FOLD
    zeros = ((a.codes.reshape(*a.scales.shape, BLOCK // 2) & 0x77) == 0).all(axis=-1) & (scales == 0)
    return jnp.where(d >= 0, d, ZEROS), ((d >= 0) | zeros) & (base < SCALE_NAN)[..., None], base


@jax.jit
def shuffle(a: Mxfp4Array) -> Mxfp4Array:
    """From "packed" to this layout. Law: `unshuffle(shuffle(a)) == a` where `fits(a)`."""
    experts, rows, length = a.shape
    groups = padded(length) // GROUP
    d, _, base = _fold(a)
    codes = jnp.pad(a.codes, ((0, 0), (0, 0), (0, padded(length) // 2 - length // 2)))
    codes = codes.reshape(experts, rows, groups, 4, 4, 4).transpose(0, 2, 1, 4, 3, 5)
    shift = jnp.array([3, 7, 3, 7], jnp.uint8)
    first = codes[..., jnp.array([0, 0, 1, 1])] >> shift & 1
    second = codes[..., jnp.array([2, 2, 3, 3])] >> shift & 1
    codes = (codes & 0x77) | first << 7 | second << 3
    d = jnp.pad(d, ((0, 0), (0, 0), (0, 4 * groups - length // BLOCK))).astype(jnp.uint8)
    d = d.reshape(experts, rows, groups, 4).transpose(0, 2, 1, 3)
    scales = jnp.concatenate([d.reshape(experts, -1), base.astype(jnp.uint8)], axis=1)
    codes, scales = codes.reshape(experts, rows, 64 * groups), scales.reshape(experts, rows, 4 * groups + 1)
    return Mxfp4Array(codes, scales, length=length, layout=TAG)


@jax.jit
def unshuffle(a: Mxfp4Array) -> Mxfp4Array:
    """From this layout to "packed"."""
    experts, rows, length = a.shape
    groups = padded(length) // GROUP
    codes = a.codes.reshape(experts, groups, rows, 4, 4, 4).transpose(0, 2, 1, 4, 3, 5)
    signs = jnp.concatenate([codes >> 7 & 1, codes >> 3 & 1], axis=-1)
    codes = (codes & 0x77) | signs[..., 0::2] << 3 | signs[..., 1::2] << 7
    scales = a.scales.reshape(experts, -1)
    d = scales[:, : 4 * groups * rows].reshape(experts, groups, rows, 4).transpose(0, 2, 1, 3)
    d = d.reshape(experts, rows, 4 * groups)[..., : length // BLOCK].astype(jnp.int32)
    base = scales[:, 4 * groups * rows :].astype(jnp.int32)
    scale = jnp.where(d == ZEROS, 0, base[..., None] + d - FOLD).astype(jnp.uint8)
    codes = codes.reshape(experts, rows, 64 * groups)[..., : length // 2]
    return Mxfp4Array(codes, scale, length=length, layout=PACKED)
