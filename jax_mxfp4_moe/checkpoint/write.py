"""Writes expert weights as checkpoints in the names of gpt-oss, AMD Quark and compressed-tensors.

A file's header comes before its data: `TensorSource` states name, dtype and shape, and makes the bytes when they are due, one
expert at a time, so that writing takes one expert's memory beside the weights themselves. A checkpoint is written into a
temporary folder beside its place and renamed when it is whole; nothing half-written is ever left under its name.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_mxfp4_moe.checkpoint import names
from jax_mxfp4_moe.checkpoint.config import word
from jax_mxfp4_moe.checkpoint.files import DTYPES, Tensor
from jax_mxfp4_moe.checkpoint.load import Router
from jax_mxfp4_moe.checkpoint.names import NameTable, RouterNames
from jax_mxfp4_moe.mxfp4 import BLOCK, PACKED, Mxfp4Array
from jax_mxfp4_moe.weights import MoeWeights, check_weights

MAX_SHARD_BYTES = 5_000_000_000
"""Size beyond which a new file is begun."""


class Family(NamedTuple):
    """The names that one family of models has in one format: tables, and what `{block}` stands for in them."""

    experts: NameTable
    router: RouterNames
    block: str = "mlp"


def _router(name: str) -> RouterNames:
    return next(router for router in names.ROUTERS if router.weight.endswith(name))


_GPT_OSS_ROUTER, _ROUTER, _DEEPSEEK_V4_ROUTER = (
    _router(f"{name}.weight") for name in ("{block}.router", "{block}.gate", ".ffn.gate")
)

FORMATS: dict[str, dict[str, Family]] = {
    "gpt_oss": {"gpt_oss": Family(names.GPT_OSS, _GPT_OSS_ROUTER)},
    "quark": {
        "default": Family(names.QUARK, _ROUTER),
        "gpt_oss": Family(names.QUARK_GPT_OSS, _GPT_OSS_ROUTER),
        "mixtral": Family(names.QUARK_W, _ROUTER, "block_sparse_moe"),
        "deepseek_v4": Family(names.QUARK_W, _DEEPSEEK_V4_ROUTER, "ffn"),
    },
    "compressed_tensors": {
        "default": Family(names.COMPRESSED_TENSORS, _ROUTER),
        "mixtral": Family(names.COMPRESSED_TENSORS_W, _ROUTER, "block_sparse_moe"),
    },
}
"""The formats that can be written, each with its families of models, the default one first."""

QUARK_SCALE_RULES = ("even", "floor", "ceil")
"""The scale rules that Quark's `scale_calculation_mode` has a word for."""


def family_of(where: str, format: str, family: str | None) -> Family:
    """Looks a format and family up; raises ValueError, beginning with `where`, if there is none."""
    if format not in FORMATS:
        raise ValueError(f"{where}: format {format!r} given; expected one of {', '.join(FORMATS)}.")
    families = FORMATS[format]
    family = next(iter(families)) if family is None else family
    if family not in families:
        raise ValueError(
            f"{where}: family {family!r} given; expected one of {', '.join(families)}, whose names format {format!r} can be written in."
        )
    return families[family]


# --- tensors to be written -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: its header entry, and a function that makes its bytes, in pieces that need not be kept.

    Attributes:
      name, dtype, shape: as they will stand in the header; `dtype` is a key of `DTYPES`.
      pieces: returns arrays whose bytes in C order, one array after the other, are the tensor's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        storage = DTYPES[self.dtype]
        return math.prod(self.shape) // storage.elements * storage.nbytes


def copy_of(tensor: Tensor) -> TensorSource:
    """The source that carries a tensor of another checkpoint over byte by byte, 16 MiB at a time, whatever its type."""

    def pieces() -> Iterator[np.ndarray]:
        step = 1 << 24
        for start in range(0, tensor.nbytes, step):
            # A new map each time, so that the pages of the last one do not stay in this process.
            yield tensor.bytes[start : start + step]

    return TensorSource(tensor.name, tensor.dtype, tensor.shape, pieces)


def array_source(name: str, array: Any) -> TensorSource:
    """The source of an array in memory, in the dtype that it has."""
    return TensorSource(name, _dtype_name(name, array.dtype), tuple(array.shape), lambda: [np.asarray(array)])


class _Part(NamedTuple):
    """A projection as a format stores it: key of the name table, the stack of MoeWeights it comes from, and which rows of it."""

    name: str
    stack: str
    rows: Callable[[np.ndarray], np.ndarray]


def _interleave(rows: np.ndarray) -> np.ndarray:
    """[2F, ...] gate rows first -> gate at even places, up at odd ones."""
    return rows.reshape(2, len(rows) // 2, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


_DOWN = _Part("down", "down", lambda rows: rows)
_FUSED = (_Part("gate_up", "gate_up", _interleave), _DOWN)
_SEPARATE = (
    _Part("gate", "gate_up", lambda rows: rows[: len(rows) // 2]),
    _Part("up", "gate_up", lambda rows: rows[len(rows) // 2 :]),
    _DOWN,
)

Fetch = Callable[[str, str, int], np.ndarray]
"""Gives one expert's ("gate_up" or "down", "codes", "scales" or "bias", expert): [rows, columns], gate rows first; a bias [rows]."""


def fetch_from(weights: MoeWeights) -> Fetch:
    """The `Fetch` of weights in memory."""

    def fetch(stack: str, leaf: str, expert: int) -> np.ndarray:
        array = getattr(weights, f"{stack}_bias") if leaf == "bias" else getattr(getattr(weights, stack), leaf)
        return np.asarray(array[expert])

    return fetch


def layer_sources(
    layer: int,
    shapes: MoeWeights,
    fetch: Fetch,
    *,
    format: str,
    family: str | None = None,
    root: str = "model.",
    block: str | None = None,
    shared: bool = False,
) -> list[TensorSource]:
    """The tensors of one layer's experts in the names of `format`: biases, then codes and scales, expert by expert where they are apart.

    Args:
      layer: the number in the names.
      shapes: the layer in the packed layout; shape and dtype are all that its leaves need.
      fetch: called for each expert when its bytes are due.
      format, family: keys of `FORMATS`; the format's first family if it is left out.
      root, block: what stands before "layers." and behind the number in the names; that of the family if `block` is left out.
      shared: these are shared experts, given as one expert of their joint width.

    Raises:
      ValueError: an unknown format or family, another layout, or something that the format cannot say.
      TypeError: leaves of a wrong dtype.
    """
    where = f"save: layer {layer}"
    known = family_of("save", format, family)
    table = known.experts
    if isinstance(shapes, MoeWeights) and shapes.layout != PACKED:
        raise ValueError(
            f"{where}: weights in layout {shapes.layout!r} given; expected layout 'packed', which files hold. Save the weights that "
            "prepare() was given, or undo it with unprepare() of that implementation."
        )
    check_weights(where, shapes)
    if shapes.num_experts == 0:
        raise ValueError(f"{where}: weights without experts given; expected at least one.")
    if shared:
        if format == "gpt_oss":
            raise ValueError(
                f"{where}: shared experts given; expected none in format 'gpt_oss', which has no names for them. "
                "Use 'quark' or 'compressed_tensors'."
            )
        if shapes.num_experts != 1:
            raise ValueError(
                f"{where}: {shapes.num_experts} shared experts given; expected them as one expert of their joint width: join their gate, "
                "up and down matrices along the intermediate axis."
            )
        table = names.shared(table)
    stacked = format == "gpt_oss"
    everyone = range(shapes.num_experts)
    parts = _FUSED if "gate_up" in table else _SEPARATE

    def source(part: _Part, leaf: str, expert: int | None) -> TensorSource:
        weights: Mxfp4Array = getattr(shapes, part.stack)
        shape: tuple[int, ...] = (weights.shape[-2] // (2 if part.name in ("gate", "up") else 1),)
        dtype = "U8"
        if leaf == "bias":
            dtype = _dtype_name(f"{where}: {part.stack}_bias", getattr(shapes, f"{part.stack}_bias").dtype)
        elif leaf == "scales":
            shape += (weights.length // BLOCK,)
        else:
            shape += (weights.length // BLOCK, BLOCK // 2) if stacked else (weights.length // 2,)
        return TensorSource(
            names.fill(
                getattr(table[part.name], leaf), root=root, layer=layer, block=block or known.block, expert=expert
            ),
            dtype,
            (len(everyone), *shape) if stacked else shape,
            lambda: (part.rows(fetch(part.stack, leaf, e)) for e in (everyone if expert is None else (expert,))),
        )

    experts: Sequence[int | None] = [None] if stacked else everyone
    biased = [part for part in parts if getattr(shapes, f"{part.stack}_bias") is not None]
    return [source(part, "bias", expert) for part in biased for expert in experts] + [
        source(part, leaf, expert) for expert in experts for part in parts for leaf in ("codes", "scales")
    ]


def _dtype_name(what: str, dtype: Any) -> str:
    dtype = np.dtype(dtype)
    for name, storage in DTYPES.items():
        if storage.numpy == dtype:  # bytes are U8: it stands before the types that NumPy lacks
            return name
    raise TypeError(f"{what} of dtype {dtype} given; expected one that a safetensors file can hold. Cast it.")


# --- configuration ---------------------------------------------------------------------------------------------------


def quantization_config(
    format: str, *, activation_quant: str | None = None, scale_rule: str = "even", kept: Iterable[str] = ()
) -> dict[str, Any]:
    """The `quantization_config` of config.json, in the words of `format`.

    Args:
      format: a key of `FORMATS`.
      activation_quant: how the weights were made to be run: None or "mxfp4".
      scale_rule: the rule their scales were made by, and by which activations are to be quantized.
      kept: modules that are not quantized, as names in which `*` stands for anything.

    Raises:
      ValueError: the format has no words for this.
    """
    family_of("quantization_config", format, None)
    if activation_quant not in ((None,) if format == "gpt_oss" else (None, "mxfp4")):
        expected = "None" if format == "gpt_oss" else "None or 'mxfp4'"
        raise ValueError(
            f"save: weights with activation_quant={activation_quant!r} given; expected {expected} in format {format!r}, whose "
            "configuration cannot say more. To declare the weights fit for activations that are not quantized: "
            "weights.replace(activation_quant=None), or convert with weights_only."
        )
    if format == "gpt_oss":
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}
    if format == "compressed_tensors":
        if activation_quant and scale_rule != "even":
            raise ValueError(
                f"save: scale_rule={scale_rule!r} given, with activation_quant={activation_quant!r}; expected 'even' in format "
                "'compressed_tensors', whose configuration has no word for others, so that activations would be quantized by another rule. "
                "Use 'quark', or declare the weights fit for activations that are not quantized: weights.replace(activation_quant=None), "
                "or convert with weights_only."
            )
        numbers = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**numbers, "dynamic": False, "scale_dtype": "torch.uint8"},
            "input_activations": {**numbers, "dynamic": True} if activation_quant else None,
            "output_activations": None,
            "format": "mxfp4-pack-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            # Names without a prefix are taken literally there.
            "ignore": ["re:" + re.escape(name).replace(r"\*", ".*") + "$" if "*" in name else name for name in kept],
        }
    if scale_rule not in QUARK_SCALE_RULES:
        raise ValueError(
            f"save: scale_rule={scale_rule!r} given; expected one of {', '.join(QUARK_SCALE_RULES)} in format 'quark', whose "
            "configuration has no word for others."
        )
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": BLOCK,
        "ch_axis": -1,
        "is_dynamic": False,
        "round_method": "half_even",
        "scale_format": "e8m0",
        "scale_calculation_mode": scale_rule,
    }
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": {**weight, "is_dynamic": True} if activation_quant else None,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": list(kept),
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }


def modules_kept(tensors: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """The modules that `weight` tensors which are not quantized belong to, for `quantization_config`.

    Layer numbers become `*`, unless that would catch a module of `quantized` too.
    """
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    known = "\n".join({name.rpartition(".")[0] for name in quantized})

    @functools.cache
    def catches(general: str) -> bool:
        return re.search("(?m)^" + re.escape(general).replace(r"\*", ".*") + "$", known) is not None

    generals = {module: re.sub(r"\b(layers|block)\.\d+\.", r"\1.*.", module) for module in modules}
    return sorted({module if catches(general) else general for module, general in generals.items()})


def minimal_config(
    format: str, family: str | None, layers: int, experts: int, hidden: int, intermediate: int
) -> dict[str, Any]:
    """The sizes, under the names that config.json has them by, for experts that come without a model."""
    is_gpt_oss = "gpt_oss" in (format, family)
    small = is_gpt_oss or family == "mixtral"
    return {
        **({"model_type": "gpt_oss"} if is_gpt_oss else {}),
        "hidden_size": hidden,
        "num_local_experts" if small else "num_experts": experts,
        "intermediate_size" if small else "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
    }


# --- files -----------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path,
    groups: Sequence[Sequence[TensorSource]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Writes tensors in the order given into `model.safetensors`, or into numbered shards with an index.

    Args:
      folder: an existing folder without tensors.
      groups: each begins a new file. Tensors are put next to each other, so that a group has to be in an order in which each begins
        at a multiple of its item size: see `aligned`; the sizes of `layer_sources` are all multiples of 32 bytes.
      max_shard_bytes: a new file is begun before a tensor that would exceed it; a larger tensor has a file for itself.
      progress: called with the number of bytes after each piece.

    Raises:
      ValueError: max_shard_bytes is not positive, or a name occurs twice.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"save: max_shard_bytes={max_shard_bytes} given; expected a positive number.")
    shards: list[list[TensorSource]] = []
    for group in groups:
        shard: list[TensorSource] = []
        size = 0
        for tensor in group:
            if shard and size + tensor.nbytes > max_shard_bytes:
                shards.append(shard)
                shard, size = [], 0
            shard.append(tensor)
            size += tensor.nbytes
        if shard:
            shards.append(shard)
    all_names = [tensor.name for shard in shards for tensor in shard]
    twice = sorted(name for name, count in collections.Counter(all_names).items() if count > 1)
    if twice:
        raise ValueError(f"save: tensor {twice[0]!r} is given twice; expected each name once.")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys((tensor.name for tensor in shard), file))
        _write_file(folder / file, shard, progress or (lambda nbytes: None))
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )


def _write_file(path: Path, tensors: Sequence[TensorSource], progress: Callable[[int], object]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without this word, torch's loaders refuse a file
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                file.write(data.data)
                written += data.size
                progress(data.size)
            if written != tensor.nbytes:
                raise RuntimeError(
                    f"{path}: tensor {tensor.name!r} gave {written} bytes; {tensor.nbytes} were announced."
                )
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a temporary folder that takes the place of `path` when the block ends well, and is removed when it does not.

    Args:
      path: must not exist, or be an empty folder, or, with `overwrite`, a folder that holds a checkpoint, which is then replaced
        as a whole.

    Raises:
      FileExistsError: `path` is a file, or a folder that must not be replaced.
    """
    path = Path(path).resolve()
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if occupied and not overwrite:
        raise FileExistsError(
            f"save: {path} exists and is not an empty folder; expected a new place. Give another path, or overwrite=True to replace it."
        )
    if occupied and not (path.is_dir() and (any(path.glob("*.safetensors")) or (path / "config.json").exists())):
        raise FileExistsError(
            f"save: {path} is not a checkpoint, and would be deleted by overwrite=True; expected a folder with .safetensors files or "
            "config.json. Give another path."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        yield draft
        if not occupied:
            os.rename(draft, path)  # onto an empty folder, too; one that has been filled meanwhile makes it fail
            return
        old = path.with_name(f"{draft.name}.old")
        os.rename(path, old)
        try:
            os.rename(draft, path)
        except OSError:
            os.rename(old, path)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def save(
    path: str | os.PathLike[str],
    layers: Mapping[int, MoeWeights],
    *,
    format: str,
    family: str | None = None,
    routers: Mapping[int, Router] | None = None,
    shared: Mapping[int, MoeWeights] | None = None,
    config: Mapping[str, Any] | None = None,
    root: str = "model.",
    scale_rule: str = "even",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes the expert layers of a model as a checkpoint; `load(path, layer=n)` gives `layers[n]` back, byte by byte.

    Args:
      path: the new folder. It appears when it is complete.
      layers: weights in the packed layout by the number of their layer.
      format: "gpt_oss" (stacked experts), "quark" or "compressed_tensors" (one tensor for each expert and projection).
      family: the names of which models: "default" (Qwen3, DeepSeek, Kimi: mlp.experts.0.gate_proj), "mixtral", "gpt_oss", or
        "deepseek_v4"; not every format has every one.
      routers: as `load_router` returns them, by the number of their layer.
      shared: shared experts of a layer as one expert of their joint width.
      config: fields for config.json; the sizes alone if it is left out. Its `quantization_config` is replaced. Format "gpt_oss" needs its
        `model_type`, or `family="gpt_oss"`.
      root: what stands before "layers." in the names.
      scale_rule: how the scales were made, recorded where the format has a word for it.
      max_shard_bytes: see `write_tensors`.
      overwrite: replace a checkpoint that is there.

    Raises:
      ValueError: weights in the layout of an implementation, or something that the format cannot say.
      TypeError: not MoeWeights, or leaves of a wrong dtype.
      FileExistsError: see `new_folder`.
    """
    family_of("save", format, family)
    if not isinstance(layers, Mapping) or not layers:
        raise TypeError(
            f"save: layers of type {type(layers).__name__} given; expected weights by layer number, such as {{0: weights}}."
        )
    wrong = [number for number in layers if not isinstance(number, int) or isinstance(number, bool) or number < 0]
    if wrong:
        raise ValueError(f"save: layers numbered {wrong} given; expected integers from 0 on.")
    shared, routers = shared or {}, routers or {}
    unknown = sorted((shared.keys() | routers.keys()) - layers.keys())
    if unknown:
        raise ValueError(
            f"save: shared experts or routers of layers {unknown} given; expected layers among {sorted(layers)}."
        )
    experts: list[TensorSource] = []
    others: list[TensorSource] = []
    options: dict[str, Any] = {"format": format, "family": family, "root": root}
    for number, weights in layers.items():
        experts += layer_sources(number, weights, fetch_from(weights), **options)
        if number in shared:
            one = shared[number]
            experts += layer_sources(number, one, fetch_from(one), shared=True, **options)
        if number in routers:
            others += router_sources(number, routers[number], **options)
    quants = {weights.activation_quant for weights in (*layers.values(), *shared.values())}
    if len(quants) > 1:
        raise ValueError(
            f"save: layers with activation_quant {sorted(map(str, quants))} given; expected one for all, since config.json states it once."
        )
    kept = modules_kept((source.name for source in others), (source.name for source in experts))
    if format == "gpt_oss" and family is None and word(config or {}, "model_type") is None:
        raise ValueError(
            "save: no model_type given with format 'gpt_oss'; expected one, since without it these names stand for the activation and the "
            "routing of gpt-oss. Give config={'model_type': ...}, or family='gpt_oss' if the layers are of gpt-oss."
        )
    if config is None:
        first = next(iter(layers.values()))
        sizes = (first.num_experts, first.hidden_size, first.intermediate_size)
        config = minimal_config(format, family, max(layers) + 1, *sizes)
    config = dict(config)
    config["quantization_config"] = quantization_config(
        format, activation_quant=quants.pop(), scale_rule=scale_rule, kept=kept
    )
    with new_folder(path, overwrite=overwrite) as draft:
        write_json(draft / "config.json", config)
        write_tensors(draft, [aligned(others), experts], max_shard_bytes=max_shard_bytes)


def aligned(tensors: Iterable[TensorSource]) -> list[TensorSource]:
    """The tensors, wide types first."""
    return sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].numpy.itemsize)


def router_sources(
    layer: int,
    router: Router,
    *,
    format: str,
    family: str | None = None,
    root: str = "model.",
    block: str | None = None,
) -> list[TensorSource]:
    """The tensors of one layer's router; for the arguments see `layer_sources`."""
    known = family_of("save", format, family)
    templates = {
        "weight": known.router.weight,
        "bias": known.router.bias,
        "correction_bias": next(iter(known.router.correction_bias), None),
    }
    sources = []
    for part, array in router._asdict().items():
        template = templates[part]
        if array is None:
            continue
        if template is None:
            raise ValueError(
                f"save: layer {layer}: a router with {part} given; expected none in the names of this family, which have no word for it."
            )
        sources.append(array_source(names.fill(template, root=root, layer=layer, block=block or known.block), array))
    return sources
