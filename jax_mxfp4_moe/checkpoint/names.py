"""The names under which checkpoint formats keep the parts of a mixture-of-experts layer.

Templates have the fields `{root}` (what stands before "layers.", for example "model."), `{layer}`, `{block}` (what a model calls its
expert block, for example "mlp") and, where each expert has tensors of its own, `{expert}`. Readers match names against templates with
`pattern`; writers make names of them with `fill`, its inverse.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

BLOCKS = ("mlp", "block_sparse_moe", "ffn", "feed_forward")
"""What models call the block that holds router and experts."""


class Names(NamedTuple):
    """Templates of the tensors of one projection; None for what a format does not have.

    Attributes:
      codes: the packed codes, or the weights themselves where they are floats.
      scales: the block scales.
      bias: one value an output row.
      input_scale: a static scale of the activations.
    """

    codes: str
    scales: str | None = None
    bias: str | None = None
    input_scale: str | None = None


NameTable = dict[str, Names]
"""Templates by projection: "gate_up" and "down" where gate and up are one tensor, else "gate", "up" and "down"."""

_HF_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_W_PROJECTIONS = ("w1", "w3", "w2")
_EXPERTS = "{root}layers.{layer}.{block}.experts"
_EXPERT = _EXPERTS + ".{expert}"


def _linear(module: str, codes: str, scales: str | None) -> Names:
    return Names(module + codes, scales and module + scales, module + ".bias", module + ".input_scale")


def _gated(
    projections: tuple[str, str, str], codes: str = ".weight", scales: str | None = ".weight_scale"
) -> NameTable:
    names = zip(("gate", "up", "down"), projections, strict=True)
    return {part: _linear(f"{_EXPERT}.{name}", codes, scales) for part, name in names}


# Stacked over the experts, gate and up rows interleaved: even rows gate, odd rows up.
GPT_OSS: NameTable = {
    part: Names(*(f"{_EXPERTS}.{part}_proj_{what}" for what in ("blocks", "scales", "bias")))
    for part in ("gate_up", "down")
}
GPT_OSS_ORIGINAL: NameTable = {
    part: Names(*(f"{{root}}block.{{layer}}.mlp.{mlp}_{what}" for what in ("weight.blocks", "weight.scales", "bias")))
    for part, mlp in (("gate_up", "mlp1"), ("down", "mlp2"))
}

# Tensors for each expert. The second table of each pair has Mixtral's words: w1 gate, w3 up, w2 down.
QUARK: NameTable = _gated(_HF_PROJECTIONS)
QUARK_W: NameTable = _gated(_W_PROJECTIONS)
COMPRESSED_TENSORS: NameTable = _gated(_HF_PROJECTIONS, ".weight_packed")
COMPRESSED_TENSORS_W: NameTable = _gated(_W_PROJECTIONS, ".weight_packed")
DEEPSEEK_V4: NameTable = _gated(_W_PROJECTIONS, ".weight", ".scale")
DENSE: NameTable = _gated(_HF_PROJECTIONS, ".weight", None)
DENSE_W: NameTable = _gated(_W_PROJECTIONS, ".weight", None)

# gpt-oss by Quark: tensors for each expert, gate and up rows interleaved.
QUARK_GPT_OSS: NameTable = {
    part: _linear(f"{_EXPERT}.{part}_proj", ".weight", ".weight_scale") for part in ("gate_up", "down")
}

# Floats stacked over the experts. Models differ in the order of axes and rows: see dense.py.
DENSE_STACKED: NameTable = {
    part: Names(f"{_EXPERTS}.{part}_proj", bias=f"{_EXPERTS}.{part}_proj_bias") for part in ("gate_up", "down")
}

GGUF: NameTable = {
    part: Names(f"{{root}}blk.{{layer}}.ffn_{part}_exps.weight", bias=f"{{root}}blk.{{layer}}.ffn_{part}_exps.bias")
    for part in ("gate", "up", "down")
}


def shared(table: NameTable) -> NameTable:
    """The templates of the shared experts beside the routed ones of `table`: one tensor for all of them, without `{expert}`."""

    def rename(template: str | None) -> str | None:
        if template is None:
            return None
        return template.replace(".experts.{expert}.", ".shared_experts.").replace("_exps.", "_shexp.")

    return {part: Names(*map(rename, names)) for part, names in table.items()}  # type: ignore[arg-type]


class RouterNames(NamedTuple):
    """Templates of a router.

    Attributes:
      weight: [E, D].
      bias: [E], added to the logits.
      correction_bias: [E], added to the scores for the choice of experts only; the first of these that exists.
    """

    weight: str
    bias: str | None = None
    correction_bias: tuple[str, ...] = ()


_GATE = "{root}layers.{layer}.{block}.gate"

ROUTERS: tuple[RouterNames, ...] = (
    RouterNames("{root}layers.{layer}.{block}.router.weight", "{root}layers.{layer}.{block}.router.bias"),
    RouterNames("{root}block.{layer}.mlp.gate.weight", "{root}block.{layer}.mlp.gate.bias"),
    # DeepSeek-V4's own names call the correction bias "bias".
    RouterNames("{root}layers.{layer}.ffn.gate.weight", None, ("{root}layers.{layer}.ffn.gate.bias",)),
    RouterNames(
        _GATE + ".weight",
        _GATE + ".bias",
        (_GATE + ".e_score_correction_bias", "{root}layers.{layer}.{block}.e_score_correction_bias"),
    ),
    RouterNames(
        "{root}blk.{layer}.ffn_gate_inp.weight",
        "{root}blk.{layer}.ffn_gate_inp.bias",
        ("{root}blk.{layer}.exp_probs_b.bias",),
    ),
)
"""Routers of all formats; the first whose weight exists is used."""

_FIELDS = {
    "root": r"(?P<root>(?:[^.]+\.)*?)",
    "layer": r"(?P<layer>0|[1-9][0-9]{0,5})",
    "block": f"(?P<block>{'|'.join(BLOCKS)})",
    "expert": r"(?P<expert>0|[1-9][0-9]{0,5})",
}


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    """The regular expression that a template stands for, with a group for each of its fields. Use its `fullmatch`."""
    text = re.escape(template)
    for field, expression in _FIELDS.items():
        text = text.replace(re.escape("{" + field + "}"), expression)
    return re.compile(text)


def fill(template: str, *, root: str = "model.", layer: int, block: str = "mlp", expert: int | None = None) -> str:
    """The name that a template stands for. The original gpt-oss names and those of GGUF have root ""."""
    return template.format(root=root, layer=layer, block=block, expert=expert)


_NUMBERED = re.compile(r"(?:^|\.)(?:layers|block|blk)\.(0|[1-9][0-9]{0,5})\.")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)(0|[1-9][0-9]{0,5})(?=\.)")


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor name belongs to, if any."""
    found = _NUMBERED.search(name)
    return int(found[1]) if found else None


def as_of_expert_0(name: str) -> tuple[str, int | None]:
    """The name that the tensor of expert 0 has, and whose tensor this is; the name itself and None if it is of no expert."""
    found = _EXPERT_NUMBER.search(name)
    return (name[: found.start()] + "0" + name[found.end() :], int(found[0])) if found else (name, None)


def is_extra_head(root: str) -> bool:
    """Whether names with this root belong to a head that predicts further tokens, which may number its own layers from 0."""
    return any(word.startswith("mtp") for word in root.split("."))
