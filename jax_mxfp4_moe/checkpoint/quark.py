"""Checkpoints by AMD Quark: DeepSeek-R1, Qwen3, Kimi-K2 and others, and gpt-oss.

Every expert has tensors of its own. Gate and up are apart, except in gpt-oss, where they are one tensor whose rows alternate.
`quantization_config` says how activations are to be quantized and by which rule scales are made.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.config import Config, check_method, quantization, table, word
from jax_mxfp4_moe.checkpoint.experts import Experts, PackedExperts, Place, find
from jax_mxfp4_moe.checkpoint.files import Checkpoint
from jax_mxfp4_moe.mxfp4 import BLOCK

NAME = "quark"
TABLES = (names.QUARK, names.QUARK_W, names.QUARK_GPT_OSS)
SHARED_TABLES = (names.shared(names.QUARK), names.shared(names.QUARK_W))


def routed(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The experts of a layer, or None if they do not have the names of this format."""
    return _experts(checkpoint, layer, TABLES)


def shared(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The shared experts of a layer, as one; None if there are none of this format."""
    return _experts(checkpoint, layer, SHARED_TABLES)


def _experts(checkpoint: Checkpoint, layer: int, tables: tuple[names.NameTable, ...]) -> Experts | None:
    for name_table in tables:
        place = find(checkpoint, layer, name_table)
        if place is not None:
            _check_dtypes(place)
            config = check_method(place.where, checkpoint.config, NAME, "quark")
            model_type = word(checkpoint.config, "model_type")
            if place.is_gate_up_fused and model_type is not None and not model_type.startswith("gpt_oss"):
                raise ValueError(
                    f"load: {place.where} has gate and up in one tensor, with model_type={model_type!r}; expected 'gpt_oss', whose rows "
                    "alternate: those of other models may lie apart. Export gate_proj and up_proj as two tensors."
                )
            spec = _spec(place, config)
            weight = _first_of(spec.get("weight"))
            _check_weight(place, weight)
            experts = PackedExperts(place, NAME)
            inputs = _first_of(spec.get("input_tensors"))
            experts.set_activation_quant(_activation_quant(place, inputs), not (inputs or {}).get("is_dynamic"))
            experts.scale_rule = word(inputs or {}, "scale_calculation_mode") or word(
                weight or {}, "scale_calculation_mode"
            )
            return experts
    return None


def global_scale_rule(config: Config) -> str | None:
    """The rule by which Quark made the scales of a checkpoint, for the layers that it left in floats."""
    found = quantization(config)
    if word(found, "quant_method") != "quark":
        return None
    return word(_first_of(table(found, "global_quant_config").get("weight")) or {}, "scale_calculation_mode")


def _spec(place: Place, config: Config) -> Config:
    """The part of quantization_config that holds for these experts: an override by name, or the global one.

    Raises:
      ValueError: it is not the same for all of their tensors, or says that one is not quantized.
    """
    overrides, everywhere = table(config, "layer_quant_config"), table(config, "global_quant_config")
    for pattern in overrides:
        # A regular expression from a file could run for ever; the file's tensors decide everything else.
        if pattern.startswith("re:"):
            raise ValueError(
                f"load: {place.where} has a regular expression {pattern[:80]!r} in layer_quant_config; expected names or globs. Replace "
                "it by those in config.json."
            )
    excluded = config.get("exclude")
    excluded = [str(name) for name in excluded] if isinstance(excluded, list) else []
    globs = [name for name in excluded if not name.startswith("re:")]
    if not overrides and not globs:
        return everywhere
    first: tuple[str, Config] | None = None
    for part in place.table:
        for expert in place.ids:
            module = place.name(part, "codes", expert).removesuffix(".weight")
            for glob in (glob for glob in globs if fnmatch.fnmatchcase(module, glob)):
                raise ValueError(
                    f"load: {place.where} has {module!r} in MXFP4, and {glob[:80]!r} in exclude says that it is not quantized; expected "
                    "the same for all tensors of its experts. Correct quantization_config in config.json."
                )
            named = (table(overrides, pattern) for pattern in overrides if fnmatch.fnmatchcase(module, pattern))
            spec = next(named, everywhere)
            if first is None:
                first = module, spec
            elif any(spec.get(key) != first[1].get(key) for key in ("weight", "input_tensors")):
                raise ValueError(
                    f"load: {place.where} has {first[0]!r} and {module!r}, which quantization_config has quantized differently; expected "
                    "the same for all tensors of its experts. Correct layer_quant_config in config.json."
                )
    return first[1] if first else everywhere


def _check_dtypes(place: Place) -> None:
    """Refuses other formats that have the same names, by what their tensors are."""
    part = place.part("gate")
    weight, scale = (place.tensors(part, field)[0] for field in ("codes", "scales"))
    method = word(quantization(place.checkpoint.config), "quant_method")
    if weight.dtype in ("F8_E4M3", "F8_E5M2"):
        raise ValueError(
            f"load: {weight} found in {place.where}, with quant_method={method!r}: weights in float8; expected MXFP4. This package "
            "reads no float8 weights: convert them to bfloat16 first."
        )
    if scale.dtype == "F8_E4M3":
        raise ValueError(
            f"load: {scale} found in {place.where}, with quant_method={method!r}; expected one scale byte for each 32 elements. Blocks of "
            "16 are NVFP4, another format, which this package does not read."
        )


def _first_of(spec: Any) -> Config | None:
    """A tensor's quantization; two steps of it come as a list."""
    if isinstance(spec, list) and len(spec) == 1:
        spec = spec[0]
    if spec is None or isinstance(spec, Mapping):
        return spec
    raise ValueError(
        f"configuration: quantization {str(spec)[:80]} found; expected one object. This package reads one step of it."
    )


def _check_weight(place: Place, weight: Config | None) -> None:
    if weight is None:
        return
    expected = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0"}
    for key, want in expected.items():
        if weight.get(key) not in (None, want):
            raise ValueError(
                f"load: {place.where} has weights quantized with {key}={str(weight[key])[:80]!r}; expected {want!r}, as in MXFP4. This "
                "package reads no other format."
            )


def _activation_quant(place: Place, inputs: Config | None) -> str | None:
    if inputs is None:
        return None
    dtype, scheme = word(inputs, "dtype"), word(inputs, "qscheme")
    if dtype == "fp4" and inputs.get("group_size") == BLOCK:
        return "mxfp4"
    if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel", "per_token"):
        return "fp8"
    raise ValueError(
        f"load: {place.where} has activations quantized as dtype={dtype!r}, qscheme={scheme!r}, group_size={inputs.get('group_size')!r}; "
        "expected fp4 in groups of 32, fp8_e4m3 per tensor or token, or none. Set input_tensors to null in config.json to run with "
        "activations that are not quantized."
    )
