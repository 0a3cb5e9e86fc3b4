"""Tuned rows: reading them, judging them against the installed aiter, and choosing one.

A table is CSV in aiter's own columns, so that the files of aiter's tuner are tables as they are. Ours have five more, which aiter ignores:
  dispatch_policy  how `moe_sorting_fwd` sorts: 0 chooses by size, 1 is one kernel, 2 is several; all give the same result;
  pipeline         "two_stage" (the calls of `calls`), or "vendor" (aiter's `fused_moe` runs the layer). A vendor row that names kernels has
                   the figure of those, and is for releases whose own table names them for this shape;
  layer_us         microseconds of the whole layer; aiter's `us` is that of the two products alone;
  releases         "first..last": the releases on which the figure was recorded;
  source           where it was.
Rows of one shape stand in order of preference. `select` takes the first that was recorded on the installed release and is right there, or
else the first that is right there. The precision of activations is part of the question: a row decides how fast, never what.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib
import itertools
import os
import pathlib
import re
import warnings
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from jax_mxfp4_moe.implementations.aiter import kernels, names
from jax_mxfp4_moe.implementations.aiter.layout import padded
from jax_mxfp4_moe.implementations.aiter.release import TRITON_RULE, Release, flydsl_registry
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import table

ARCH = "gfx950"
SEEDS = ("seed_dispatch", "seed_block_m")
"""Presets that are tables: the tuned program's two revisions, as they were written."""
VENDOR = "vendor"
"""The preset that hands the layer to aiter's `fused_moe`."""
OWN_CHOICE = "own_choice"
"""The preset that names no row: the two-stage calls with what aiter itself resolves."""
PRESETS = (*SEEDS, VENDOR, OWN_CHOICE)


class RowReplacedWarning(UserWarning):
    """A row that a user asked for cannot run as it stands on this aiter, and another runs in its place."""


CONFIG_VARIABLE = "AITER_CONFIG_FMOE"
"""aiter's own: files of tuned rows, joined by `os.pathsep`."""

FP4 = "torch.float4_e2m1fn_x2"
KEY_COLUMNS = (
    "cu_num", "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type", "use_g1u1",
    "doweight_stage1",
)  # fmt: skip
"""What aiter looks a row up by, in its order; from v0.1.16 on with `gfx` before them."""
_TEXTS = ("act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type")
CONFIG_NAMES = ("block_m", "ksplit", "kernel_name1", "kernel_name2", "dispatch_policy", "pipeline")
"""What a row says about how to run; the rest of it is for whom, and from where."""
NEEDED_COLUMNS = (*KEY_COLUMNS, "block_m", "ksplit", "kernelName1", "kernelName2")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table. Names are aiter's, in this package's spelling.

    Attributes:
      tag: aiter's `_tag`; releases differ in which tagged rows they read.
      table: file and line that it was read from.
      replaces: why the row that was asked for is not this one; empty if this is it.
    """

    token: int
    model_dim: int
    inter_dim: int
    expert: int
    topk: int
    block_m: int
    ksplit: int
    kernel_name1: str
    kernel_name2: str
    cu_num: int = 256
    act_type: str = "ActivationType.Silu"
    dtype: str = "torch.bfloat16"
    q_dtype_a: str = FP4
    q_dtype_w: str = FP4
    q_type: str = "QuantType.per_1x32"
    use_g1u1: int = 1
    doweight_stage1: int = 0
    gfx: str = ARCH
    run_1stage: int = 0
    tag: str = ""
    dispatch_policy: int = 0
    pipeline: str = "two_stage"
    us: float | None = None
    layer_us: float | None = None
    releases: str = ""
    source: str = ""
    table: str = ""
    replaces: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """aiter's key of 13 parts, the activation as text."""
        return tuple(getattr(self, name) for name in KEY_COLUMNS)

    @property
    def activation_quant(self) -> str | None:
        """What the row's kernels round activations to: with ksplit > 1 nothing, whatever the key says."""
        return None if self.ksplit > 1 else "mxfp4"

    @property
    def origin(self) -> str:
        """Where the row and its figure are from, in words."""
        figure = (
            f"{self.layer_us:g} us a layer"
            if self.layer_us is not None
            else f"{self.us:g} us for both products"
            if self.us is not None
            else "no time recorded"
        )
        parts = [self.table or "argument", f"{self.source}: {figure}" if self.source else figure]
        if self.replaces:
            parts.append(f"in the place of a row that is refused: {self.replaces}")
        return "; ".join(parts)

    def config(self) -> Config:
        """The parameters that a call runs with."""
        return Config.of({name: getattr(self, name) for name in CONFIG_NAMES}, self.origin)

    def csv(self) -> dict[str, str]:
        """The fields that aiter reads, such that it reads them back: no empty names."""
        fields = {name: str(getattr(self, name)) for name in ("gfx", *KEY_COLUMNS, "block_m", "ksplit", "run_1stage")}
        fields |= {
            "kernelName1": self.kernel_name1 or names.PLACEHOLDER,
            "kernelName2": self.kernel_name2 or names.PLACEHOLDER,
        }
        us = "" if self.us is None else str(self.us)
        return fields | {"us1": "0", "err1": "0", "us2": "0", "err2": "0", "us": us or "0", "tflops": "0", "bw": "0"}


# --- reading -----------------------------------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> tuple[Row, ...]:
    """Rows of the MXFP4 layers in a table, ours or aiter's; rows of other precisions and devices are passed over.

    Raises:
      ValueError: a column is missing, or a field of an MXFP4 row is not what its column holds; the text names file and line.
    """
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read(path: pathlib.Path, modified: int) -> tuple[Row, ...]:
    rows = []
    for line, fields in lines(path):
        if fields["q_type"] == "QuantType.per_1x32" and fields["q_dtype_a"] == fields["q_dtype_w"] == FP4:
            row = row_of(f"{path.name} line {line}", fields)
            if row.gfx in ("", "0", ARCH):
                rows.append(dataclasses.replace(row, gfx=ARCH))
    return tuple(rows)


def lines(path: pathlib.Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers and fields of a table, text as it stands; "nan", as aiter's own tools write it, is an empty field."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in NEEDED_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"tuning table {path}: columns {missing} are missing; expected aiter's own: {', '.join(NEEDED_COLUMNS)}."
            )
        for fields in reader:
            texts = {str(name): (value or "").strip() for name, value in fields.items() if name is not None}
            yield reader.line_num, {name: "" if text.lower() == "nan" else text for name, text in texts.items()}


def row_of(where: str, fields: Mapping[str, str]) -> Row:
    """One line of a table."""

    def whole(name: str, default: int | None = None) -> int:
        text = {"True": "1", "False": "0"}.get(fields.get(name, ""), fields.get(name, ""))
        if text == "" and default is not None:
            return default
        if not re.fullmatch(r"\d+(\.0*)?", text):
            raise ValueError(f"tuning table {where}: {name}={fields.get(name, '')!r} given; expected a whole number.")
        return int(float(text))

    def figure(name: str) -> float | None:
        try:
            return float(fields[name]) if fields.get(name) else None
        except ValueError:
            raise ValueError(f"tuning table {where}: {name}={fields[name]!r} given; expected microseconds.") from None

    pipeline = fields.get("pipeline") or "two_stage"
    if pipeline not in ("two_stage", VENDOR):
        raise ValueError(f"tuning table {where}: pipeline={pipeline!r} given; expected 'two_stage' or {VENDOR!r}.")
    policy = whole("dispatch_policy", 0)
    if policy > 2:
        raise ValueError(f"tuning table {where}: dispatch_policy={policy} given; expected 0, 1 or 2.")
    key: dict[str, Any] = {name: fields[name] if name in _TEXTS else whole(name) for name in KEY_COLUMNS}
    return Row(
        **key,
        block_m=whole("block_m", 0 if pipeline == VENDOR else None),
        ksplit=whole("ksplit"),
        kernel_name1=fields["kernelName1"],
        kernel_name2=fields["kernelName2"],
        gfx=fields.get("gfx", ""),
        run_1stage=whole("run_1stage", 0),
        tag=fields.get("_tag", ""),
        dispatch_policy=policy,
        pipeline=pipeline,
        us=figure("us"),
        layer_us=figure("layer_us"),
        releases=fields.get("releases", ""),
        source=fields.get("source", ""),
        table=where,
    )


def preset_rows(preset: str) -> tuple[Row, ...]:
    """Rows of one of `SEEDS`, as written."""
    return read(table.TABLES / ARCH / f"aiter.{preset}.csv")


def default_rows() -> tuple[Row, ...]:
    """Rows of the shipped default table."""
    return read(table.TABLES / ARCH / "aiter.csv")


def user_rows() -> tuple[Row, ...]:
    """Rows of the user: the table in the folder of JAX_MXFP4_MOE_TABLES, then the files that AITER_CONFIG_FMOE names."""
    ours = [folder / ARCH / "aiter.csv" for folder in table.folders() if folder != table.TABLES]
    return tuple(row for path in (*ours, *user_files()) if path.is_file() for row in read(path))


def user_files() -> list[pathlib.Path]:
    """The files that the user gave aiter in AITER_CONFIG_FMOE, without one that this package put there."""
    named = os.environ.get(CONFIG_VARIABLE, "").split(os.pathsep)
    return [pathlib.Path(name) for name in named if name and not pathlib.Path(name).name.startswith(WRITTEN_PREFIX)]


def refuse_files_to_be_rewritten(release: Release) -> None:
    """Keeps the user's files from aiter where it would change them.

    aiter merges several files whenever it is asked for its table. From v0.1.12 on, where two rows are for one shape and tag, it writes
    the files anew with the faster one alone, and fails.

    Raises:
      ValueError: AITER_CONFIG_FMOE names such files, and `release` is of those versions, or of an unknown one.
    """
    named = [pathlib.Path(name) for name in os.environ.get(CONFIG_VARIABLE, "").split(os.pathsep) if name]
    version = _version(release.version)
    if len(named) < 2 or (version and version < (0, 1, 12)):
        return
    first: dict[tuple[str, ...], str] = {}
    for path in filter(pathlib.Path.is_file, named):
        for line, fields in lines(path):
            key = (*text_key(fields), fields.get("_tag", ""))
            if key in first:
                raise ValueError(
                    f"mxfp4_moe: {CONFIG_VARIABLE} with {len(named)} files given, where {first[key]} and {path} line {line} are for one "
                    f"shape; expected files without a common shape, since aiter {release.version} would rewrite them and fail. Merge them "
                    "into one file that has one row for each shape."
                )
            first[key] = f"{path} line {line}"


def text_key(fields: Mapping[str, str]) -> tuple[str, ...]:
    """aiter's key in text, numbers and truth values in one form."""
    return tuple({"True": "1", "False": "0"}.get(fields[n], fields[n].removesuffix(".0")) for n in KEY_COLUMNS)


WRITTEN_PREFIX = "jax_mxfp4_moe-"
"""How the names of files begin that `inject` writes for aiter."""


# --- judging -----------------------------------------------------------------------------------------------------------------------


def verdict(row: Row, release: Release, registry: Container[str] | None = None) -> str | None:
    """Why `row` must not run on `release`, one clause for each fault, or None if it may.

    A row is refused if its numbers would be wrong, or if aiter would run something else than it says.

    Args:
      registry: names of the FlyDSL kernels that the installed aiter knows; None to judge by the facts of `release` alone.
    """
    if row.pipeline == VENDOR:
        return None  # aiter's own function on aiter's own terms
    if row.run_1stage:
        return "run_1stage is a kernel of one stage, which the two-stage calls do not run (config='vendor')"
    if row.ksplit > 1:
        return _problem_with_split_k(row, release)
    faults = [
        fault
        for stage, name in ((1, row.kernel_name1), (2, row.kernel_name2))
        if (fault := names.problem_with(stage, name, row.block_m, row.inter_dim, release, registry)) is not None
    ]
    if faults:
        return "; ".join(faults)
    if row.block_m not in kernels.BLOCK_MS:
        return f"block_m={row.block_m} is none of aiter's block sizes: {', '.join(map(str, kernels.BLOCK_MS))}"
    return None


def _problem_with_split_k(row: Row, release: Release) -> str | None:
    if release.split_k is None:
        return f"ksplit={row.ksplit} needs the split-K kernels for MXFP4 weights that come with v0.1.10"
    if not release.split_k_is_right:
        return (
            f"ksplit={row.ksplit}: this aiter takes the columns of stage 1 for alternating groups of 16 gate and 16 up rows, and "
            "cannot be told that the gate rows come first"
        )
    if any(name.startswith(("flydsl_", "opus_")) for name in (row.kernel_name1, row.kernel_name2)):
        return f"ksplit={row.ksplit} beside {row.kernel_name1!r} and {row.kernel_name2!r}: aiter would run those, and not split K"
    block_m = names.split_k_block(row.token)
    if row.block_m != block_m:
        return (
            f"block_m={row.block_m}: with ksplit > 1 aiter sorts {row.token} tokens by {block_m}, whatever a row says"
        )
    return None


def nearest_legal(row: Row, release: Release, registry: Container[str] | None = None) -> Row:
    """`row`, or else the right row nearest to it: the same block size if any kernel has it, and as few other kernels as can be.

    The row returned says in `replaces` why it is not `row`. A row with ksplit > 1 that no kernel can run becomes one with quantized
    activations; `Row.activation_quant` tells.

    Raises:
      NotImplementedError: nothing near it is right; the text has the reason.
    """
    why = verdict(row, release, registry)
    if why is None:
        return row
    for candidate in _near(row, release):
        if verdict(candidate, release, registry) is None:
            return dataclasses.replace(candidate, replaces=why)
    raise NotImplementedError(
        f"aiter: no kernel of aiter {release.version} can stand in for the row of {row.table}: {why}."
    )


def _near(row: Row, release: Release) -> Iterator[Row]:
    row = dataclasses.replace(row, run_1stage=0)
    if row.ksplit > 1:
        yield dataclasses.replace(row, block_m=names.split_k_block(row.token))
    row = dataclasses.replace(row, ksplit=0)
    for block_m in dict.fromkeys((row.block_m, *names.CK_TILES[1])):
        firsts = names.alternatives(1, row.kernel_name1, block_m, release)
        seconds = names.alternatives(2, row.kernel_name2, block_m, release)
        pairs = itertools.product(firsts, seconds)
        for first, second in sorted(
            pairs, key=lambda pair: (pair[0] != row.kernel_name1) + (pair[1] != row.kernel_name2)
        ):
            yield dataclasses.replace(row, block_m=block_m, kernel_name1=first, kernel_name2=second)


def is_read(row: Row, release: Release) -> bool:
    """Whether `release` reads a row with this `_tag`."""
    return {"none": True, "untagged": not row.tag, "not_fallback": row.tag != "flydsl_fallback"}[release.tag_filter]


def vendor_rule(release: Release, tokens: int, kernel_name1: str = "") -> tuple[str, str] | None:
    """(scale_rule, rounding) with which aiter's own `fused_moe` quantizes activations; None if it could not be told.

    Args:
      kernel_name1: of the row that it runs, if any; one that quantizes inside stage 1 does so by FlyDSL's own rule.
    """
    kernel = kernels.flydsl_kernel(kernel_name1)
    if kernel is not None and kernel.quantizes:
        return None
    hip = None if release.hip_scale_rule is None else (release.hip_scale_rule, "nearest_even")
    if release.hip_quant == "fused" or release.triton_quant is None or tokens > 1024:
        return hip
    return TRITON_RULE


# --- choosing ----------------------------------------------------------------------------------------------------------------------


def select(
    problem: MoeProblem,
    release: Release,
    preset: str | None = None,
    *,
    token: int | None = None,
    registry: Container[str] | None = None,
    vendor: bool = True,
) -> Row | None:
    """The row to run `problem` with on `release`; None to leave the choice to aiter, where no table has the shape.

    Args:
      preset: one of `PRESETS`, or None for the best row of the user's tables, then of the shipped one.
      token: the count of tokens that aiter looks rows up by; asked of the installed aiter if None.
      registry: as for `verdict`; that of the installed aiter if None.
      vendor: whether the row may hand the layer to aiter's `fused_moe`, where no preset asks for that.

    Raises:
      ValueError: an unknown preset, or one that has no row for the shape; or files of the user that aiter would rewrite.
      NotImplementedError: the preset's row cannot run on this release, and no other row has the precision that was asked for.
    """
    refuse_files_to_be_rewritten(release)
    token = _padded_tokens(problem.tokens) if token is None else token
    registry = flydsl_registry() if registry is None else registry
    if preset == VENDOR:
        return dataclasses.replace(blank(problem, token), pipeline=VENDOR, source="asked for by name")
    if preset == OWN_CHOICE:
        ksplit = 0 if problem.activation_quant else 2  # aiter keeps activations in bfloat16 only when told to
        return dataclasses.replace(blank(problem, token), ksplit=ksplit, source="asked for by name")
    if preset is not None:
        return _select_preset(problem, release, preset, token, registry)
    for row in _matching(user_rows(), problem, token):
        if is_read(row, release):
            if vendor and _is_for_fused_moe(row, problem, release, token):
                return dataclasses.replace(row, pipeline=VENDOR, source="a row that only aiter's fused_moe can run")
            row = nearest_legal(row, release, registry)
            if row.activation_quant == problem.activation_quant:
                return _told(row)
    rows = [row for row in _matching(default_rows(), problem, token) if _eligible(row, problem, release)]
    for row in sorted(rows, key=lambda row: not recorded_on(row, release)):  # stable: the file's order otherwise
        if (vendor or row.pipeline != VENDOR) and verdict(row, release, registry) is None:
            return row
    return _in_place_of_own(problem, release, token, registry, vendor)


def _is_for_fused_moe(row: Row, problem: MoeProblem, release: Release, token: int) -> bool:
    """Whether a user's row names kernels that only aiter's `fused_moe` can call, and it has that row, and rounds as is asked for."""
    own = own_row(problem, release, token)
    return (
        any(map(kernels.has_own_protocol, (row.kernel_name1, row.kernel_name2)))
        and own is not None
        and (own.kernel_name1, own.kernel_name2) == (row.kernel_name1, row.kernel_name2)
        and vendor_rule(release, problem.tokens, row.kernel_name1) == (problem.scale_rule, problem.rounding)
    )


def _in_place_of_own(
    problem: MoeProblem, release: Release, token: int, registry: Container[str] | None, vendor: bool
) -> Row | None:
    """None where aiter's own row for the shape is as good as any, or what to run where the two-stage calls must not run it."""
    own = own_row(problem, release, token)
    why = None if own is None else verdict(own, release, registry)
    if own is None or why is None:
        return None
    kernel = kernels.flydsl_kernel(own.kernel_name1)
    reads_in_turn = kernel is not None and "gui" in kernel.options  # of these weights fused_moe is wrong as well
    rule = vendor_rule(release, problem.tokens, own.kernel_name1)
    if vendor and not reads_in_turn and rule == (problem.scale_rule, problem.rounding):
        return dataclasses.replace(own, pipeline=VENDOR, source=f"aiter's own row is left to its fused_moe: {why}")
    return nearest_legal(own, release, registry)


def _select_preset(
    problem: MoeProblem, release: Release, preset: str, token: int, registry: Container[str] | None
) -> Row:
    if preset not in PRESETS:
        raise ValueError(
            f"mxfp4_moe: config={preset!r} given; expected one of {', '.join(PRESETS)}, a mapping, or None."
        )
    found = next(iter(_matching(preset_rows(preset), problem, token)), None)
    if found is None:
        shapes = ", ".join(f"{r.token}x{r.model_dim}x{r.inter_dim} E{r.expert} K{r.topk}" for r in preset_rows(preset))
        raise ValueError(
            f"mxfp4_moe: config={preset!r} given for {problem}; expected one of its shapes, tokens x hidden x intermediate: {shapes}. "
            "Leave config unset for the default table, or aiter's own choice."
        )
    row = nearest_legal(found, release, registry)
    if row.activation_quant is not None and problem.activation_quant is None:
        raise NotImplementedError(
            f"mxfp4_moe: config={preset!r} given with activation_quant=None, and the row that can run on aiter {release.version} quantizes "
            f"activations ({row.replaces or 'as written'}). Pass activation_quant='mxfp4', or another config."
        )
    return _told(row)


def _told(row: Row) -> Row:
    """`row`, after a warning if it stands in for another."""
    if row.replaces:
        warnings.warn(
            f"aiter: the row of {row.table} is not run as it stands: {row.replaces}.", RowReplacedWarning, stacklevel=3
        )
    return row


def _padded_tokens(tokens: int) -> int:
    return int(importlib.import_module("aiter.fused_moe").get_padded_M(tokens))


def blank(problem: MoeProblem, token: int | None = None) -> Row:
    """The key of `problem`, and no choice: block_m 0 leaves the kernels to aiter."""
    sizes = (
        _padded_tokens(problem.tokens) if token is None else token,
        padded(problem.hidden),
        padded(problem.intermediate),
        problem.experts,
        problem.top_k,
    )
    return Row(
        *sizes, 0, 0, "", "", dtype=f"torch.{problem.dtype}", doweight_stage1=int(problem.apply_router_weight_on_input)
    )


def _matching(rows: Iterable[Row], problem: MoeProblem, token: int) -> list[Row]:
    """Rows that aiter would look up for `problem`."""
    if problem.activation != "silu":
        return []
    key = blank(problem, token).key
    return [row for row in rows if row.key == key]


def _eligible(row: Row, problem: MoeProblem, release: Release) -> bool:
    """Whether a row of the default table keeps the numbers that were asked for, and its figure is of what would run."""
    if row.activation_quant != problem.activation_quant:
        return False
    if row.pipeline != VENDOR:
        return True
    rule = (problem.scale_rule, problem.rounding)
    own = [own.kernel_name1 for own in own_rows() if own.key == row.key and is_read(own, release)]
    if any(vendor_rule(release, problem.tokens, name) != rule for name in own or [""]):
        return False
    # A figure of certain kernels says nothing where aiter's own table names others for this shape.
    return not row.kernel_name1 or any(name.startswith(row.kernel_name1) for name in own)


def own_file() -> pathlib.Path | None:
    """The table that the installed aiter reads of itself, merged from the files it brings, or given by the user; None without one."""
    core = importlib.import_module("aiter.jit.core")
    if core in _own_files:
        return _own_files[core]
    named = getattr(getattr(core, "AITER_CONFIGS", core), "AITER_CONFIG_FMOE_FILE", None)
    return pathlib.Path(named) if named and os.path.isfile(named) else None


_own_files: weakref.WeakKeyDictionary[ModuleType, pathlib.Path | None] = weakref.WeakKeyDictionary()


def remember_own_file(path: pathlib.Path | None) -> None:
    """Lets `own_file` answer with `path` from now on, for as long as this aiter is loaded."""
    _own_files[importlib.import_module("aiter.jit.core")] = path


def own_rows() -> tuple[Row, ...]:
    """MXFP4 rows of aiter's own table."""
    path = own_file()
    return () if path is None or not path.is_file() else read(path)


def own_row(problem: MoeProblem, release: Release, token: int | None = None) -> Row | None:
    """The row of aiter's own table for `problem`, with the precision that is asked for; `token` is as for `select`."""
    token = _padded_tokens(problem.tokens) if token is None else token
    rows = (row for row in _matching(own_rows(), problem, token) if is_read(row, release))
    return next((row for row in rows if row.activation_quant == problem.activation_quant), None)


def recorded_on(row: Row, release: Release) -> bool:
    """Whether the row's figure was recorded on this release, by its version; False where either is unknown."""
    first, dots, last = row.releases.partition("..")
    here = _version(release.version)
    if not dots or not here:
        return False
    return _version(first) <= here and (not last or here <= _version(last))


def _version(text: str) -> tuple[int, ...]:
    """Numbers of a version, as far as they order releases: (0, 1, 16, 6) for 0.1.16.post6."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))
