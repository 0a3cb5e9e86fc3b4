"""Fills tuning tables: measures every config of an implementation, and keeps the first one or what beats it."""

from __future__ import annotations

import csv
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_mxfp4_moe import bench, device, doctor, implementations, testing, workloads
from jax_mxfp4_moe.implementations.base import Config, Implementation
from jax_mxfp4_moe.tuning.table import CONFIG_PREFIX, KEY_COLUMNS, key_of, problem_of
from jax_mxfp4_moe.workloads import Workload

MARGIN = 0.03
"""A config must be faster than the first one by this share to be worth a row; noise is judged on top of that, in `winner`."""

CALLS = 8
"""Recorded calls that are timed together."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome for one workload.

    Attributes:
      default: the config that runs untuned.
      winner: the config that beats the default; None if the default is as good, within the noise.
      times: microseconds of every config that gave the right answer, round by round.
      wrong: errors of those that did not.
      failed: what went wrong with those that could not run here, such as too much shared memory; never the default.
      why: why nothing was measured, if so.
    """

    workload: Workload
    default: Config
    winner: Config | None
    times: dict[Config, np.ndarray]
    wrong: dict[Config, float]
    why: str | None = None
    failed: dict[Config, str] = dataclasses.field(default_factory=dict)


def search(workload: Workload, implementation: Implementation, *, repeats: int | None = None) -> Found:
    """Checks all configs of `implementation` and times those that are right, in the same rounds.

    Where calls can be recorded into a CUDA graph, CALLS of them are timed in one program.
    """
    problem, case = workload.problem, workload.case()
    platform = device.platforms(case.x)[0]
    why = implementation.why_not(problem, platform)
    if why is not None:
        return Found(workload, Config(()), None, {}, {}, why)
    configs, answer = implementation.configs(problem, platform), bench.expected(problem, case)
    calls = 1
    right: dict[Config, Any] = {}
    wrong: dict[Config, float] = {}
    failed: dict[Config, str] = {}
    for config in configs:
        try:
            made = bench.candidate(problem, case, implementation.name, config, None)
            why = bench.fallback(made, None)
            if why is not None:
                return Found(workload, configs[0], None, {}, {}, why)
            error = answer.error(made.run())
        except Exception as reason:
            if config == configs[0]:
                raise
            failed[config] = f"{type(reason).__name__}: {reason}"
            continue
        if not error <= answer.tolerance:
            wrong[config] = error
            continue
        if made.bridge == "graph":
            calls = CALLS
            made = bench.candidate(problem, case, implementation.name, config, None, calls=calls)
            for _ in range(3):  # XLA runs a program before it records it
                jax.block_until_ready(made.run())
        right[config] = made.run
    labels = {str(config): config for config in right}
    measured = testing.interleaved_us({str(config): run for config, run in right.items()}, repeats=repeats)
    times = {labels[label]: values / calls for label, values in measured.items()}
    return Found(workload, configs[0], winner(configs[0], times), times, wrong, failed=failed)


def winner(default: Config, times: dict[Config, np.ndarray]) -> Config | None:
    """The config that is fastest relative to `default`, round by round, if it beats it by more than the noise.

    That is, by `MARGIN` in the median, and in more rounds than a fair coin would give it, by two standard deviations.
    """
    if default not in times:
        return None
    ratios = {config: values / times[default] for config, values in times.items()}
    best = min(ratios, key=lambda config: float(np.median(ratios[config])))
    won, rounds = np.count_nonzero(ratios[best] < 1), len(ratios[best])
    return best if np.median(ratios[best]) < 1 - MARGIN and won > rounds / 2 + rounds**0.5 else None


def row_of(found: Found) -> dict[str, str]:
    """The table row of a workload whose default is right: key, config, and where the figures are from."""
    kept = found.winner or found.default
    versions = doctor.versions()
    return {
        **dict(zip(KEY_COLUMNS, key_of(found.workload.problem), strict=True)),
        **{f"{CONFIG_PREFIX}{name}": str(value) for name, value in kept.items},
        "us": f"{np.median(found.times[kept]):.1f}",
        "us_default": f"{np.median(found.times[found.default]):.1f}",
        "workload": found.workload.name,
        **{name: versions[name] for name in ("jax", "jaxlib", "torch")},
        "machine": doctor.machine(),
    }


def merge(path: pathlib.Path, measured: Iterable[tuple[tuple[str, ...], dict[str, str] | None]]) -> None:
    """Brings the table at `path` up to date: each key's row is replaced, or dropped where None is given; others stay.

    A reader sees the old table or the new one, whole.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            rows = {tuple(row[column] for column in KEY_COLUMNS): row for row in csv.DictReader(file)}
    for key, row in measured:
        rows.pop(key, None)
        if row is not None:
            rows[key] = row
    columns = list(dict.fromkeys([*KEY_COLUMNS, *(name for row in rows.values() for name in row)]))
    columns.sort(key=lambda name: (name not in KEY_COLUMNS, not name.startswith(CONFIG_PREFIX)))  # stable
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows, key=_order))
    os.replace(draft, path)


def _order(key: tuple[str, ...]) -> tuple[Any, ...]:
    """Layers together, their token counts ascending; numbers by value."""
    named = dict(zip(KEY_COLUMNS, key, strict=True))
    columns = ("model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "token")
    return tuple(int(named[c]) if named[c].isdigit() else named[c] for c in columns)


def run(
    names: Sequence[str],
    implementation: str,
    folder: pathlib.Path,
    *,
    keys: Sequence[Sequence[str]] = (),
    repeats: int | None = None,
) -> int:
    """Tunes the named workloads, and problems given by their key, into `folder`/<arch>/<implementation>.csv.

    A row is written for each, also where the default config is as good as any, so that lookup knows that it was measured.

    Returns:
      the exit status: 1 if any config gave a wrong answer, or any workload could not be measured.

    Raises:
      ValueError, TypeError: an unknown name, or a key of no problem.
    """
    chosen = [workloads.get(name) for name in names]
    chosen += [Workload(",".join(key), problem_of(key)) for key in keys]
    tuned = implementations.get("tune", implementation)
    if tuned.presets:
        print(f"{implementation} takes its rows from aiter's own tuner; bench --validate checks and times them")
        return 1
    path = folder / device.arch(device.platforms()[0]) / f"{implementation}.csv"
    failed = False
    for workload in chosen:
        found = search(workload, tuned, repeats=repeats)
        failed |= bool(found.wrong) or found.why is not None
        if found.why is not None:
            print(f"{workload.name}  cannot be measured: {implementation} {found.why}")
            continue
        for config, values in found.times.items():
            kept = "  <- kept" if config == (found.winner or found.default) else ""
            note = ("  default" if config == found.default else "") + kept
            print(f"{workload.name}  {config}  {np.median(values):.1f} us{note}", flush=True)
        for config, reason in found.failed.items():
            print(f"{workload.name}  {config}  cannot run here: {reason.splitlines()[0][:200]}")
        for config, error in found.wrong.items():
            print(f"{workload.name}  {config}  WRONG: error {error:.1e}")
        merge(path, [(key_of(workload.problem), row_of(found) if found.default in found.times else None)])
        print(f"wrote {path}")
    return int(failed)
