"""Kernel names in tables: which of them aiter has kernels for, and which stands nearest to one that must not run."""

from __future__ import annotations

import re
from collections.abc import Container

from jax_mxfp4_moe.implementations.aiter import kernels
from jax_mxfp4_moe.implementations.aiter.release import Release

CK_TILES: dict[int, dict[int, tuple[str, ...]]] = {
    1: {32: ("256x32x128x128_1x4", "64x32x32x128_1x1"), 64: ("256x64x128x128_1x4",), 128: ("256x128x128x128_1x4",)},
    2: {
        32: ("256x32x128x128_1x4", "64x32x32x128_1x1"),
        64: ("256x64x128x128_1x4", "64x64x128x128_1x1"),
        128: ("256x128x128x128_1x4", "64x128x128x128_1x1"),
    },
}
"""By stage and block_m: threads x rows x columns x bytes of the contraction, then waves. The same in every release from v0.1.9."""

PLACEHOLDER = "placeholder"
"""Name for a stage that runs no named kernel (ksplit > 1): aiter reads an empty field of a table as NaN, and fails."""

_SORT_BLOCK = re.compile(r"_sbm\d+")
_NEEDS_OTHERS = re.compile(r"_(?:fq|fp4|fp8|gui)(?=_|$)")
"""Options of a FlyDSL name with which the kernel reads or writes in another form than the two-stage calls do."""


def ck_name(stage: int, tile: str) -> str:
    """The full name of a CK kernel of `CK_TILES`: MXFP4 on both sides, shuffled weights, SiLU, bfloat16 out."""
    if stage == 1:
        return (
            f"moe_ck2stages_gemm1_{tile}_MulABScaleShuffled_v3_Nswizzle0_Quant3_MulRoutedWeight0_silu_FP4X2_FP4X2_B16"
        )
    version = "v1" if tile.startswith("64x32x") else "v3"
    return f"moe_ck2stages_gemm2_{tile}_MulABScaleExpertWeightShuffled_{version}_Nswizzle0_Quant3_MulRoutedWeight1_FP4X2_FP4X2_B16"


def ck_name_for(stage: int, block_m: int) -> str:
    """The CK kernel of 256 threads whose tiles have `block_m` rows."""
    return ck_name(stage, CK_TILES[stage][block_m][0])


_CK_NAMES = {ck_name(stage, tile) for stage, rows in CK_TILES.items() for tiles in rows.values() for tile in tiles}


def problem_with(
    stage: int, name: str, block_m: int, inter_dim: int, release: Release, registry: Container[str] | None = None
) -> str | None:
    """Why a table must not name this kernel for stage 1 or 2 on blocks of `block_m` sorted rows, as a clause; None if it may.

    `inter_dim` is the padded intermediate size.

    Besides `kernels.misfit`, which is about wrong numbers, this is about names with which aiter would run something else.

    Args:
      registry: names of the FlyDSL kernels that the installed aiter knows; None to judge by the facts of `release` alone.
    """
    if not name:
        return f"stage {stage} has no kernel name, and aiter reads an empty field as NaN"
    kernel = kernels.flydsl_kernel(name)
    if kernel is not None and kernel.tile_m < 32 and not release.flydsl_sort_block_m and release.flydsl:
        return f"{name} would skip its products with tiles of {kernel.tile_m} rows, and this aiter's FlyDSL kernels need 32 or more"
    if kernel is not None and stage == 2 and kernel.mode == "reduce" and "is_ep" not in release.trailing:
        return f"{name} sums over every slot, and this aiter cannot tell it which are skipped: use one with _atomic in its name"
    found = kernels.misfit(name, stage, block_m, inter_dim, release)
    if found is not None:
        return found
    if kernel is not None:
        is_there = registry is None or registered_name(name, release) in registry
        if is_there or kernels.is_registered_by_us(name, release):
            return None
        return f"{name} is not registered in this aiter"
    ck = kernels.ck_stage_and_rows(name)
    if ck is None:
        return f"{name} is neither a CK nor a FlyDSL kernel, and aiter would take it for one in assembly"
    if ck[0] != stage:
        return f"{name} is a kernel of stage {ck[0]} and was given for stage {stage}"
    if name not in _CK_NAMES:
        return f"{name} is not among aiter's CK kernels for MXFP4, and aiter would run one of its own choice"
    if stage == 1 and "64x32x32x128" in name and "bias1" in release.trailing:
        return f"{name} came with v0.1.9"
    return None


def registered_name(name: str, release: Release) -> str:
    """The name that aiter looks up in its registry: less the block size of the sorting, where the release reads that from the name."""
    return _SORT_BLOCK.sub("", name) if release.flydsl_sort_block_m else name


def alternatives(stage: int, name: str, block_m: int, release: Release) -> list[str]:
    """Names near to `name` for blocks of `block_m` rows, the nearest first, ending with a CK kernel; not all need be right."""
    names = [name]
    kernel = kernels.flydsl_kernel(name)
    if kernel is not None and release.flydsl:
        tile = f"_t{kernel.tile_m}x{kernel.tile_n}x"
        plain = _SORT_BLOCK.sub("", _NEEDS_OTHERS.sub("", name))
        deep = plain.replace(f"{tile}{kernel.tile_k}", f"{tile}256")
        told = f"_sbm{block_m}"  # only stage 2 reads it
        names += [plain, plain + told, deep, deep + told] if stage == 2 else [plain, deep]
        names.append(deep.replace(tile, f"_t{block_m}x{kernel.tile_n}x"))
    if block_m in CK_TILES[stage]:
        names.append(ck_name_for(stage, block_m))
    return list(dict.fromkeys(names))


def split_k_block(token: int) -> int:
    """The block size that aiter sorts by when ksplit > 1, whatever a row says."""
    return 16 if token < 2048 else 32 if token < 16384 else 64
