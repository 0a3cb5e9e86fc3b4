"""aiter.ops.flydsl: which kernels a release registers, and whether the package is there."""

from __future__ import annotations

import functools
import re
from typing import Any

from aiter_sim import stages


def fill_flydsl(sim, module):
    module.is_flydsl_available = sim.module("aiter.ops.flydsl.utils").is_flydsl_available


def fill_flydsl_utils(sim, module):
    @functools.lru_cache(maxsize=1)
    def is_flydsl_available():
        return sim.flydsl

    module.is_flydsl_available = is_flydsl_available


def fill_flydsl_kernels(sim, module):
    """The registry of kernels by name, which callers may extend."""
    profile = sim.profile
    if profile.flydsl_import_needs_package and not sim.flydsl:
        raise ModuleNotFoundError("No module named 'flydsl'", name="flydsl")
    module._KERNEL_PARAMS = flydsl_registry(profile)
    suffix = re.compile("".join(f"({text})?" for text in profile.flydsl_suffixes) + "$")

    def get_flydsl_kernel_params(name):
        found = module._KERNEL_PARAMS.get(name)
        match = suffix.search(name)
        if found is not None or not match or not match[0]:
            return found
        found = module._KERNEL_PARAMS.get(name[: match.start()])
        if found is None:
            return None
        found = dict(found)
        for text in match.groups():
            if text and text.startswith("_sbm"):
                found["sort_block_m"] = int(text[4:])
            elif text in ("_fp4", "_fp8"):
                found["out_dtype"] = text[1:]
        return found

    def flydsl_kernel_name(stage, a_dtype, b_dtype, out_dtype, tile_m, tile_n, tile_k, mode="", sort_block_m=0):
        name = f"flydsl_moe{stage}_a{a_dtype}_w{b_dtype}_{out_dtype}_t{tile_m}x{tile_n}x{tile_k}"
        name += f"_{mode}" if mode else ""
        return name + (f"_sbm{sort_block_m}" if sort_block_m not in (0, tile_m) else "")

    module.get_flydsl_kernel_params, module.flydsl_kernel_name = get_flydsl_kernel_params, flydsl_kernel_name
    if profile.cktile_silu_needs_flydsl and sim.flydsl:
        module.flydsl_silu_and_mul_interleaved = stages.silu_and_mul


def flydsl_registry(profile) -> dict[str, dict[str, Any]]:
    """The FP4 x FP4 kernels with bfloat16 results; the real registry has those of other types too."""
    common = {"a_dtype": "fp4", "b_dtype": "fp4", "out_dtype": "bf16"}
    base = "flydsl_moe{}_afp4_wfp4_bf16_t{}x{}x{}"
    registry = {}
    first_tiles = [(m, 256) for m in (16, 32, 64)]
    if 1 in profile.flydsl_stages:
        first_tiles = [(32, 32), *((m, n) for m in (32, 64, 128) for n in (64, 128))]
    for tile_m, tile_n in first_tiles:
        for waves in (1, 2, 3, 4) if 1 in profile.flydsl_stages else (1,):
            for b_nt in (2, 0) if 1 in profile.flydsl_options else (None,):
                name = (
                    base.format(1, tile_m, tile_n, 256)
                    + (f"_w{waves}" if waves > 1 else "")
                    + ("_bnt0" if b_nt == 0 else "")
                )
                registry[name] = {
                    "stage": 1,
                    **common,
                    "tile_m": tile_m,
                    "tile_n": tile_n,
                    "tile_k": 256,
                    "MPerBlock": tile_m,
                }
                if 1 in profile.flydsl_stages:
                    registry[name] |= {"waves_per_eu": waves, "k_batch": 1}
    for tile_m in profile.flydsl_tiles_m:
        for tile_n in (128, 256):
            for tile_k in profile.flydsl_tiles_k:
                for mode in ("atomic", "reduce"):
                    for b_nt in (0, 2) if 2 in profile.flydsl_options else (None,):
                        name = base.format(2, tile_m, tile_n, tile_k) + f"_{mode}" + ("_bnt2" if b_nt == 2 else "")
                        registry[name] = {"stage": 2, **common, "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k}
                        registry[name] |= {"mode": mode, "MPerBlock": tile_m}
                        if b_nt is not None:
                            registry[name] |= {"b_nt": b_nt, "xcd_swizzle": 0}
                            registry[name + "_persist"] = {**registry[name], "persist": True}
    return registry


def fill_flydsl_compiler(sim, module):
    """The compile function of stage 2. It makes nothing here; what it is written with differs between releases."""
    if not sim.flydsl:
        raise ModuleNotFoundError("No module named 'flydsl'", name="flydsl")
    profile = sim.profile

    @functools.cache
    def compile_before_v0_1_12(*, tile_m, tile_k):
        sim.unsupported("compiling")

    @functools.cache
    def compile_through_registers(*, tile_m, tile_k):
        def moe_gemm2():
            def _k_shift_bits(k):
                return k // 128 % 2 * 16

            return _k_shift_bits

        sim.unsupported("compiling", moe_gemm2)

    @functools.cache
    def compile_with_copies(*, tile_m, tile_k):
        def moe_gemm2(rocdl):
            def _k_shift_bits(k):
                return k // 128 % 2 * 16

            rocdl.raw_ptr_buffer_load_lds(_k_shift_bits)

        sim.unsupported("compiling", moe_gemm2)

    late = compile_with_copies if profile.flydsl_copies_to_lds else compile_through_registers
    module.compile_mixed_moe_gemm2 = late if profile.flydsl_has_sort_block_m else compile_before_v0_1_12


def fill_flydsl_package(sim, module):
    """The package flydsl itself, of which only its presence and its version matter here."""
    module.__version__ = sim.profile.flydsl_version
