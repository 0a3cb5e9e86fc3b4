"""Both grouped products for Hopper: weights are decoded on their way from shared memory to the tensor cores.

One program a multiprocessor, three groups of four warps: one copies weights and rows into a ring of shared memory, two multiply, each
64 weight rows. With one plane they take turns: while one decodes, the other multiplies. In Gluon, since none of this can be said in `tl`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from jax_mxfp4_moe.implementations.triton.decode import look_up, power_of_two
from jax_mxfp4_moe.implementations.triton.overlap import wait_for_previous
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
LEVELS = gl.constexpr(3)
"""Sizes of a tile: all of its rows, half and a quarter."""


def stages(planes: int, tile_rows: int) -> int:
    """Copies under way."""
    return RING // (2 * HALF.value * STEP.value // 2 + planes * STEP.value * tile_rows)


def stack(planes: int, tile_rows: int) -> int:
    """Planes that lie side by side in one operand: all, while registers hold their sums."""
    return planes if tile_rows <= 64 else 1


@gluon.jit
def find_tile(t, count, tile_expert, tile_row, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first row, column tile) of turn t of count * COLUMNS; past them an expert that exists."""
    group = t // (GROUP * COLUMNS)
    size = gl.maximum(gl.minimum(count - group * GROUP, GROUP), 1)
    within = t % (GROUP * COLUMNS)
    tile = group * GROUP + within % size
    some = t < count * COLUMNS
    e, start = gl.load(tile_expert + tile, mask=some, other=0), gl.load(tile_row + tile, mask=some, other=0)
    return e, start, within // size


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
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, STACK: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies what a tile of N rows multiplies, step by step; returns the number of steps so far."""
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    PARTS: gl.constexpr = 2 * PLANES // STACK
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(1, wide))
    w, _ = weight_row(r, column, WIDTH, GATED)
    b = gl.arange(0, STEP // 2, layout=gl.SliceLayout(0, wide))
    weights = codes + e.to(gl.int64) * (WEIGHT_ROWS * K // 2)
    at = w[:, None] * 64 + ((b // 64) * (WEIGHT_ROWS * 64) + b % 64)[None, :]
    n = gl.arange(0, STACK * N, layout=gl.SliceLayout(1, wide))
    p = start + n % N
    mine = p < end
    if GATED:
        row = gl.load(order + p, mask=mine, other=0) // TOP_K
    else:
        row = gl.where(mine, p, 0)
    rows = planes + (row.to(gl.int64) * PLANES + n // N)[:, None] * K + b[None, :]
    for step in range((K + STEP - 1) // STEP):
        slot = it % STAGES
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        inside = mine[:, None] & (b >= 0)[None, :]
        some = (r >= 0)[:, None] & (b >= 0)[None, :]
        if K % STEP != 0:  # zeros past the end
            inside = inside & (step * (STEP // 2) + b < K // 2)[None, :]
            some = some & (step * (STEP // 2) + b < K // 2)[None, :]
        load_into(ring_codes.index(slot), weights + step * (2 * WEIGHT_ROWS * 64) + at, mask=some)
        for part in gl.static_range(PARTS):
            load_into(
                ring_rows.index(slot * PARTS + part).slice(0, STACK * N),
                rows + (part * (K // 2) + step * (STEP // 2)),
                mask=inside,
            )
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        it += 1
    return it


@gluon.jit
def copy_tiles(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    ring_codes, ring_rows, full, empty, turns,
    K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, STACK: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TILE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What the copying warps do."""
    COLUMNS: gl.constexpr = (WIDTH + HALF - 1) // HALF if GATED else (WIDTH + 2 * HALF - 1) // (2 * HALF)
    count = gl.load(tile_count)
    it = gl.to_tensor(0)
    for t in range(gl.program_id(0), count * COLUMNS, gl.num_programs(0)):
        e, start, column = find_tile(t, count, tile_expert, tile_row, COLUMNS, GROUP)
        end = gl.load(offsets + e + 1)
        rows = gl.minimum(end - start, TILE)
        for level in gl.static_range(LEVELS):
            if (rows <= TILE >> level) & (rows > (TILE >> level + 1 if level + 1 < LEVELS else 0)):
                it = copy_tile(
                    planes, codes, order, e, start, end, column, ring_codes, ring_rows, full, empty, it,
                    TILE >> level, K, WIDTH, TOP_K, PLANES, STACK, GATED, STAGES,
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
def add_product(part, weights, ring_rows, at, C: gl.constexpr, NEW: gl.constexpr):
    """Begins the product of a step's weights with the two halves of C operand rows."""
    x0 = ring_rows.index(at).slice(0, C).permute([1, 0])
    x1 = ring_rows.index(at + 1).slice(0, C).permute([1, 0])
    part = warpgroup_mma(weights[0], x0, part, use_acc=not NEW, is_async=True)
    return warpgroup_mma(weights[1], x1, part, is_async=True)


@gluon.jit
def wait_for(full, it, STAGES: gl.constexpr):
    """Waits for the copies of step `it`, and makes them visible to the tensor cores; returns its place in the ring."""
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
    fence_async_shared()
    return it % STAGES


@gluon.jit
def take_turn(turns, turn, ME: gl.constexpr):
    """Waits until the other consumer has begun its products of this turn (ME 1), or of the one before (ME 0).

    Both have as many turns. Not taken by a last odd step, nor with two passes, whose products are long enough to hide the decoding.
    """
    mbarrier.wait(turns.index(ME), (turn & 1) ^ (1 - ME))


@gluon.jit
def pass_turn(turns, ME: gl.constexpr):
    """Lets the other consumer begin."""
    barrier()
    mbarrier.arrive(turns.index(1 - ME), count=1)


@gluon.jit
def add_step(acc, d, ring_codes, ring_rows, full, empty, it, C: gl.constexpr, PASSES: gl.constexpr,
             STAGES: gl.constexpr, ME: gl.constexpr):  # fmt: skip
    """Adds a step's products to acc, the second plane's, if that has a pass of its own, with its weight; d: the step's exponents."""
    sums: gl.constexpr = acc.type.layout
    zeros = warpgroup_mma_init(gl.zeros([HALF, C], gl.float32, sums))
    slot = wait_for(full, it, STAGES)
    weights = decode_step(ring_codes, slot, d, gl.DotOperandLayout(0, sums, 4), ME)
    for plane in gl.static_range(PASSES):
        part = add_product(zeros, weights, ring_rows, slot * (2 * PASSES) + 2 * plane, C, True)
        acc += warpgroup_mma_wait(0, deps=[part]) * (1.0 if plane == 0 else 0.03125)
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    return acc


@gluon.jit
def add_two_steps(acc, d, following, ring_codes, ring_rows, full, empty, turns, it, turn, C: gl.constexpr, STAGES: gl.constexpr,
                  ME: gl.constexpr):  # fmt: skip
    """The same for one pass and two steps, in turn with the other consumer; the second is decoded while the first is multiplied."""
    sums: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    slot = wait_for(full, it, STAGES)
    weights = decode_step(ring_codes, slot, d, operand, ME)
    take_turn(turns, turn, ME)
    part = add_product(warpgroup_mma_init(gl.zeros([HALF, C], gl.float32, sums)), weights, ring_rows, slot * 2, C, True)
    last = wait_for(full, it + 1, STAGES)
    weights = decode_step(ring_codes, last, following, operand, ME)
    part = add_product(part, weights, ring_rows, last * 2, C, False)
    pass_turn(turns, ME)
    acc += warpgroup_mma_wait(0, deps=[part])
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    mbarrier.arrive(empty.index(last), count=1)
    return acc


@gluon.jit
def multiply_tile(
    first, second, scales, e, column, ring_codes, ring_rows, full, empty, turns, it, turn,
    C: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, PASSES: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """[64, C] float32 of consumer ME, without the scales of rows; first, second: exponents of the first two steps.

    The tensor cores' sums keep 13 bits, so that they are added to float32 ones after every step, or two with one pass.
    """
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32])
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    scales += e.to(gl.int64) * (WEIGHT_ROWS * (K // 32 + 1))
    acc = gl.zeros([HALF, C], gl.float32, sums)
    d, following = first, second
    if PASSES == 1:
        for pair in range(STEPS // 2):
            d2 = load_exponents(scales, 2 * pair + 2, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
            d3 = load_exponents(scales, 2 * pair + 3, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
            acc = add_two_steps(acc, d, following, ring_codes, ring_rows, full, empty, turns, it, turn, C, STAGES, ME)
            d, following = d2, d3
            it += 2
            turn += 1
        if STEPS % 2 == 1:
            acc = add_step(acc, d, ring_codes, ring_rows, full, empty, it, C, PASSES, STAGES, ME)
            it += 1
    else:
        for step in range(STEPS):
            d2 = load_exponents(scales, step + 2, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
            acc = add_step(acc, d, ring_codes, ring_rows, full, empty, it, C, PASSES, STAGES, ME)
            d, following = following, d2
            it += 1
    return acc, it, turn


@gluon.jit
def add_stacked(acc, N: gl.constexpr, STACK: gl.constexpr):
    """[64, STACK * N] -> [64, N]: planes that lie side by side, by their weights; within a thread."""
    if STACK == 1:
        return acc
    else:
        high, low = gl.split(gl.permute(gl.reshape(acc, [HALF, 2, N]), [0, 2, 1]))
        sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
        return gl.convert_layout(high + low * 0.03125, sums, assert_trivial=True)


@gluon.jit
def finish_tile(
    acc, base, slot, factor, weight, bias, out, e, start, end, column,
    N: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What follows the sums of consumer ME: factors, bias, activation; and the rows of the output, by way of another layout.

    base: scale bytes of the 64 weight rows; slot, factor, weight: [N], of the tile's rows, a thread each.
    """
    sums: gl.constexpr = acc.type.layout
    columns: gl.constexpr = gl.SliceLayout(0, sums)
    acc *= (power_of_two(base) * 0.015625)[:, None]
    w, _ = weight_row(ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums)), column, WIDTH, GATED)
    if GATED:
        acc *= gl.convert_layout(factor, columns)[None, :]
        if WEIGHTED:
            acc *= gl.convert_layout(weight, columns)[None, :]
        if HAS_BIAS:
            acc += gl.load(bias + e.to(gl.int64) * (2 * WIDTH) + w).to(gl.float32)[:, None]
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
        acc *= gl.convert_layout(factor, columns)[None, :]
        if HAS_BIAS:
            acc += gl.load(bias + e.to(gl.int64) * WIDTH + w).to(gl.float32)[:, None]
        if WEIGHTED:
            acc *= gl.convert_layout(weight, columns)[None, :]
        rows: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        y = gl.convert_layout(acc.to(out.dtype.element_ty), rows)
        slot = gl.convert_layout(slot, gl.SliceLayout(0, rows))
        d = column * (2 * HALF) + ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, rows))
        m = start + gl.arange(0, N, layout=gl.SliceLayout(0, rows))
        at = out + slot.to(gl.int64)[None, :] * WIDTH + d[:, None]
        gl.store(at, y, mask=(m < end)[None, :] & (d < WIDTH)[:, None])


@gluon.jit
def begin_tile(scales, offsets, e, column, K: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, ME: gl.constexpr):
    """What a tile's first steps need: the end of its expert's rows, and the exponents of two steps."""
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    end = gl.load(offsets + e + 1)
    scales += e.to(gl.int64) * (WEIGHT_ROWS * (K // 32 + 1))
    first = load_exponents(scales, 0, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)
    return end, first, load_exponents(scales, 1, column, WEIGHT_ROWS, K, WIDTH, GATED, ME)


@gluon.jit
def make_tile(
    first, second, row_scales, scales, bias, topk_weights, order, offsets, out, e, start, end, column, e2, column2,
    ring_codes, ring_rows, full, empty, turns, it, turn,
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, STACK: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """One tile of N rows, by consumer ME; returns the numbers of steps and turns so far, and `begin_tile` of the next one, (e2, column2).

    What a tile needs from memory is asked for a good while before: for its end before its products, for the next one before its end.
    """
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    m = start + gl.arange(0, N, layout=one_each)
    slot = gl.load(order + m, mask=m < end, other=0)
    w, _ = weight_row(ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums)), column, WIDTH, GATED)
    base = gl.load(scales + e.to(gl.int64) * (WEIGHT_ROWS * (K // 32 + 1)) + (WEIGHT_ROWS * (K // 32) + w)).to(gl.int32)
    factor = row_factors(row_scales, slot // TOP_K if GATED else m, m < end, ROW_SCALES)
    weight = factor
    if WEIGHTED:
        weight = gl.load(topk_weights + slot, mask=m < end, other=0.0)
    acc, it, turn = multiply_tile(
        first, second, scales, e, column, ring_codes, ring_rows, full, empty, turns, it, turn,
        STACK * N, K, WIDTH, PLANES // STACK, GATED, STAGES, ME,
    )  # fmt: skip
    end2, first, second = begin_tile(scales, offsets, e2, column2, K, WIDTH, GATED, ME)
    finish_tile(
        add_stacked(acc, N, STACK), base, slot, factor, weight, bias, out, e, start, end, column,
        N, WIDTH, GATED, HAS_BIAS, WEIGHTED, ACTIVATION, ALPHA, LIMIT, ME,
    )  # fmt: skip
    return it, turn, end2, first, second


@gluon.jit
def multiply_tiles(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    ring_codes, ring_rows, full, empty, turns,
    K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, STACK: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TILE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What a multiplying group of warps does."""
    COLUMNS: gl.constexpr = (WIDTH + HALF - 1) // HALF if GATED else (WIDTH + 2 * HALF - 1) // (2 * HALF)
    count = gl.load(tile_count)
    it, turn = gl.to_tensor(0), gl.to_tensor(0)
    e, start, column = find_tile(gl.program_id(0), count, tile_expert, tile_row, COLUMNS, GROUP)
    end, first, second = begin_tile(scales, offsets, e, column, K, WIDTH, GATED, ME)
    for t in range(gl.program_id(0), count * COLUMNS, gl.num_programs(0)):
        e2, start2, column2 = find_tile(t + gl.num_programs(0), count, tile_expert, tile_row, COLUMNS, GROUP)
        rows = gl.minimum(end - start, TILE)
        for level in gl.static_range(LEVELS):
            if (rows <= TILE >> level) & (rows > (TILE >> level + 1 if level + 1 < LEVELS else 0)):
                it, turn, end, first, second = make_tile(
                    first, second, row_scales, scales, bias, topk_weights, order, offsets, out, e, start, end, column, e2, column2,
                    ring_codes, ring_rows, full, empty, turns, it, turn,
                    TILE >> level, K, WIDTH, TOP_K, PLANES, STACK, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                    ACTIVATION, ALPHA, LIMIT, STAGES, ME,
                )  # fmt: skip
        e, start, column = e2, start2, column2


@gluon.jit
def hopper_product(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
    K: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PLANES: gl.constexpr, STACK: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, ROW_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TILE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Stage 1 (GATED, out: h [rows, F] in sorted order) or stage 2 (out [slots, D], weighted). Grid: at most the multiprocessors."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    blocks: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ring_codes = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * HALF, STEP // 2], swizzled)
    ring_rows = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * 2 * PLANES // STACK, STACK * TILE, STEP // 2], blocks
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=2)
    wait_for_previous(PDL)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
                ring_codes, ring_rows, full, empty, turns, K, WIDTH, TOP_K, PLANES, STACK, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                ACTIVATION, ALPHA, LIMIT, TILE, GROUP, STAGES, 0)),
            (multiply_tiles, (
                planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
                ring_codes, ring_rows, full, empty, turns, K, WIDTH, TOP_K, PLANES, STACK, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                ACTIVATION, ALPHA, LIMIT, TILE, GROUP, STAGES, 1)),
            (copy_tiles, (
                planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, out,
                ring_codes, ring_rows, full, empty, turns, K, WIDTH, TOP_K, PLANES, STACK, GATED, HAS_BIAS, WEIGHTED, ROW_SCALES,
                ACTIVATION, ALPHA, LIMIT, TILE, GROUP, STAGES, 2)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
