"""Steps 2 and 4: rows are brought to the operand form of the products, rounded to MXFP4 on the way where the problem asks for it.

The operand form of a row is PLANES rows of K elements whose weighted sum is the row, in the order of `decode.quad_position`:

  BITS  bfloat16 planes, weight 1: one holds a bfloat16 row or MXFP4 values, two a float16 row and three a float32 row. Exact.
  E4M3  float8 planes times a power of two a row: one holds MXFP4 values, two (weights 1 and 2 ** -5) a bfloat16 row. Exact where
        an element is within 2 ** -15 of the row's largest; below that the error is at most 2 ** -22 of the largest.
"""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.decode import e2m1_to_float32, power_of_two, quad_position


@triton.jit
def round_to_mxfp4(x, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr):
    """The values that `jax_mxfp4_moe.quantize` rounds x to, bit by bit; x: [blocks, 8, 4] float32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(tl.max(magnitude, axis=2), axis=1)[:, None, None]
    scale = tl.minimum(tl.maximum(((amax + CARRY) >> 23) - 2, 0), 254)
    field, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    quotient = (tl.maximum(field - scale + 127, 0) << 23) | mantissa
    power = ((105 - tl.minimum(scale, 64)) << 23).to(tl.float32, bitcast=True)
    tiny = (mantissa.to(tl.float32) * power).to(tl.int32, bitcast=True)
    scaled = tl.where(field == 0, tiny, quotient)
    # Midpoints between neighbouring magnitudes; `nearest_even` lets every other one go up only when it is exceeded.
    e: tl.constexpr = 0 if HALF_AWAY else 1
    code = (scaled >= 0x3E800000 + e).to(tl.int32)
    code += (scaled >= 0x3F400000).to(tl.int32)
    code += (scaled >= 0x3FA00000 + e).to(tl.int32)
    code += (scaled >= 0x3FE00000).to(tl.int32)
    code += (scaled >= 0x40200000 + e).to(tl.int32)
    code += (scaled >= 0x40600000).to(tl.int32)
    code += (scaled >= 0x40A00000 + e).to(tl.int32)
    code |= (bits >> 28) & 8
    value = e2m1_to_float32(code) * power_of_two(scale)
    return tl.where(amax >= 0x7F800000, float("nan"), value)


@triton.jit
def load_row(
    x,
    row,
    block,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    QUANT: tl.constexpr,
    CARRY: tl.constexpr,
    HALF_AWAY: tl.constexpr,
):
    """Blocks `block`, `block + 1`, ... of one row, as float32 [BLOCKS, 8, 4], 0 past K."""
    blocks = block + tl.arange(0, BLOCKS)[:, None, None]
    k = blocks * 32 + tl.arange(0, 8)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    v = tl.load(x + row * K + k, mask=blocks < K // 32, other=0.0).to(tl.float32)
    if QUANT:
        v = round_to_mxfp4(v, CARRY, HALF_AWAY)
    return v


@triton.jit
def split_row(
    x, planes, row_scales, row,
    K: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """Writes the operand form of one row."""
    row = row.to(tl.int64)
    out = planes + row * PLANES * PADDED
    if MODE >= 2:
        amax = 0
        for block in range(0, K // 32, BLOCKS):
            v = load_row(x, row, block, K, BLOCKS, False, CARRY, HALF_AWAY)
            bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            amax = tl.maximum(amax, tl.max(tl.max(tl.max(bits, axis=2), axis=1), axis=0))
        # The largest element comes to lie in 128..256, and what the first plane leaves of it, times 32, too. Rounding to MXFP4 may raise
        # an element to the next power of two at most, which is left room for.
        exponent = tl.minimum(tl.maximum((260 if QUANT else 261) - (amax >> 23), 1), 254)
        up = (exponent << 23).to(tl.float32, bitcast=True)
        down = tl.where(amax >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(row_scales + row, down)
    for block in range(0, PADDED // 32, BLOCKS):
        v = load_row(x, row, block, K, BLOCKS, QUANT, CARRY, HALF_AWAY)
        blocks = block + tl.arange(0, BLOCKS)[:, None, None]
        at = quad_position(blocks, tl.arange(0, 8)[None, :, None], tl.arange(0, 4)[None, None, :], PADDED, MODE)
        inside = tl.broadcast_to(blocks < PADDED // 32, (BLOCKS, 8, 4))
        if MODE >= 2:
            v = tl.where(amax >= 0x7F800000, 0.0, v * up)
            high = v.to(tl.float8e4nv)
            tl.store(out + at, high, mask=inside)
            if PLANES == 2:
                tl.store(out + PADDED + at, ((v - high.to(tl.float32)) * 32.0).to(tl.float8e4nv), mask=inside)
        elif PLANES == 1:
            tl.store(out + at, v.to(tl.bfloat16), mask=inside)
        else:
            for plane in tl.static_range(PLANES):
                # The upper half of a float32 is a bfloat16; what is left of v is then exact.
                bits = v.to(tl.int32, bitcast=True)
                part = (bits & -65536).to(tl.float32, bitcast=True)
                part = tl.where(v == v, part, float("nan"))
                tl.store(out + plane * PADDED + at, part.to(tl.bfloat16), mask=inside)
                v = tl.where((bits & 0x7F800000) == 0x7F800000, 0.0, v - part)


@triton.jit
def split_rows(
    x, planes, row_scales, count, rows,
    K: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """Brings the rows of h that an expert owns to operand form; `count` points to their number, `rows` is its bound."""
    used = tl.minimum(tl.load(count), rows)
    row = tl.program_id(0)
    while row < used:
        split_row(x, planes, row_scales, row, K, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)
        row += tl.num_programs(0)
