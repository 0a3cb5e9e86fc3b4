"""From a checkpoint on disk to `MoeWeights`: which format it is, which part of it is wanted, and what else a model needs to know."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe.checkpoint import compressed_tensors, config, deepseek_v4, dense, gguf, gpt_oss, names, quark
from jax_mxfp4_moe.checkpoint.experts import APART, FLOATS, Experts, SplitExperts, assemble
from jax_mxfp4_moe.checkpoint.files import Checkpoint, Tensor, expect, open_checkpoint
from jax_mxfp4_moe.moe import prepare
from jax_mxfp4_moe.mxfp4 import BLOCK
from jax_mxfp4_moe.problem import ACTIVATION_QUANTS
from jax_mxfp4_moe.quantize import Rounding, ScaleRule, check_rules
from jax_mxfp4_moe.weights import MoeWeights

PACKED_FORMATS = (gpt_oss, quark, compressed_tensors, deepseek_v4, gguf)
"""Readers of MXFP4; their names for tensors exclude one another. What none of them knows may be floats, of which `dense` reads."""

Source = str | os.PathLike[str] | Checkpoint
"""A path, or a checkpoint that is open already, so that its headers are read once for many layers."""


def load(
    path: Source,
    *,
    layer: int,
    implementation: str | None = None,
    experts: slice | Sequence[int] | None = None,
    intermediate: slice | None = None,
    include_shared: bool = False,
    quantize: bool | None = None,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "nearest_even",
    activation_quant: str | None = "auto",
) -> MoeWeights:
    """Loads the experts of one layer, without torch and without expanding packed weights.

    The format follows from config.json and from tensor names, never from file names. Host memory: the result and one expert.

    Args:
      path: a folder, a .safetensors or a .gguf file (see `open_checkpoint`), or an open `Checkpoint`.
      layer: the number in the tensor names.
      implementation: also `prepare` the weights for it.
      experts: those to load, in this order: a slice or ids. Shared experts have the ids from E on, if they are included.
      intermediate: the range of F to load, in whole blocks of 32: those rows of gate and up, with biases, and those columns of down.
        The down bias is not cut: where partial results are added up, only one rank may use it.
      include_shared: put the shared experts behind the routed ones, for `append_shared_experts`; one of n times F becomes n experts.
      quantize: whether experts in floats may be quantized. None: if the whole checkpoint is in floats, but not for a layer that a
        quantized checkpoint has left in floats.
      scale_rule, rounding: of experts in floats, see `jax_mxfp4_moe.quantize`. None: the rule that the configuration states,
        or else "even".
      activation_quant: recorded in the result. "auto": what the configuration says the checkpoint was made for, and None where it says
        nothing.

    Returns:
      MoeWeights of logical shapes [E, 2F, D] and [E, D, F], gate rows first, as JAX arrays. `activation_scale` is the largest static scale
      of all experts, whichever were loaded.

    Raises:
      FileNotFoundError: no such path, or a shard is missing.
      ValueError: a damaged file; no or several formats recognized; tensors missing, or of a shape or type that does not fit; a format
        that is not MXFP4; experts or a range of F that do not exist; experts in floats where `quantize` does not allow them.
    """
    checkpoint = _open(path)
    routed = _routed(checkpoint, layer)
    sources = [routed]
    if include_shared:
        sources.append(_shared(checkpoint, layer, routed))
    _set_rules(checkpoint, sources, quantize, scale_rule, rounding)
    everything = [(source, expert) for source in sources for expert in range(source.num_experts)]
    chosen = _chosen(routed.where, everything, experts)
    part = _part(routed, intermediate)
    if activation_quant == "auto":
        activation_quant = routed.activation_quant
    if activation_quant not in ACTIVATION_QUANTS:
        raise ValueError(
            f"load: activation_quant={activation_quant!r} given; expected 'auto' or one of {ACTIVATION_QUANTS}. "
            "Leave it out to follow the configuration."
        )
    weights = assemble(chosen, part, activation_quant)
    if activation_quant == "fp8":
        scales = [found for source in sources if (found := source.input_scales()) is not None]
        weights.activation_scale = jnp.asarray(np.max(scales, axis=0)) if scales else None
    return weights if implementation is None else prepare(weights, implementation)


class Router(NamedTuple):
    """The router of one layer, in the types of the checkpoint.

    Attributes:
      weight: [E, D]; logits are `x @ weight.T + bias`.
      bias: [E] or None.
      correction_bias: [E] or None; for `topk_routing`.
    """

    weight: jax.Array
    bias: jax.Array | None
    correction_bias: jax.Array | None


def load_router(path: Source, *, layer: int) -> Router:
    """Loads the router of one layer, for all experts.

    Raises:
      FileNotFoundError, ValueError: as for `load`; also where the layer has no router that computes scores: some layers of DeepSeek-V4
        look experts up by token.
    """
    checkpoint = _open(path)
    experts = _routed(checkpoint, layer)
    tensors = _router_tensors(checkpoint, layer)
    if tensors.weight is None:
        raise ValueError(
            f"load_router: {experts.where} has no router; expected one of {', '.join(_router_names(layer))}. Complete the download."
        )
    by_token = tensors.weight.name.removesuffix("weight") + "tid2eid"
    if by_token in checkpoint:
        raise ValueError(
            f"load_router: {experts.where} looks its experts up by token, in {checkpoint[by_token]}; expected a router that chooses by "
            "score. Read that table with open_checkpoint, and pass its rows as topk_ids."
        )

    def read(tensor: Tensor | None, *shape: int | None) -> Any:
        return None if tensor is None else jnp.array(expect(tensor, FLOATS, shape).read())

    e = experts.num_experts
    return Router(read(tensors.weight, e, None), read(tensors.bias, e), read(tensors.correction_bias, e))


ROUTING_OPTIONS = ("scoring", "renormalize", "num_groups", "topk_groups", "group_score", "routed_scaling_factor")
"""Arguments of `topk_routing` that a checkpoint decides."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint says of its expert layers, in the words of this package.

    Words that this package lacks are given as they are; the function that they are meant for refuses them.

    Attributes:
      layers: the format of each layer that has routed experts, by its number.
      num_experts, hidden_size, intermediate_size: E, D, F of the first of those layers.
      num_shared_experts: how many experts of F the shared ones make; 0 if there are none.
      num_experts_per_tok: K, or None if the configuration does not say.
      use_bias, router_bias, correction_bias: whether experts and router have them.
      activation, activation_alpha, activation_limit, activation_quant, scale_rule: see `mxfp4_moe`.
      apply_router_weight_on_input: see `mxfp4_moe`.
      scoring, renormalize, num_groups, topk_groups, group_score, routed_scaling_factor: see `topk_routing`.
      model_type: the model type, or the architecture of a GGUF file; None if the configuration does not say.
      guessed: which of `scoring` and `renormalize` neither the configuration nor the model type decides.
      notes: sentences on what this package does not take from the checkpoint, or had to assume.
    """

    layers: dict[int, str]
    num_experts: int
    hidden_size: int
    intermediate_size: int
    num_shared_experts: int
    num_experts_per_tok: int | None
    use_bias: bool
    router_bias: bool
    correction_bias: bool
    activation: str
    activation_alpha: float | None
    activation_limit: float | None
    activation_quant: str | None
    scale_rule: str
    scoring: str
    renormalize: bool
    num_groups: int | None
    topk_groups: int | None
    group_score: str | None
    routed_scaling_factor: float
    apply_router_weight_on_input: bool
    model_type: str | None
    guessed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def format(self) -> str:
        """The format of the first layer that has routed experts."""
        return next(iter(self.layers.values()))

    def activation_options(self) -> dict[str, Any]:
        """Keyword arguments for `mxfp4_moe`; what activations are quantized to is in the weights."""
        keys = (
            "activation",
            "activation_alpha",
            "activation_limit",
            "scale_rule",
            "apply_router_weight_on_input",
        )
        return {key: getattr(self, key) for key in keys}

    def routing_options(self, **given: Any) -> dict[str, Any]:
        """Keyword arguments for `topk_routing`; the correction bias comes from `load_router`.

        Args:
          **given: options instead of what the checkpoint says, such as those that it leaves open.

        Raises:
          ValueError: an option that the checkpoint leaves open is not given.
        """
        open_ = [name for name in self.guessed if name not in given]
        if open_:
            raise ValueError(
                f"routing_options: nothing is known of the routing of model_type={self.model_type!r}, and its configuration does not say "
                f"it; expected {' and '.join(open_)} to be given, as the model's own code has it. Pass "
                f"{', '.join(f'{name}=...' for name in open_)}."
            )
        return {**{key: getattr(self, key) for key in ROUTING_OPTIONS}, **given}


def describe(path: Source) -> Description:
    """Says what a checkpoint holds, from its headers and configuration; no weights are read.

    Raises:
      FileNotFoundError, ValueError: as for `load`.
    """
    checkpoint = _open(path)
    sources = {layer: source for layer in checkpoint.layers if (source := _find(checkpoint, layer)) is not None}
    if not sources:
        raise _unrecognized(checkpoint, None)
    layer, first = next(iter(sources.items()))
    notes = []
    shared = 0
    if has_shared(checkpoint, layer):
        try:
            source = _shared(checkpoint, layer, first)
            shared = source.num_experts
            if source.is_dense and not first.is_dense:
                notes.append(
                    "The shared experts are in floats: to have them beside the routed ones, load with quantize=True."
                )
        except ValueError as error:
            notes.append(
                f"The shared experts cannot be loaded beside the routed ones: {str(error).removeprefix('load: ')}"
            )
    floats = [number for number, source in sources.items() if source.is_dense]
    if floats and len(floats) < len(sources):
        notes.append(f"Layers {', '.join(map(str, floats))} are in floats: load them with quantize=True.")
    tables = [name for names_ in checkpoint.layers.values() for name in names_ if name.endswith(".tid2eid")]
    if tables:
        notes.append(
            f"{len(tables)} layers look experts up by token, in tensors such as {tables[0]}: they have no router to load."
        )
    stated = config.integer(checkpoint.config, "hidden_size")
    if stated not in (None, first.hidden_size):
        notes.append(
            f"The experts have D={first.hidden_size} and the model hidden_size={stated}: it projects x to D before "
            "them and y back after them."
        )
    router = _router_tensors(checkpoint, layer)
    model = config.model_options(
        checkpoint.config, first.format, has_correction_bias=router.correction_bias is not None
    )
    return Description(
        layers={number: source.format for number, source in sources.items()},
        num_experts=first.num_experts,
        hidden_size=first.hidden_size,
        intermediate_size=first.intermediate_size,
        num_shared_experts=shared,
        use_bias=first.has_gate_up_bias or first.has_down_bias,
        router_bias=router.bias is not None,
        correction_bias=router.correction_bias is not None,
        activation_quant=first.activation_quant,
        scale_rule=first.scale_rule or "even",
        notes=(*notes, *first.notes, *model.pop("notes")),
        **model,
    )


# --- which format ----------------------------------------------------------------------------------------------------


def _open(path: Source) -> Checkpoint:
    return path if isinstance(path, Checkpoint) else open_checkpoint(path)


def _find(checkpoint: Checkpoint, layer: int) -> Experts | None:
    """The routed experts of a layer, or None if it has none that any reader knows."""
    found = [source for reader in PACKED_FORMATS if (source := reader.routed(checkpoint, layer)) is not None]
    if len(found) > 1:
        raise ValueError(
            f"load: {found[0].where} has the tensors of {len(found)} formats, {' and '.join(s.format for s in found)}; expected one. "
            "Keep each form of a model in a folder of its own."
        )
    return found[0] if found else dense.routed(checkpoint, layer)


def _routed(checkpoint: Checkpoint, layer: int) -> Experts:
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise TypeError(
            f"load: layer of type {type(layer).__name__} given; expected an integer, the number in the tensor names."
        )
    source = _find(checkpoint, layer)
    if source is None:
        raise _unrecognized(checkpoint, layer)
    return source


def _unrecognized(checkpoint: Checkpoint, layer: int | None) -> ValueError:
    looked_for = [
        names.fill(table[part].codes, root="", layer="N" if layer is None else layer, block="mlp", expert=0)  # type: ignore[arg-type]
        for table in (names.GPT_OSS, names.GPT_OSS_ORIGINAL, names.QUARK, names.QUARK_W, names.QUARK_GPT_OSS, names.COMPRESSED_TENSORS,
                      names.DEEPSEEK_V4, names.DENSE_STACKED, names.GGUF)
        for part in (next(iter(table)),)
    ]  # fmt: skip
    if layer is None:
        where, found = f"{checkpoint.path}", list(checkpoint)
    elif layer in checkpoint.layers:
        where, found = f"layer {layer} of {checkpoint.path}", list(checkpoint.layers[layer])
    else:
        numbers = list(checkpoint.layers)
        return ValueError(
            f"load: layer {layer} of {checkpoint.path} asked for; expected one of {len(numbers)} layers"
            f"{f', {numbers[0]} to {numbers[-1]}' if numbers else ''}. Give the number in the tensor names."
        )
    method = config.word(config.quantization(checkpoint.config), "quant_method")
    return ValueError(
        f"load: {where} has no experts in a known format. Looked for {', '.join(looked_for)} and the like; found {len(found)} tensors, "
        f"{', '.join(found[:5])}{', ...' if len(found) > 5 else ''}, and quant_method={method!r}. Is it a layer with experts?"
    )


def has_shared(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether a layer has shared experts, of whatever format."""
    return any(".shared_expert" in name or "_shexp." in name for name in checkpoint.layers.get(layer, ()))


def _shared(checkpoint: Checkpoint, layer: int, routed: Experts) -> Experts:
    """The shared experts of a layer as experts of the routed ones' F."""
    if not has_shared(checkpoint, layer):
        raise ValueError(
            f"load: {routed.where} has no shared experts; expected some with include_shared=True. Leave it out."
        )
    gates = [name for name in checkpoint.layers[layer] if name.endswith(".shared_expert_gate.weight")]
    if gates or any("_inp_shexp." in name for name in checkpoint.layers[layer]):
        raise ValueError(
            f"load: the shared expert of {routed.where} has a gate of its own{f', {gates[0]}' if gates else ''}; expected one that counts "
            f"with weight 1. {APART}"
        )
    for reader in (*PACKED_FORMATS, dense):
        source: Experts | None = reader.shared(checkpoint, layer)
        if source is not None:
            break
    else:
        found = next(name for name in checkpoint.layers[layer] if ".shared_expert" in name or "_shexp." in name)
        raise ValueError(
            f"load: {routed.where} has shared experts in no known format, such as {checkpoint[found]}; expected names like those of the "
            f"routed ones. {APART}"
        )
    if source.hidden_size != routed.hidden_size:
        raise ValueError(
            f"load: the shared experts of {routed.where} have D={source.hidden_size}; expected D={routed.hidden_size}, that of the routed "
            f"ones. {APART}"
        )
    if source.has_gate_up_bias != routed.has_gate_up_bias or source.has_down_bias != routed.has_down_bias:
        raise ValueError(
            f"load: {routed.where} has biases in its routed or in its shared experts only; expected them in both, to stand side by side. "
            f"{APART}"
        )
    return SplitExperts(source, routed.intermediate_size)


def _set_rules(
    checkpoint: Checkpoint,
    sources: Sequence[Experts],
    quantize: bool | None,
    scale_rule: ScaleRule | None,
    rounding: Rounding,
) -> None:
    """Decides whether and how experts in floats are quantized."""
    stated = next((source.scale_rule for source in sources if source.scale_rule), None)
    rule = scale_rule or stated or quark.global_scale_rule(checkpoint.config) or "even"
    check_rules("load", scale_rule or "even", rounding)
    for source in sources:
        source = source.wide if isinstance(source, SplitExperts) else source
        if not isinstance(source, dense.DenseExperts):
            continue
        if quantize is False or (quantize is None and config.quantization(checkpoint.config)):
            raise ValueError(
                f"load: the {'shared ' if source is not sources[0] else ''}experts of {source.where} are in floats, "
                f"{'in a checkpoint that is quantized otherwise' if quantize is None else 'and quantize=False was given'}; expected MXFP4. "
                "Pass quantize=True to round them to MXFP4 while loading, which changes the model, or run them in floats."
            )
        check_rules("load: the configuration", rule, rounding)
        source.rules = {"scale_rule": rule, "rounding": rounding}


def _chosen(
    where: str, everything: list[tuple[Experts, int]], experts: slice | Sequence[int] | None
) -> list[tuple[Experts, int]]:
    if experts is None:
        return everything
    total = len(everything)
    if isinstance(experts, slice):
        ids = list(range(total)[experts])
    else:
        ids = [int(e) if hasattr(e, "__index__") and not isinstance(e, bool) else -1 for e in experts]
    if not ids or not all(0 <= e < total for e in ids):
        shown = experts if isinstance(experts, slice) else list(experts)[:8]
        raise ValueError(
            f"load: experts={shown} given; expected at least one id from 0 to {total - 1}, those of {where}. Shared experts come after the "
            "routed ones, with include_shared=True."
        )
    return [everything[e] for e in ids]


def _part(routed: Experts, intermediate: slice | None) -> slice:
    f = routed.intermediate_size
    if intermediate is None:
        return slice(0, f)
    start = 0 if intermediate.start is None else intermediate.start
    stop = f if intermediate.stop is None else intermediate.stop
    whole = intermediate.step in (None, 1) and all(hasattr(n, "__index__") and n % BLOCK == 0 for n in (start, stop))
    if not whole or not 0 <= start <= stop <= f:
        raise ValueError(
            f"load: intermediate={intermediate} given for F={f} of {routed.where}; expected 0 <= start <= stop <= {f}, both multiples of "
            f"{BLOCK}, since blocks cannot be cut. Divide the {f // BLOCK} blocks, and not F, by the number of ranks."
        )
    return slice(int(start), int(stop))


# --- routers ---------------------------------------------------------------------------------------------------------


class _RouterTensors(NamedTuple):
    weight: Tensor | None = None
    bias: Tensor | None = None
    correction_bias: Tensor | None = None


def _router_tensors(checkpoint: Checkpoint, layer: int) -> _RouterTensors:
    for router in names.ROUTERS:
        found = [
            match.groupdict()
            for name in checkpoint.layers.get(layer, ())
            if (match := names.pattern(router.weight).fullmatch(name)) and int(match["layer"]) == layer
        ]
        main = [fields for fields in found if not names.is_extra_head(fields["root"])] or found
        if main:
            fields = {"root": main[0]["root"], "block": main[0].get("block") or "mlp", "layer": layer}

            def get(*templates: str | None, fields: dict[str, Any] = fields) -> Tensor | None:
                tensors = (checkpoint.get(names.fill(template, **fields)) for template in templates if template)
                return next((tensor for tensor in tensors if tensor is not None), None)

            return _RouterTensors(get(router.weight), get(router.bias), get(*router.correction_bias))
    return _RouterTensors()


def _router_names(layer: int) -> list[str]:
    return [names.fill(router.weight, root="", layer=layer) for router in names.ROUTERS]
