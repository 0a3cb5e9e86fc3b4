"""Step 5: the grouped down product, one row a slot, and the sum of each token's rows. No atomics: the same bits in every run."""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.decode import power_of_two, shuffled_to_e4m3
from jax_mxfp4_moe.implementations.triton.overlap import wait_for_previous
from jax_mxfp4_moe.implementations.triton.product import add_planes, load_operand, load_shuffled, multiply, pick_tile
from jax_mxfp4_moe.implementations.triton.quantize import row_factors


@triton.jit
def stage2(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    K: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr, STACK: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr,
    ROW_SCALES: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [slots, D], weighted. Grid: bound of tiles times ceil(D / BLOCK_D)."""
    wait_for_previous(PDL)
    count = tl.load(tile_count)
    tile, column = pick_tile(tl.program_id(0), count, tl.cdiv(D, BLOCK_D), GROUP)
    if tile < count:
        e = tl.load(tile_expert + tile)
        start = tl.load(tile_row + tile)
        end = tl.load(offsets + e + 1)
        N: tl.constexpr = STACK * TILE
        n = tl.arange(0, N)
        p = start + n % TILE
        mask = (p < end) & (n // TILE < PLANES)
        d = column * BLOCK_D + tl.arange(0, BLOCK_D)
        w = tl.minimum(d, D - 1)
        acc = multiply(
            codes, scales, e, w, planes, row_scales, p.to(tl.int64) * PLANES + n // TILE, mask,
            D, K, BLOCK_D, N, BLOCK_K, MODE, PTX, STAGES,
        )  # fmt: skip
        acc = add_planes(acc, BLOCK_D, TILE, STACK, MODE)
        m = start + tl.arange(0, TILE)
        slot = tl.load(order + m, mask=m < end, other=0)
        if ROW_SCALES:
            acc *= row_factors(row_scales, m, m < end, ROW_SCALES)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + e.to(tl.int64) * D + w).to(tl.float32)[:, None]
        if WEIGHTED:
            acc *= tl.load(topk_weights + slot, mask=m < end, other=0.0)[None, :]
        at = out + slot.to(tl.int64)[None, :] * D + d[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(m < end)[None, :] & (d < D)[:, None])


@triton.jit
def stage2_spans(
    planes, row_scales, codes, scales, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    K: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr, STACK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr, MODE: tl.constexpr,
    ROW_SCALES: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same without bias for K of one step in the shuffled layout: a program keeps its rows of h and goes over SPAN column tiles.

    D is a multiple of BLOCK_D. Grid: bound of tiles times ceil(D / BLOCK_D / SPAN).
    """
    wait_for_previous(PDL)
    SPANS: tl.constexpr = (D // BLOCK_D + SPAN - 1) // SPAN
    tile = tl.program_id(0) // SPANS
    if tile < tl.load(tile_count):
        e = tl.load(tile_expert + tile)
        start = tl.load(tile_row + tile)
        end = tl.load(offsets + e + 1)
        N: tl.constexpr = STACK * TILE
        n = tl.arange(0, N)
        p = start + n % TILE
        x0, x1 = load_operand(
            planes, p.to(tl.int64) * PLANES + n // TILE, (p < end) & (n // TILE < PLANES), 0, K, BLOCK_K
        )
        m = start + tl.arange(0, TILE)
        slot = tl.load(order + m, mask=m < end, other=0)
        h_scale = row_factors(row_scales, m, m < end, ROW_SCALES) * 0.015625
        if WEIGHTED:
            factor = tl.load(topk_weights + slot, mask=m < end, other=0.0)
        codes += e.to(tl.int64) * (D * K // 2)
        scales += e.to(tl.int64) * (D * (K // 32 + 1))
        first = (tl.program_id(0) % SPANS) * SPAN
        bases = scales + D * (K // 32)
        base = tl.load(bases + first * BLOCK_D + tl.arange(0, BLOCK_D))
        for column in tl.range(first, tl.minimum(first + SPAN, D // BLOCK_D), num_stages=STAGES):
            d = column * BLOCK_D + tl.arange(0, BLOCK_D)
            # A turn ahead, since the compiler gets only what a product needs in advance.
            next_base = tl.load(bases + tl.minimum(column + 1, D // BLOCK_D - 1) * BLOCK_D + tl.arange(0, BLOCK_D))
            c, f = load_shuffled(codes, scales, d, 0, D, K, BLOCK_K)
            w0, w1 = shuffled_to_e4m3(c, f, BLOCK_D, BLOCK_K // 32, PTX)
            acc = tl.dot(w0, x0)
            acc = tl.dot(w1, x1, acc)
            # One factor after the other: their product may be infinite where a sum is 0.
            acc = add_planes(acc, BLOCK_D, TILE, STACK, MODE) * power_of_two(base.to(tl.int32))[:, None]
            acc *= h_scale[None, :]
            if WEIGHTED:
                acc *= factor[None, :]
            at = out + slot.to(tl.int64)[None, :] * D + d[:, None]
            tl.store(at, acc.to(out.dtype.element_ty), mask=(m < end)[None, :])
            base = next_base


@triton.jit
def combine(
    rows, topk_ids, y, D: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y [tokens, D]: the sum of each token's rows in the order of its slots; those of skipped slots are not read.

    Grid: tokens, ceil(D / BLOCK).
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        e = tl.load(topk_ids + slot)
        width = tl.where((e >= 0) & (e < EXPERTS), D, 0)
        total += tl.load(rows + slot * D + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(y + token * D + d, total.to(y.dtype.element_ty), mask=d < D)
