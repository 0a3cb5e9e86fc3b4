"""Step 1: rows sorted by expert, and the list of tiles that the products work through. No host reads a count.

A tile is up to TILE rows of one expert. Written: `order` [rows], the slot of each sorted row; `offsets` [E + 1], first row of each
expert; `tile_expert`, `tile_row` [tiles], and `tile_count` [1]. The sort is stable and uses no atomics, so that it is the same in
every run. Few slots: every program ranks its slots against all ids, in one launch or two. Many: chunks are counted, counts are added up,
and each slot is ranked inside its chunk, in three.
"""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.overlap import wait_for_previous
from jax_mxfp4_moe.implementations.triton.quantize import split_row

RANK = tl.constexpr(16)
"""Slots that a program ranks."""
SHIFT = tl.constexpr(13)
"""Bits of a slot's number in its key where every slot is compared with all."""
CHUNK = tl.constexpr(1024)
"""Slots of a chunk."""


@triton.jit
def load_ids(ids, at, rows, EXPERTS: tl.constexpr):
    """Ids at `at`, EXPERTS where the slot is skipped."""
    e = tl.load(ids + at, mask=at < rows, other=-1)
    return tl.where((e < 0) | (e >= EXPERTS), EXPERTS, e)


@triton.jit
def ranks_of(ids, keys, rows, EXPERTS: tl.constexpr, SCAN: tl.constexpr):
    """How many slots come before each of `keys`, [RANK]; the key of a slot is its expert, then its number."""
    before = tl.zeros((RANK, SCAN), tl.int32)
    ahead = load_ids(ids, tl.arange(0, SCAN), rows, EXPERTS)
    for start in range(0, rows, SCAN):
        slots, e = start + tl.arange(0, SCAN), ahead
        ahead = load_ids(ids, slots + SCAN, rows, EXPERTS)
        theirs = tl.where(slots < rows, (e << SHIFT) | slots, 2**31 - 1)
        before += (theirs[None, :] < keys[:, None]).to(tl.int32)
    return tl.sum(before, axis=1)


@triton.jit
def count_rows(ids, rows, EXPERTS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of each expert, [WIDTH], by one program."""
    e = tl.arange(0, WIDTH)
    counts = tl.zeros((WIDTH, 32), tl.int32)
    for start in range(0, rows, 32):
        theirs = load_ids(ids, start + tl.arange(0, 32), rows, EXPERTS)
        counts += (theirs[None, :] == e[:, None]).to(tl.int32)
    return tl.sum(counts, axis=1)


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
    ids, order, offsets, tile_expert, tile_row, tile_count, x, planes, row_scales, rows, tokens, ranks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SCAN: tl.constexpr, LIST: tl.constexpr,
    K: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Step 1, and step 2 of one token a program. Grid: (LIST ? 1 : ceil((EXPERTS + 1) / RANK)) + ranks + tokens.

    With LIST one program counts and lists the tiles; else offsets are ranks too, and `list_few` follows.
    """
    wait_for_previous(PDL)
    FIRST: tl.constexpr = 1 if LIST else (EXPERTS + RANK) // RANK
    program = tl.program_id(0)
    if program < FIRST:
        if LIST:
            counts = count_rows(ids, rows, EXPERTS, WIDTH)
            list_tiles(counts, offsets, tile_expert, tile_row, tile_count, EXPERTS, WIDTH, TILE)
        else:
            e = program * RANK + tl.arange(0, RANK)
            tl.store(offsets + e, ranks_of(ids, e << SHIFT, rows, EXPERTS, SCAN), mask=e <= EXPERTS)
    elif program < FIRST + ranks:
        slots = (program - FIRST) * RANK + tl.arange(0, RANK)
        e = load_ids(ids, slots, rows, EXPERTS)
        at = ranks_of(ids, (e << SHIFT) | slots, rows, EXPERTS, SCAN)
        tl.store(order + at, slots, mask=(slots < rows) & (e < EXPERTS))
    else:
        token = program - FIRST - ranks
        split_row(x, planes, row_scales, token, K, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)


@triton.jit
def list_few(
    offsets, tile_expert, tile_row, tile_count, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The tiles from the offsets; one program."""
    wait_for_previous(PDL)
    e = tl.arange(0, WIDTH)
    counts = tl.load(offsets + e + 1, mask=e < EXPERTS, other=0) - tl.load(offsets + e, mask=e < EXPERTS, other=0)
    list_tiles(counts, offsets, tile_expert, tile_row, tile_count, EXPERTS, WIDTH, TILE)


@triton.jit
def count_chunks(
    ids, counts, x, planes, row_scales, rows, tokens, chunks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    K: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
    QUANT: tl.constexpr, CARRY: tl.constexpr, HALF_AWAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Ids in each chunk, counts [chunks, WIDTH]; and step 2. Grid: chunks + tokens."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    if program < chunks:
        e = load_ids(ids, program * CHUNK + tl.arange(0, CHUNK), rows, EXPERTS)
        tl.store(counts + program * WIDTH + tl.arange(0, WIDTH), tl.histogram(e, WIDTH))
    else:
        split_row(x, planes, row_scales, program - chunks, K, PADDED, PLANES, BLOCKS, MODE, QUANT, CARRY, HALF_AWAY)


@triton.jit
def add_chunks(
    counts,
    offsets,
    tile_expert,
    tile_row,
    tile_count,
    chunks,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turns counts into each chunk's first row among those of its expert; one program."""
    wait_for_previous(PDL)
    e = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for chunk in range(chunks):
        count = tl.load(counts + chunk * WIDTH + e)
        tl.store(counts + chunk * WIDTH + e, total)
        total += count
    list_tiles(total, offsets, tile_expert, tile_row, tile_count, EXPERTS, WIDTH, TILE)


@triton.jit
def place(ids, order, counts, offsets, rows, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Ranks slots inside their chunk. Grid: ceil(rows / RANK)."""
    wait_for_previous(PDL)
    first = tl.program_id(0) * RANK
    slots = first + tl.arange(0, RANK)
    mine = load_ids(ids, slots, rows, EXPERTS)
    chunk = first // CHUNK
    before = tl.load(counts + chunk * WIDTH + mine, mask=mine < EXPERTS, other=0)
    before += tl.load(offsets + mine, mask=mine < EXPERTS, other=0)
    for start in range(chunk * CHUNK, first + RANK, 256):
        others = start + tl.arange(0, 256)
        theirs = tl.where(others < rows, load_ids(ids, others, rows, EXPERTS), EXPERTS + 1)
        less = (theirs[None, :] == mine[:, None]) & (others[None, :] < slots[:, None])
        before += tl.sum(less.to(tl.int32), axis=1)
    tl.store(order + before, slots, mask=(slots < rows) & (mine < EXPERTS))
