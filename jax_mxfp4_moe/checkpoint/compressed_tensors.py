"""compressed-tensors `mxfp4-pack-quantized`, as llm-compressor writes it and Kimi-K3 uses it: codes in `weight_packed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.config import Config, check_method, table, word
from jax_mxfp4_moe.checkpoint.experts import Experts, PackedExperts, Place, find
from jax_mxfp4_moe.checkpoint.files import Checkpoint
from jax_mxfp4_moe.mxfp4 import BLOCK

NAME = "compressed_tensors"
FORMAT = "mxfp4-pack-quantized"
TABLES = (names.COMPRESSED_TENSORS, names.COMPRESSED_TENSORS_W)
SHARED_TABLES = tuple(names.shared(table) for table in TABLES)


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
            config = check_method(place.where, checkpoint.config, NAME, "compressed-tensors")
            first = place.name("gate", "codes", place.ids[0])
            global_scale = first.removesuffix("weight_packed") + "weight_global_scale"
            if global_scale in checkpoint:
                raise ValueError(
                    f"load: {checkpoint[global_scale]} found beside {first!r}; expected none in {FORMAT}. It belongs to NVFP4, blocks "
                    "of 16, which this package does not read."
                )
            experts = PackedExperts(place, NAME)
            experts.set_activation_quant(*_activation_quant(place, config))
            experts.scale_rule = "even"  # the library has no other rule
            return experts
    return None


def _activation_quant(place: Place, config: Config) -> tuple[str | None, bool]:
    """What the groups of 4-bit weights say of their inputs, and whether their scales are static.

    Which modules a group is for does not matter where all agree.
    """
    if not config:
        return None, False
    found = set()
    groups = table(config, "config_groups")
    for group in groups.values():
        if not isinstance(group, Mapping):
            continue
        weights = table(group, "weights")
        if word(group, "format") in (None, FORMAT) and weights.get("num_bits") == 4:
            for key, want in (("type", "float"), ("strategy", "group"), ("group_size", BLOCK)):
                if weights.get(key) != want:
                    raise ValueError(
                        f"load: {place.where} has weights with {key}={str(weights.get(key))[:80]!r}; expected {want!r} in {FORMAT}. "
                        "This package reads no other format."
                    )
            found.add(_input(place, group.get("input_activations")))
    stated = word(config, "format")
    if stated != FORMAT and not found:
        raise ValueError(
            f"load: {place.where} has quantization_config.format={stated!r}; expected {FORMAT!r}, or groups of that format. This package "
            "reads no other of compressed-tensors."
        )
    if len(found) > 1:
        raise ValueError(
            f"load: {place.where} has groups of 4-bit weights that differ in their inputs: {sorted(map(str, found))}; expected one. Remove "
            "the groups that are not for experts from config.json."
        )
    return found.pop() if found else (None, False)


def _input(place: Place, inputs: Any) -> tuple[str | None, bool]:
    if inputs is None:
        return None, False
    if isinstance(inputs, Mapping) and inputs.get("type") == "float":
        if inputs.get("num_bits") == 4 and inputs.get("group_size") == BLOCK:
            return "mxfp4", False
        if inputs.get("num_bits") == 8 and inputs.get("strategy") in ("tensor", "token"):
            return "fp8", inputs.get("dynamic") is False
    raise ValueError(
        f"load: {place.where} has input_activations {str(inputs)[:120]}; expected 4-bit floats in groups of {BLOCK}, 8-bit floats per "
        "tensor or token, or none. Set input_activations to null in config.json to run with activations that are not quantized."
    )
