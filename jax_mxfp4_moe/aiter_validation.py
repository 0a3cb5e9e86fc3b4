"""`bench --validate --implementation aiter`: checks every row of aiter's tables on the device, times it, and writes a report.

Each row runs through `mxfp4_moe` in `jax.jit` and is compared with the float64 reference, all tokens of it, once for every rounding rule
that the installed aiter has, and is timed in the same rounds as aiter's own `fused_moe`, called from torch on the same buffers.

On a simulated aiter (`aiter.__simulated__`) the same happens on the CPU with smaller sizes; nothing is timed then, and the report says
so at its head and in every row.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import pathlib
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_mxfp4_moe import bench, device, doctor, testing, workloads
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.aiter import known_releases, release, slots, tables
from jax_mxfp4_moe.implementations.aiter.release import Release, flydsl_registry
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.moe import prepare
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.workloads import Workload

IMPLEMENTATION = "aiter"
SIMULATED = "SIMULATED"
REPORT = pathlib.Path("aiter_validation.md")
FUSED_MOE = "aiter fused_moe"
"""Label of aiter's own function, called from torch."""

TOKEN_TOLERANCE = 0.1
"""Largest relative error of any one token. One code of the shared expert's h that rounds to its neighbour moves a token by about 0.02;
only the largest codes of a token move it by more than 0.1. A lost or foreign expert of average weight does, and a block of rows in the
wrong place has many such tokens."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A config to check.

    Attributes:
      labels: who asks for it: "default", presets, and lines of the shipped table.
      config: parameters, or the name of a preset that has none, or that failed.
      activation_quant: what its kernels round activations to.
      source: where it came from.
      why: what the tables raised in the place of a config; empty if nothing.
    """

    labels: tuple[str, ...]
    config: Config | str
    activation_quant: str | None
    source: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
      status: "ok", "WRONG" (an error above its tolerance), "FAILED" (it raised; `why` says what), or "refused" (`fused_moe` must not run
        this problem on this aiter, `why` says why; no fault).
      error: of all tokens together; `worst_token` is that of the token whose own is the largest.
      us: median microseconds of a call, each blocked until ready; None where nothing is timed.
      bridge: how torch is reached, such as "eager"; empty where nothing ran, or without JAX.
    """

    workload: str
    labels: str
    rule: str
    status: str
    error: float | None = None
    tolerance: float | None = None
    worst_token: float | None = None
    us: float | None = None
    bridge: str = ""
    config: str = ""
    why: str = ""

    @property
    def failed(self) -> bool:
        """Whether the command must exit with an error."""
        return self.status in ("WRONG", "FAILED")


def choices(problem: MoeProblem, platform: str, installed: Release) -> list[Choice]:
    """Every config that the tables have for `problem`, as it may run on `installed`; equal ones once, failed ones last."""
    aiter = IMPLEMENTATIONS[IMPLEMENTATION]
    found: dict[Any, Choice] = {}

    def add(label: str, config: Config | str, activation_quant: str | None, source: str) -> None:
        key = config if isinstance(config, str) else config.items
        known = found.get(key)
        labels = (*(known.labels if known else ()), label)
        found[key] = Choice(labels, config, activation_quant, known.source if known else source)

    def precision(config: Config) -> str | None:
        return None if config["ksplit"] > 1 else problem.activation_quant

    rows = [row for row in tables.default_rows() if row.key == tables.blank(problem).key]
    asked: list[tuple[str, Callable[[], Config]]] = [
        ("default", lambda: aiter.configs(problem, platform)[0]),
        *(
            (name, functools.partial(aiter.preset, name, problem, platform))
            for name in tables.SEEDS
            if _has(name, problem)
        ),
        *((row.table, row.config) for row in rows if _runs(row, installed)),
    ]
    failed = []
    for label, make in asked:
        try:
            config = make()
        except Exception as raised:  # noqa: BLE001 - the report of a stranger's machine must be whole
            failed.append(Choice((label,), label, None, "the tables", _one_line(raised)))
            continue
        named = (
            tables.VENDOR
            if config["pipeline"] == tables.VENDOR
            else tables.OWN_CHOICE
            if not config["block_m"]
            else None
        )
        add(label, named or config, problem.activation_quant if named else precision(config), config.source)
    for name in (tables.VENDOR, tables.OWN_CHOICE):
        add(name, name, problem.activation_quant, "asked for by name")
    return [*found.values(), *failed]


def _has(preset: str, problem: MoeProblem) -> bool:
    return any(row.key == tables.blank(problem).key for row in tables.preset_rows(preset))


def _runs(row: tables.Row, installed: Release) -> bool:
    return row.pipeline != tables.VENDOR and tables.verdict(row, installed, flydsl_registry()) is None


def scaled(workload: Workload) -> Workload:
    """A problem of the same kind that a simulation computes in seconds."""
    problem = workload.problem
    small = dataclasses.replace(
        problem,
        tokens=min(problem.tokens, 16),
        experts=min(problem.experts, problem.top_k + 3),
        hidden=min(problem.hidden, 512),
        intermediate=min(problem.intermediate, 256),
    )
    return dataclasses.replace(workload, problem=small)


def validate(workload: Workload, platform: str, installed: Release, *, repeats: int | None = None) -> list[Result]:
    """Checks every choice of one workload with every rule, and times them; simulated, in the size of `scaled`."""
    results: list[Result] = []
    size = scaled(workload) if installed.simulated else workload
    case = size.case()
    for (scale_rule, rounding), quantizer in installed.activation_rules.items():
        rule = f"{scale_rule} + {rounding} ({quantizer})"
        problem, asked = (
            dataclasses.replace(p, scale_rule=scale_rule, rounding=rounding) for p in (size.problem, workload.problem)
        )
        ready: dict[str, Callable[[], Any]] = {}
        plain = dataclasses.replace(
            problem, activation_quant=None
        )  # a row with ksplit > 1 keeps activations as they are
        right: dict[str | None, np.ndarray] = {}
        mine: list[Result] = []
        for choice in choices(asked, platform, installed):
            if choice.config == tables.VENDOR and tables.vendor_rule(installed, problem.tokens) != (
                scale_rule,
                rounding,
            ):
                continue  # fused_moe rounds by a rule of its own, and was checked with that, or will be
            result = Result(
                size.name, ", ".join(choice.labels), rule, "ok", config=f"{choice.config} ({choice.source})"
            )
            if choice.why:
                mine.append(dataclasses.replace(result, status="FAILED", why=choice.why))
                continue
            try:
                made = bench.candidate(problem, case, IMPLEMENTATION, choice.config, None)
                y = np.asarray(made.run())
            except Exception as raised:  # noqa: BLE001 - as above
                refused = choice.config == tables.VENDOR and isinstance(raised, ValueError)
                mine.append(
                    dataclasses.replace(result, status="refused" if refused else "FAILED", why=_one_line(raised))
                )
                continue
            checked = problem if choice.activation_quant else plain
            if choice.activation_quant not in right:
                right[choice.activation_quant] = testing.reference(checked, case)
            result = compared(result, y, right[choice.activation_quant], testing.tolerance(checked))
            result = dataclasses.replace(result, bridge=made.bridge)
            mine.append(result)
            if result.status == "ok":
                ready[result.labels] = made.run
        mine += _own(size.name, rule, problem, case, ready)
        if not installed.simulated:
            try:
                times = testing.interleaved_us(ready, repeats=repeats)
            except Exception as raised:  # noqa: BLE001 - as above
                times = {}
                mine.append(Result(size.name, "times of all", rule, "FAILED", why=_one_line(raised)))
            mine = [
                dataclasses.replace(r, us=float(np.median(times[r.labels]))) if r.labels in times else r for r in mine
            ]
        results += mine
    return results


def compared(result: Result, y: np.ndarray, right: np.ndarray, tolerance: float) -> Result:
    """`result` with the errors of `y` [T, D] against `right`, of all tokens together and of the worst one, and their verdict."""
    error = testing.relative_error(y, right)
    worst = max((testing.relative_error(*rows) for rows in zip(y, right, strict=True)), default=0.0)
    status = "ok" if error <= tolerance and worst <= TOKEN_TOLERANCE else "WRONG"
    return dataclasses.replace(result, status=status, error=error, tolerance=tolerance, worst_token=worst)


def _own(
    name: str, rule: str, problem: MoeProblem, case: testing.Case, ready: dict[str, Callable[[], Any]]
) -> list[Result]:
    """aiter's `fused_moe` from torch, on the same numbers, entered into `ready` to be timed; not checked, since its rule is its own."""
    result = Result(name, FUSED_MOE, rule, "ok", config="from torch; rounds by its own rule, not checked here")
    try:
        call = fused_moe_call(problem, case)
        call()
    except Exception as error:  # noqa: BLE001 - as above
        return [dataclasses.replace(result, status="FAILED", why=_one_line(error))]
    ready[FUSED_MOE] = call
    return [result]


def fused_moe_call(problem: MoeProblem, case: testing.Case) -> Callable[[], Any]:
    """A call of aiter's `fused_moe` on torch tensors that share memory with `case`; it returns when the device is done."""
    import torch

    from jax_mxfp4_moe.implementations.aiter import calls, layout

    weights = prepare(case.weights, IMPLEMENTATION)
    pad = layout.padded(problem.hidden) - problem.hidden
    topk_weights, topk_ids, _ = slots.to_unnamed_experts(case.topk_weights, case.topk_ids, problem.experts)
    arrays = (
        jax.numpy.pad(case.x, ((0, 0), (0, pad))), weights.gate_up.codes, weights.gate_up.scales, weights.down.codes, weights.down.scales,
        topk_weights, topk_ids,
    )  # fmt: skip
    inputs = [torch.from_dlpack(jax.block_until_ready(array)) for array in arrays]
    output = torch.empty_like(inputs[0])

    def call() -> Any:
        calls.run_vendor(inputs, [output], None)
        if output.is_cuda:
            torch.cuda.synchronize(output.device)
        return output

    return call


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


# --- the report --------------------------------------------------------------------------------------------------------------------


def report(results: Sequence[Result], installed: Release, pending: Sequence[str] = ()) -> str:
    """The report in Markdown; `pending` are the names of workloads that have not run yet."""
    stamp = f" {SIMULATED}" if installed.simulated else ""
    facts = {
        "result": summary(results),
        **({"not run yet": ", ".join(pending)} if pending else {}),
        "checked": f"every token, against float64 on the host; worst token at most {TOKEN_TOLERANCE}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"`{shlex.join(['python', '-m', 'jax_mxfp4_moe', *sys.argv[1:]])}`",
        "device": f"a simulation on {doctor.machine()}" if installed.simulated else doctor.machine(),
        "HIP runtime": ", ".join(device.hip_runtimes()) or "none loaded",
        "aiter": installed.version,
        **{name: version for name, version in doctor.versions().items() if version != doctor.NOT_INSTALLED},
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("AITER_")},
    }
    columns = (
        "workload", "config", "rule", "status", "error", "tolerance", "worst token", "us", "bridge", "runs, or why not",
    )  # fmt: skip
    lines = [
        f"# Validation of aiter's rows{stamp}",
        "",
        *(
            [
                f"{SIMULATED}: every row below ran on a simulation of aiter on a CPU, in smaller sizes. It says nothing about a GPU, and "
                "nothing was timed.",
                "",
            ]
            if installed.simulated
            else []
        ),
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "## Rows",
        "",
        f"| {' | '.join(([SIMULATED] if installed.simulated else []) + list(columns))} |",
        f"|{'---|' * (len(columns) + installed.simulated)}",
        *(_line(result, installed.simulated) for result in results),
        "",
        "## The installed aiter",
        "",
        *(f"- {name}: {value}" for name, value in dataclasses.asdict(installed).items()),
        "",
        "## Rows as written, and what this aiter runs for them",
        "",
        *(f"- {name}: {told}" for name, told in known_releases.verdicts(installed, flydsl_registry()).items()),
    ]
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    """How many rows are right, of those that were checked or failed."""
    counted = [result for result in results if result.error is not None or result.failed]
    return f"{sum(not result.failed for result in counted)} of {len(counted)} rows right"


def _line(result: Result, simulated: bool) -> str:
    cells = [
        result.workload,
        result.labels,
        result.rule,
        result.status,
        "-" if result.error is None else f"{result.error:.1e}",
        "-" if result.tolerance is None else f"{result.tolerance:.0e}",
        "-" if result.worst_token is None else f"{result.worst_token:.1e}",
        "-" if result.us is None else f"{result.us:.1f}",
        result.bridge or "-",
        result.why or result.config,
    ]
    cells = [SIMULATED, *cells] if simulated else cells
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def run(names: Sequence[str] = (), *, repeats: int | None = None, path: pathlib.Path | None = None) -> int:
    """Validates the named workloads (the seven tuned ones if none), writes the report, and returns the exit status: 1 if a row is wrong.

    The report is written anew after each workload, so that a fault of the device takes no more than one with it.

    Raises:
      ValueError: an unknown name.
    """
    chosen = [workloads.get(name) for name in names or workloads.TUNED_WORKLOADS]
    platform = device.platforms()[0]
    why = IMPLEMENTATIONS[IMPLEMENTATION].why_not(None, platform)
    if why is not None:
        print(f"{IMPLEMENTATION} {why}.\nNothing was validated; docs/mi355x.md says what is needed.")
        return 1
    installed = release.load()
    print(
        f"aiter {installed.version} on {doctor.machine()}"
        + (f": {SIMULATED}, nothing is timed" if installed.simulated else "")
    )
    results: list[Result] = []
    path = REPORT if path is None else path
    for done, workload in enumerate(chosen, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tables.RowReplacedWarning)  # the report has them all
            mine = validate(workload, platform, installed, repeats=repeats)
        for result in mine:
            print(_line(result, installed.simulated), flush=True)
        results += mine
        _write(path, report(results, installed, [later.name for later in chosen[done:]]))
    print(f"{summary(results)}; wrote {path}")
    return int(any(result.failed for result in results))


def _write(path: pathlib.Path, text: str) -> None:
    """Puts `text` into `path` at once: the file is the old one or the new one at any time."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
