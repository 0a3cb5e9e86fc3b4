"""Steps 2 and 4: rows are brought to the operand form of the products, rounded on the way to what the problem asks for.

The operand form of a row is PLANES rows of K elements whose weighted sum is the row, in the order of `decode.quad_position`:

  BITS  bfloat16 planes, weight 1: one holds a bfloat16 row or MXFP4 values, two a float16 row and three a float32 row. Exact.
  E4M3  float8 planes times a power of two a row: one holds MXFP4 values, two (weights 1 and 2 ** -5) a bfloat16 row. Exact where
        an element is within 2 ** -15 of the row's largest; below that the error is at most 2 ** -22 of the largest.

In both, one plane holds "fp8" activations: the E4M3 values themselves, exact, whose float32 scale is the row's factor.

  SCALED  the MXFP4 bytes as they are, in their own order: codes [rows, K // 2] in the place of planes, and scales [rows, K // 32] in
          that of factors, all uint8.
"""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.decode import power_of_two, quad_position
from jax_mxfp4_moe.implementations.triton.overlap import wait_for_previous

MXFP4 = tl.constexpr(1)
"""QUANT of rows that are rounded to MXFP4; 0 leaves them as they are."""
FP8 = tl.constexpr(2)
"""QUANT of rows that are rounded to E4M3, each with a scale of its own."""
STATIC_FP8 = tl.constexpr(3)
"""The same with one scale, which `row_scales` points to, for all."""


@triton.jit
def largest(x):
    """Bits of the largest magnitude of each block, int32 [blocks, 1, 1]; x: [blocks, 8, 4] float32."""
    return tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1)[:, None, None]


@triton.jit
def largest_of_all(x, BLOCKS: tl.constexpr):
    """The same of all blocks, one int32; within threads first."""
    return tl.max(tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (BLOCKS * 32,)), axis=0)


@triton.jit
def scale_of(amax, CARRY: tl.constexpr):
    """The E8M0 byte of blocks with these largest magnitudes, all finite; int32."""
    return tl.minimum(tl.maximum(((amax + CARRY) >> 23) - 2, 0), 254)


@triton.jit
def encode_mxfp4(x, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr):
    """Codes and scales that `jax_mxfp4_moe.quantize` gives x, bit by bit; x: [blocks, 8, 4] float32.

    int32 both, the scales [blocks, 1, 1]; where a scale is 255 codes mean nothing.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = largest(x)
    scale = scale_of(amax, CARRY)
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
    return code, tl.where(amax >= 0x7F800000, 255, scale)


@triton.jit
def with_sign(magnitude, bits):
    """A magnitude that is not negative, float32, with the sign of `bits`."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def round_to_e2m1(x, scale, HALF_AWAY: tl.constexpr):
    """The values of `encode_mxfp4`'s codes, float32, in half the instructions; means nothing in blocks that are not finite."""
    bits = x.to(tl.int32, bitcast=True)
    # Exact from 2 ** -126 up, and what is below rounds to 0 anyway.
    q = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * power_of_two(254 - scale)
    if HALF_AWAY:
        b = q.to(tl.int32, bitcast=True)
        large = ((b + 0x200000) & -0x400000).to(tl.float32, bitcast=True)
        value = tl.where(q < 1.0, tl.where(q >= 0.75, 1.0, tl.where(q >= 0.25, 0.5, 0.0)), large)
    else:
        # A power of two so large that their sum keeps one bit behind q's first one, and halves below 1; to nearest, ties to even.
        top = (tl.maximum(q, 1.0).to(tl.int32, bitcast=True) & 0x7F800000) + 0xB000000
        top = top.to(tl.float32, bitcast=True)
        value = (q + top) - top
    return with_sign(tl.minimum(value, 6.0), bits)


@triton.jit
def round_to_e4m3(q):
    """The E4M3 values nearest to q, 0..448 in float32, as `jax_mxfp4_moe.quantize.quantize_fp8` rounds."""
    # Normal values keep three bits of the mantissa; below 2 ** -6 the sum keeps multiples of 2 ** -9. To nearest, ties to even.
    b = q.to(tl.int32, bitcast=True)
    normal = ((b + 0x7FFFF + ((b >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(q < 0.015625, (q + 16384.0) - 16384.0, normal)


@triton.jit
def static_scale(scale):
    """The float32 value that `scale` points to; NaN if it is none of 2 ** -100 .. 2 ** 100."""
    s = tl.load(scale)
    return tl.where((s >= 7.888609052210118e-31) & (s <= 1.2676506002282294e30), s, float("nan"))


@triton.jit
def row_factors(row_scales, at, mask, ROW_SCALES: tl.constexpr):
    """Factors of rows `at`, float32: one each, or one for all (ROW_SCALES 2)."""
    if ROW_SCALES == 2:
        return tl.where(mask, static_scale(row_scales), 0.0)
    else:
        return tl.load(row_scales + at, mask=mask, other=0.0)


@triton.jit
def load_row(x, row, block, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Blocks `block`, `block + 1`, ... of one row, as float32 [BLOCKS, 8, 4], 0 past K."""
    blocks = block + tl.arange(0, BLOCKS)[:, None, None]
    k = blocks * 32 + tl.arange(0, 8)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    return tl.load(x + row * K + k, mask=blocks < K // 32, other=0.0).to(tl.float32)


@triton.jit
def split_row(
    x, planes, row_scales, row,
    K: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """Writes the operand form of one row."""
    row = row.to(tl.int64)
    if MODE == 5:
        pack_row(x, planes, row_scales, row, K, BLOCKS, CARRY, HALF_AWAY)
    else:
        plane_row(x, planes, row_scales, row, K, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)


@triton.jit
def pack_row(
    x, codes, scales, row, K: tl.constexpr, BLOCKS: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr
):
    """Writes the MXFP4 bytes of one row."""
    for block in range(0, K // 32, BLOCKS):
        v = load_row(x, row, block, K, BLOCKS)
        code, scale = encode_mxfp4(v, CARRY, HALF_AWAY)
        code = tl.where(scale == 255, 0, code)
        even, odd = tl.split(tl.reshape(code, (BLOCKS, 16, 2)))
        blocks = block + tl.arange(0, BLOCKS)
        at = codes + row * (K // 2) + (blocks * 16)[:, None] + tl.arange(0, 16)[None, :]
        tl.store(at, (even | (odd << 4)).to(tl.uint8), mask=(blocks < K // 32)[:, None])
        scale = tl.reshape(scale, (BLOCKS,)).to(tl.uint8)
        tl.store(scales + row * (K // 32) + blocks, scale, mask=blocks < K // 32)


@triton.jit
def plane_row(
    x, planes, row_scales, row,
    K: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """Writes the planes of one row, which is read once if BLOCKS holds it."""
    out = planes + row * PLANES * PADDED
    if BLOCKS * 32 >= PADDED:
        v = load_row(x, row, 0, K, BLOCKS)
        amax = largest_of_all(v, BLOCKS)
        scale = scale_of_row(amax, row_scales, row, MODE, QUANT)
        write_planes(out, v, 0, amax, scale, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)
    else:
        amax = 0
        if QUANT == 2 or (QUANT < 2 and MODE >= 2):
            for block in range(0, K // 32, BLOCKS):
                amax = tl.maximum(amax, largest_of_all(load_row(x, row, block, K, BLOCKS), BLOCKS))
        scale = scale_of_row(amax, row_scales, row, MODE, QUANT)
        for block in range(0, PADDED // 32, BLOCKS):
            v = load_row(x, row, block, K, BLOCKS)
            write_planes(out, v, block, amax, scale, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)


@triton.jit
def scale_of_row(amax, row_scales, row, MODE: tl.constexpr, QUANT: tl.constexpr):
    """What a row's elements are multiplied by, from its largest magnitude: a float32 for FP8, for E4M3 planes the exponent field of one,
    else 0. Stores the row's factor, if it has one of its own.
    """
    if QUANT >= 2:
        if QUANT == 2:
            scale = tl.cast(amax, tl.float32, bitcast=True) * 0.002232142857142857
            scale = tl.where(amax >= 0x7F800000, float("nan"), tl.maximum(scale, 7.888609052210118e-31))
            tl.store(row_scales + row, scale)
        else:
            scale = static_scale(row_scales)
        # A plain division may be an approximate one.
        return tl.div_rn(1.0, scale)
    elif MODE >= 2:
        # The largest element comes to lie in 128..256, and what the first plane leaves of it, times 32, too. Rounding to MXFP4 may raise
        # an element to the next power of two at most, which is left room for.
        exponent = tl.minimum(tl.maximum((260 if QUANT else 261) - (amax >> 23), 1), 254)
        down = tl.where(amax >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(row_scales + row, down)
        return exponent
    else:
        return 0


@triton.jit
def write_planes(
    out, v, block, amax, scale,
    PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """Rounds blocks `block`, ... of a row, v as `load_row` gives them, and writes their planes."""
    if QUANT == 1:
        tops = largest(v)
        byte = scale_of(tops, CARRY)
        v = round_to_e2m1(v, byte, HALF_AWAY)
        if MODE >= 2:  # both powers of two at once
            power = byte + scale - 127
            v = tl.where(amax >= 0x7F800000, 0.0, v * tl.where(power > 0, power << 23, 0).to(tl.float32, bitcast=True))
        else:
            v = tl.where(tops >= 0x7F800000, float("nan"), v * power_of_two(byte))
    elif QUANT >= 2:
        bits = v.to(tl.int32, bitcast=True)
        q = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * scale, 448.0)
        if MODE < 2:
            q = round_to_e4m3(q)
        v = with_sign(q, bits)
        if QUANT == 3:  # else the row's scale is NaN
            v = tl.where((bits & 0x7FFFFFFF) >= 0x7F800000, float("nan"), v)
        v = tl.where(scale == scale, v, 0.0)
    elif MODE >= 2:
        v = tl.where(amax >= 0x7F800000, 0.0, v * (scale << 23).to(tl.float32, bitcast=True))
    blocks = block + tl.arange(0, BLOCKS)[:, None, None]
    at = quad_position(blocks, tl.arange(0, 8)[None, :, None], tl.arange(0, 4)[None, None, :], PADDED, MODE)
    inside = tl.broadcast_to(blocks < PADDED // 32, (BLOCKS, 8, 4))
    if MODE >= 2:
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
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Brings the rows of h that an expert owns to operand form; `count` points to their number, `rows` is its bound."""
    wait_for_previous(PDL)
    used = tl.minimum(tl.load(count), rows)
    row = tl.program_id(0)
    while row < used:
        split_row(x, planes, row_scales, row, K, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)
        row += tl.num_programs(0)
