"""Device functions that turn MXFP4 bytes into operands of a matrix product, and the order of K that goes with each.

A byte holds the elements 2i (low nibble) and 2i + 1 (high nibble). Each function returns two tensors of the bytes' shape that
together hold every element; the other operand must be stored in the same order, which `quad_position` gives. So the packed layout is
read as it is, and no nibble ever moves to another byte.
"""

import triton
import triton.language as tl

BITS = tl.constexpr(0)
"""bfloat16 products of packed weights: any weights, any target, portable arithmetic."""
WIDE = tl.constexpr(1)
"""bfloat16 products of shuffled weights (`layout.py`) that `product.expand` decoded beforehand."""
E4M3 = tl.constexpr(2)
"""float8 products of packed weights: every E2M1 value is an E4M3 value, and its block's scale folds into the exponent."""
SHUFFLED = tl.constexpr(3)
"""float8 products of shuffled weights."""
EXPANDED = tl.constexpr(4)
"""The same, decoded beforehand, for when every weight is used many times."""
SCALED = tl.constexpr(5)
"""Products of packed weights and packed activations as they are, by instructions that take the scales along."""

FOLD = tl.constexpr(11)
"""Binades that fold into an E4M3 exponent without touching subnormals: 0.5 * 2 ** -5 .. 6 * 2 ** 6."""


@triton.jit
def quad_position(block, quad, b, K: tl.constexpr, MODE: tl.constexpr):
    """Where element 32 block + 4 quad + b of a row of K goes: the first tensor's elements, then those of the second.

    Written as a multiple of 4 plus b where it is one, so that the compiler sees four neighbours.
    """
    if MODE == 1 or MODE >= 3:
        return (quad % 2) * (K // 2) + ((block // 4) * 16 + (quad // 2) * 4 + block % 4) * 4 + b
    elif MODE == 2:
        return (quad % 2) * (K // 2) + (block * 4 + quad // 2) * 4 + b
    else:
        return (b % 2) * (K // 2) + block * 16 + quad * 2 + b // 2


@triton.jit
def power_of_two(scale):
    """float32 value of an E8M0 byte (int32): 2 ** -127 for 0, NaN for 255."""
    bits = tl.where(scale == 0, 1 << 22, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float32(code):
    """Exact value of a code 0..15 (int32)."""
    # As the low exponent bits of a float32 a code is its value times 2 ** -126, subnormal codes included.
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def spread(blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """[ROWS, BLOCKS] -> [ROWS, BLOCKS * 16]: a block's value for each of its bytes."""
    return tl.reshape(tl.broadcast_to(blocks[:, :, None], (ROWS, BLOCKS, 16)), (ROWS, BLOCKS * 16))


@triton.jit
def spread_shuffled(blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The same in the order of `layout.py`: four bytes of each of a group's blocks in turn."""
    blocks = tl.reshape(blocks, (ROWS, BLOCKS // 4, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(blocks, (ROWS, BLOCKS // 4, 4, 4, 4)), (ROWS, BLOCKS * 16))


@triton.jit
def to_bfloat16(codes, scale):
    """Even and odd elements of packed bytes in bfloat16; scale: float32, one for each byte. Exact."""
    codes = codes.to(tl.int32)
    even = e2m1_to_float32(codes & 15) * scale
    odd = e2m1_to_float32(codes >> 4) * scale
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def to_e4m3(codes, fold, ROWS: tl.constexpr, BYTES: tl.constexpr, PTX: tl.constexpr):
    """Elements 0..3 and 4..7 of every four bytes as E4M3 values code * 2 ** (fold / 8 - 5).

    codes: uint8; fold: 8 * d for each byte, int8, d in 0..11, equal in every four bytes.
    """
    if PTX:
        first, second = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 small, large, which, value, sign;
            and.b32 small, $3, 0xffffff00;
            add.u32 small, small, 0x14100800;
            add.u32 large, $3, 0x24201c18;
            and.b32 which, $2, 0x7777;
            prmt.b32 value, small, large, which;
            shr.b32 which, $2, 1;
            and.b32 which, which, 0x4444;
            prmt.b32 sign, 0x0, 0x80808080, which;
            or.b32 $0, value, sign;
            shr.b32 which, $2, 16;
            and.b32 which, which, 0x7777;
            prmt.b32 value, small, large, which;
            shr.b32 which, $2, 17;
            and.b32 which, which, 0x4444;
            prmt.b32 sign, 0x0, 0x80808080, which;
            or.b32 $1, value, sign;
            }""",
            constraints="=r,=r,r,r",
            args=[codes, fold],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)
    else:
        fold = fold.to(tl.int32)
        low = e4m3_bits(codes.to(tl.int32) & 15, fold)
        high = e4m3_bits(codes.to(tl.int32) >> 4, fold)
        # [.., byte pair of four, byte of pair, nibble] -> pairs apart
        both = tl.reshape(tl.join(low, high), (ROWS, BYTES // 4, 2, 4))
        first, second = tl.split(tl.permute(both, (0, 1, 3, 2)))
        first, second = tl.reshape(first, (ROWS, BYTES)), tl.reshape(second, (ROWS, BYTES))
        return (
            first.to(tl.uint8).to(tl.float8e4nv, bitcast=True),
            second.to(tl.uint8).to(tl.float8e4nv, bitcast=True),
        )


@triton.jit
def e4m3_bits(code, fold):
    """Bits of code * 2 ** (fold / 8 - 5) in E4M3, all int32."""
    magnitude = code & 7
    bits = tl.where(magnitude >= 2, magnitude * 4 + 8, 8) + fold
    return tl.where(magnitude == 0, 0, bits) | ((code & 8) << 4)


@triton.jit
def look_up(codes, small, large):
    """Elements 0..3 and 4..7 of every four bytes in the layout of `layout.py`, from the E4M3 bytes of the eight magnitudes. PTX."""
    first, second = tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 which, value, sign;
        and.b32 which, $2, 0x77777777;
        prmt.b32 value, $3, $7, which;
        and.b32 sign, $2, 0x80808080;
        or.b32 $0, value, sign;
        shr.b32 which, which, 16;
        prmt.b32 value, $3, $7, which;
        shl.b32 sign, $2, 4;
        and.b32 sign, sign, 0x80808080;
        or.b32 $1, value, sign;
        }""",
        constraints="=r,=r,r,r,r,r,r,r,r,r,r",
        args=[codes, small, large],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )
    return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


@triton.jit
def shuffled_to_e4m3(codes, d, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PTX: tl.constexpr):
    """The same as `to_e4m3` in the layout of `layout.py`; d: int32 [ROWS, BLOCKS], 0..12."""
    BYTES: tl.constexpr = BLOCKS * 16
    if PTX:
        # The E4M3 bytes of the eight magnitudes, with d in the exponent of all but zero.
        small = spread_shuffled(d * 0x08080800 + 0x14100800, ROWS, BLOCKS)
        large = spread_shuffled(d * 0x08080808 + 0x24201C18, ROWS, BLOCKS)
        return look_up(codes, small, large)
    else:
        codes = codes.to(tl.int32)
        fold = spread_shuffled(d * 8, ROWS, BLOCKS)
        both = tl.reshape(tl.join(codes & 7, (codes >> 4) & 7), (ROWS, BYTES // 4, 2, 4))
        first, second = tl.split(tl.permute(both, (0, 1, 3, 2)))
        first = e4m3_bits(tl.reshape(first, (ROWS, BYTES)), fold) | (codes & 0x80)
        second = e4m3_bits(tl.reshape(second, (ROWS, BYTES)), fold) | ((codes & 8) << 4)
        return (
            first.to(tl.uint8).to(tl.float8e4nv, bitcast=True),
            second.to(tl.uint8).to(tl.float8e4nv, bitcast=True),
        )
