"""What every format's reader gives: the experts of one layer, a matrix at a time; and how `MoeWeights` are put together from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_mxfp4_moe.checkpoint.config import expert_count
from jax_mxfp4_moe.checkpoint.files import Checkpoint, Tensor, expect
from jax_mxfp4_moe.checkpoint.names import NameTable, fill, is_extra_head, pattern
from jax_mxfp4_moe.mxfp4 import BLOCK, Mxfp4Array
from jax_mxfp4_moe.weights import MoeWeights

FLOATS = ("F32", "BF16", "F16")
"""Types of weights, biases and routers that are floats."""

SHOWN = 5
"""Items of a list that a message shows."""

Matrix = tuple[np.ndarray, np.ndarray]
"""Codes [rows, length / 2] and scales [rows, length / 32], both uint8."""


class Experts:
    """The routed or shared experts of one layer as a checkpoint has them.

    Attributes:
      format: the name of the reader's module.
      where: layer and file, for messages.
      num_experts, hidden_size, intermediate_size: E, D, F.
      has_gate_up_bias, has_down_bias: whether the experts have biases.
      activation_quant: what the checkpoint was made for; see `MoeWeights`.
      scale_rule: the rule by which the checkpoint says scales are made, or None if it says nothing.
      is_dense: the weights are floats and are quantized while they are read.
      notes: sentences on what is not taken from the checkpoint.
    """

    format = ""
    where = ""
    num_experts = 0
    hidden_size = 0
    intermediate_size = 0
    has_gate_up_bias = False
    has_down_bias = False
    activation_quant: str | None = None
    scale_rule: str | None = None
    is_dense = False
    notes: tuple[str, ...] = ()

    def matrix(self, expert: int, projection: str, part: slice) -> Matrix:
        """One expert's "gate" or "up" rows [F, D], or "down" [D, F], cut to `part` of F, which is whole blocks."""
        raise NotImplementedError

    def bias(self, expert: int, projection: str, part: slice) -> np.ndarray:
        """The bias of that projection: `part` of [F] for "gate" and "up", all of [D] for "down"."""
        raise NotImplementedError

    def input_scales(self) -> np.ndarray | None:
        """The static float8 scales (x, h) of the activations: float32 [2], each the largest of all experts, or None."""
        return None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tensors of one layer's experts are: a table of names, and what fills its templates.

    Attributes:
      checkpoint, table, layer, root, block: what `names.fill` needs.
      ids: the experts if each has tensors of its own, else (None,).
      present: the (projection, field) pairs of the table that the layer has tensors of.
      stacked: whether a tensor holds all experts along its first axis.
    """

    checkpoint: Checkpoint
    table: NameTable
    layer: int
    root: str
    block: str
    ids: tuple[int | None, ...]
    present: frozenset[tuple[str, str]]
    stacked: bool

    @property
    def where(self) -> str:
        """For messages."""
        return f"layer {self.layer} of {self.checkpoint.path}"

    @property
    def is_gate_up_fused(self) -> bool:
        """Whether gate and up are one tensor."""
        return "gate_up" in self.table

    def part(self, projection: str) -> str:
        """The key of the table for a projection."""
        return "gate_up" if self.is_gate_up_fused and projection != "down" else projection

    def name(self, part: str, field: str, expert: int | None) -> str:
        """The name of a tensor."""
        template = getattr(self.table[part], field)
        return fill(template, root=self.root, layer=self.layer, block=self.block, expert=expert)

    def tensors(self, part: str, field: str) -> list[Tensor]:
        """That tensor of every expert; none if the checkpoint lacks them."""
        if (part, field) not in self.present:
            return []
        return [self.checkpoint[self.name(part, field, expert)] for expert in self.ids]

    def entry(self, projection: str, field: str, expert: int) -> np.ndarray:
        """One expert's part of a tensor, mapped."""
        tensor = self.checkpoint[self.name(self.part(projection), field, None if self.stacked else self.ids[expert])]
        return tensor.read(expert, expert + 1)[0] if self.stacked else tensor.read()


def find(checkpoint: Checkpoint, layer: int, table: NameTable) -> Place | None:
    """Looks for experts with the names of `table` in a layer.

    Returns:
      Their place, or None if the layer has no gate by the names of this table.

    Raises:
      ValueError: a tensor is missing, expert ids have gaps or do not fit the configuration, or names fit in two places.
    """
    # By root and block: the experts that have each field of each projection.
    found: dict[tuple[str, str], dict[tuple[str, str], frozenset[int]]] = {}
    for part, names in table.items():
        for field, template in zip(names._fields, names, strict=True):
            expression = pattern(template) if template else None
            for name, ids in checkpoint.families.get(layer, {}).items():
                match = expression.fullmatch(name) if expression else None
                if match and int(match["layer"]) == layer:
                    key = (match["root"], match.groupdict().get("block") or "")
                    found.setdefault(key, {})[part, field] = ids
    # Formats share names: all call down alike, and several the weight, so that what tells them apart is the gate and its scale.
    (gate, names), *_ = table.items()
    telling = {(gate, field) for field in ("codes", "scales") if getattr(names, field)}
    found = {key: fields for key, fields in found.items() if telling <= fields.keys()}
    found = {key: fields for key, fields in found.items() if not is_extra_head(key[0])} or found
    if not found:
        return None
    if len(found) > 1:
        places = ", ".join(repr(root + block) for root, block in sorted(found))
        raise ValueError(
            f"load: layer {layer} of {checkpoint.path} has experts in {len(found)} places, {places}; expected one. Give the path of a "
            "file that holds only the model's own layers."
        )
    ((root, block), fields) = next(iter(found.items()))
    experts: tuple[int | None, ...] = tuple(sorted(frozenset().union(*fields.values()))) or (None,)
    stacked = experts == (None,) and "shared_experts." not in names.codes and "_shexp." not in names.codes
    place = Place(checkpoint, table, layer, root, block, experts, frozenset(fields), stacked)
    _check_complete(place, fields)
    return place


def _check_complete(place: Place, fields: Mapping[tuple[str, str], frozenset[int]]) -> None:
    """All experts from 0 on, and of each all that the table names; what is optional, for all experts or for none."""
    ids = frozenset(expert for expert in place.ids if expert is not None)
    if ids:
        stated = expert_count(place.checkpoint.config)
        count = max(ids) + 1 if stated is None else stated
        extra = sorted(expert for expert in ids if expert >= count)
        num_missing = count - (len(ids) - len(extra))
        if num_missing or extra:
            # A configuration can state any number: no list is made of it.
            missing = list(itertools.islice((expert for expert in range(count) if expert not in ids), SHOWN))
            raise ValueError(
                f"load: {place.where} has {len(ids)} experts; expected ids 0..{count - 1}"
                f"{'' if stated is None else ', as its configuration says'}. {_listed('Missing', missing, num_missing)}"
                f"{_listed('Extra', extra, len(extra))}Complete the download, or correct config.json."
            )
    required = {
        (part, field) for part, names in place.table.items() for field in ("codes", "scales") if getattr(names, field)
    }
    # Gate and up belong together: a bias of one without that of the other is damage.
    upper = [part for part in place.table if part != "down"]
    required |= {(part, field) for part in upper for found, field in fields if found in upper}
    absent = [
        place.name(part, field, expert)
        for part, field in sorted(required | fields.keys())
        for expert in place.ids
        if (part, field) not in fields or (expert is not None and expert not in fields[part, field])
    ]
    if absent:
        raise ValueError(
            f"load: {place.where} lacks {len(absent)} of the {len(place.ids) * len(required | fields.keys())} tensors of its experts. "
            f"{_listed('Missing', absent, len(absent))}Complete the download."
        )


def _listed(what: str, items: Sequence[Any], count: int) -> str:
    """The first items, and how many more of `count` there are."""
    shown = ", ".join(map(str, items[:SHOWN]))
    return f"{what}: {shown}{f' and {count - SHOWN} more' if count > SHOWN else ''}. " if count else ""


class NamedExperts(Experts):
    """Experts whose tensors have the names of a `Place`.

    Attributes:
      is_static: activations in float8 have the scales that the file states, and not one for each row.
    """

    is_static = False

    def __init__(self, place: Place, format: str) -> None:
        self.place, self.format, self.where = place, format, place.where
        self.has_gate_up_bias = bool(place.tensors(place.part("gate"), "bias"))
        self.has_down_bias = bool(place.tensors("down", "bias"))
        # Gate and up in one tensor alternate, row by row, unless a reader says otherwise.
        self.rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if place.is_gate_up_fused else {}

    def bias(self, expert: int, projection: str, part: slice) -> np.ndarray:
        """Rows of a bias lie as those of its weight."""
        bias = self.place.entry(projection, "bias", expert)
        return bias if projection == "down" else bias[self.rows.get(projection, slice(None))][part]

    def set_activation_quant(self, activation_quant: str | None, is_static: bool) -> None:
        """Records what the configuration says; static scales of activations must then be there."""
        self.activation_quant, self.is_static = activation_quant, is_static
        if activation_quant == "fp8" and is_static:
            self._require_scales()

    def _require_scales(self) -> None:
        """Raises ValueError unless both products have static scales of their activations."""
        for part in (self.place.part("gate"), "down"):
            if not self.place.tensors(part, "input_scale"):
                name = self.place.name(part, "input_scale", self.place.ids[0])
                raise ValueError(
                    f"load: {self.where} has static scales of activations by its configuration; expected them in tensors such as "
                    f"{name!r}, which are missing. Complete the download."
                )

    def input_scales(self) -> np.ndarray | None:
        """The largest over all experts, since one grouped product has one scale for its activations."""
        # Scales that were left in the file do not count where the configuration says that there is one for each row.
        if not self.is_static or not any(self.place.tensors(part, "input_scale") for part in self.place.table):
            return None
        self._require_scales()

        def largest(parts: Iterable[str]) -> float:
            scales = []
            for tensor in (t for part in parts for t in self.place.tensors(part, "input_scale")):
                scale = expect(tensor, FLOATS).read().astype(np.float32)
                if scale.size != 1 or not np.isfinite(scale).all() or not (scale > 0).all():
                    raise ValueError(
                        f"{tensor}: {scale.reshape(-1)[:4]} found; expected one positive number, a scale of activations."
                    )
                scales.append(float(scale.reshape(())))
            return max(scales)

        return np.array([largest(part for part in self.place.table if part != "down"), largest(["down"])], np.float32)

    def _set_sizes(self, num_experts: int, hidden: int, intermediate: int) -> None:
        """Records E, D and F, and checks the biases against them."""
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden, intermediate
        if num_experts == 0:
            raise ValueError(f"load: {self.where} has tensors of no experts; expected at least one.")
        for name, size in (("F", intermediate), ("D", hidden)):
            if size == 0 or size % BLOCK:
                raise ValueError(
                    f"load: {self.where} has {name}={size}; expected a multiple of {BLOCK}, since blocks must be whole."
                )
        stated = expert_count(self.place.checkpoint.config)
        if self.place.stacked and stated not in (None, num_experts):
            raise ValueError(
                f"load: {self.where} has {num_experts} experts; expected {stated}, as its configuration says."
            )
        sizes = {"gate_up": 2 * intermediate, "gate": intermediate, "up": intermediate, "down": hidden}
        for part in self.place.table:
            for bias in self.place.tensors(part, "bias"):
                expect(bias, FLOATS, (*((num_experts,) if self.place.stacked else ()), sizes[part]))


CODES = ("U8", "I8", "F4")
SCALES = ("U8", "F8_E8M0")
"""Types of packed codes and of their scales. All hold the same bytes; the shape of F4 counts elements, two a byte."""


class PackedExperts(NamedExperts):
    """MXFP4 experts in safetensors files: codes and scales in tensors of their own."""

    def __init__(self, place: Place, format: str) -> None:
        super().__init__(place, format)
        first = expect(place.tensors(place.part("gate"), "codes")[0], CODES)
        lead = first.shape[:1] if place.stacked else ()
        rows, *columns = first.shape[len(lead) :] or (0,)
        fused = 2 if place.is_gate_up_fused else 1
        if len(columns) not in (1, 2) or rows % fused:
            raise ValueError(
                f"{first}: found; expected {'[E, ' if lead else '['}rows, columns / 2]{', an even number of rows' if fused == 2 else ''}."
            )
        self._set_sizes(
            lead[0] if lead else len(place.ids), math.prod(columns) * (1 if first.dtype == "F4" else 2), rows // fused
        )
        f, d = self.intermediate_size, self.hidden_size
        for part in place.table:
            rows, length = {"gate_up": (2 * f, d), "down": (d, f)}.get(part, (f, d))
            for tensor in place.tensors(part, "codes"):
                per = 1 if tensor.dtype == "F4" else 2
                # The bytes of a block may have an axis of their own.
                blocked = len(tensor.shape) - len(lead) == 3
                expect(
                    tensor, CODES, (*lead, rows, *((length // BLOCK, BLOCK // per) if blocked else (length // per,)))
                )
            for tensor in place.tensors(part, "scales"):
                if tensor.dtype == "F8_E4M3" or tensor.shape == (*lead, rows, length // 16):
                    raise ValueError(
                        f"{tensor}: found; expected {' or '.join(SCALES)} [{', '.join(map(str, (*lead, rows, length // BLOCK)))}], one "
                        "scale byte for each 32 elements. Blocks of 16 are NVFP4, another format, which this package does not read."
                    )
                expect(tensor, SCALES, (*lead, rows, length // BLOCK))

    def matrix(self, expert: int, projection: str, part: slice) -> Matrix:
        """Views of the file; nothing is copied."""
        rows = self.rows.get(projection, slice(None))
        codes = self.place.entry(projection, "codes", expert)[rows]
        scales = self.place.entry(projection, "scales", expert)[rows]
        return cut(codes.reshape(len(codes), -1).view(np.uint8), scales.view(np.uint8), projection, part)


def cut(codes: np.ndarray, scales: np.ndarray, projection: str, part: slice) -> Matrix:
    """Cuts a whole matrix to `part` of F: rows of gate and up, columns of down."""
    if projection != "down":
        return codes[part], scales[part]
    return codes[:, part.start // 2 : part.stop // 2], scales[:, part.start // BLOCK : part.stop // BLOCK]


APART = "Load without include_shared, and run the shared experts as a layer of their own."
"""The remedy where shared experts cannot stand beside the routed ones."""


class SplitExperts(Experts):
    """One wide expert of n times F as n experts of F, whose sum it is. The down bias goes to the first."""

    def __init__(self, wide: Experts, intermediate: int) -> None:
        if wide.num_experts != 1 or wide.intermediate_size % intermediate:
            raise ValueError(
                f"load: {wide.where} has shared experts with F={wide.intermediate_size}; expected a multiple of F={intermediate}, that "
                f"of the routed ones. {APART}"
            )
        self.wide = wide
        self.num_experts = wide.intermediate_size // intermediate
        self.intermediate_size, self.hidden_size = intermediate, wide.hidden_size
        self.format, self.where, self.activation_quant = wide.format, wide.where, wide.activation_quant
        self.has_gate_up_bias, self.has_down_bias = wide.has_gate_up_bias, wide.has_down_bias
        self.is_dense = wide.is_dense

    def _within(self, expert: int, part: slice) -> slice:
        start = expert * self.intermediate_size
        return slice(start + part.start, start + part.stop)

    def matrix(self, expert: int, projection: str, part: slice) -> Matrix:
        """A range of the wide expert's F."""
        return self.wide.matrix(0, projection, self._within(expert, part))

    def bias(self, expert: int, projection: str, part: slice) -> np.ndarray:
        """Zeros for the down bias of all but the first, so that it is added once."""
        bias = self.wide.bias(0, projection, self._within(expert, part))
        return np.zeros_like(bias) if projection == "down" and expert else bias

    def input_scales(self) -> np.ndarray | None:
        """Those of the wide expert."""
        return self.wide.input_scales()


def assemble(chosen: Sequence[tuple[Experts, int]], part: slice, activation_quant: str | None) -> MoeWeights:
    """Copies experts one by one from the file into the arrays of a `MoeWeights`.

    Memory: the result, and what `Experts.matrix` makes for one matrix: nothing for packed formats, a matrix for the others.

    Args:
      chosen: (source, expert of that source) for each expert of the result; sources of one D and F, all with biases or none.
      part: the range of F to load, whole blocks.
      activation_quant: recorded in the result.
    """
    first = chosen[0][0]
    f, d = part.stop - part.start, first.hidden_size

    def stack(rows: int, length: int, projections: Sequence[str]) -> Mxfp4Array:
        codes = _aligned((len(chosen), rows, length // 2), np.dtype(np.uint8))
        scales = _aligned((len(chosen), rows, length // BLOCK), np.dtype(np.uint8))
        for i, (source, expert) in enumerate(chosen):
            for at, projection in enumerate(projections):
                mine = slice(at * f, (at + 1) * f) if projection != "down" else slice(None)
                codes[i, mine], scales[i, mine] = source.matrix(expert, projection, part)
        return Mxfp4Array(jax.device_put(codes), jax.device_put(scales))

    def biases(projections: Sequence[str], has: str) -> Any:
        if not getattr(first, has):
            return None
        rows = [np.concatenate([source.bias(e, p, part) for p in projections]) for source, e in chosen]
        return jax.device_put(np.stack(rows))

    return MoeWeights(
        stack(2 * f, d, ("gate", "up")),
        stack(d, f, ("down",)),
        biases(("gate", "up"), "has_gate_up_bias"),
        biases(("down",), "has_down_bias"),
        activation_quant=activation_quant,
    )


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that `jax.device_put` takes over on a CPU: without a copy, which needs a 64-byte boundary."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
