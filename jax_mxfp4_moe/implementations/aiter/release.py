"""What the installed aiter offers and expects, by looking at it and never at its version number.

aiter's Python functions move between releases: arguments appear, the table of tuned rows changes its shape, operations get
successors with another rounding. Builds from a branch carry whatever version text they like, so every fact here comes from a
signature, an attribute, or a calculation on the CPU whose answer differs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
import types
from typing import Any

FIRST = "v0.1.9"
"""The oldest release that the adapter is written for."""

TRITON_QUANT_MODULES = ("aiter.ops.triton.quant.fused_mxfp4_quant", "aiter.ops.triton.fused_mxfp4_quant")
TRITON_RULE = ("even", "half_away")
"""Scale rule and rounding of aiter's fused Triton quantizer: the same in every release that has one."""

FLYDSL_FORCE_VARIABLE = "AITER_FLYDSL_FORCE"
"""Read by aiter whenever it resolves a row; anything but "1" (its default) keeps rows of other kernels as they are."""

COMMON = (
    "token",
    "model_dim",
    "inter_dim",
    "expert",
    "topk",
    "dtype",
    "q_dtype_a",
    "q_dtype_w",
    "q_type",
    "use_g1u1",
    "activation",
    "doweight_stage1",
    "hidden_pad",
    "intermediate_pad",
)
"""Parameters of `aiter.fused_moe.get_2stage_cfgs` that every release has, in order."""


@dataclasses.dataclass(frozen=True)
class Release:
    """Facts about one installed aiter.

    Attributes:
      version: for people only.
      simulated: the module says of itself that it is a simulation on a CPU (`__simulated__ = True`).
      unusable: None, or one sentence that says what is broken or too old, with the remedy; the other facts then mean nothing.
      trailing: parameters of `get_2stage_cfgs` after those of COMMON.
      table: what `aiter.fused_moe.cfg_2stages` is once loaded: "dict", or "pair" of dicts (primary, and one whose keys ignore the
        activation).
      key_has_gfx: keys of the table begin with the architecture, and have 14 parts instead of 13.
      key_activations: the forms of the activation under which a key must be entered to be found: "str", or "enum" and "str".
      tag_filter: which rows of a table file are read: "none" (all; the column is unknown), "untagged" (only rows without `_tag`) or
        "not_fallback" (all but those tagged `flydsl_fallback`).
      metadata: field names of what `get_2stage_cfgs` returns.
      flydsl: FlyDSL kernels can be compiled here, in aiter's own opinion.
      flydsl_stages: the stages for which this aiter knows FlyDSL kernels: (), (2,) or (1, 2).
      flydsl_sort_block_m: a FlyDSL stage 2 can have other tiles than the sorting (parameter `sort_block_m`); without it they are the same.
      flydsl_t16: `FLYDSL_T16` is registered by aiter itself.
      flydsl_t16_registrable: it is not, but may be: `register_flydsl_t16`; its products are right for intermediate sizes of at most
        FLYDSL_T16_MAX_INTERMEDIATE.
      flydsl_overrides: with FlyDSL at hand, rows of other kernels are replaced unless AITER_FLYDSL_FORCE is "0".
      triton_quant: module of the fused Triton quantizer, or None.
      hip_quant: "fused" (one HIP operation quantizes and sorts), "separate" (two operations) or None.
      hip_scale_rule: scale rule of the HIP quantizer and of aiter's weight quantizer; None where it could not be told.
      split_k: how stage 1 with ksplit > 1 (bfloat16 activations) pairs gate and up columns: "halves" (gate rows first, which is how
        weights are stored here), "choice" (must be told: post_activation_layout="standard"), "interleaved" (wrong for these weights, no
        way to tell it) or None (no such kernel).
    """

    version: str = "unknown"
    simulated: bool = False
    unusable: str | None = None
    trailing: tuple[str, ...] = ()
    table: str = "dict"
    key_has_gfx: bool = False
    key_activations: tuple[str, ...] = ("str",)
    tag_filter: str = "none"
    metadata: tuple[str, ...] = ()
    flydsl: bool = False
    flydsl_stages: tuple[int, ...] = ()
    flydsl_sort_block_m: bool = False
    flydsl_t16: bool = False
    flydsl_t16_registrable: bool = False
    flydsl_overrides: bool = False
    triton_quant: str | None = None
    hip_quant: str | None = None
    hip_scale_rule: str | None = None
    split_k: str | None = None

    @property
    def key_length(self) -> int:
        """Parts of a key of the table."""
        return 14 if self.key_has_gfx else 13

    @property
    def activation_rules(self) -> dict[tuple[str, str], str]:
        """(scale_rule, rounding) -> "triton" or "hip": the quantizers of activations, in the words of `quantize`."""
        rules = {}
        if self.triton_quant is not None:
            rules[TRITON_RULE] = "triton"
        if self.hip_quant is not None and self.hip_scale_rule is not None:
            rules[self.hip_scale_rule, "nearest_even"] = "hip"
        return rules

    @property
    def split_k_is_right(self) -> bool:
        """Whether ksplit > 1 gives right numbers for weights whose gate rows come first."""
        return self.split_k in ("halves", "choice")

    def config_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `get_2stage_cfgs` after those of COMMON, for shuffled weights without biases."""
        given = {"bias1": None, "bias2": None, "is_shuffled": True}
        return {name: value for name, value in given.items() if name in self.trailing}


FLYDSL_T16 = "flydsl_moe2_afp4_wfp4_bf16_t16x128x128_atomic"
"""The FlyDSL stage-2 kernel of the tuned program: tiles of 16 rows, 128 columns and 128 elements."""
FLYDSL_T16_MAX_INTERMEDIATE = 256
"""Where aiter does not register `FLYDSL_T16` itself, its compile function fails on more than two tiles along the contraction."""
_FLYDSL_T16_PARAMETERS = {
    "stage": 2, "a_dtype": "fp4", "b_dtype": "fp4", "out_dtype": "bf16", "tile_m": 16, "tile_n": 128, "tile_k": 128, "mode": "atomic",
    "MPerBlock": 16,
}  # fmt: skip


def load() -> Release:
    """The facts about the aiter that `import aiter` finds, importing it. Never raises."""
    try:
        module = importlib.import_module("aiter")
    except Exception as error:  # noqa: BLE001 - a broken extension module raises whatever it likes
        return Release(unusable=_cannot_be_imported("aiter", error))
    return detect(module)


@functools.lru_cache(maxsize=8)
def detect(aiter: types.ModuleType) -> Release:
    """The facts about an imported aiter. Never raises; looks at a module once."""
    version, simulated = _version(aiter), getattr(aiter, "__simulated__", False) is True
    try:
        fused_moe = importlib.import_module("aiter.fused_moe")
    except Exception as error:  # noqa: BLE001 - some releases swallow a failed import and fail later, anyhow
        return Release(version, simulated, unusable=_cannot_be_imported("aiter.fused_moe", error))
    missing = _missing(aiter, fused_moe)
    if missing is not None:
        return Release(version, simulated, unusable=missing)

    parameters = tuple(inspect.signature(fused_moe.get_2stage_cfgs).parameters)
    if parameters[: len(COMMON)] != COMMON:
        return Release(
            version,
            simulated,
            unusable=f"needs get_2stage_cfgs({', '.join(COMMON)}, ...) in aiter.fused_moe, found "
            f"({', '.join(parameters)}) in aiter {version}: install a release from {FIRST} on that the runbook lists",
        )
    trailing = parameters[len(COMMON) :]
    metadata = tuple(field.name for field in dataclasses.fields(fused_moe.MOEMetadata))
    pair = "gate_mode" in trailing  # both came with the same change of the table
    registry = flydsl_registry()
    stages = tuple(n for n in (1, 2) if hasattr(fused_moe, f"_flydsl_stage{n}_wrapper"))
    flydsl = bool(stages) and registry is not None and _flydsl_available()
    # Programs may add a name, as the tuned one does where it cannot run; aiter has both modes of a tile.
    t16 = {FLYDSL_T16, FLYDSL_T16.replace("_atomic", "_reduce")} <= (registry or {}).keys()
    return Release(
        version=version,
        simulated=simulated,
        trailing=trailing,
        table="pair" if pair else "dict",
        key_has_gfx="is_ep" in trailing,
        key_activations=("enum", "str") if pair else ("str",),
        tag_filter="not_fallback" if "output_aux" in metadata else "untagged" if stages else "none",
        metadata=metadata,
        flydsl=flydsl,
        flydsl_stages=stages,
        flydsl_sort_block_m=1 in stages,
        flydsl_t16=t16,
        flydsl_t16_registrable=flydsl and not t16 and _compiles_t16(),
        flydsl_overrides="is_ep" in trailing,
        triton_quant=next((name for name in TRITON_QUANT_MODULES if _has_fused_quantizer(name)), None),
        hip_quant=_hip_quant(aiter),
        hip_scale_rule=_hip_scale_rule(aiter),
        split_k=_split_k(fused_moe, trailing),
    )


def flydsl_overrides_now(release: Release) -> bool:
    """Whether aiter would replace a row of other kernels by FlyDSL's, as the environment stands."""
    return release.flydsl_overrides and release.flydsl and os.environ.get(FLYDSL_FORCE_VARIABLE, "1") == "1"


def flydsl_registry() -> dict[str, dict[str, Any]] | None:
    """aiter's own dict of FlyDSL kernels by name, to which kernels may be added; None if this install has none."""
    try:
        registry = importlib.import_module("aiter.ops.flydsl.moe_kernels")._KERNEL_PARAMS
    except Exception:  # noqa: BLE001 - some releases cannot import it without flydsl
        return None
    return registry if isinstance(registry, dict) else None


def register_flydsl_t16() -> None:
    """Adds `FLYDSL_T16` to aiter's registry, where it finds kernels by name at every call; for `flydsl_t16_registrable` releases."""
    registry = flydsl_registry()
    assert registry is not None
    registry.setdefault(FLYDSL_T16, dict(_FLYDSL_T16_PARAMETERS))


def _compiles_t16() -> bool:
    """Whether aiter's compile function of stage 2 makes a right kernel of tiles of 16 rows and 128 elements.

    It must know tiles of 128 elements, for which it shifts packed scales; older ones leave all products out. And it must bring
    activations into LDS through registers: later ones copy 16 bytes a thread there, more than its share of such a tile, and
    rows come to lie in wrong places.
    """
    try:
        module = importlib.import_module("aiter.ops.flydsl.kernels.mixed_moe_gemm_2stage")
        code = inspect.unwrap(module.compile_mixed_moe_gemm2).__code__
    except Exception:  # noqa: BLE001 - a flydsl that does not fit, or another file
        return False
    names = _names_within(code)
    return "_k_shift_bits" in names and "raw_ptr_buffer_load_lds" not in names


def _names_within(code: types.CodeType) -> set[str]:
    """Every name that a function and the functions inside of it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names, *code.co_varnames, *code.co_cellvars}.union(*map(_names_within, inner))


def _cannot_be_imported(name: str, error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"cannot import {name} ({text}): repair or reinstall amd-aiter, and flydsl in the version that it names"


def _version(aiter: types.ModuleType) -> str:
    try:
        return str(importlib.import_module(f"{aiter.__name__}._version").__version__)
    except (ImportError, AttributeError):
        pass
    try:
        return importlib.metadata.version("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _missing(aiter: types.ModuleType, fused_moe: types.ModuleType) -> str | None:
    """A sentence about the first name that the adapter cannot do without and that is not there."""
    needed = {
        "aiter": (aiter, ("ActivationType", "QuantType", "dtypes", "moe_sorting_fwd", "ck_moe_stage2_fwd")),
        "aiter.fused_moe": (fused_moe, ("get_2stage_cfgs", "get_padded_M", "MOEMetadata", "fused_moe")),
    }
    for where, (module, names) in needed.items():
        for name in names:
            if not hasattr(module, name):
                return (
                    f"needs {where}.{name}, which aiter {_version(aiter)} does not have: install a release from {FIRST} on, and look "
                    "at the warnings of `import aiter`, which hide failed imports in some releases"
                )
    return None


def _flydsl_available() -> bool:
    try:
        return bool(importlib.import_module("aiter.ops.flydsl.utils").is_flydsl_available())
    except Exception:  # noqa: BLE001 - a flydsl that does not fit
        return False


def _has_fused_quantizer(name: str) -> bool:
    try:
        return hasattr(importlib.import_module(name), "fused_dynamic_mxfp4_quant_moe_sort")
    except Exception:  # noqa: BLE001 - absent, or a triton that does not fit
        return False


def _hip_quant(aiter: types.ModuleType) -> str | None:
    if hasattr(aiter, "fused_dynamic_mxfp4_quant_moe_sort"):
        return "fused"
    try:
        utility = importlib.import_module("aiter.utility.fp4_utils")
    except Exception:  # noqa: BLE001
        return None
    return "separate" if hasattr(aiter, "get_hip_quant") and hasattr(utility, "moe_mxfp4_sort") else None


# Scale bytes of blocks whose largest value is 1.25, 1.5, 1.5078125 and 1.75.
_SCALE_BYTES = {
    (125, 126, 126, 126): "half_up",
    (125, 125, 126, 126): "rceil",
    (125, 125, 125, 126): "even",
    (125, 125, 125, 125): "floor",
    (126, 126, 126, 126): "ceil",
}


def _hip_scale_rule(aiter: types.ModuleType) -> str | None:
    """Asks aiter's torch quantizer, which shares its scale rule with the HIP one in every release and runs on a CPU."""
    import torch

    try:
        blocks = torch.zeros(4, 32)
        blocks[:, 0] = torch.tensor([1.25, 1.5, 1.5078125, 1.75])
        _, scales = aiter.get_torch_quant(aiter.QuantType.per_1x32)(blocks)
        found = tuple(scales.view(torch.uint8).flatten().tolist())
    except Exception:  # noqa: BLE001 - then no rule can be promised
        return None
    return _SCALE_BYTES.get(found)


def _split_k(fused_moe: types.ModuleType, trailing: tuple[str, ...]) -> str | None:
    stage1 = getattr(fused_moe, "cktile_moe_stage1", None)
    if stage1 is None or "is_shuffled" not in trailing or "split_k" not in inspect.signature(stage1).parameters:
        return None
    if "post_activation_layout" in inspect.signature(stage1).parameters:
        return "choice"
    # One release in between looks at the type of the weights and takes FP4 ones for interleaved.
    return "interleaved" if _mentions(stage1, "float4_e2m1fn_x2") else "halves"


def _mentions(function: Any, name: str) -> bool:
    """Whether a Python function's own code uses `name`, as an attribute, a variable or a string."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and (name in code.co_names or name in code.co_consts)
