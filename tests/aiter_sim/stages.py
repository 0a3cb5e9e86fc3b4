"""The grouped products, work-group by work-group on the shuffled bytes: a wrong tile, layout or dtype gives wrong numbers."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import torch

from aiter_sim import numerics
from aiter_sim.sorting import TOKEN_BITS

CK_NAME = re.compile(
    r"moe_ck2stages_gemm([12])_(\d+)x(\d+)x(\d+)x(\d+)_(\dx\d)_MulABScale(ExpertWeight)?(Shuffled)?_v(\d)_"
)

# Threads x MPerBlock x NPerBlock x KPerBlock of the instances that are built, for each of the two products.
CK_TILES = {
    1: ("64x32x32x128_1x1", "256x32x128x128_1x4", "256x64x128x128_1x4", "256x128x128x128_1x4"),
    2: (
        "64x32x32x128_1x1",
        "256x32x128x128_1x4",
        "64x64x128x128_1x1",
        "256x64x128x128_1x4",
        "64x128x128x128_1x1",
        "256x128x128x128_1x4",
    ),
}


def ck_name(stage: int, tile: str) -> str:
    """A kernel name in CK's list."""
    if stage == 1:
        return (
            f"moe_ck2stages_gemm1_{tile}_MulABScaleShuffled_v3_Nswizzle0_Quant3_MulRoutedWeight0_silu_FP4X2_FP4X2_B16"
        )
    version = "v1" if tile == "64x32x32x128_1x1" else "v3"
    return f"moe_ck2stages_gemm2_{tile}_MulABScaleExpertWeightShuffled_{version}_Nswizzle0_Quant3_MulRoutedWeight1_FP4X2_FP4X2_B16"


def ck_tile(stage: int, kernel: str, block_m: int, inter_dim: int) -> tuple[int, int]:
    """MPerBlock and NPerBlock: of the named instance, or else by the heuristic for block_m."""
    match = CK_NAME.match(kernel)
    if (
        match
        and int(match[1]) == stage
        and f"{match[2]}x{match[3]}x{match[4]}x{match[5]}_{match[6]}" in CK_TILES[stage]
    ):
        return int(match[3]), int(match[4])
    if block_m not in (32, 64, 128):
        raise RuntimeError(f"Unsupported block_m {block_m} for moe heuristic dispatch")
    small = block_m == 32 and (stage == 1 or inter_dim <= 256)
    return block_m, 32 if small else 128


class Weights:
    """One stack of packed weights [experts, rows, row_bytes] with its shuffled scales, as a kernel reads it from memory."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, *, shuffled: bool = True, k: int | None = None
    ) -> None:
        self.experts, self.rows, last = weight.shape
        self.k = 2 * last if k is None else k
        self.codes, self.scales, self.shuffled = numerics.raw(weight), numerics.raw(scale), shuffled
        self._cache: dict[int, np.ndarray] = {}

    def expert(self, expert: int) -> np.ndarray:
        """[rows, k] float32; memory outside of the weights holds anything."""
        if not 0 <= expert < self.experts:
            return np.full((self.rows, self.k), np.nan, np.float32)
        if expert not in self._cache:
            row_bytes = self.k // 2
            n, kb = np.arange(self.rows)[:, None], np.arange(row_bytes)
            offsets = numerics.shuffled_offset(n, kb, row_bytes) if self.shuffled else n * row_bytes + kb
            row = expert * self.rows + n
            scales = numerics.scale_address(row, np.arange(self.k // 32), self.k // 32)
            codes = self.codes[expert * self.rows * row_bytes + offsets]
            self._cache[expert] = numerics.dequantize(codes, self.scales[scales])
        return self._cache[expert]


class Fp4Rows:
    """Packed activations in the order of the input, with their scales in sorted order."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, k: int) -> None:
        self.k, self.scales = k, numerics.raw(scale)
        self.codes = numerics.raw(codes).reshape(-1, k // 2)

    def __call__(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        columns = -(-(self.k // 32) // 8) * 8
        addresses = numerics.scale_address(positions[:, None], np.arange(self.k // 32), columns)
        return numerics.dequantize(self.codes[rows], self.scales[addresses])


class Bf16Rows:
    """Activations that were not quantized."""

    def __init__(self, x: torch.Tensor, k: int) -> None:
        self.x = numerics.floats(x).reshape(-1, k).astype(np.float32)

    def __call__(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.x[rows]


def tiles(sorted_ids, sorted_expert_ids, num_valid_ids, tokens, tile_m, rows_per_expert_id, limit):
    """What each work-group along M works on: (sorted positions, tokens, slots) of its real rows, and its expert."""
    ids, experts = sorted_ids.numpy(), sorted_expert_ids.numpy()
    end = min(int(num_valid_ids[0]), limit)
    for start in range(0, end, tile_m):
        block = ids[start : start + tile_m]
        token, slot = block & ((1 << TOKEN_BITS) - 1), block >> TOKEN_BITS
        if token[0] >= tokens or start // rows_per_expert_id >= len(experts):
            continue
        real = np.flatnonzero(token < tokens)
        yield start + real, token[real], slot[real], int(experts[start // rows_per_expert_id])


def silu_and_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def gate_up_rows(a, weights, walk, tokens, topk):
    """The raw product of stage 1, [tokens, topk, 2 * inter_dim] float32, and which slots were computed."""
    raw = np.zeros((tokens, topk, weights.rows), np.float32)
    done = np.zeros((tokens, topk), bool)
    for positions, token, slot, expert in walk:
        with np.errstate(all="ignore"):  # garbage in, garbage out
            raw[token, slot] = a(token, positions) @ weights.expert(expert).T
        done[token, slot] = True
    return raw, done


def stage1(a, weights, walk, out, topk, *, router_weights=None):
    """Gate and up product with SiLU, rounded once to the dtype of `out` [tokens, topk, inter_dim]."""
    tokens = out.shape[0]
    if router_weights is not None:
        raise NotImplementedError("aiter_sim: doweight_stage1")
    raw, done = gate_up_rows(a, weights, walk, tokens, topk)
    half = weights.rows // 2
    view = numerics.floats(out)
    view[done] = silu_and_mul(raw[done][:, :half], raw[done][:, half:]).astype(view.dtype)


def stage2(a, weights, walk, out, topk, sorted_weights, *, accumulate=True, knows_skips=True):
    """Down product times the router's weight, rounded to bfloat16 and added in bfloat16, here in the order of slots.

    Without `accumulate`, the deterministic mode, every slot of a scratch is summed, and the sum stored: a slot that nobody
    computed counts with what lies there, unless the kernel was told which slots those are.
    """
    tokens = out.shape[0]
    parts = np.zeros((topk, tokens, weights.rows), np.float32)
    done = np.zeros((topk, tokens), bool)
    scale = sorted_weights.numpy()
    for positions, token, slot, expert in walk:
        with np.errstate(all="ignore"):
            product = a(token * topk + slot, positions) @ weights.expert(expert).T
            parts[slot, token] = product * scale[positions][:, None]
        done[slot, token] = True
    parts = parts.astype(ml_dtypes.bfloat16)
    view = numerics.floats(out)
    if not accumulate:
        parts[~done] = 0 if knows_skips else np.nan
        view[:] = parts.astype(np.float32).sum(0).astype(view.dtype)
        return
    for slot in range(topk):
        view[done[slot]] = (view[done[slot]].astype(np.float32) + parts[slot][done[slot]].astype(np.float32)).astype(
            view.dtype
        )
