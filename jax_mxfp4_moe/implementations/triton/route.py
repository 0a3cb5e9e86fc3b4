"""Step 1: rows sorted by expert, and the list of tiles that the products work through. No host reads a count.

A tile is up to TILE rows of one expert. Written: `order` [rows], the slot of each sorted row; `offsets` [E + 1], first row of each
expert; `tile_expert`, `tile_row` [tiles], and `tile_count` [1]. The sort is stable and uses no atomics, so that it is the same in
every run. Few slots: every program ranks its slots against all ids, in one launch. Many: chunks are counted, counts are added up, and each
slot is ranked inside its chunk, in three.
"""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.quantize import split_row

RANK = tl.constexpr(32)
"""Slots that a program ranks."""
SCAN = tl.constexpr(256)
"""Ids that it compares them with at a time."""
CHUNK = tl.constexpr(1024)
"""Slots of a chunk."""


@triton.jit
def load_ids(ids, at, rows, EXPERTS: tl.constexpr):
    """Ids at `at`, EXPERTS where the slot is skipped."""
    e = tl.load(ids + at, mask=at < rows, other=-1)
    return tl.where((e < 0) | (e >= EXPERTS), EXPERTS, e)


@triton.jit
def rank(ids, order, first, rows, EXPERTS: tl.constexpr):
    """Sorted positions of slots first .. first + RANK - 1: how many slots come before each."""
    slots = first + tl.arange(0, RANK)
    mine = load_ids(ids, slots, rows, EXPERTS)
    before = tl.zeros((RANK,), tl.int32)
    for start in range(0, rows, SCAN):
        others = start + tl.arange(0, SCAN)
        theirs = tl.where(others < rows, load_ids(ids, others, rows, EXPERTS), EXPERTS + 1)
        less = (theirs[None, :] < mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (others[None, :] < slots[:, None]))
        before += tl.sum(less.to(tl.int32), axis=1)
    tl.store(order + before, slots, mask=(slots < rows) & (mine < EXPERTS))


@triton.jit
def list_tiles(
    counts, offsets, tile_expert, tile_row, tile_count, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """From the rows of each expert to where they start, and the tiles. counts: int32 [WIDTH]."""
    e = tl.arange(0, WIDTH)
    counts = tl.where(e < EXPERTS, counts, 0)
    starts = tl.cumsum(counts, axis=0) - counts
    tl.store(offsets + e, starts, mask=e <= EXPERTS)
    tiles = (counts + TILE - 1) // TILE
    first = tl.cumsum(tiles, axis=0) - tiles
    tl.store(tile_count, tl.sum(tiles, axis=0))
    step = tl.arange(0, 4)
    most = tl.max(tiles, axis=0)
    for i in range(0, most, 4):
        mask = (i + step)[None, :] < tiles[:, None]
        at = first[:, None] + i + step[None, :]
        tl.store(tile_expert + at, tl.broadcast_to(e[:, None], (WIDTH, 4)), mask=mask)
        tl.store(tile_row + at, starts[:, None] + (i + step[None, :]) * TILE, mask=mask)


@triton.jit
def route_few(
    ids, order, offsets, tile_expert, tile_row, tile_count, x, planes, row_scales, rows, tokens,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    K: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """The whole of step 1, and step 2 of one token a program. Grid: 1 + ceil(rows / RANK) + tokens."""
    program = tl.program_id(0)
    ranks = tl.cdiv(rows, RANK)
    if program == 0:
        counts = tl.zeros((WIDTH,), tl.int32)
        for start in range(0, rows, CHUNK):
            slots = start + tl.arange(0, CHUNK)
            e = load_ids(ids, slots, rows, EXPERTS)
            counts += tl.histogram(e, WIDTH)
        list_tiles(counts, offsets, tile_expert, tile_row, tile_count, EXPERTS, WIDTH, TILE)
    elif program <= ranks:
        rank(ids, order, (program - 1) * RANK, rows, EXPERTS)
    else:
        split_row(x, planes, row_scales, program - 1 - ranks, K, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)


@triton.jit
def count_chunks(
    ids, counts, x, planes, row_scales, rows, tokens, chunks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    K: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr,
):  # fmt: skip
    """Ids in each chunk, counts [chunks, WIDTH]; and step 2. Grid: chunks + tokens."""
    program = tl.program_id(0)
    if program < chunks:
        e = load_ids(ids, program * CHUNK + tl.arange(0, CHUNK), rows, EXPERTS)
        tl.store(counts + program * WIDTH + tl.arange(0, WIDTH), tl.histogram(e, WIDTH))
    else:
        split_row(x, planes, row_scales, program - chunks, K, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)


@triton.jit
def add_chunks(
    counts, offsets, tile_expert, tile_row, tile_count, chunks, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Turns counts into each chunk's first row among those of its expert; one program."""
    e = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for chunk in range(chunks):
        count = tl.load(counts + chunk * WIDTH + e)
        tl.store(counts + chunk * WIDTH + e, total)
        total += count
    list_tiles(total, offsets, tile_expert, tile_row, tile_count, EXPERTS, WIDTH, TILE)


@triton.jit
def place(ids, order, counts, offsets, rows, EXPERTS: tl.constexpr, WIDTH: tl.constexpr):
    """Ranks slots inside their chunk. Grid: ceil(rows / RANK)."""
    first = tl.program_id(0) * RANK
    slots = first + tl.arange(0, RANK)
    mine = load_ids(ids, slots, rows, EXPERTS)
    chunk = first // CHUNK
    before = tl.load(counts + chunk * WIDTH + mine, mask=mine < EXPERTS, other=0)
    before += tl.load(offsets + mine, mask=mine < EXPERTS, other=0)
    for start in range(chunk * CHUNK, first + RANK, SCAN):
        others = start + tl.arange(0, SCAN)
        theirs = tl.where(others < rows, load_ids(ids, others, rows, EXPERTS), EXPERTS + 1)
        less = (theirs[None, :] == mine[:, None]) & (others[None, :] < slots[:, None])
        before += tl.sum(less.to(tl.int32), axis=1)
    tl.store(order + before, slots, mask=(slots < rows) & (mine < EXPERTS))
