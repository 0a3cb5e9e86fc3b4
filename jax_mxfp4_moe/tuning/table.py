"""Which config an implementation runs a problem with.

Looked up in this order, and nowhere else:
  1. the caller's `config` argument: parameters, or the name of a preset, where the implementation has any;
  2. the row of `tables/<arch>/<implementation>.csv` for exactly this problem, user tables before shipped ones;
  3. the row for the same problem with the token count rounded up to a power of two;
  4. the implementation's first config. Where a table for this implementation and architecture exists, the caller then gets an
     `UntunedWarning`, once for each key; `warnings.simplefilter("error", UntunedWarning)` makes it an error.

A table is CSV. Its key columns have the names of aiter's own tables, so that a row can go either way; columns
named `config_<parameter>` hold the config, and the rest (time, versions) is provenance. Every config of an implementation
gives the same answer, and a row made for another type or activation precision does not match: a table can change how
fast a call is, and never what it returns. A preset is the caller's own choice, and may carry another precision.

`aiter` reads its tables itself (`implementations/aiter/tables.py`): they are in aiter's own words, and which row is right depends on
the aiter installed. So for it, 2 and 3 are part of 4.
"""

from __future__ import annotations

import csv
import functools
import operator
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_mxfp4_moe import device
from jax_mxfp4_moe.implementations.base import Config, Implementation
from jax_mxfp4_moe.mxfp4 import float_dtype
from jax_mxfp4_moe.problem import ACTIVATION_DEFAULTS, ACTIVATION_QUANTS, MoeProblem, resolve_activation

TABLES = pathlib.Path(__file__).parent / "tables"
USER_TABLES_VARIABLE = "JAX_MXFP4_MOE_TABLES"
"""Environment variable: a folder laid out like `tables/`, whose rows are read before the shipped ones."""

KEY_COLUMNS = ("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a")
CONFIG_PREFIX = "config_"


def key_of(problem: MoeProblem, *, tokens: int | None = None) -> tuple[str, ...]:
    """The key columns' values for `problem`, as text."""
    values = (
        problem.tokens if tokens is None else tokens,
        problem.hidden,
        problem.intermediate,
        problem.experts,
        problem.top_k,
        problem.activation,
        problem.dtype,
        problem.activation_quant or problem.dtype,
    )
    return tuple(str(value) for value in values)


class UntunedWarning(UserWarning):
    """A table exists for what runs here and has no row for this problem. Names the key and the command that measures one."""


_warned: set[tuple[str, ...]] = set()


def problem_of(key: Sequence[str]) -> MoeProblem:
    """The inverse of `key_of`, as far as a key says it: a problem that has this key.

    Raises:
      ValueError, TypeError: another number of values than KEY_COLUMNS, or one that no problem has.
    """
    where = f"tuning key {','.join(key)}"
    if len(key) != len(KEY_COLUMNS):
        raise ValueError(f"{where}: {len(key)} values given; expected {len(KEY_COLUMNS)}: {','.join(KEY_COLUMNS)}.")
    *sizes, activation, dtype, quantized = key
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"{where}: sizes {','.join(sizes)} given; expected positive integers.")
    float_dtype(f"{where}: dtype", dtype)
    quant = None if quantized == dtype else quantized
    if quant not in ACTIVATION_QUANTS:
        known = ", ".join(map(repr, filter(None, ACTIVATION_QUANTS)))
        raise ValueError(
            f"{where}: q_dtype_a {quantized!r} given; expected the same as dtype, {dtype!r}, or one of {known}."
        )
    # A limit changes numbers and not the time: where it has no default, any will do.
    needs_limit = ACTIVATION_DEFAULTS.get(activation, {}).get("limit", 0) is None
    alpha, limit = resolve_activation(where, activation, None, 7.0 if needs_limit else None)
    tokens, hidden, intermediate, experts, top_k = map(int, sizes)
    return MoeProblem(
        tokens, top_k, experts, hidden, intermediate, dtype, dtype, activation, alpha, limit, activation_quant=quant
    )  # fmt: skip


def _warn_untuned(implementation: Implementation, problem: MoeProblem, platform: str, config: Config) -> None:
    arch, key = device.arch(platform), key_of(problem)
    tables = [folder / arch / f"{implementation.name}.csv" for folder in folders()]
    name = (implementation.name, arch, *key)
    if name in _warned or not any(path.is_file() for path in tables):
        return
    shown = ", ".join(f"{column}={value}" for column, value in zip(KEY_COLUMNS, key, strict=True))
    warnings.warn(
        f"mxfp4_moe: no table of {implementation.name!r} for {arch} has a row for {shown}; running its default config {config}. To measure "
        f"one: python -m jax_mxfp4_moe tune --implementation {implementation.name} --key {','.join(key)} --out FOLDER, and set "
        f"{USER_TABLES_VARIABLE}=FOLDER.",
        UntunedWarning,
        stacklevel=5,
    )
    _warned.add(name)  # behind the warning: as an error it is given each time


def lookup(
    implementation: Implementation, problem: MoeProblem, platform: str, config: Mapping[str, Any] | str | None
) -> Config:
    """Returns the config to run `problem` with on `platform`; the order is at the head of this module.

    Raises:
      TypeError: `config` is not a mapping.
      ValueError: a parameter that the implementation does not have, a preset that it does not know, or a value, in `config` or in a
        table, of the wrong type or below 1.
    """
    defaults = implementation.configs(problem, platform)
    if isinstance(config, str):
        if config not in implementation.presets:
            known = ", ".join(map(repr, implementation.presets))
            has = f"the presets {known}" if known else "no presets"
            raise ValueError(
                f"mxfp4_moe: config={config!r} given; implementation {implementation.name!r} has {has}. "
                "Pass a mapping of parameters, or leave config unset."
            )
        return implementation.preset(config, problem, platform)
    if config is not None:
        if not isinstance(config, Mapping):
            raise TypeError(
                f"mxfp4_moe: config of type {type(config).__name__} given; expected a mapping of parameters, or None."
            )
        names = {name for name, _ in defaults[0].items}
        if not set(config) <= names:
            raise ValueError(
                f"mxfp4_moe: config={dict(config)!r} given; expected parameters of implementation {implementation.name!r}: "
                f"{', '.join(sorted(names)) or 'it has none'}."
            )
        values = {
            n: operator.index(v) if isinstance(v, np.integer) else v
            for n, v in {**dict(defaults[0].items), **config}.items()
        }
        for name, default in defaults[0].items:
            _check("mxfp4_moe: config", name, values[name], default, _least(implementation, name, default))
        return Config.of(values, "argument")
    if implementation.presets:
        return defaults[0]
    bucket = 1 << (problem.tokens - 1).bit_length()
    for tokens, what in ((problem.tokens, "row"), (bucket, "bucket")):
        for folder in folders():
            path = folder / device.arch(platform) / f"{implementation.name}.csv"
            rows = _rows(path, path.stat().st_mtime_ns) if path.is_file() else {}
            found = rows.get(key_of(problem, tokens=tokens))
            if found is not None:
                where = f"tuning table {path}, {what} token={tokens}"
                values = {
                    n: _parse(where, n, found[n], d, _least(implementation, n, d)) if n in found else d
                    for n, d in defaults[0].items
                }
                return Config.of(values, f"{path.parent.name}/{path.name}, {what} token={tokens}")
    _warn_untuned(implementation, problem, platform, defaults[0])
    return defaults[0]


def _least(implementation: Implementation, name: str, default: Any) -> int:
    """Counts start at 1, or at 0 where that is the default or the implementation names the parameter among its `switches`."""
    least = 0 if name in implementation.switches else 1
    return min(default, least) if type(default) is int else least


def _parse(where: str, name: str, text: str, default: Any, least: int) -> Any:
    """Reads a config value of a table in the type of the implementation's default."""
    try:
        value = {"True": True, "False": False}[text] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError):
        value = text
    _check(where, name, value, default, least)
    return value


def _check(where: str, name: str, value: Any, default: Any, least: int) -> None:
    """A config value has the type of the default, and an int is `least` or more."""
    if type(value) is not type(default) or (type(value) is int and value < least):
        expected = f"an int of at least {least}" if type(default) is int else f"a {type(default).__name__}"
        raise ValueError(f"{where}: {name}={value!r} given; expected {expected}, for example {default!r}.")


def folders() -> list[pathlib.Path]:
    """Folders of tables, those of the user first."""
    user = os.environ.get(USER_TABLES_VARIABLE)
    return [*([pathlib.Path(user)] if user else []), TABLES]


@functools.lru_cache(maxsize=64)
def _rows(path: pathlib.Path, modified: int) -> dict[tuple[str, ...], dict[str, str]]:
    """Rows of a table by key; `modified` makes an edited file be read again."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = set(KEY_COLUMNS) - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"tuning table {path}: columns {sorted(missing)} are missing; expected {', '.join(KEY_COLUMNS)}."
            )
        return {
            tuple(row[column] for column in KEY_COLUMNS): {
                name.removeprefix(CONFIG_PREFIX): value
                for name, value in row.items()
                if name.startswith(CONFIG_PREFIX) and value
            }
            for row in reader
        }
