"""Numbers and layouts of aiter's MXFP4 operations, in NumPy on raw bytes.

Written from the formulas alone and sharing nothing with the package, so that it can judge the package.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
GARBAGE = 0xFF
"""Fills what an operation leaves unwritten: NaN as a scale and as a bfloat16."""

FLOAT4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
FLOAT8_E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)


# --- tensors as NumPy arrays that share their memory -----------------------------------------------------------------


def raw(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of a tensor in memory order: what a kernel sees that is given nothing but the address."""
    if not tensor.is_contiguous():
        raise RuntimeError(
            f"aiter_sim: a kernel was given a tensor with strides {tensor.stride()}; it reads contiguous memory"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def floats(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16, float16 or float32 tensor as an array that shares its memory."""
    dtype = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}[tensor.dtype]
    return raw(tensor).view(dtype).reshape(tensor.shape)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A fresh tensor as the allocator gives it, here always full of garbage."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * itemsize), GARBAGE, dtype=torch.uint8).view(dtype)


# --- MXFP4 -----------------------------------------------------------------------------------------------------------


def scale_bytes(amax: np.ndarray, rule: str) -> np.ndarray:
    """E8M0 bytes for the largest magnitudes of blocks.

    half_up: quarter of amax, exponent up when the mantissa is at least 1.5. hip_half_up: the same with amax at least
    1e-10. rceil: a sixth of amax, up to a power of two. even: amax up when the mantissa is at least 1.75, exponent - 2.
    """
    amax = np.asarray(amax, np.float32)
    if rule == "even":
        bits = amax.view(np.uint32).astype(np.int64)
        field = (bits + 0x200000) >> 23
        # Rounding up the largest binade gives infinity, whose logarithm is clamped to the largest exponent.
        return np.where(field >= 255, 254, np.clip(field - 2, 0, 254)).astype(np.uint8)
    if rule == "hip_half_up":
        amax = np.maximum(amax, np.float32(1e-10))
    if rule in ("half_up", "hip_half_up"):
        bits = (amax / np.float32(4)).view(np.uint32).astype(np.int64)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        up = (mantissa >= 0x400000) & ((field > 0) | (mantissa > 0x400000))
    elif rule == "rceil":
        bits = (amax / np.float32(6)).view(np.uint32).astype(np.int64)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        up = mantissa > 0
    else:
        raise ValueError(rule)
    return np.where(field == 255, 255, field + up).astype(np.uint8)


def element_codes(ratios: np.ndarray, rounding: str) -> np.ndarray:
    """E2M1 codes of x / scale: nearest; ties to the even code or away from zero; beyond 6 saturates."""
    magnitude = np.abs(ratios)
    codes = np.zeros(magnitude.shape, np.uint8)
    for i, midpoint in enumerate(MIDPOINTS):
        stays = rounding == "nearest_even" and i % 2 == 0
        codes += (magnitude > midpoint if stays else magnitude >= midpoint).astype(np.uint8)
    return codes | (np.signbit(ratios).astype(np.uint8) << 3)


def quantize(x: np.ndarray, scale_rule: str, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """[rows, n] -> packed bytes [rows, n / 2] and scale bytes [rows, n / 32]."""
    with np.errstate(all="ignore"):  # rows that were never written may hold anything
        x = np.asarray(x).astype(np.float32)
        blocks = x.reshape(len(x), -1, BLOCK)
        scales = scale_bytes(np.abs(blocks).max(axis=-1), scale_rule)
        ratios = blocks.astype(np.float64) / np.ldexp(1.0, scales.astype(int) - 127)[..., None]
    codes = element_codes(ratios, rounding).reshape(x.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Packed bytes [..., n / 2] and scale bytes [..., n / 32] -> float32 [..., n]."""
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1)
    values = values.reshape(*codes.shape[:-1], -1, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        return (values * E8M0[scales][..., None]).reshape(*codes.shape[:-1], -1)


# --- layouts ---------------------------------------------------------------------------------------------------------


def shuffled_offset(n: np.ndarray, kb: np.ndarray, row_bytes: int) -> np.ndarray:
    """Where byte kb of row n of one expert lies after shuffle_weight with 16 x 16 tiles."""
    return ((((n // 16) * (row_bytes // 32) + kb // 32) * 2 + (kb % 32) // 16) * 16 + n % 16) * 16 + kb % 16


def scale_address(row: np.ndarray, column: np.ndarray, columns: int) -> np.ndarray:
    """Where the scale of a row and a K-block lies, for weights and for sorted activations; `columns` is a multiple of 8."""
    return (
        (row // 32) * columns * 32
        + (column // 8) * 256
        + (column % 4) * 64
        + (row % 16) * 4
        + ((column % 8) // 4) * 2
        + (row % 32) // 16
    )


def shuffle_codes(codes: np.ndarray) -> np.ndarray:
    """[experts, rows, row_bytes] bytes -> the same shape, shuffled."""
    experts, rows, row_bytes = codes.shape
    offsets = shuffled_offset(np.arange(rows)[:, None], np.arange(row_bytes), row_bytes)
    out = np.empty((experts, rows * row_bytes), np.uint8)
    out[:, offsets.reshape(-1)] = codes.reshape(experts, -1)
    return out.reshape(codes.shape)


def shuffle_scales(scales: np.ndarray, padding: int = GARBAGE) -> np.ndarray:
    """[rows, columns] bytes -> padded to [multiple of 256, multiple of 8], shuffled; what is padding is undefined."""
    rows, columns = scales.shape
    padded = (-(-rows // 256) * 256, -(-columns // 8) * 8)
    out = np.full(padded[0] * padded[1], padding, np.uint8)
    out[scale_address(np.arange(rows)[:, None], np.arange(columns), padded[1])] = scales
    return out.reshape(padded)
