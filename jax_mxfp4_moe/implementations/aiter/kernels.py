"""What aiter would launch for a row, and why some of that would give wrong numbers.

aiter checks few of the conditions below itself: a kernel whose tiles do not fit the sorted order multiplies rows by the
weights of another expert, without an error.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from typing import Any, NamedTuple

from jax_mxfp4_moe.implementations.aiter.release import FLYDSL_T16, FLYDSL_T16_MAX_INTERMEDIATE, Release

BLOCK_MS = (16, 32, 64, 128)
"""Rows of one expert's block that aiter's sorters and kernels know."""

NATIVE_FP4_VARIABLE, STAGE2_FP8_VARIABLE = "AITER_MXFP4_INTERMEDIATE", "AITER_FLYDSL_STAGE2_FP8"
"""Read by aiter at every call, from v0.1.16.post6 and v0.1.19.post2 on; "1" lets stage 2 keep slots in less than bfloat16."""

SPLIT_K_STAGE1 = "cktile_moe_stage1"
"""The stage-1 function that takes bfloat16 activations and splits the sum; aiter resolves rows with ksplit > 1 to it."""
_STAGES = {
    "stage1": ("ck_moe_stage1", "ck_moe_stage1_fwd", SPLIT_K_STAGE1, "_flydsl_stage1_wrapper"),
    "stage2": ("ck_moe_stage2_fwd", "cktile_moe_stage2", "_flydsl_stage2_wrapper"),
}

_CK_NAME = re.compile(r"moe_ck2stages_gemm(?P<stage>[12])_\d+x(?P<rows>\d+)x\d+x\d+_")
_FLYDSL_NAME = re.compile(
    r"flydsl_moe(?P<stage>[12])_a(?P<a>[a-z0-9]+)_w(?P<w>[a-z0-9]+)_[a-z0-9]+"
    r"_t(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)(?P<options>(_[a-z0-9]+)*)"
)


class FlydslKernel(NamedTuple):
    """What the name of a FlyDSL kernel says, with the parameters of its registration, if any, on top.

    Attributes:
      stage, tile_m, tile_n, tile_k: as named.
      types: of activations and weights, for example "fp4", "fp4".
      mode: "atomic" or "reduce"; only stage 2 has one.
      sort_block_m: the sorting's block_m that the kernel is told of; 0 for tile_m. Only stage 2 reads it.
      options: the words after the tile.
    """

    stage: int
    tile_m: int
    tile_n: int
    tile_k: int
    types: tuple[str, str]
    mode: str
    sort_block_m: int
    options: tuple[str, ...]

    @property
    def quantizes(self) -> bool:
        """Whether it is a stage 1 that quantizes its own result."""
        return self.stage == 1 and not {"fq", "fp4", "fp8"}.isdisjoint(self.options)


def ck_stage_and_rows(name: str) -> tuple[int, int] | None:
    """The stage of a CK kernel and the rows of its tile by its name, `...gemm{stage}_256x{rows}x128x128_...`; None for any other name."""
    found = _CK_NAME.match(name)
    return None if found is None else (int(found["stage"]), int(found["rows"]))


def flydsl_kernel(name: str, params: dict[str, Any] | None = None) -> FlydslKernel | None:
    """The facts in a FlyDSL kernel's name; `params` are those it is registered with. None for any other name."""
    found = _FLYDSL_NAME.fullmatch(name)
    if found is None:
        return None
    options = tuple(found["options"].split("_")[1:])
    facts: dict[str, Any] = {
        "tile_m": found["m"],
        "tile_n": found["n"],
        "tile_k": found["k"],
        "mode": "reduce" if "reduce" in options else "atomic",
        "sort_block_m": next((word[3:] for word in options if re.fullmatch(r"sbm\d+", word)), 0),
        **(params or {}),
    }
    return FlydslKernel(
        stage=int(found["stage"]),
        tile_m=int(facts["tile_m"]),
        tile_n=int(facts["tile_n"]),
        tile_k=int(facts["tile_k"]),
        types=(found["a"], found["w"]),
        mode=facts["mode"],
        sort_block_m=int(facts["sort_block_m"]),
        options=options,
    )


def misfit(
    name: str, stage: int, block_m: int, inter_dim: int, release: Release, params: dict[str, Any] | None = None
) -> str | None:
    """Why a kernel is wrong in a stage after sorting by `block_m`, as a clause; None if nothing speaks against it.

    Args:
      name: a kernel's name; the empty one leaves the choice to aiter, by block_m.
      stage: 1 or 2.
      block_m: that of the sorting.
      inter_dim: columns of h, padded: the length of stage 2's sums.
      release: the aiter in question.
      params: what the kernel is registered with, for FlyDSL kernels.
    """
    ck = ck_stage_and_rows(name)
    if ck is not None and ck[1] != block_m:
        return f"{name} multiplies {ck[1]} rows by one expert's weights, but rows are sorted into blocks of {block_m}"
    if ck is not None and "Shuffled" not in name:
        return f"{name} reads weights that are not shuffled"
    kernel = flydsl_kernel(name, params)
    if has_own_protocol(name):
        return f"{name} follows a protocol of its own"
    if kernel is None:
        return "aiter has no CK kernel for block_m 16" if block_m == 16 else None
    if kernel.stage != stage:
        return f"{name} is a kernel of stage {kernel.stage} and was given for stage {stage}"
    if not release.flydsl or stage not in release.flydsl_stages:
        return f"{name} needs FlyDSL for stage {stage}, which this aiter does not have here: install the flydsl that it names"
    if kernel.types != ("fp4", "fp4"):
        return f"{name} multiplies {' by '.join(kernel.types)}, expected fp4 by fp4"
    if "gui" in kernel.options:
        return f"{name} reads gate and up rows in turn, and here the gate rows come first"
    if kernel.quantizes:
        return f"{name} quantizes inside stage 1, which only aiter's own fused_moe can call"
    if stage == 1 and kernel.tile_m < 32:
        return f"{name} has tiles of {kernel.tile_m} rows, and FlyDSL's stage 1 takes the expert of every 32 rows: it needs 32 or more"
    is_told = stage == 2 and release.flydsl_sort_block_m and kernel.sort_block_m
    sorted_by = kernel.sort_block_m if is_told else kernel.tile_m
    if sorted_by != block_m or block_m % kernel.tile_m:
        return (
            f"{name} has tiles of {kernel.tile_m} rows and expects rows sorted by {sorted_by}, found block_m {block_m}"
        )
    if kernel.tile_k >= 256 or release.flydsl_t16:
        return None
    if not is_registered_by_us(name, release):
        return f"{name} has tile_k {kernel.tile_k}, for which this aiter has no right kernel; releases that register such kernels have"
    if inter_dim > FLYDSL_T16_MAX_INTERMEDIATE:
        return f"{name} can be compiled by this aiter for intermediate sizes of at most {FLYDSL_T16_MAX_INTERMEDIATE}, found {inter_dim}"
    return None


def has_own_protocol(name: str) -> bool:
    """Whether a kernel is one of those that only aiter's own `fused_moe` can call, such as the `flydsl_mxmoe` ones."""
    return name.startswith(("flydsl_", "opus_")) and flydsl_kernel(name) is None


def is_registered_by_us(name: str, release: Release) -> bool:
    """Whether a kernel is the one that aiter does not register and that may be added to its registry: its sorting's block is free."""
    return release.flydsl_t16_registrable and re.fullmatch(rf"{FLYDSL_T16}(_sbm\d+)?", name) is not None


def unsupported(metadata: Any, inter_dim: int, release: Release) -> str | None:
    """Why what `get_2stage_cfgs` returned must not be run by this adapter, as a clause that ends in a remedy; None if it may."""

    def flag(name: str, default: Any = False) -> Any:
        return getattr(metadata, name, default)

    protocols = {
        "a one-stage kernel": flag("run_1stage"),
        "the auxiliary sort": flag("output_aux") or not flag("prequant", True),
        "a bfloat16 second stage": flag("skip_inter_quant"),
        "flat sorting": flag("flat"),
        "a route bucket": flag("route_bucket"),
    }
    if rounds_by_own_rule(metadata):
        return "it chose quantization inside stage 1, by FlyDSL's own rule: leave config unset, or name other kernels"
    for what, present in protocols.items():
        if present:
            return f"it chose {what}, which only its own fused_moe can call: use config='vendor'"
    block_m = int(metadata.block_m)
    if block_m not in BLOCK_MS:
        return f"it chose block_m {block_m}, expected one of {BLOCK_MS}: correct the row"
    for n, stage in ((1, "stage1"), (2, "stage2")):
        function, keywords = _parts(getattr(metadata, stage))
        if function.__name__ not in _STAGES[stage]:
            return f"it chose {function.__name__} for stage {n}, expected one of {', '.join(_STAGES[stage])}: correct the row"
        name = keywords.get("kernelName", "")
        if function.__name__.startswith("cktile"):
            continue
        if not isinstance(name, str):
            return f"the row names no kernel for stage {n} (aiter read {name!r}): give it one, an empty field is not read as empty"
        reason = misfit(name, n, block_m, inter_dim, release, _registered(name))
        if reason is not None:
            return f"{reason}: correct the row"
    if splits_k(metadata) and not release.split_k_is_right:
        return "its stage 1 with ksplit > 1 pairs gate and up columns in another order than these weights: use ksplit 0"
    if (switch := rounds_slots(metadata)) is not None:
        return f"its stage 2 may round every slot's result before the sum, as {switch}=1 lets it: unset {switch}"
    if sums_slots(metadata) and not takes_mask(metadata):
        return "its stage 2 sums over slots that were skipped, whose rows nobody wrote: use a kernel with _atomic in its name"
    return None


def splits_k(metadata: Any) -> bool:
    """Whether stage 1 takes bfloat16 activations. By the function: rows may be overridden, and ksplit can be negative."""
    return _parts(metadata.stage1)[0].__name__ == SPLIT_K_STAGE1


def taken_for_assembly(metadata: Any) -> str | None:
    """The name of a stage 1 that aiter does not recognize and hands to its assembly, which has none for MXFP4; None if it does not."""
    function, keywords = _parts(metadata.stage1)
    if function.__name__ != "asm_stage1":
        return None
    return str(keywords.get("kernelName") or "a kernel without a name")


def missing_flydsl(metadata: Any, release: Release) -> str | None:
    """Why aiter's own `fused_moe` cannot launch its FlyDSL kernels here, as a clause that ends in a remedy; None if nothing is missing."""
    if getattr(metadata, "output_aux", False) and not release.flydsl:
        return "its native kernels need FlyDSL, which this aiter does not have here: install the flydsl that it names"
    for stage in (metadata.stage1, metadata.stage2):
        function, keywords = _parts(stage)
        name = str(keywords.get("kernelName"))
        if (
            "_flydsl_stage" in getattr(function, "__name__", "")
            and has_own_protocol(name)
            and _registered(name) is None
        ):
            return f"{name} is not registered in this aiter: correct the row"
    return None


def rounds_slots(metadata: Any) -> str | None:
    """The switch of aiter's environment by which stage 2 rounds each slot's result to 4 or 8 bits before the sum; None if neither is on."""
    native = getattr(metadata, "output_aux", False)
    if native and os.environ.get(NATIVE_FP4_VARIABLE) == "1":
        return NATIVE_FP4_VARIABLE
    sums = native or getattr(metadata, "skip_inter_quant", False) or sums_slots(metadata)
    return STAGE2_FP8_VARIABLE if sums and os.environ.get(STAGE2_FP8_VARIABLE) == "1" else None


def wrong_anyhow(metadata: Any, inter_dim: int, release: Release) -> str | None:
    """Why what aiter resolved would be wrong in its own `fused_moe` as well, as a clause; None if nothing speaks against it."""
    for n, stage in ((1, "stage1"), (2, "stage2")):
        function, keywords = _parts(getattr(metadata, stage))
        name = keywords.get("kernelName")
        by_ck = function.__name__.startswith("ck_")
        if not isinstance(name, str) or not (by_ck or "flydsl_stage" in function.__name__) or has_own_protocol(name):
            continue
        if by_ck and name.startswith("flydsl_"):
            continue  # CK does not know it, and goes by block_m
        reason = misfit(name, n, int(metadata.block_m), inter_dim, release, _registered(name))
        if reason is not None:
            return reason
    return None


def writes_what_is_given(metadata: Any) -> bool:
    """Whether both stages are CK's, which write into the buffers that they are given and allocate nothing."""
    functions = [_parts(stage)[0].__name__ for stage in (metadata.stage1, metadata.stage2)]
    return functions[0] in ("ck_moe_stage1", "ck_moe_stage1_fwd") and functions[1] == "ck_moe_stage2_fwd"


def rounds_by_own_rule(metadata: Any) -> bool:
    """Whether stage 1 quantizes its result by FlyDSL's own rule, which changed between releases and is not that of the quantizers.

    The native kernels, which go with the auxiliary sort, quantize inside too, but by the rule of the HIP quantizer of their releases.
    """
    fused = getattr(metadata, "fuse_quant", "") or getattr(metadata, "fuse_fp4_quant", False)
    return bool(fused) and not getattr(metadata, "output_aux", False)


def identity(metadata: Any) -> tuple[Any, ...]:
    """What tells two answers of aiter apart, hashable: block_m, ksplit, and for both stages the function and its kernel, as text."""
    stages = (_parts(stage) for stage in (metadata.stage1, metadata.stage2))
    names = (f"{function.__name__} {keywords.get('kernelName', '')}" for function, keywords in stages)
    return (int(metadata.block_m), int(metadata.ksplit), *names)


def sums_slots(metadata: Any) -> bool:
    """Whether stage 2 writes every slot's row and then sums them, instead of adding atomically."""
    function, keywords = _parts(metadata.stage2)
    name = keywords.get("kernelName", "")
    if function.__name__ != "_flydsl_stage2_wrapper" or not isinstance(name, str):
        return False
    kernel = flydsl_kernel(name, _registered(name))
    return kernel is not None and kernel.mode == "reduce"


def takes_mask(metadata: Any) -> bool:
    """Whether stage 2 can be told which experts are masked."""
    return {"expert_mask", "topk_ids"} <= set(inspect.signature(_parts(metadata.stage2)[0]).parameters)


def _parts(stage: Any) -> tuple[Any, dict[str, Any]]:
    """The function and the bound arguments of a stage."""
    return getattr(stage, "func", stage), getattr(stage, "keywords", None) or {}


def _registered(name: str) -> dict[str, Any] | None:
    """What a FlyDSL kernel is registered with, suffixes included, in aiter's own opinion."""
    if not name.startswith("flydsl_"):
        return None
    try:
        return importlib.import_module("aiter.ops.flydsl.moe_kernels").get_flydsl_kernel_params(name)
    except Exception:  # noqa: BLE001 - no flydsl
        return None
