"""Checkpoint files as lazy mappings from tensor names to views of their bytes.

Headers are parsed here rather than by the safetensors package: its NumPy and Flax readers know neither F8_E8M0 nor F4, and its
torch reader needs torch. A header is untrusted input. Every number in it is compared with the size of the file before anything
is mapped or allocated, and nothing is ever unpickled. Memory maps are made when a tensor is read and cover only what was asked
for, so a process holds the pages of no more than the views it keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_mxfp4_moe.checkpoint.names import as_of_expert_0, layer_of

MAX_HEADER_BYTES = 100_000_000
"""Largest header that is read: the limit of the safetensors format itself, applied to GGUF, index and config files too."""

MAX_AXES = 32
"""Most axes a tensor may have."""

MAX_NAME_BYTES = 1024
"""Longest name of a tensor or of a metadata entry, so that no message is filled by one."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""File types that only unpickling can read."""

_PICKLE_STARTS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))

MXFP4_BLOCKS = "MXFP4_BLOCKS"
"""The dtype name given here to GGUF type 39: blocks of 17 bytes, a scale byte and 16 bytes of codes in split order."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a dtype is stored: groups of `elements` elements along the last axis in `nbytes` bytes; `numpy` if NumPy can view them."""

    elements: int
    nbytes: int
    numpy: np.dtype


def _numpy(dtype: Any) -> Storage:
    dtype = np.dtype(dtype)
    return Storage(1, dtype.itemsize, dtype)


_BYTES = np.dtype(np.uint8)

DTYPES: dict[str, Storage] = {
    "BOOL": _numpy(np.bool_),
    "U8": _numpy(np.uint8),
    "I8": _numpy(np.int8),
    "U16": _numpy(np.uint16),
    "I16": _numpy(np.int16),
    "U32": _numpy(np.uint32),
    "I32": _numpy(np.int32),
    "U64": _numpy(np.uint64),
    "I64": _numpy(np.int64),
    "F16": _numpy(np.float16),
    "BF16": _numpy(ml_dtypes.bfloat16),
    "F32": _numpy(np.float32),
    "F64": _numpy(np.float64),
    "C64": _numpy(np.complex64),
    "F8_E4M3": Storage(1, 1, _BYTES),
    "F8_E5M2": Storage(1, 1, _BYTES),
    "F8_E8M0": Storage(1, 1, _BYTES),
    "F4": Storage(2, 1, _BYTES),
    "F6_E2M3": Storage(4, 3, _BYTES),
    "F6_E3M2": Storage(4, 3, _BYTES),
    MXFP4_BLOCKS: Storage(32, 17, _BYTES),
}
"""The dtypes of the safetensors format, and one of GGUF. What NumPy has no type for is read as bytes."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in a file.

    Attributes:
      name: its name in the file.
      dtype: a key of `DTYPES`, or "ggml type N" for a GGUF type that this package does not read.
      shape: as the header gives it. F4 counts elements, two a byte; packed codes in U8 or I8 count bytes.
      path, offset, nbytes: the file, and the range of bytes in it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def bytes(self) -> np.ndarray:
        """[nbytes] uint8: a read-only memory map of exactly this tensor's range."""
        return _map(self.path, self.offset, self.nbytes)

    def read(self, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Maps the entries start..stop of the first axis, or all of them; no byte is read before it is used.

        Returns:
          A read-only array of shape [stop - start, *shape[1:]] in the NumPy type of `dtype`. Types that NumPy lacks come as uint8,
          the last axis then counting bytes: [..., n / 2] for F4, [..., n / 32 * 17] for GGUF's MXFP4.

        Raises:
          ValueError: the tensor is of a type that is not read, or start..stop is out of range.
        """
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self}: asked for; expected one of {', '.join(DTYPES)}. This package does not read that type."
            )
        storage = DTYPES[self.dtype]
        shape = self.shape
        if storage.elements > 1:
            shape = (*shape[:-1], shape[-1] // storage.elements * storage.nbytes)
        offset, nbytes = self.offset, self.nbytes
        if start is not None or stop is not None:
            start, stop = start or 0, (shape or (0,))[0] if stop is None else stop
            if not shape or not 0 <= start <= stop <= shape[0]:
                raise ValueError(
                    f"{self}: entries {start} to {stop} asked for; expected a range within the first axis."
                )
            entry = math.prod(shape[1:]) * storage.numpy.itemsize
            offset, nbytes, shape = offset + start * entry, (stop - start) * entry, (stop - start, *shape[1:])
        return _map(self.path, offset, nbytes).view(storage.numpy).reshape(shape)

    def __str__(self) -> str:
        """For messages: name, dtype and shape, and the file."""
        return f"tensor {self.name!r} {self.dtype} {list(self.shape)} in {self.path}"


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, and its configuration. Made by `open_checkpoint`.

    Attributes:
      path: what was opened.
      config: the contents of `config.json`, empty if there is none; for a GGUF file its metadata.
      container: "safetensors" or "gguf".
      files: the tensor files.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        container: str,
        files: tuple[Path, ...],
    ) -> None:
        self.path, self._tensors, self.config, self.container, self.files = path, tensors, config, container, files

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @functools.cached_property
    def layers(self) -> dict[int, tuple[str, ...]]:
        """Names of the tensors of each layer, by its number."""
        layers: dict[int, list[str]] = {}
        for name in self._tensors:
            number = layer_of(name)
            if number is not None:
                layers.setdefault(number, []).append(name)
        return {number: tuple(layers[number]) for number in sorted(layers)}

    @functools.cached_property
    def families(self) -> dict[int, dict[str, frozenset[int]]]:
        """By layer, names that differ in the expert only, written as of expert 0, and the experts that have one.

        A model has some hundred thousand tensors, but a layer only a dozen kinds of them. Of names without an expert the set is empty.
        """
        families: dict[int, dict[str, set[int]]] = {}
        for number, names in self.layers.items():
            family = families.setdefault(number, {})
            for name in names:
                first, expert = as_of_expert_0(name)
                family.setdefault(first, set()).update(() if expert is None else (expert,))
        return {number: {name: frozenset(ids) for name, ids in family.items()} for number, family in families.items()}

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors in {len(self.files)} {self.container} files)"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint: reads and checks all headers, and maps nothing yet.

    Args:
      path: a folder with an index and its shards, with one or more .safetensors files, or with .gguf files; or one such file. The
        `config.json` beside the tensors is read too.

    Raises:
      FileNotFoundError: no such path, or a shard that the index names is missing.
      ValueError: a truncated or malformed file, a file that would have to be unpickled, or a folder without tensors.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise FileNotFoundError(
            f"open_checkpoint: {path} given, which does not exist; expected a folder or a file of tensors."
        )
    return _open_files(path, (path,), path.parent / "config.json")


def expect(tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> Tensor:
    """Returns `tensor` if its dtype is among `dtypes` and its shape is `shape` (None fits any size); otherwise raises ValueError."""
    fits = shape is None or (
        len(shape) == len(tensor.shape)
        and all(want in (None, found) for want, found in zip(shape, tensor.shape, strict=True))
    )
    if tensor.dtype in dtypes and fits:
        return tensor
    wanted = "" if shape is None else f" [{', '.join('any' if size is None else str(size) for size in shape)}]"
    raise ValueError(
        f"{tensor}: found; expected {' or '.join(dtypes)}{wanted}. The file does not hold what its names and configuration say."
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, refusing duplicate keys, non-finite numbers, and files of more than `MAX_HEADER_BYTES`."""
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file; expected a JSON file.")
    size = path.stat().st_size  # first: a bounded read() allocates its bound
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes found; expected a JSON file of at most {MAX_HEADER_BYTES}.")
    with path.open("rb") as file:
        text = file.read(size)
    return _parse_json(text, str(path))


# --- folders ---------------------------------------------------------------------------------------------------------


def _open_folder(folder: Path) -> Checkpoint:
    names = sorted(os.listdir(folder))
    config = folder / "config.json"
    indices = [n for n in names if n.endswith(".safetensors.index.json")]
    if "model.safetensors.index.json" in indices:
        indices = ["model.safetensors.index.json"]
    if len(indices) > 1:
        raise ValueError(
            f"open_checkpoint: {folder} has {len(indices)} index files, {', '.join(indices)}; expected one, or one named "
            "model.safetensors.index.json. Move each checkpoint to a folder of its own."
        )
    if indices:
        return _open_index(folder, folder / indices[0], config)
    for suffix in (".safetensors", ".gguf"):
        files = tuple(folder / n for n in names if n.endswith(suffix))
        if folder / f"model{suffix}" in files:
            files = (folder / f"model{suffix}",)
        if files:
            return _open_files(folder, files, config)
    pickles = [n for n in names if n.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise _pickle_error(folder / pickles[0])
    raise ValueError(
        f"open_checkpoint: {folder} has no tensors among its {len(names)} entries; expected model.safetensors, "
        "model.safetensors.index.json with its shards, or a .gguf file. Was the download completed?"
    )


def _open_index(folder: Path, index: Path, config: Path) -> Checkpoint:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(
            f"{index}: weight_map of type {type(weight_map).__name__} found; expected names of tensors and shards."
        )
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        # A shard lies beside its index. Anything else could reach any file of the machine.
        if (
            shard != os.path.basename(shard)
            or shard in ("", ".", "..")
            or "\\" in shard
            or "\0" in shard
            or len(shard) > 250
        ):
            raise ValueError(
                f"{index}: shard {_short(shard)!r} found; expected the plain name of a file in the same folder."
            )
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        raise FileNotFoundError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}. Complete the download."
        )
    headers = {shard: _read_header(folder / shard).tensors for shard in shards}
    tensors = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ValueError(
                f"{index}: tensor {_short(name)!r} is said to be in {shard}, which does not hold it. Index and shards are of different "
                "checkpoints, or the index is damaged: download both again."
            )
        tensors[name] = headers[shard][name]
    return Checkpoint(folder, tensors, _config(config), "safetensors", tuple(folder / shard for shard in shards))


def _open_files(path: Path, files: tuple[Path, ...], config: Path) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    headers = [_read_header(file) for file in files]
    for header in headers:
        both = tensors.keys() & header.tensors.keys()
        if both:
            name = min(both)
            raise ValueError(
                f"open_checkpoint: {path} has tensor {_short(name)!r} in two files, {tensors[name].path.name} and "
                f"{header.tensors[name].path.name}; expected each once. Give the path of one file, or add the index."
            )
        tensors.update(header.tensors)
    container, metadata = headers[0].container, headers[0].metadata
    if container != "gguf":
        return Checkpoint(path, tensors, _config(config), container, files)
    if metadata.get("split.count") not in (None, 0, 1, len(files)):
        raise ValueError(
            f"open_checkpoint: {path} is {len(files)} of {_short(metadata['split.count'])} parts of a checkpoint; expected all of them. "
            "Give the path of a folder that holds all parts and nothing else."
        )
    return Checkpoint(path, tensors, metadata, container, files)


def _config(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _pickle_error(path: Path) -> ValueError:
    return ValueError(
        f"{path}: a file that can only be read by unpickling, which runs code from the file; expected .safetensors or .gguf. "
        "Convert it where you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')."
    )


# --- headers ---------------------------------------------------------------------------------------------------------


class _Header(NamedTuple):
    container: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def _read_header(path: Path) -> _Header:
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file; expected a .safetensors or .gguf file.")
    if path.name.endswith(PICKLE_SUFFIXES):
        raise _pickle_error(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"GGUF":
            return _read_gguf(path, size)
        # torch's archives and bare pickles, whatever they are called. A header may have a length with the same first bytes (640 is
        # b"\x80\x02"), but it opens with a brace.
        if (start[:4] == b"PK\x03\x04" or start[:2] in _PICKLE_STARTS) and file.read(1) != b"{":
            raise _pickle_error(path)
        file.seek(8)
        if len(start) < 8:
            raise ValueError(
                f"{path}: {size} bytes found; expected a safetensors file, which begins with 8 bytes of header length."
            )
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ValueError(
                f"{path}: a header of {length} bytes is announced in a file of {size} bytes; expected at most "
                f"{min(MAX_HEADER_BYTES, size - 8)}. The file is truncated, or not in the safetensors format."
            )
        text = file.read(length)
    header = _parse_json(text, f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ found that is not a table of strings.")
    tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_ranges(path, tensors.values(), 8 + length, size)
    return _Header("safetensors", tensors, metadata)


def _tensor(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> Tensor:
    """Checks one entry of a safetensors header."""
    where = f"{path}: tensor {_short(name)!r}"
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(f"{where}: a name of {len(name)} characters found; expected at most {MAX_NAME_BYTES}.")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: entry {_short(entry)} found; expected dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES or dtype == MXFP4_BLOCKS:
        known = ", ".join(name for name in DTYPES if name != MXFP4_BLOCKS)
        raise ValueError(f"{where}: dtype {_short(dtype)} found; expected one of {known}.")
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(map(_is_size, shape)):
        raise ValueError(
            f"{where}: shape {_short(shape)} found; expected at most {MAX_AXES} integers that are not negative."
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{where}: data_offsets {_short(offsets)} found; expected two integers that are not negative.")
    begin, end = offsets
    nbytes = _nbytes(where, dtype, shape)
    if end - begin != nbytes:
        raise ValueError(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, but data_offsets {offsets} span {end - begin}."
        )
    if data_start + end > file_size:
        raise ValueError(
            f"{where}: data_offsets {offsets} end beyond the {file_size - data_start} bytes of data in the file. The file is "
            "truncated: download it again."
        )
    return Tensor(name, dtype, tuple(shape), path, data_start + begin, nbytes)


def _nbytes(where: str, dtype: str, shape: list[int]) -> int:
    storage = DTYPES[dtype]
    if storage.elements > 1 and (not shape or shape[-1] % storage.elements):
        raise ValueError(
            f"{where}: {dtype} {shape} found; expected a last axis that is a multiple of {storage.elements}."
        )
    return math.prod(shape) // storage.elements * storage.nbytes


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_ranges(path: Path, tensors: Any, start: int, size: int) -> None:
    """The format leaves no gap and no overlap between tensors, and nothing behind the last one."""
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != start:
            what = "overlaps the one before it" if tensor.offset < start else "follows a gap"
            raise ValueError(f"{tensor}: begins at byte {tensor.offset} and {what}; expected it at {start}.")
        start += tensor.nbytes
    if start != size:
        raise ValueError(
            f"{path}: {size} bytes found, but its header describes {start}. The file is damaged: download it again."
        )


def _parse_json(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"key {twice!r} appears twice")
        return table

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: not valid JSON ({_short(str(error))}). The file is damaged or not what its name says."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON {type(value).__name__} found; expected an object.")
    return value


def _short(value: Any) -> str:
    """repr of an untrusted value, cut so that a hostile file cannot fill the message."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "an integer of more than 64 bits"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else text[:120] + "..."


def _map(path: Path, offset: int, nbytes: int) -> np.ndarray:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    # Compared again: reading a map beyond the end of its file would kill the process.
    if offset + nbytes > path.stat().st_size:
        raise ValueError(
            f"{path}: shorter than it was when it was opened. Do not write to a checkpoint while it is read."
        )
    return np.memmap(path, np.uint8, "r", offset, (nbytes,)).view(np.ndarray)


# --- GGUF ------------------------------------------------------------------------------------------------------------

_GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_DTYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16", 39: MXFP4_BLOCKS}
_GGUF_MAX_KEPT = 1 << 16
"""Longest string or number array of the metadata that is kept; vocabularies are longer and are skipped."""


class _Cursor:
    """Reads a GGUF header from a memory map; every length is compared with what is left of the file first."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, nbytes: int, what: str) -> bytes:
        start = self.skip(nbytes, what)
        return self.data[start : self.position].tobytes()

    def skip(self, nbytes: int, what: str) -> int:
        left = len(self.data) - self.position
        if nbytes > left:
            raise ValueError(
                f"{self.path}: {what} of {nbytes} bytes announced with {left} left. The file is truncated or not GGUF."
            )
        self.position += nbytes
        return self.position - nbytes

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each."""
        count = self.number("<Q", what)
        left = len(self.data) - self.position
        if count * least_bytes > left:
            raise ValueError(
                f"{self.path}: {count} {what} announced with {left} bytes left. The file is truncated or not GGUF."
            )
        return count

    def string(self, what: str) -> str:
        length = self.count(f"bytes of {what}", 1)
        if length > MAX_NAME_BYTES:
            raise ValueError(f"{self.path}: {what} of {length} bytes found; expected at most {MAX_NAME_BYTES}.")
        return self.take(length, what).decode("utf-8", "replace")

    def value(self, key: str) -> Any:
        """A metadata value; None for what is not kept."""
        kind = self.number("<I", "a metadata type")
        if kind in _GGUF_SCALARS:
            return self.number(_GGUF_SCALARS[kind], key)
        if kind == _GGUF_STRING:
            length = self.count("bytes of a metadata string", 1)
            text = self.take(min(length, _GGUF_MAX_KEPT), key)
            self.skip(length - len(text), key)
            return text.decode("utf-8", "replace") if length <= _GGUF_MAX_KEPT else None
        if kind != _GGUF_ARRAY:
            raise ValueError(f"{self.path}: metadata {key!r} of type {kind} found; expected a type from 0 to 12.")
        inner = self.number("<I", "an array type")
        if inner in _GGUF_SCALARS:
            form = _GGUF_SCALARS[inner]
            count = self.count("numbers of a metadata array", struct.calcsize(form))
            if count > _GGUF_MAX_KEPT:
                self.skip(count * struct.calcsize(form), key)
                return None
            return [self.number(form, key) for _ in range(count)]
        if inner != _GGUF_STRING:
            raise ValueError(f"{self.path}: metadata array {key!r} of type {inner} found; expected numbers or strings.")
        for _ in range(self.count("strings of a metadata array", 8)):
            self.skip(self.number("<Q", "a string length"), key)
        return None


def _read_gguf(path: Path, size: int) -> _Header:
    # Without the limit, a sparse file could hold a list of 2 ** 36 strings that takes days to skip.
    cursor = _Cursor(path, _map(path, 0, min(size, MAX_HEADER_BYTES)))
    cursor.skip(4, "magic")
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version} found; expected 2 or 3 in little-endian order.")
    tensor_count = cursor.count("tensors", 24)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata entries", 13)):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise ValueError(f"{path}: metadata {_short(key)!r} appears twice.")
        metadata[key] = cursor.value(key)
    entries: dict[str, tuple[list[int], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.string("a tensor name")
        if name in entries:
            raise ValueError(f"{path}: tensor {_short(name)!r} appears twice.")
        axes = cursor.number("<I", "a number of axes")
        if axes > MAX_AXES:
            raise ValueError(f"{path}: tensor {_short(name)!r} with {axes} axes found; expected at most {MAX_AXES}.")
        # GGUF lists the fastest axis first.
        shape = [cursor.number("<Q", "a size") for _ in range(axes)][::-1]
        entries[name] = (shape, cursor.number("<I", "a tensor type"), cursor.number("<Q", "an offset"))
    alignment = metadata.get("general.alignment", 32)
    if not _is_size(alignment) or alignment == 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ValueError(f"{path}: general.alignment {_short(alignment)} found; expected a power of two.")
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    ordered = sorted(entries.items(), key=lambda item: item[1][2])
    limits = [*(start + offset for _, (_, _, offset) in ordered), size][1:]
    for (name, (shape, kind, offset)), limit in zip(ordered, limits, strict=True):
        where = f"{path}: tensor {name!r}"
        dtype = _GGUF_DTYPES.get(kind, f"ggml type {kind}")
        if not all(map(_is_size, shape)):
            raise ValueError(f"{where}: shape {_short(shape)} found; expected sizes below 2 ** 63.")
        if dtype in DTYPES:
            nbytes = _nbytes(where, dtype, shape)
        else:
            nbytes = max(
                limit - start - offset, 0
            )  # of a type that is not read, only where the next one begins is known
        if start + offset + nbytes > limit:
            raise ValueError(
                f"{where}: {dtype} {shape} takes {nbytes} bytes from {start + offset}, beyond {limit}, where the next tensor begins or "
                "the file ends. The file is truncated or damaged: download it again."
            )
        tensors[name] = Tensor(name, dtype, tuple(shape), path, start + offset, nbytes)
    return _Header("gguf", {name: tensors[name] for name in entries}, metadata)
