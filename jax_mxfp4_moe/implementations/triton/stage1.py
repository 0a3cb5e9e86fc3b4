"""Step 3: the grouped gate and up product, its bias and the gated activation."""

import triton
import triton.language as tl

from jax_mxfp4_moe.implementations.triton.overlap import wait_for_previous
from jax_mxfp4_moe.implementations.triton.product import add_planes, multiply, pick_tile
from jax_mxfp4_moe.implementations.triton.quantize import row_factors

SILU = tl.constexpr(0)
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oai": 3, "silu_clamped": 4, "silu_post_clamped": 5}


@triton.jit
def sigmoid(x):
    """In float32, without overflow: exp of minus the magnitude."""
    t = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, t) / (1.0 + t)


@triton.jit
def clamp_below(x, limit):
    """min(x, limit) that keeps NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def clamp_both(x, limit):
    """clip(x, -limit, limit) that keeps NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """`stage1.activate` of the package, by number."""
    if ACTIVATION == 0:
        return gate * sigmoid(gate) * up
    elif ACTIVATION == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * sigmoid(2.0 * inner) * up
    elif ACTIVATION == 3:
        gate = clamp_below(gate, LIMIT)
        return gate * sigmoid(ALPHA * gate) * (clamp_both(up, LIMIT) + 1.0)
    elif ACTIVATION == 4:
        gate = clamp_below(gate, LIMIT)
        return gate * sigmoid(gate) * clamp_both(up, LIMIT)
    else:
        return clamp_below(gate * sigmoid(gate), LIMIT) * clamp_both(up, LIMIT)


@triton.jit
def stage1(
    planes, row_scales, codes, scales, bias, topk_weights, order, offsets, tile_expert, tile_row, tile_count, h,
    K: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, PLANES: tl.constexpr, STACK: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr,
    ROW_SCALES: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [rows, F] in sorted order. Grid: bound of tiles times ceil(F / BLOCK_F)."""
    wait_for_previous(PDL)
    count = tl.load(tile_count)
    tile, column = pick_tile(tl.program_id(0), count, tl.cdiv(F, BLOCK_F), GROUP)
    if tile < count:
        e = tl.load(tile_expert + tile)
        start = tl.load(tile_row + tile)
        end = tl.load(offsets + e + 1)
        ROWS: tl.constexpr = 2 * BLOCK_F
        N: tl.constexpr = STACK * TILE
        n = tl.arange(0, N)
        p = start + n % TILE
        mask = (p < end) & (n // TILE < PLANES)
        token = tl.load(order + p, mask=mask, other=0) // TOP_K
        r = tl.arange(0, ROWS)
        w = (r // BLOCK_F) * F + tl.minimum(column * BLOCK_F + r % BLOCK_F, F - 1)
        acc = multiply(
            codes, scales, e, w, planes, row_scales, token.to(tl.int64) * PLANES + n // TILE, mask,
            2 * F, K, ROWS, N, BLOCK_K, MODE, PTX, STAGES,
        )  # fmt: skip
        acc = add_planes(acc, ROWS, TILE, STACK, MODE)
        m = start + tl.arange(0, TILE)
        slot = tl.load(order + m, mask=m < end, other=0)
        if ROW_SCALES:
            acc *= row_factors(row_scales, slot // TOP_K, m < end, ROW_SCALES)[None, :]
        if WEIGHTED:
            acc *= tl.load(topk_weights + slot, mask=m < end, other=0.0)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + e.to(tl.int64) * (2 * F) + w).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_F, TILE)), (1, 2, 0)))
        y = activate(gate, up, ACTIVATION, ALPHA, LIMIT)
        f = column * BLOCK_F + tl.arange(0, BLOCK_F)
        at = h + m.to(tl.int64)[None, :] * F + f[:, None]
        tl.store(at, y.to(h.dtype.element_ty), mask=(m < end)[None, :] & (f < F)[:, None])
