"""Asking aiter what it makes of a row, and seeing that it makes just that.

aiter resolves a shape by its own table of tuned rows, which it reads once, from the file that AITER_CONFIG_FMOE names; that one stands in
the place of all of aiter's own files. So:
  - where aiter has not read its table yet and the user has not set the variable, one file is written, with aiter's own rows and our
    defaults for shapes that it has none for, and the variable names it. Child processes inherit it: no other row may stand there;
  - the row that is asked for stands in the table in memory, and only while aiter is asked.
Before and after, aiter has its own rows, so that its `fused_moe`, called by us or by another program, runs on its own tuning. Neither the
user's variable nor the user's files are ever changed.

The answer is compared with the row, since several releases put other kernels in its place.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import importlib
import io
import os
import pathlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from jax_mxfp4_moe.implementations.aiter import kernels, names, tables
from jax_mxfp4_moe.implementations.aiter.release import (
    FLYDSL_FORCE_VARIABLE,
    Release,
    flydsl_overrides_now,
    flydsl_registry,
    register_flydsl_t16,
)
from jax_mxfp4_moe.implementations.aiter.tables import CONFIG_VARIABLE, Row
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.problem import MoeProblem

ANY_ACTIVATION = "__ignore__"
"""What stands for the activation in the second dict of newer tables."""


class RowNotHonouredWarning(UserWarning):
    """aiter resolved a shape to something else than the row that was put into its table."""


_seen: weakref.WeakSet[ModuleType] = weakref.WeakSet()
"""Loaded aiters (their `fused_moe` modules) for which the way in was chosen."""
_lock = threading.RLock()


def resolve(problem: MoeProblem, config: Config, release: Release) -> Any:
    """What aiter's `get_2stage_cfgs` makes of `problem`, with the row of `config` in its table.

    Args:
      config: the parameters of `tables.CONFIG_NAMES`; block_m 0 leaves the kernels to aiter.

    Raises:
      ValueError: a row that must not run on this release; the text has the reason and the nearest row that may. Or files of the user
        that aiter would rewrite.
      NotImplementedError: aiter runs something else than was asked for, and the row came from the caller, or the precision is another.
    """
    tables.refuse_files_to_be_rewritten(release)
    row = _row_of(problem, config, release)
    with _lock:
        metadata = _resolve(problem, row, release)
        is_own = row.block_m == 0 and row.pipeline != tables.VENDOR
        if is_own and problem.activation_quant == "mxfp4" and kernels.splits_k(metadata):
            # Its heuristic may keep activations in bfloat16, which would be other numbers than were asked for.
            row = dataclasses.replace(
                row, block_m=32, kernel_name1=names.ck_name_for(1, 32), kernel_name2=names.ck_name_for(2, 32)
            )
            metadata = _resolve(problem, row, release)
    found = difference(row, metadata)
    if found is not None:
        told = f"aiter {release.version} was given {config} ({config.source}) for {problem}, and resolved {found}. {_remedy(release)}"
        if _is_given_by_name(config) or kernels.splits_k(metadata) != (row.ksplit > 1):
            raise NotImplementedError(f"mxfp4_moe: {told}")
        warnings.warn(told, RowNotHonouredWarning, stacklevel=2)
    return metadata


def difference(row: Row, metadata: Any) -> str | None:
    """What of `row` aiter did not take over into `metadata`, in words; None if it is the row."""
    if row.pipeline == tables.VENDOR or row.block_m == 0:
        return None
    asked, found = {"block_m": str(row.block_m)}, {"block_m": str(int(metadata.block_m))}
    if row.ksplit > 1:
        asked |= {"ksplit": str(row.ksplit), "stage 1": kernels.SPLIT_K_STAGE1}
        found |= {"ksplit": str(int(metadata.ksplit)), "stage 1": _function(metadata.stage1)}
    else:
        asked |= {"stage 1": row.kernel_name1, "stage 2": row.kernel_name2}
        found |= {"stage 1": _kernel(metadata.stage1), "stage 2": _kernel(metadata.stage2)}
    differing = [f"{what} {found[what]} for {asked[what]}" for what in asked if asked[what] != found[what]]
    return ", ".join(differing) or None


def _kernel(stage: Any) -> str:
    """The kernel that a stage was bound to, and the function, where that is not the one for such a kernel."""
    function, name = _function(stage), (getattr(stage, "keywords", None) or {}).get("kernelName") or ""
    fits = ("flydsl" in function) == str(name).startswith("flydsl_") and "asm" not in function
    return str(name) if name and fits else f"{function}({name})"


def _function(stage: Any) -> str:
    return getattr(getattr(stage, "func", stage), "__name__", repr(stage))


def _row_of(problem: MoeProblem, config: Config, release: Release) -> Row:
    """The row that `config` is; refused where it must not run."""
    values = {name: config[name] for name in tables.CONFIG_NAMES}
    if values["pipeline"] not in ("two_stage", tables.VENDOR) or values["dispatch_policy"] not in (0, 1, 2):
        raise ValueError(
            f"mxfp4_moe: config with pipeline={values['pipeline']!r}, dispatch_policy={values['dispatch_policy']!r} given; expected "
            f"'two_stage' or {tables.VENDOR!r}, and 0, 1 or 2."
        )
    row = dataclasses.replace(tables.blank(problem), **values)
    if row.ksplit > 1:
        row = dataclasses.replace(row, block_m=row.block_m or names.split_k_block(row.token))
    elif row.block_m == 0:
        return row
    registry = flydsl_registry()
    why = tables.verdict(row, release, registry)
    if why is not None:
        near = tables.nearest_legal(row, release, registry)
        raise ValueError(
            f"mxfp4_moe: config={config} given with aiter {release.version}: {why}. The nearest that may run: {near.config()}."
        )
    return row


def _is_given_by_name(config: Config) -> bool:
    """Whether the caller asked for just this row, in an argument or a preset, and not a table in passing."""
    return config.source == "argument" or config.source.startswith(tuple(f"aiter.{seed}" for seed in tables.SEEDS))


def _remedy(release: Release) -> str:
    if flydsl_overrides_now(release) and FLYDSL_FORCE_VARIABLE in os.environ:
        return f"Unset {FLYDSL_FORCE_VARIABLE}."
    for variable in ("AITER_BYPASS_TUNE_CONFIG", "AITER_KSPLIT"):
        if os.environ.get(variable, "0") != "0":
            return f"Unset {variable}."
    return "Pass another config, or config='vendor'."


def _resolve(problem: MoeProblem, row: Row, release: Release) -> Any:
    """aiter's answer with `row` in its table, or with its own rows alone where `row` leaves the choice to it."""
    fused_moe = importlib.import_module("aiter.fused_moe")
    if row.pipeline == tables.VENDOR or row.block_m == 0:
        return _ask(fused_moe, problem, release)
    if kernels.is_registered_by_us(row.kernel_name2, release):
        register_flydsl_t16()
    with _keeping_rows(fused_moe, row, release):
        if fused_moe not in _seen:
            _seen.add(fused_moe)
            if _may_write(fused_moe) and (written := _write_file(release)) is not None:
                _name_file(fused_moe, written)
        if fused_moe.cfg_2stages is None:
            try:
                _ask(fused_moe, problem, release)
            except Exception:
                if fused_moe.cfg_2stages is None:
                    raise  # otherwise it is of the row that is there now
        with _in_memory(fused_moe, row, release):
            return _ask(fused_moe, problem, release)


def _ask(fused_moe: ModuleType, problem: MoeProblem, release: Release) -> Any:
    """aiter's answer for `problem`; aiter remembers it until its cache is cleared."""
    import aiter
    import torch

    blank = tables.blank(problem)
    return fused_moe.get_2stage_cfgs(
        blank.token, blank.model_dim, blank.inter_dim, blank.expert, blank.topk,
        getattr(torch, problem.dtype), aiter.dtypes.fp4x2, aiter.dtypes.fp4x2, aiter.QuantType.per_1x32, True, aiter.ActivationType.Silu,
        False, 0, 0, **release.config_arguments(),
    )  # fmt: skip


@contextlib.contextmanager
def _keeping_rows(fused_moe: ModuleType, row: Row, release: Release) -> Iterator[None]:
    """While aiter resolves `row`, keeps newer releases from putting FlyDSL kernels in its place; the user's own setting stands."""
    kernel_names = (row.kernel_name1, row.kernel_name2)
    wanted = row.block_m != 0 and not any(name.startswith("flydsl_") for name in kernel_names)
    if not wanted or not flydsl_overrides_now(release) or FLYDSL_FORCE_VARIABLE in os.environ:
        yield
        return
    os.environ[FLYDSL_FORCE_VARIABLE] = "0"
    fused_moe.get_2stage_cfgs.cache_clear()
    try:
        yield
    finally:
        del os.environ[FLYDSL_FORCE_VARIABLE]
        fused_moe.get_2stage_cfgs.cache_clear()  # what was resolved here is for this call alone


# --- the file ----------------------------------------------------------------------------------------------------------------------


def _may_write(fused_moe: ModuleType) -> bool:
    """Whether a file still reaches aiter, and is the user's wish: the table is unread, and the variable unset."""
    core = importlib.import_module("aiter.jit.core")
    reads_late = hasattr(core, "AITER_CONFIGS")
    return reads_late and fused_moe.cfg_2stages is None and not os.environ.get(CONFIG_VARIABLE)


def _write_file(release: Release) -> pathlib.Path | None:
    """Writes aiter's own table with our defaults for shapes that it lacks; None where that is empty or (a warning) cannot be written."""
    own = tables.own_file()
    lines = [fields for _, fields in tables.lines(own)] if own is not None else []
    theirs = {tables.text_key(fields) for fields in lines}
    ours = [row for row in _legal_defaults(release) if tables.text_key(row.csv()) not in theirs]
    if not lines and not ours:
        return None
    try:
        path = write_table(lines, ours, _cu_num())
    except OSError as error:
        warnings.warn(
            f"aiter: no table can be written to {cache_folder()} ({error}); rows go into aiter's table in memory. "
            "Set XDG_CACHE_HOME to a folder that can be written.",
            stacklevel=2,
        )
        return None
    tables.remember_own_file(own)
    return path


def _name_file(fused_moe: ModuleType, path: pathlib.Path) -> None:
    """Lets aiter, which has read no table yet, read `path`."""
    os.environ[CONFIG_VARIABLE] = str(path)
    importlib.import_module("aiter.jit.core").AITER_CONFIG.get_config_file.cache_clear()
    fused_moe.get_2stage_cfgs.cache_clear()


def _legal_defaults(release: Release) -> Iterator[Row]:
    """For each shape of the shipped table, the row that `tables.select` prefers, if the two-stage calls run it."""
    registry, seen = flydsl_registry(), set()
    for row in sorted(tables.default_rows(), key=lambda row: not tables.recorded_on(row, release)):
        two_stage = row.pipeline != tables.VENDOR and row.ksplit <= 1
        if two_stage and row.key not in seen and tables.verdict(row, release, registry) is None:
            seen.add(row.key)
            yield row


def write_table(own: Iterable[dict[str, str]], rows: Iterable[Row], cu_num: int) -> pathlib.Path:
    """Writes a table of `own`, lines as aiter has them, and `rows`, for other shapes, into the user's cache; returns its path.

    The name is a digest of the content, so that processes share a file and never change it under each other.
    """
    lines = [*(row.csv() | {"cu_num": str(cu_num)} for row in rows), *own]
    columns = list(dict.fromkeys(name for fields in lines for name in fields))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([{**dict.fromkeys(_ZERO_COLUMNS & set(columns), "0"), **fields} for fields in lines])
    content = text.getvalue().encode()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tables.WRITTEN_PREFIX}{hashlib.sha256(content).hexdigest()[:16]}.csv"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    os.replace(draft, path)
    return path


_ZERO_COLUMNS = {"xbf16", "flat"}
"""Columns of newer releases, which ours and older rows leave out; empty fields would be NaN."""


def cache_folder() -> pathlib.Path:
    """Where tables for aiter are written: `jax_mxfp4_moe` in XDG_CACHE_HOME, or in ~/.cache."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jax_mxfp4_moe"


# --- the table in memory -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_memory(fused_moe: ModuleType, row: Row, release: Release) -> Iterator[None]:
    """`row` stands in aiter's loaded table, and what was there before is back afterwards."""
    places = _places(row, release)
    held = {(n, key): _dicts(fused_moe, release)[n].get(key) for n, key in places}
    _put(fused_moe, {place: _entry(row) for place in places}, release)
    try:
        yield
    finally:
        _put(fused_moe, held, release)


def _put(fused_moe: ModuleType, entries: dict[tuple[int, tuple], dict[str, Any] | None], release: Release) -> None:
    """Enters rows into the table, or takes them out where None, and makes aiter forget its answers."""
    for (n, key), entry in entries.items():
        if entry is None:
            _dicts(fused_moe, release)[n].pop(key, None)
        else:
            _dicts(fused_moe, release)[n][key] = entry
    fused_moe.get_2stage_cfgs.cache_clear()


def _dicts(fused_moe: ModuleType, release: Release) -> tuple[dict, ...]:
    table = fused_moe.cfg_2stages
    return table if release.table == "pair" else (table,)


def _entry(row: Row) -> dict[str, Any]:
    """What aiter keeps of a row; an empty name is NaN, as it is after reading a file, except where nothing looks at it."""
    empty = names.PLACEHOLDER if row.ksplit > 1 else float("nan")
    return {
        "block_m": row.block_m, "ksplit": row.ksplit, "run_1stage": row.run_1stage, "xbf16": 0, "flat": 0,
        "kernelName1": row.kernel_name1 or empty, "kernelName2": row.kernel_name2 or empty,
        "us1": 0.0, "us2": 0.0, "us": row.us or 0.0, "err1": "0", "err2": "0", "tflops": 0.0, "bw": 0.0,
    }  # fmt: skip


def _places(row: Row, release: Release) -> list[tuple[int, tuple]]:
    """(which dict, key) of all entries by which this release may look the row's shape up."""
    import aiter

    _, *sizes = row.key[:6]
    forms = {"str": row.act_type, "enum": aiter.ActivationType.Silu}

    def key(activation: Any) -> tuple:
        parts = (_cu_num(), *sizes, activation, *row.key[7:])
        return (tables.ARCH, *parts) if release.key_has_gfx else parts

    keys = [(0, key(forms[form])) for form in release.key_activations]
    return [*keys, (1, key(ANY_ACTIVATION))] if release.table == "pair" else keys


def _cu_num() -> int:
    """Compute units, as aiter counts them; a row is looked up by them too."""
    return int(importlib.import_module("aiter.jit.utils.chip_info").get_cu_num())
