"""Converts a checkpoint into another format: expert weights are rewritten, or quantized, and everything else is copied byte by byte.

Memory: one expert and one piece of a tensor; where experts in floats become one stacked tensor, that tensor.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_mxfp4_moe.checkpoint import config, dense, names, write
from jax_mxfp4_moe.checkpoint.experts import CODES, FLOATS, NamedExperts
from jax_mxfp4_moe.checkpoint.files import MXFP4_BLOCKS, PICKLE_SUFFIXES, Checkpoint, Tensor, open_checkpoint
from jax_mxfp4_moe.checkpoint.load import PACKED_FORMATS, Description, describe, load_router
from jax_mxfp4_moe.checkpoint.write import TensorSource
from jax_mxfp4_moe.mxfp4 import BLOCK, Mxfp4Array
from jax_mxfp4_moe.quantize import Rounding, ScaleRule, check_rules
from jax_mxfp4_moe.weights import MoeWeights

READERS: dict[str, Any] = {reader.NAME: reader for reader in (*PACKED_FORMATS, dense)}

_TENSOR_SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors", ".safetensors.index.json", ".gguf", ".h5", ".msgpack", ".onnx")


class Converted(NamedTuple):
    """What `convert` did.

    Attributes:
      layers: numbers of the layers whose experts were rewritten.
      quantized: whether they were in floats.
      copied: how many tensors were copied.
      nbytes: bytes of all tensors written.
      notes: sentences on what was left as it was, or left out.
    """

    layers: tuple[int, ...]
    quantized: bool
    copied: int
    nbytes: int
    notes: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    layers: Collection[int] | None = None,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "nearest_even",
    weights_only: bool = False,
    max_shard_bytes: int = write.MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Converted:
    """Writes a model with its experts in the format `to`.

    Packed experts keep their bytes. Experts in floats are quantized, but not those that a quantized checkpoint has left in floats: they
    are copied, as shared experts in floats are.

    Args:
      source: see `open_checkpoint`.
      destination: the new folder; see `new_folder`.
      to: "gpt_oss", "quark" or "compressed_tensors".
      layers: write only the experts and routers of these layers, without the rest of the model. Without it, a whole model is written; the
        source must then have Hugging Face names, and nothing quantized besides its experts.
      scale_rule, rounding: for experts in floats. None: "even".
      weights_only: declare the weights fit for activations that are not quantized, whatever the source says.
      max_shard_bytes: size beyond which a new file is begun.
      overwrite: replace a checkpoint at `destination`.
      progress: called after each piece with the bytes written and the bytes of all.

    Raises:
      FileNotFoundError, ValueError: as for `load`; also where the model cannot be said in the format `to`.
      FileExistsError: see `new_folder`.
    """
    write.family_of("convert", to, None)
    check_rules("convert", scale_rule or "even", rounding)
    checkpoint = open_checkpoint(source)
    home, target = checkpoint.files[0].parent.resolve(), Path(destination).resolve()
    if target == home or target in home.parents:
        raise ValueError(f"convert: {destination} given, which holds the source; expected another folder.")
    plan = _Plan(checkpoint, to, layers, {"scale_rule": scale_rule or "even", "rounding": rounding}, weights_only)
    if scale_rule is not None and not plan.quantized:
        raise ValueError(
            f"convert: scale_rule={scale_rule!r} given, and the experts of {source} are in MXFP4 already; expected it only where they are "
            "in floats. Leave it out."
        )
    groups = [write.aligned(plan.others), plan.experts]
    total, done = sum(tensor.nbytes for group in groups for tensor in group), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    with write.new_folder(target, overwrite=overwrite) as draft:
        if layers is None:
            for file in _other_files(checkpoint.path):
                shutil.copyfile(file, draft / file.name)
        write.write_json(draft / "config.json", plan.config)
        write.write_tensors(draft, groups, max_shard_bytes=max_shard_bytes, progress=advance)
    return Converted(tuple(plan.layers), plan.quantized, plan.copied, total, tuple(plan.notes))


class _Plan:
    """Which tensors will be written from what; nothing is read yet but headers.

    Attributes:
      layers: the layers whose experts are rewritten.
      experts, others: the tensors to be written.
      config: the new config.json.
      quantized, copied, notes: see `Converted`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        to: str,
        layers: Collection[int] | None,
        rules: dict[str, str],
        weights_only: bool,
    ) -> None:
        self.checkpoint, self.to, self.rules = checkpoint, to, rules
        self.notes: list[str] = []
        self.experts: list[TensorSource] = []
        self.others: list[TensorSource] = []
        facts = describe(checkpoint)
        found: dict[int, NamedExperts] = {
            number: READERS[format].routed(checkpoint, number) for number, format in facts.layers.items()
        }
        self.layers = self._select(found, layers)
        self.quantized = any(source.is_dense for source in self.layers.values())
        quants = {source.activation_quant for source in self.layers.values()}
        if len(quants) > 1:
            raise ValueError(
                f"convert: {checkpoint.path} has layers made for activations quantized as {sorted(map(str, quants))}; expected one for "
                "all, since config.json states it once. Convert some of its layers."
            )
        self.activation_quant = None if weights_only else quants.pop()
        scale_rule = next(
            (source.scale_rule for source in self.layers.values() if source.scale_rule and not source.is_dense),
            rules["scale_rule"],
        )
        # One cache for all layers, or each would keep its last. A stacked tensor of codes is followed by one of scales: experts in floats
        # are quantized once for both, and kept for that long.
        stacked = (
            max(source.num_experts for source in self.layers.values()) if to == "gpt_oss" and self.quantized else 1
        )
        self._matrix = functools.lru_cache(maxsize=stacked)(_matrix)
        first = next(iter(self.layers.values()))
        family = _family(checkpoint, first, to)
        consumed: set[str] = set()
        for number, source in self.layers.items():
            consumed |= self._add(number, source, family, shared=False)
            shared = self._shared(number)
            if shared is not None:
                consumed |= self._add(number, shared, family, shared=True)
        copied = list(self._copied(consumed, layers))
        self.copied = len(copied)
        self.others += map(write.copy_of, copied)
        for number, source in self.layers.items():
            if layers is not None and _home(source) is None:
                router = load_router(checkpoint, layer=number)
                self.others += write.router_sources(number, router, format=to, family=family)
        kept = write.modules_kept((tensor.name for tensor in self.others), (tensor.name for tensor in self.experts))
        if to == "gpt_oss" and (facts.activation, facts.scoring) != ("swiglu_oai", "softmax_after_topk"):
            raise ValueError(
                f"convert: {checkpoint.path} has activation={facts.activation!r} and scoring={facts.scoring!r}; expected 'swiglu_oai' and "
                "'softmax_after_topk' in format 'gpt_oss', whose names stand for them. Use 'quark' or 'compressed_tensors'."
            )
        if _home(first) is None:
            self.notes += facts.notes
        self.config = _config(checkpoint, to, family, self.layers, facts)
        self.config["quantization_config"] = write.quantization_config(
            to, activation_quant=self.activation_quant, scale_rule=scale_rule, kept=kept
        )

    def _select(self, found: dict[int, NamedExperts], layers: Collection[int] | None) -> dict[int, NamedExperts]:
        unknown = sorted(set(layers or ()) - found.keys())
        if unknown or (layers is not None and not layers):
            raise ValueError(
                f"convert: layers {unknown} given; expected some of {', '.join(map(str, found))}, which have experts in "
                f"{self.checkpoint.path}."
            )
        chosen = {n: source for n, source in found.items() if layers is None or n in layers}
        if not config.quantization(self.checkpoint.config):
            return chosen
        floats = [n for n, source in chosen.items() if source.is_dense]
        if floats:
            self.notes.append(
                f"Layers {', '.join(map(str, floats))} are in floats in a checkpoint that is quantized otherwise: their experts were "
                f"{'copied' if layers is None else 'left out'}."
            )
        chosen = {n: source for n, source in chosen.items() if n not in floats}
        if not chosen:
            raise ValueError(
                f"convert: {self.checkpoint.path} has no experts in MXFP4 among the chosen layers; expected some."
            )
        return chosen

    def _shared(self, layer: int) -> NamedExperts | None:
        """The shared experts of a layer if they are packed; others are treated like any tensor."""
        mine = [
            self.checkpoint[name]
            for name in self.checkpoint.layers[layer]
            if ".shared_expert" in name or "_shexp." in name
        ]
        if not any(tensor.dtype in (*CODES, MXFP4_BLOCKS) for tensor in mine):
            return None
        return next((s for reader in PACKED_FORMATS if (s := reader.shared(self.checkpoint, layer)) is not None), None)

    def _add(self, layer: int, source: NamedExperts, family: str, *, shared: bool) -> set[str]:
        """Plans one layer's experts; returns the names of the tensors that they are made from."""
        root, block = _home(source) or ("model.", None)
        e, f, d = source.num_experts, source.intermediate_size, source.hidden_size
        shapes = MoeWeights(
            _shapes(e, 2 * f, d),
            _shapes(e, d, f),
            _bias_shape(source, "gate", e, 2 * f),
            _bias_shape(source, "down", e, d),
            activation_quant=self.activation_quant,
        )
        if isinstance(source, dense.DenseExperts):
            source.rules = dict(self.rules)

        def fetch(stack: str, leaf: str, expert: int) -> np.ndarray:
            if leaf == "bias":
                return np.concatenate([source.bias(expert, p, slice(0, f)) for p in _PROJECTIONS[stack]])
            return self._matrix(source, stack, expert)[leaf == "scales"]

        self.experts += write.layer_sources(
            layer,
            shapes,
            fetch,
            format=self.to,
            family=family,
            root=root,
            block=block,
            shared=shared,
        )
        place = source.place
        return {
            tensor.name
            for part in place.table
            for field in names.Names._fields
            for tensor in place.tensors(part, field)
        }

    def _copied(self, consumed: set[str], layers: Collection[int] | None) -> Iterator[Tensor]:
        """The tensors to be carried over: all others, or with `layers` those that share a block with the experts."""
        checkpoint = self.checkpoint
        rewritten = {name for number in self.layers for name in checkpoint.layers[number]}
        blocks = tuple(f"{home[0]}layers.{n}.{home[1]}." for n, s in self.layers.items() if (home := _home(s)))
        left_out = []
        for name, tensor in checkpoint.items():
            if name in consumed or (layers is not None and not name.startswith(blocks)):
                continue
            if name in rewritten and ".experts." in name:
                raise ValueError(
                    f"convert: {tensor} belongs to experts that are rewritten; expected only what load() reads: weights, scales, biases."
                )
            if _is_plain(checkpoint, tensor):
                yield tensor
            elif layers is not None:
                left_out.append(name)
            else:
                raise ValueError(
                    f"convert: {tensor} is quantized, or has names of its own; expected a Hugging Face model in which only the experts "
                    f"are quantized, since the configuration of {self.to!r} describes nothing else. Convert some of its layers (--layers): "
                    "their experts and routers are written without the rest."
                )
        if left_out:
            self.notes.append(
                f"{len(left_out)} tensors were left out that are quantized otherwise, such as {left_out[0]}."
            )


_PROJECTIONS = {"gate_up": ("gate", "up"), "down": ("down",)}


def _matrix(source: NamedExperts, stack: str, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one expert, gate rows first."""
    whole = slice(0, source.intermediate_size)
    found = [source.matrix(expert, projection, whole) for projection in _PROJECTIONS[stack]]
    codes, scales = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return codes, scales


def _shapes(experts: int, rows: int, length: int) -> Mxfp4Array:
    codes, scales = ((experts, rows, length // n) for n in (2, BLOCK))
    return Mxfp4Array(jax.ShapeDtypeStruct(codes, np.uint8), jax.ShapeDtypeStruct(scales, np.uint8))


def _bias_shape(source: NamedExperts, projection: str, experts: int, rows: int) -> jax.ShapeDtypeStruct | None:
    found = source.place.tensors(source.place.part(projection), "bias")
    return jax.ShapeDtypeStruct((experts, rows), found[0].read(0, 0).dtype) if found else None


def _home(source: NamedExperts) -> tuple[str, str] | None:
    """Root and block of the source's names; None for GGUF and the original gpt-oss, whose names have no such parts."""
    place = source.place
    block = "ffn" if source.format == "deepseek_v4" else place.block
    return (place.root, block) if block else None


def _family(checkpoint: Checkpoint, source: NamedExperts, to: str) -> str:
    """The family of names in format `to` that belongs to the model; its first one if there is none."""
    stated = checkpoint.config.get("model_type"), checkpoint.config.get("general.architecture")
    home = _home(source)
    family = {"block_sparse_moe": "mixtral", "ffn": "deepseek_v4"}.get(home[1]) if home else None
    if source.format == "gpt_oss" or stated[0] == "gpt_oss" or stated[1] == "gpt-oss":
        family = "gpt_oss"
    return family if family in write.FORMATS[to] else next(iter(write.FORMATS[to]))


def _is_plain(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    if checkpoint.container != "safetensors" or tensor.name.startswith("block."):
        return False
    return tensor.dtype in (*FLOATS, "F64", "I64", "I32", "I16", "BOOL")


def _other_files(folder: Path) -> Iterable[Path]:
    """Tokenizer, license and the like, if a whole folder is converted."""
    if not folder.is_dir():
        return ()
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(_TENSOR_SUFFIXES)
        and file.name != "config.json"
    )


def _config(
    checkpoint: Checkpoint, to: str, family: str, layers: dict[int, NamedExperts], facts: Description
) -> dict[str, Any]:
    first = next(iter(layers.values()))
    if _home(first) is None or not checkpoint.config:  # GGUF, and the original gpt-oss, have other fields
        sizes = write.minimal_config(
            to, family, max(layers) + 1, first.num_experts, first.hidden_size, first.intermediate_size
        )
        return {**sizes, **_words(facts)} if facts.model_type else sizes
    result = copy.deepcopy(dict(checkpoint.config))
    result.pop("expert_dtype", None)
    if isinstance(result.get("text_config"), dict):
        result["text_config"].pop("quantization_config", None)
    return result


def _words(facts: Description) -> dict[str, Any]:
    """What a description says of activation and routing, in the words of config.json; what is a guess is left out."""
    if facts.activation == "swiglu_oai":
        words: dict[str, Any] = {
            "model_type": "gpt_oss",
            "swiglu_alpha": facts.activation_alpha,
            "swiglu_limit": facts.activation_limit,
        }
    else:
        words = {
            "hidden_act": facts.activation,
            "scoring_func": None if "scoring" in facts.guessed else facts.scoring,
            "norm_topk_prob": None if "renormalize" in facts.guessed else facts.renormalize,
            "n_group": facts.num_groups,
            "topk_group": facts.topk_groups,
            "routed_scaling_factor": facts.routed_scaling_factor,
        }
    if facts.apply_router_weight_on_input:
        words["model_type"] = "llama4_text"  # there is no other word for it
    words["num_experts_per_tok"] = facts.num_experts_per_tok
    return {key: value for key, value in words.items() if value is not None}


def run(source: Path, destination: Path, **options: Any) -> int:
    """`convert` with a progress bar, for the command line; returns the exit status: 1 if there is nothing at `destination` to use."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(str(options["to"]), total=None)
            done = convert(
                source, destination, progress=lambda n, total: bar.update(task, completed=n, total=total), **options
            )
    except (ValueError, OSError) as error:
        print(str(error) if isinstance(error, ValueError) else f"convert: {error}", file=sys.stderr)
        return 1
    print(
        f"wrote {destination}: {done.nbytes / 1e9:.3f} GB; experts of {len(done.layers)} layers "
        f"{'quantized' if done.quantized else 'rewritten'}, {done.copied} tensors copied"
    )
    for note in done.notes:
        print(note)
    return 0
