"""The product of a tile of rows with rows of packed weights, that both stages share."""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.decode import (
    FOLD,
    e2m1_to_float32,
    power_of_two,
    shuffled_to_e4m3,
    spread,
    to_bfloat16,
    to_e4m3,
)
from jax_mxfp4_moe.implementations.triton.overlap import wait_for_previous

E2M1 = tl.constexpr("e2m1")
"""The name of the format; some versions of Triton's interpreter want it as a constexpr."""


@triton.jit
def pick_tile(program, tile_count, TILES: tl.constexpr, GROUP: tl.constexpr):
    """(tile, column tile) of a program: GROUP tiles of rows share their weights while those are in the cache."""
    if GROUP == 1:
        return program // TILES, program % TILES
    else:
        group = program // (GROUP * TILES)
        size = tl.minimum(tile_count - group * GROUP, GROUP)
        within = program % (GROUP * TILES)
        size = tl.maximum(size, 1)
        return tl.where(within < size * TILES, group * GROUP + within % size, tile_count), within // size


@triton.jit
def load_weights(codes, scales, w, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[ROWS, BLOCK_K // 2] bytes and [ROWS, BLOCK_K // 32] scales from column k."""
    HALF: tl.constexpr = BLOCK_K // 2
    bytes_ = k // 2 + tl.arange(0, HALF)
    blocks = k // 32 + tl.arange(0, BLOCK_K // 32)
    cp = codes + w[:, None] * (K // 2) + bytes_[None, :]
    sp = scales + w[:, None] * (K // 32) + blocks[None, :]
    if K % BLOCK_K == 0:
        return tl.load(cp), tl.load(sp).to(tl.int32)
    else:
        # Past K codes are 0 and the scale is that of the last block, which is neither NaN where the row is not nor far from it.
        sp = scales + w[:, None] * (K // 32) + tl.minimum(blocks, K // 32 - 1)[None, :]
        return tl.load(cp, mask=bytes_[None, :] < K // 2, other=0), tl.load(sp).to(tl.int32)


@triton.jit
def load_shuffled(codes, scales, w, k, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same of one expert's weights in the layout of `layout.py`; w: int32 rows."""
    byte = k // 2 + tl.arange(0, BLOCK_K // 2)
    block = k // 32 + tl.arange(0, BLOCK_K // 32)
    cp = codes + w[:, None] * 64 + ((byte // 64) * (N * 64) + byte % 64)[None, :]
    sp = scales + w[:, None] * 4 + ((block // 4) * (N * 4) + block % 4)[None, :]
    if K % BLOCK_K == 0:
        return tl.load(cp), tl.load(sp).to(tl.int32)
    else:
        c = tl.load(cp, mask=byte[None, :] < K // 2, other=0)
        return c, tl.load(sp, mask=block[None, :] < K // 32, other=0).to(tl.int32)


@triton.jit
def load_operand(x, rows, mask, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The two [BLOCK_K // 2, N] halves of the operand form from column k."""
    HALF: tl.constexpr = BLOCK_K // 2
    at = k // 2 + tl.arange(0, HALF)
    if K % BLOCK_K != 0:
        mask = mask[None, :] & (at[:, None] < K // 2)
    else:
        mask = mask[None, :]
    p = x + rows[None, :] * K + at[:, None]
    return tl.load(p, mask=mask, other=0.0), tl.load(p + K // 2, mask=mask, other=0.0)


@triton.jit
def load_packed(x, x_scales, rows, mask, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K // 2, N] bytes and [N, BLOCK_K // 32] scales of packed rows from column k; past K codes are 0 as those of the weights."""
    at = k // 2 + tl.arange(0, BLOCK_K // 2)
    blocks = k // 32 + tl.arange(0, BLOCK_K // 32)
    if K % BLOCK_K != 0:
        inside = mask[None, :] & (at[:, None] < K // 2)
        blocks = tl.minimum(blocks, K // 32 - 1)
    else:
        inside = mask[None, :]
    c = tl.load(x + rows[None, :] * (K // 2) + at[:, None], mask=inside, other=0)
    return c, tl.load(x_scales + rows[:, None] * (K // 32) + blocks[None, :], mask=mask[:, None], other=0)


@triton.jit
def multiply(
    codes, scales, expert, w, x, x_scales, rows, mask,
    WEIGHT_ROWS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, MODE: tl.constexpr,
    PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[ROWS, N] float32: weight rows w of `expert`, which has WEIGHT_ROWS, times operand rows `rows`.

    Where the operand form has a factor for each row, that is left to the caller. K is padded to whole groups in the shuffled layout.
    """
    BLOCKS: tl.constexpr = BLOCK_K // 32
    HALF: tl.constexpr = BLOCK_K // 2
    acc = tl.zeros((ROWS, N), tl.float32)
    if MODE == 1 or MODE == 4:
        codes += expert.to(tl.int64) * WEIGHT_ROWS * K
        scales += expert.to(tl.int64) * (WEIGHT_ROWS * (K // 32 + 1))
        at = tl.arange(0, BLOCK_K)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            wp = codes + w[:, None] * K + (k + at)[None, :]
            xp = x + rows[None, :] * K + (k + at)[:, None]
            if K % BLOCK_K == 0:
                wt, xt = tl.load(wp), tl.load(xp, mask=mask[None, :], other=0.0)
            else:
                inside = k + at < K
                wt = tl.load(wp, mask=inside[None, :], other=0.0)
                xt = tl.load(xp, mask=mask[None, :] & inside[:, None], other=0.0)
            if MODE == 1:
                acc = tl.dot(wt, xt, acc)
            else:
                # The tensor core keeps some 13 bits of a float8 sum, so that a sum never runs over more than one block of K.
                acc += tl.dot(wt, xt)
        if MODE == 4:
            base = tl.load(scales + WEIGHT_ROWS * (K // 32) + w).to(tl.int32)
            acc *= (power_of_two(base) * 0.015625)[:, None]
    elif MODE == 3:
        codes += expert.to(tl.int64) * (WEIGHT_ROWS * K // 2)
        scales += expert.to(tl.int64) * (WEIGHT_ROWS * (K // 32 + 1))
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            c, d = load_shuffled(codes, scales, w, k, WEIGHT_ROWS, K, BLOCK_K)
            first, second = shuffled_to_e4m3(c, d, ROWS, BLOCKS, PTX)
            x0, x1 = load_operand(x, rows, mask, k, K, BLOCK_K)
            part = tl.dot(first, x0)
            part = tl.dot(second, x1, part)
            acc += part
        base = tl.load(scales + WEIGHT_ROWS * (K // 32) + w).to(tl.int32)
        acc *= (power_of_two(base) * 0.015625)[:, None]  # 2 ** (5 - FOLD)
    elif MODE == 2:
        w = expert.to(tl.int64) * WEIGHT_ROWS + w
        widest = tl.zeros((ROWS, BLOCKS), tl.int32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            c, s = load_weights(codes, scales, w, k, K, BLOCK_K)
            top = tl.max(s, axis=1)
            gap = top[:, None] - s
            widest = tl.maximum(widest, gap)
            fold = (tl.maximum(FOLD - gap, 0) * 8).to(tl.int8)
            first, second = to_e4m3(c, spread(fold, ROWS, BLOCKS), ROWS, HALF, PTX)
            x0, x1 = load_operand(x, rows, mask, k, K, BLOCK_K)
            part = tl.dot(first, x0)
            part = tl.dot(second, x1, part)
            acc += part * power_of_two(top)[:, None]
        if tl.max(tl.max(widest, axis=1), axis=0) > FOLD:
            # Scales of one row lie too far apart to fold at once: sum the blocks of every FOLD + 1 binades by themselves.
            acc = tl.zeros((ROWS, N), tl.float32)
            passes = tl.max(tl.max(widest, axis=1), axis=0) // (FOLD + 1) + 1
            for i in range(passes):
                low = i * (FOLD + 1)
                for k in tl.range(0, K, BLOCK_K, num_stages=1):
                    c, s = load_weights(codes, scales, w, k, K, BLOCK_K)
                    top = tl.max(s, axis=1)
                    gap = top[:, None] - s - low
                    mine = spread(((gap >= 0) & (gap <= FOLD)).to(tl.int8), ROWS, BLOCKS)
                    fold = (tl.minimum(tl.maximum(FOLD - gap, 0), FOLD) * 8).to(tl.int8)
                    c = tl.where(mine != 0, c, 0)
                    first, second = to_e4m3(c, spread(fold, ROWS, BLOCKS), ROWS, HALF, PTX)
                    x0, x1 = load_operand(x, rows, mask, k, K, BLOCK_K)
                    part = tl.dot(first, x0)
                    part = tl.dot(second, x1, part)
                    scale = tl.where(top == 255, 255, tl.maximum(top - low, 0))
                    acc += part * power_of_two(scale)[:, None]
        acc *= 0.015625  # 2 ** (5 - FOLD)
    elif MODE == 5:
        w = expert.to(tl.int64) * WEIGHT_ROWS + w
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            c, s = load_weights(codes, scales, w, k, K, BLOCK_K)
            xc, xs = load_packed(x, x_scales, rows, mask, k, K, BLOCK_K)
            acc = tl.dot_scaled(c, s.to(tl.uint8), E2M1, xc, xs, E2M1, acc)
    else:
        w = expert.to(tl.int64) * WEIGHT_ROWS + w
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            c, s = load_weights(codes, scales, w, k, K, BLOCK_K)
            even, odd = to_bfloat16(c, spread(power_of_two(s), ROWS, BLOCKS))
            x0, x1 = load_operand(x, rows, mask, k, K, BLOCK_K)
            acc = tl.dot(even, x0, acc)
            acc = tl.dot(odd, x1, acc)
    return acc


@triton.jit
def add_planes(acc, ROWS: tl.constexpr, TILE: tl.constexpr, STACK: tl.constexpr, MODE: tl.constexpr):
    """[ROWS, STACK * TILE] -> [ROWS, TILE]: the planes of an operand, by their weights."""
    if STACK == 1:
        return acc
    else:
        acc = tl.reshape(acc, (ROWS, STACK, TILE))
        if MODE >= 2:
            acc *= tl.where(tl.arange(0, STACK) == 0, 1.0, 0.03125)[None, :, None]
        return tl.sum(acc, axis=1)


@triton.jit
def four_e4m3(m, d):
    """Four magnitudes, one in the low bits of each byte, to the E4M3 bytes of code * 2 ** (d - 5); all in int32."""
    some = (m + 0x7F7F7F7F) & -0x7F7F7F80  # bit 7 where the magnitude is not 0
    two = (m + 0x7E7E7E7E) & -0x7F7F7F80  # and where it is above 1
    bits = (m << 2) + 0x08080808 - (((some ^ two) >> 5) & 0x04040404) + d * 0x08080808
    return bits & (((some >> 7) & 0x01010101) * 255)


@triton.jit
def two_bfloat16(even, odd, scale):
    """Two codes to the bfloat16 values code * scale, in one int32."""
    low = (e2m1_to_float32(even) * scale).to(tl.int32, bitcast=True)
    high = (e2m1_to_float32(odd) * scale).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def expand(
    words, scales, offsets, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decodes the experts that own a row, out [E, N, K] in the order of `decode.quad_position`. Grid: K / 128, ceil(N / ROWS), E.

    words: the shuffled codes, four bytes at a time, int32; so is out. With WIDE into bfloat16, else into E4M3 without the row's scale.
    """
    wait_for_previous(PDL)
    e = tl.program_id(2)
    if tl.load(offsets + e + 1) > tl.load(offsets + e):
        n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        inside = n[:, None] < N
        row = tl.minimum(n, N - 1)
        group = tl.program_id(0)
        words += e.to(tl.int64) * (N * K // 8) + group * (N * 16)
        scales += e.to(tl.int64) * (N * (K // 32 + 1))
        t = tl.arange(0, 16)
        word = tl.load(words + row[:, None] * 16 + t[None, :])
        d = tl.load(scales + group * (N * 4) + row[:, None] * 4 + (t % 4)[None, :]).to(tl.int32)
        if WIDE:
            base = tl.load(scales + N * (K // 32) + row).to(tl.int32)
            scale = power_of_two(tl.maximum(base[:, None] + d - FOLD, 0))
            out += e.to(tl.int64) * (N * K // 2)
            at = out + (n * (K // 2))[:, None] + group * 32 + tl.arange(0, 32)[None, :]
            for half in tl.static_range(2):
                # Sign of element b: bit 8 b + 7, or 8 b + 3 for the second four.
                m = word if half == 0 else word >> 16
                s = word if half == 0 else word << 4
                first = two_bfloat16((m & 7) | ((s >> 4) & 8), ((m >> 4) & 7) | ((s >> 12) & 8), scale)
                second = two_bfloat16(((m >> 8) & 7) | ((s >> 20) & 8), ((m >> 12) & 7) | ((s >> 28) & 8), scale)
                both = tl.reshape(tl.join(first, second), (ROWS, 32))
                tl.store(at + half * (K // 4), both, mask=inside)
        else:
            out += e.to(tl.int64) * (N * K // 4)
            at = out + (n * (K // 4))[:, None] + group * 16 + t[None, :]
            for half in tl.static_range(2):
                m = word if half == 0 else word >> 16
                s = word if half == 0 else word << 4
                m = (m & 7) | ((m & 0x70) << 4) | ((m & 0x700) << 8) | ((m & 0x7000) << 12)
                tl.store(at + half * (K // 8), four_e4m3(m, d) | (s & -0x7F7F7F80), mask=inside)
