"""Which config an implementation runs a problem with.

Looked up in this order, and nowhere else:
  1. the caller's `config` argument;
  2. the row of `tables/<arch>/<implementation>.csv` for exactly this problem, user tables before shipped ones;
  3. the row for the same problem with the token count rounded up to a power of two;
  4. the implementation's first config.

A table is CSV. Its key columns have the names of aiter's own tables, so that a row can go either way; columns
named `config_<parameter>` hold the config, and the rest (time, versions) is provenance. Every config of an implementation
gives the same answer, and a row made for another type or activation precision does not match: a table can change how
fast a call is, and never what it returns.
"""

from __future__ import annotations

import csv
import functools
import operator
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_mxfp4_moe import device
from jax_mxfp4_moe.implementations.base import Config, Implementation
from jax_mxfp4_moe.problem import MoeProblem

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
        raise ValueError(
            f"mxfp4_moe: config={config!r} given; implementation {implementation.name!r} has no presets. "
            "Pass a mapping of parameters, or leave config unset."
        )
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
            _check("mxfp4_moe: config", name, values[name], default)
        return Config.of(values, "argument")
    bucket = 1 << (problem.tokens - 1).bit_length()
    for tokens, what in ((problem.tokens, "row"), (bucket, "bucket")):
        for folder in folders():
            path = folder / device.arch(platform) / f"{implementation.name}.csv"
            rows = _rows(path, path.stat().st_mtime_ns) if path.is_file() else {}
            found = rows.get(key_of(problem, tokens=tokens))
            if found is not None:
                where = f"tuning table {path}, {what} token={tokens}"
                values = {n: _parse(where, n, found[n], d) if n in found else d for n, d in defaults[0].items}
                return Config.of(values, f"{path.parent.name}/{path.name}, {what} token={tokens}")
    return defaults[0]


def _parse(where: str, name: str, text: str, default: Any) -> Any:
    """Reads a config value of a table in the type of the implementation's default."""
    try:
        value = {"True": True, "False": False}[text] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError):
        value = text
    _check(where, name, value, default)
    return value


def _check(where: str, name: str, value: Any, default: Any) -> None:
    """A config value has the type of the default, and counts start at 1."""
    if type(value) is not type(default) or (type(value) is int and value < 1):
        expected = "a positive int" if type(default) is int else f"a {type(default).__name__}"
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
