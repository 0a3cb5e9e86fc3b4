"""Both grouped products for Hopper: weights are decoded on their way from shared memory to the tensor cores.

One program a multiprocessor, three groups of four warps: one copies weights and rows into a ring of shared memory, two multiply, each
64 weight rows. While one of the two decodes, the other multiplies. In Gluon, since none of this can be said in `tl`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from jax_mxfp4_moe.implementations.triton.decode import look_up, power_of_two
from jax_mxfp4_moe.implementations.triton.quantize import row_factors
from jax_mxfp4_moe.implementations.triton.stage1 import activate

# Names from Triton 3.9 on, and those of 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_into = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

HALF = gl.constexpr(64)
"""Weight rows of a consumer."""
STEP = gl.constexpr(256)
"""Elements of K that are copied, and decoded, at once: two groups of the weights' layout."""

RING = 192 * 1024
"""Bytes of shared memory for copies under way; the rest of a multiprocessor's holds results while threads exchange them."""


def stages(planes: int, tile_rows: int) -> int:
    """Copies under way."""
    return RING // (2 * HALF.value * STEP.value // 2 + planes * STEP.value * tile_rows)


@gluon.jit
def tile_at(t, count, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(tile, column tile) of turn t of count * COLUMNS."""
    group = t // (GROUP * COLUMNS)
    size = gl.minimum(count - group * GROUP, GROUP)
    within = t % (GROUP * COLUMNS)
    return group * GROUP + within % size, within // size


@gluon.jit
def weight_row(r, column, WIDTH: gl.constexpr, GATED: gl.constexpr):
    """The weight row of row r of a tile, and its column of the output; gate and up rows alternate by 8, so that a thread has both."""
    if GATED:
        f = column * HALF + (r // 16) * 8 + r % 8
        return ((r % 16) // 8) * WIDTH + gl.minimum(f, WIDTH - 1), f
    else:
        d = column * (2 * HALF) + r
        return gl.minimum(d, WIDTH - 1), d


@gluon.jit
def copy_tile(
    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, GATED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copies what a tile of N rows multiplies, step by step; returns the number of steps so far."""
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(1, wide))
    w, _ = weight_row(r, column, WIDTH, GATED)
    b = gl.arange(0, STEP // 2, layout=gl.SliceLayout(0, wide))
    weights = codes + e.to(gl.int64) * (WEIGHT_ROWS * K // 2)
    at = w[:, None] * 64 + ((b // 64) * (WEIGHT_ROWS * 64) + b % 64)[None, :]
    p = start + gl.arange(0, N, layout=gl.SliceLayout(1, wide))
    mine = p < end
    if GATED:
        row = gl.load(order + p, mask=mine, other=0) // TOP_K
    else:
        row = gl.where(mine, p, 0)
    rows = planes + row.to(gl.int64)[:, None] * (PLANES * K) + b[None, :]
    for step in range((K + STEP - 1) // STEP):
        slot = it % STAGES
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        inside = mine[:, None] & (b >= 0)[None, :]
        some = (r >= 0)[:, None] & (b >= 0)[None, :]
        if K % STEP != 0:  # zeros past the end
            inside = inside & (step * (STEP // 2) + b < K // 2)[None, :]
            some = some & (step * (STEP // 2) + b < K // 2)[None, :]
        load_into(ring_codes.index(slot), weights + step * (2 * WEIGHT_ROWS * 64) + at, mask=some)
        for half in gl.static_range(2 * PLANES):
            load_into(
                ring_rows.index(slot * (2 * PLANES) + half).slice(0, N),
                rows + (half * (K // 2) + step * (STEP // 2)),
                mask=inside,
            )
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        it += 1
    return it


@gluon.jit
def copy_tiles(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    ring_codes, ring_rows, full, empty,
    K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TILE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What the copying warps do."""
    COLUMNS: gl.constexpr = (WIDTH + HALF - 1) // HALF if GATED else (WIDTH + 2 * HALF - 1) // (2 * HALF)
    count = gl.load(tile_count)
    it = gl.to_tensor(0)
    for t in range(gl.program_id(0), count * COLUMNS, gl.num_programs(0)):
        tile, column = tile_at(t, count, COLUMNS, GROUP)
        e, start = gl.load(tile_expert + tile), gl.load(tile_row + tile)
        end = gl.load(offsets + e + 1)
        rows = end - start
        if TILE == 128:
            if rows > 64:
                it = copy_tile(
                    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
                    128, K, WIDTH, TOP_K, PLANES, GATED, STAGES,
                )  # fmt: skip
            elif rows > 32:
                it = copy_tile(
                    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
                    64, K, WIDTH, TOP_K, PLANES, GATED, STAGES,
                )  # fmt: skip
            else:
                it = copy_tile(
                    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
                    32, K, WIDTH, TOP_K, PLANES, GATED, STAGES,
                )  # fmt: skip
        else:
            if rows > 32:
                it = copy_tile(
                    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
                    64, K, WIDTH, TOP_K, PLANES, GATED, STAGES,
                )  # fmt: skip
            else:
                it = copy_tile(
                    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
                    32, K, WIDTH, TOP_K, PLANES, GATED, STAGES,
                )  # fmt: skip


@gluon.jit
def load_exponents(
    scales,
    step,
    column,
    WEIGHT_ROWS: gl.constexpr,
    K: gl.constexpr,
    WIDTH: gl.constexpr,
    GATED: gl.constexpr,
    ME: gl.constexpr,
):
    """d of the 64 rows of consumer ME in a step, int32 [4, 2, 8, 2, 1, 4, 1]: one for each four bytes of codes. 0 past K."""
    by_word: gl.constexpr = gl.BlockedLayout(
        [1, 2, 1, 2, 4, 1, 4], [1, 1, 8, 1, 1, 4, 1], [4, 1, 1, 1, 1, 1, 1], [6, 1, 4, 3, 5, 2, 0]
    )
    w, _ = weight_row(ME * HALF + gl.arange(0, HALF), column, WIDTH, GATED)
    block = gl.arange(0, 8)
    at = (
        scales + w[:, None] * 4 + ((block // 4) * (WEIGHT_ROWS * 4) + block % 4)[None, :] + step * (2 * WEIGHT_ROWS * 4)
    )
    d = gl.load(at, mask=(w >= 0)[:, None] & (step * 8 + block < K // 32)[None, :], other=0)
    return gl.set_auto_layout(gl.reshape(d.to(gl.int32), [4, 2, 8, 2, 1, 4, 1]), by_word)


@gluon.jit
def spread_words(v, LAYOUT: gl.constexpr):
    """[4, 2, 8, 2, 1, 4, 1] -> [64, 128] in the layout of the codes, without a move between threads."""
    v, _ = gl.broadcast(v, gl.full([4, 2, 8, 2, 4, 4, 4], 0, gl.int32, v.type.layout))
    return gl.convert_layout(gl.reshape(v, [HALF, STEP // 2]), LAYOUT, assert_trivial=True)


@gluon.jit
def decode_step(ring_codes, slot, d, LAYOUT: gl.constexpr, ME: gl.constexpr):
    """The weights of consumer ME in a step, as two E4M3 operands [64, 128]."""
    small = spread_words(d * 0x08080800 + 0x14100800, LAYOUT)
    large = spread_words(d * 0x08080808 + 0x24201C18, LAYOUT)
    return look_up(ring_codes.index(slot).slice(ME * HALF, HALF).load(LAYOUT), small, large)


@gluon.jit
def add_plane(part, weights, ring_rows, at, N: gl.constexpr, NEW: gl.constexpr):
    """Begins the product of a step's weights with the two halves of one plane of its rows."""
    x0 = ring_rows.index(at).slice(0, N).permute([1, 0])
    x1 = ring_rows.index(at + 1).slice(0, N).permute([1, 0])
    part = warpgroup_mma(weights[0], x0, part, use_acc=not NEW, is_async=True)
    return warpgroup_mma(weights[1], x1, part, is_async=True)


@gluon.jit
def wait_for(full, it, STAGES: gl.constexpr):
    """Waits for the copies of step `it`; returns its place in the ring."""
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
    return it % STAGES


@gluon.jit
def add_step(acc, d, ring_codes, ring_rows, full, empty, it, N: gl.constexpr, PLANES: gl.constexpr, STAGES: gl.constexpr,
             ME: gl.constexpr):  # fmt: skip
    """Adds a step's products, plane by plane, to acc; d: its exponents."""
    sums: gl.constexpr = acc.type.layout
    zeros = warpgroup_mma_init(gl.zeros([HALF, N], gl.float32, sums))
    slot = wait_for(full, it, STAGES)
    weights = decode_step(ring_codes, slot, d, gl.DotOperandLayout(0, sums, 4), ME)
    for plane in gl.static_range(PLANES):
        part = add_plane(zeros, weights, ring_rows, slot * (2 * PLANES) + 2 * plane, N, True)
        acc += warpgroup_mma_wait(0, deps=[part]) * (1.0 if plane == 0 else 0.03125)
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    return acc


@gluon.jit
def add_two_steps(acc, d, following, ring_codes, ring_rows, full, empty, it, N: gl.constexpr, STAGES: gl.constexpr,
                  ME: gl.constexpr):  # fmt: skip
    """The same for one plane and two steps, the second of which is decoded while the first is multiplied."""
    sums: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    slot = wait_for(full, it, STAGES)
    weights = decode_step(ring_codes, slot, d, operand, ME)
    part = add_plane(warpgroup_mma_init(gl.zeros([HALF, N], gl.float32, sums)), weights, ring_rows, slot * 2, N, True)
    last = wait_for(full, it + 1, STAGES)
    weights = decode_step(ring_codes, last, following, operand, ME)
    part = add_plane(part, weights, ring_rows, last * 2, N, False)
    acc += warpgroup_mma_wait(0, deps=[part])
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    mbarrier.arrive(empty.index(last), count=1)
    return acc


@gluon.jit
def multiply_tile(
    codes, scales, e, column, ring_codes, ring_rows, full, empty, it,
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, PLANES: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """[64, N] float32 of consumer ME, without the scales of rows.

    The tensor cores' sums keep 13 bits, so that they are added to float32 ones after every step, or two with one plane.
    """
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    scales += e.to(gl.int64) * (WEIGHT_ROWS * (K // 32 + 1))
    acc = gl.zeros([HALF, N], gl.float32, sums)
    d = load_exponents(scales, 0, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
    if PLANES == 1:
        following = load_exponents(scales, 1, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
        for pair in range(STEPS // 2):
            d2 = load_exponents(scales, 2 * pair + 2, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
            d3 = load_exponents(scales, 2 * pair + 3, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
            acc = add_two_steps(acc, d, following, ring_codes, ring_rows, full, empty, it, N, STAGES, ME)
            d, following = d2, d3
            it += 2
        if STEPS % 2 == 1:
            acc = add_step(acc, d, ring_codes, ring_rows, full, empty, it, N, PLANES, STAGES, ME)
            it += 1
    else:
        for step in range(STEPS):
            d_next = load_exponents(scales, step + 1, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
            acc = add_step(acc, d, ring_codes, ring_rows, full, empty, it, N, PLANES, STAGES, ME)
            d = d_next
            it += 1
    return acc, it


@gluon.jit
def finish_tile(
    acc, row_scales, scales, bias, topk_weights, order, out, e, start, end, column,
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What follows the sums of consumer ME: factors, bias, activation; and the rows of the output, by way of another layout."""
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    sums: gl.constexpr = acc.type.layout
    r = ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums))
    w, f = weight_row(r, column, WIDTH, GATED)
    scales += e.to(gl.int64) * (WEIGHT_ROWS * (K // 32 + 1))
    base = gl.load(scales + WEIGHT_ROWS * (K // 32) + w).to(gl.int32)
    acc *= (power_of_two(base) * 0.015625)[:, None]
    m = start + gl.arange(0, N, layout=gl.SliceLayout(0, sums))
    slot = gl.load(order + m, mask=m < end, other=0)
    if GATED:
        acc *= row_factors(row_scales, slot // TOP_K, m < end, ROW_SCALES)[None, :]
        if WEIGHTED:
            acc *= gl.load(topk_weights + slot, mask=m < end, other=0.0)[None, :]
        if HAS_BIAS:
            acc += gl.load(bias + e.to(gl.int64) * WEIGHT_ROWS + w).to(gl.float32)[:, None]
        both = gl.permute(gl.reshape(acc, [4, 2, 8, N]), [0, 2, 3, 1])
        gate, up = gl.split(both)
        y = gl.reshape(activate(gate, up, ACTIVATION, ALPHA, LIMIT), [HALF // 2, N])
        wide: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
        y = gl.convert_layout(y.to(out.dtype.element_ty), wide)
        f = column * HALF + ME * (HALF // 2) + gl.arange(0, HALF // 2, layout=gl.SliceLayout(1, wide))
        m = start + gl.arange(0, N, layout=gl.SliceLayout(0, wide))
        at = out + m.to(gl.int64)[None, :] * WIDTH + f[:, None]
        gl.store(at, y, mask=(m < end)[None, :] & (f < WIDTH)[:, None])
    else:
        acc *= row_factors(row_scales, m, m < end, ROW_SCALES)[None, :]
        if HAS_BIAS:
            acc += gl.load(bias + e.to(gl.int64) * WIDTH + w).to(gl.float32)[:, None]
        if WEIGHTED:
            acc *= gl.load(topk_weights + slot, mask=m < end, other=0.0)[None, :]
        rows: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        y = gl.convert_layout(acc.to(out.dtype.element_ty), rows)
        d = column * (2 * HALF) + ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, rows))
        m = start + gl.arange(0, N, layout=gl.SliceLayout(0, rows))
        slot = gl.load(order + m, mask=m < end, other=0)
        at = out + slot.to(gl.int64)[None, :] * WIDTH + d[:, None]
        gl.store(at, y, mask=(m < end)[None, :] & (d < WIDTH)[:, None])


@gluon.jit
def make_tile(
    row_scales, codes, scales, bias, topk_weights, order, out, e, start, end, column, ring_codes, ring_rows, full, empty, it,
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """One tile of N rows, by consumer ME; returns the number of steps so far."""
    acc, it = multiply_tile(
        codes, scales, e, column, ring_codes, ring_rows, full, empty, it, N, K, WIDTH, PLANES, GATED, STAGES, ME
    )
    finish_tile(
        acc, row_scales, scales, bias, topk_weights, order, out, e, start, end, column,
        N, K, WIDTH, TOP_K, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES, ACTIVATION, ALPHA, LIMIT, ME,
    )  # fmt: skip
    return it


@gluon.jit
def multiply_tiles(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    ring_codes, ring_rows, full, empty,
    K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TILE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What a multiplying group of warps does."""
    COLUMNS: gl.constexpr = (WIDTH + HALF - 1) // HALF if GATED else (WIDTH + 2 * HALF - 1) // (2 * HALF)
    count = gl.load(tile_count)
    it = gl.to_tensor(0)
    for t in range(gl.program_id(0), count * COLUMNS, gl.num_programs(0)):
        tile, column = tile_at(t, count, COLUMNS, GROUP)
        e, start = gl.load(tile_expert + tile), gl.load(tile_row + tile)
        end = gl.load(offsets + e + 1)
        rows = end - start
        if TILE == 128:
            if rows > 64:
                it = make_tile(
                    row_scales, codes, scales, bias, topk_weights, order, out, e, start, end, column,
                    ring_codes, ring_rows, full, empty, it, 128, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                    ACTIVATION, ALPHA, LIMIT, STAGES, ME,
                )  # fmt: skip
            elif rows > 32:
                it = make_tile(
                    row_scales, codes, scales, bias, topk_weights, order, out, e, start, end, column,
                    ring_codes, ring_rows, full, empty, it, 64, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                    ACTIVATION, ALPHA, LIMIT, STAGES, ME,
                )  # fmt: skip
            else:
                it = make_tile(
                    row_scales, codes, scales, bias, topk_weights, order, out, e, start, end, column,
                    ring_codes, ring_rows, full, empty, it, 32, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                    ACTIVATION, ALPHA, LIMIT, STAGES, ME,
                )  # fmt: skip
        else:
            if rows > 32:
                it = make_tile(
                    row_scales, codes, scales, bias, topk_weights, order, out, e, start, end, column,
                    ring_codes, ring_rows, full, empty, it, 64, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                    ACTIVATION, ALPHA, LIMIT, STAGES, ME,
                )  # fmt: skip
            else:
                it = make_tile(
                    row_scales, codes, scales, bias, topk_weights, order, out, e, start, end, column,
                    ring_codes, ring_rows, full, empty, it, 32, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                    ACTIVATION, ALPHA, LIMIT, STAGES, ME,
                )  # fmt: skip


@gluon.jit
def hopper_product(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TILE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Stage 1 (GATED, out: h [rows, F] in sorted order) or stage 2 (out [slots, D], weighted). Grid: at most the multiprocessors."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    blocks: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ring_codes = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * HALF, STEP // 2], swizzled)
    ring_rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2 * PLANES, TILE, STEP // 2], blocks)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
                ring_codes, ring_rows, full, empty, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                ACTIVATION, ALPHA, LIMIT, TILE, GROUP, STAGES, 0)),
            (multiply_tiles, (
                planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
                ring_codes, ring_rows, full, empty, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                ACTIVATION, ALPHA, LIMIT, TILE, GROUP, STAGES, 1)),
            (copy_tiles, (
                planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
                ring_codes, ring_rows, full, empty, K, WIDTH, TOP_K, PLANES, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                ACTIVATION, ALPHA, LIMIT, TILE, GROUP, STAGES, 2)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
