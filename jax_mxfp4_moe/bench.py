"""Times named workloads: one row for each workload and implementation, and plain JAX beside them.

Every row is checked against `testing.reference` before it is timed. A wrong answer is reported and not timed, and neither is
a fallback: a row that says `torch` ran torch the way it says. `python -m jax_mxfp4_moe bench --help` lists the options.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe import device, doctor, testing, workloads
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, get, torch_call
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.moe import mxfp4_moe, prepare
from jax_mxfp4_moe.mxfp4 import Mxfp4Array, dequantize
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.stage1 import activate
from jax_mxfp4_moe.tuning import table
from jax_mxfp4_moe.workloads import Workload

BASELINES = ("ragged_dot", "ragged_dot+dequantize")
"""Plain JAX, `lax.ragged_dot` on dequantized weights: dequantized beforehand, and in every call."""

BITS_PER_WEIGHT = 4.25
"""Four for the code, and 8 / 32 for its share of the scale."""

BASELINE_BYTES = 2**30
"""A baseline whose dequantized weights are larger than this is left out on a CPU; elsewhere half of the device's memory."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
      status: "ok", "skipped" (it cannot run; `why` says so), "FAILED" (it was asked for by name and cannot run as asked),
        or "WRONG" (its error is above the tolerance).
      bridge: how torch was reached, read from the lowered program: "eager", "graph", "callback", or "-" without torch.
      us: median of `repeats` calls, each blocked until ready. error: relative, on `checked` tokens.
      gb_per_s: bytes of the experts that are hit, as MXFP4, over `us`.
      temp_mb: megabytes that XLA plans for the call besides its arguments and y. torch allocates more of its own on a CPU.
    """

    workload: str
    implementation: str
    status: str
    config: str = "-"
    source: str = "-"
    bridge: str = "-"
    us: float | None = None
    repeats: int = 0
    experts_hit: int | None = None
    gb_per_s: float | None = None
    temp_mb: float | None = None
    error: float | None = None
    checked: int = 0
    why: str = ""

    @property
    def failed(self) -> bool:
        """Whether the command must exit with an error."""
        return self.status in ("WRONG", "FAILED")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compiled call, ready to be checked and timed: `run()` returns y; `temp_bytes` is what XLA plans besides arguments and y."""

    run: Callable[[], jax.Array]
    temp_bytes: int
    bridge: str = "-"


def candidate(
    problem: MoeProblem,
    case: testing.Case,
    implementation: str,
    config: Config | str,
    bridge: str | None,
    *,
    calls: int = 1,
) -> Candidate:
    """The call of one implementation with exactly `config`, or the preset of that name, under `jax.jit`.

    With `calls` above 1 one program makes that many, one after another, and returns what each gives. XLA records five calls and more
    into a CUDA graph by itself, so that what is timed is the work of the GPU and not of Python.
    """
    call: Callable[..., jax.Array] = functools.partial(
        mxfp4_moe,
        implementation=implementation,
        config=config if isinstance(config, str) else dict(config.items),
        bridge=bridge,
        **testing.options(problem),
    )

    def one_after_another(
        x: jax.Array, weights: Any, topk_weights: jax.Array, topk_ids: jax.Array
    ) -> tuple[jax.Array, ...]:
        results = []
        for _ in range(calls):
            results.append(call(x, weights, topk_weights, topk_ids))
            x, results[-1] = jax.lax.optimization_barrier((x, results[-1]))
        return tuple(results)

    arguments = (case.x, prepare(case.weights, implementation), case.topk_weights, case.topk_ids)
    compiled = jax.jit(call if calls == 1 else one_after_another)
    lowered = compiled.lower(*arguments)
    return Candidate(lambda: compiled(*arguments), _temp_bytes(lowered), _bridge_of(lowered.as_text()))


def _temp_bytes(lowered: Any) -> int:
    return lowered.compile().memory_analysis().temp_size_in_bytes


def _bridge_of(program: str) -> str:
    """How a lowered program reaches torch."""
    for bridge, target in torch_call.TARGETS.items():
        if target in program:
            return bridge
    return "callback" if "python_cpu_callback" in program or "python_gpu_callback" in program else "-"


def fallback(candidate: Candidate, bridge: str | None) -> str | None:
    """Why a candidate must not be timed as what it was asked to be; None if it is that."""
    asked = bridge or os.environ.get(torch_call.ENVIRONMENT_VARIABLE)
    if candidate.bridge == "callback" and asked != "callback":
        return f"fell back to bridge 'callback': {torch_call.why_not('eager')}; to time that, ask for --bridge callback"
    return None


@dataclasses.dataclass(frozen=True)
class Expected:
    """The right answer for a sample of tokens."""

    tokens: np.ndarray
    y: np.ndarray
    tolerance: float

    def error(self, y: jax.Array) -> float:
        """The relative error of a whole result, on the sample."""
        return testing.relative_error(np.asarray(y)[self.tokens], self.y)


def expected(problem: MoeProblem, case: testing.Case) -> Expected:
    """The reference for as many tokens as it can do in seconds."""
    tokens = testing.sample_tokens(problem)
    return Expected(tokens, testing.reference(problem, case, tokens), testing.tolerance(problem))


def plain_jax(problem: MoeProblem, case: testing.Case, *, in_call: bool) -> Candidate:
    """What one writes without this package: rows sorted by expert, two `lax.ragged_dot` on dequantized weights.

    Activations are not quantized. Weights are in float32 on a CPU, where XLA multiplies that faster, or else in the type of x;
    they are dequantized in every call, or once beforehand.
    """
    dtype = jnp.float32 if device.platforms(case.x)[0] == "cpu" else jnp.dtype(problem.dtype)
    ragged_dot = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32)

    def wide(a: Mxfp4Array) -> jax.Array:
        return jnp.swapaxes(dequantize(a, dtype), 1, 2)

    def layer(x: jax.Array, stacks: Any, biases: Any, topk_weights: jax.Array, topk_ids: jax.Array) -> jax.Array:
        gate_up, down = map(wide, stacks) if in_call else stacks
        ids = topk_ids.reshape(-1)
        order = jnp.argsort(ids)
        sizes = jnp.bincount(ids, length=problem.experts).astype(jnp.int32)
        tokens, (up_bias, down_bias) = order // problem.top_k, (0 if b is None else b[ids[order]] for b in biases)
        product = ragged_dot(x[tokens].astype(dtype), gate_up, sizes) + up_bias
        h = activate(product[:, : problem.intermediate], product[:, problem.intermediate :], problem).astype(x.dtype)
        product = (ragged_dot(h.astype(dtype), down, sizes) + down_bias) * topk_weights.reshape(-1)[order][:, None]
        return jnp.zeros(x.shape, jnp.float32).at[tokens].add(product).astype(problem.out_dtype)

    x, weights, topk_weights, topk_ids = case
    stacks: Any = (weights.gate_up, weights.down)
    if not in_call:
        stacks = tuple(map(jax.jit(wide), stacks))
    compiled = jax.jit(layer)
    arguments = (x, stacks, (weights.gate_up_bias, weights.down_bias), topk_weights, topk_ids)
    return Candidate(lambda: compiled(*arguments), _temp_bytes(compiled.lower(*arguments)))


def _baseline_why_not(problem: MoeProblem, platform: str) -> str | None:
    if problem.apply_router_weight_on_input:
        return "plain JAX is not written for apply_router_weight_on_input"
    itemsize = 4 if platform == "cpu" else jnp.dtype(problem.dtype).itemsize
    size = 3 * problem.experts * problem.hidden * problem.intermediate * itemsize
    stats = None if platform == "cpu" else jax.devices()[0].memory_stats()
    limit = stats["bytes_limit"] // 2 if stats and "bytes_limit" in stats else BASELINE_BYTES
    if size > limit:
        return f"dequantized weights would take {size / 2**30:.1f} GiB, more than the limit of {limit / 2**30:.1f} GiB"
    return None


def measure(
    workload: Workload,
    implementations: Sequence[str] = (),
    *,
    bridge: str | None = None,
    repeats: int | None = None,
    baselines: bool = True,
) -> list[Row]:
    """Checks and times one workload.

    Args:
      workload: what to run.
      implementations: names, each of which must run as asked, or else its row is "FAILED"; all that can run, if empty.
      bridge, repeats: as for `mxfp4_moe` and `testing.interleaved_us`.
      baselines: whether plain JAX is timed in the same rounds.
    """
    problem, case = workload.problem, workload.case()
    platform = device.platforms(case.x)[0]
    rows: dict[str, Row] = {}
    ready: dict[str, Candidate] = {}

    def check(row: Row, made: Candidate, right: Expected) -> None:
        error = right.error(made.run())
        row = dataclasses.replace(row, error=error, checked=len(right.tokens), temp_mb=made.temp_bytes / 1e6)
        if error <= right.tolerance:
            ready[row.implementation] = made
        else:
            row = dataclasses.replace(row, status="WRONG", why=f"error {error:.1e}, tolerance {right.tolerance:.0e}")
        rows[row.implementation] = row

    right = expected(problem, case)
    for name in implementations or IMPLEMENTATIONS:
        row, made = _make(workload, case, name, platform, bridge)
        if made is not None:
            check(row, made, right)
        else:
            rows[name] = dataclasses.replace(row, status="FAILED" if implementations else "skipped")

    why = _baseline_why_not(problem, platform)
    plain = dataclasses.replace(problem, activation_quant=None)
    if why is None and baselines and plain != problem:
        right = expected(plain, case)
    for name in BASELINES if baselines else ():
        if why is None:
            check(Row(workload.name, name, "ok"), plain_jax(plain, case, in_call=name != BASELINES[0]), right)
        else:
            rows[name] = Row(workload.name, name, "skipped", why=why)

    hit = len(np.unique(np.asarray(case.topk_ids)))
    needed = hit * 3 * problem.hidden * problem.intermediate * BITS_PER_WEIGHT / 8
    for name, values in testing.interleaved_us({n: made.run for n, made in ready.items()}, repeats=repeats).items():
        us = float(np.median(values))
        rows[name] = dataclasses.replace(rows[name], us=us, repeats=len(values), gb_per_s=needed / us / 1e3)
    return [dataclasses.replace(row, experts_hit=hit) for row in rows.values()]


def _make(
    workload: Workload, case: testing.Case, name: str, platform: str, bridge: str | None
) -> tuple[Row, Candidate | None]:
    """A row of an implementation, and its call; without the call, the row says why."""
    problem, row = workload.problem, Row(workload.name, name, "ok")
    why = IMPLEMENTATIONS[name].why_not(problem, platform)
    if why is not None:
        return dataclasses.replace(row, why=why), None
    config = table.lookup(IMPLEMENTATIONS[name], problem, platform, None)
    try:
        made = candidate(problem, case, name, config, bridge)
    except (NotImplementedError, ImportError) as refusal:  # this bridge, for this plan: known only to the bridge
        return dataclasses.replace(row, why=str(refusal)), None
    row = dataclasses.replace(row, config=str(config), source=config.source, bridge=made.bridge)
    why = fallback(made, bridge)
    return (row, made) if why is None else (dataclasses.replace(row, why=why), None)


def bar(rows: Iterable[Row]) -> float | None:
    """Time of `xla` over that of the best other row of one workload: at most 1 on a CPU is the aim; None if either is missing."""
    us = {row.implementation: row.us for row in rows if row.us is not None}
    others = [value for name, value in us.items() if name != "xla"]
    return us["xla"] / min(others) if "xla" in us and others else None


_WIDTHS = {
    "workload": 17,
    "implementation": 21,
    "status": 7,
    "us": 10,
    "hit": 4,
    "GB/s": 7,
    "temp MB": 7,
    "error": 8,
    "bridge": 8,
}


def heading() -> str:
    """The line above those of `text`."""
    return "  ".join(name.ljust(width) for name, width in _WIDTHS.items()) + "  config (source)"


def text(row: Row) -> str:
    """A row for people."""

    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = (
        row.workload, row.implementation, row.status, shown(row.us, ".1f"), shown(row.experts_hit, "d"), shown(row.gb_per_s, ".3g"),
        shown(row.temp_mb, ".2f"), shown(row.error, ".1e"), row.bridge,
    )  # fmt: skip
    last = row.why or (f"{row.config} ({row.source})" if row.source != "-" else "")
    return (
        "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS.values(), strict=True)) + f"  {last}".rstrip()
    )


def run(
    names: Sequence[str] = (),
    implementations: Sequence[str] = (),
    *,
    bridge: str | None = None,
    repeats: int | None = None,
    path: pathlib.Path | None = None,
) -> int:
    """Prints the rows of all named workloads, writes them to a CSV file if asked, and returns the exit status.

    Raises:
      ValueError: an unknown name.
    """
    platform = device.platforms()[0]
    chosen = [workloads.get(name) for name in names or workloads.CPU_WORKLOADS]
    for name in implementations:
        get("bench", name)
    facts = {**doctor.versions(), "platform": platform, "machine": doctor.machine()}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(heading())
    rows: list[Row] = []
    for workload in chosen:
        mine = measure(workload, implementations, bridge=bridge, repeats=repeats)
        print(*map(text, mine), sep="\n", flush=True)
        ratio = bar(mine)
        if ratio is not None and platform == "cpu":
            print(f"RESULT {workload.name}_xla_over_best_other {ratio:.3f}")
        rows += mine
    if path is not None:
        columns = [field.name for field in dataclasses.fields(Row)]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*columns, *facts], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**dataclasses.asdict(row), **facts} for row in rows)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    import sys

    from jax_mxfp4_moe.__main__ import main

    sys.exit(main(["bench", *sys.argv[1:]]))
