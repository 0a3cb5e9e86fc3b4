"""The simulated module tree: which modules a release has, and what fills each."""

from __future__ import annotations

from typing import Any

from aiter_sim.flydsl import (
    fill_flydsl,
    fill_flydsl_compiler,
    fill_flydsl_kernels,
    fill_flydsl_package,
    fill_flydsl_utils,
)
from aiter_sim.fused_moe import fill_fused_moe
from aiter_sim.operations import (
    fill_aiter,
    fill_chip_info,
    fill_core,
    fill_dtypes,
    fill_fp4_utils,
    fill_shuffle,
    fill_version,
)
from aiter_sim.triton_quantizer import fill_triton_kernel, fill_triton_wrapper


def tree(profile, flydsl: bool) -> dict[str, Any]:
    """Module name -> what fills it, or None for a package that holds nothing."""
    names: dict[str, Any] = {
        "aiter": fill_aiter,
        "aiter._version": fill_version,
        "aiter.jit": None,
        "aiter.jit.core": fill_core,
        "aiter.jit.utils": None,
        "aiter.jit.utils.chip_info": fill_chip_info,
        "aiter.ops": None,
        "aiter.ops.shuffle": fill_shuffle,
        "aiter.ops.triton": None,
        "aiter.utility": None,
        "aiter.utility.dtypes": fill_dtypes,
        "aiter.utility.fp4_utils": fill_fp4_utils,
        "aiter.fused_moe": fill_fused_moe,
    }
    if profile.triton_package is not None:
        package = profile.triton_package
        if package:
            names |= {
                f"aiter.ops.triton.{package}"[:-1]: None,
                f"aiter.ops.triton._triton_kernels.{package}"[:-1]: None,
            }
        names["aiter.ops.triton._triton_kernels"] = None
        names[f"aiter.ops.triton.{package}fused_mxfp4_quant"] = fill_triton_wrapper
        names[f"aiter.ops.triton._triton_kernels.{package}fused_mxfp4_quant"] = fill_triton_kernel
    if profile.flydsl_stages:
        names |= {"aiter.ops.flydsl": fill_flydsl, "aiter.ops.flydsl.utils": fill_flydsl_utils}
        names["aiter.ops.flydsl.moe_kernels"] = fill_flydsl_kernels
        names["aiter.ops.flydsl.kernels"] = None
        names["aiter.ops.flydsl.kernels.mixed_moe_gemm_2stage"] = fill_flydsl_compiler
    if flydsl:
        names["flydsl"] = fill_flydsl_package
    return names
