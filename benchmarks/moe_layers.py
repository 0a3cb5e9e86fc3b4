"""Whole layers on a GPU: `triton` by CUDA-graph replay and through `jax.jit`, beside plain JAX and torch on bfloat16 weights.

    PYTHONPATH=. python benchmarks/moe_layers.py results.jsonl [--cases r257i256m16,ossm1,...] [--seconds 230] [--others others.jsonl]

Cases are named as in triton_layer.py. Every figure is of a result that was compared with a float32 evaluation of some tokens before. The
table's columns, in microseconds a call:
  bound           the larger of bytes of the experts that are hit, and of activations, / 4218 GB/s, and of flops / 756 TFLOP/s
  GPU             of the kernels alone, median over graph replays; routings rotate, so that weights are not found in the cache
  routing         of sorting and listing tiles alone, without the quantization of x that shares its launch; part of GPU
  jit             wall time of a jitted call, back to back, recorded into command buffers, always with the same arguments
  ragged_dot      the same of rows sorted by expert and two `jax.lax.ragged_dot` on bfloat16 weights, in one jit; ratio: that over jit
  grouped_mm      of torch's grouped_mm on bfloat16 weights between plain torch operations, by graph replay
  triton_kernels  the best row of a case in --others, JSON lines with "case" (r257i256/M16), "peer" (a_...; with fp8 in it for fp8
                  activations, else bfloat16), "ok" and "us", of that program on the same device

Kernels are compiled on all cores first. Each set of weights has a process of its own, which ends if a case takes too long.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import fcntl
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import torch
import triton_layer

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, bench, mxfp4_moe, testing
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, torch_call
from jax_mxfp4_moe.implementations.torch import Packed, dequantize, dequantize_fp8, quantize, quantize_fp8
from jax_mxfp4_moe.implementations.triton import layout
from jax_mxfp4_moe.implementations.triton import pipeline as launches
from jax_mxfp4_moe.tuning import table

CASES = [
    *[f"{weights}m{tokens}" for weights in ("r257i256", "r33i512") for tokens in (16, 128, 512)],
    *[f"r33i2048m{tokens}" for tokens in (512, 4096, 16384)],
    *[f"ossm{tokens}" for tokens in (1, 16, 128, 1024, 4096)],
]
ACTIVATIONS = {"bf16": None, "mxfp4": "mxfp4", "fp8": "fp8"}
CASE_SECONDS = 45
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+CUSTOM_CALL",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
HEADER = "| case | activations | bound | by | GPU | over bound | routing | jit | ragged_dot | ratio | grouped_mm | triton_kernels | error |"
Rows = dict[int, torch.Tensor]
"""Rows of y, by token."""


def config_of(problem):
    return table.lookup(IMPLEMENTATIONS["triton"], problem, "cuda", None)


def expected(layer: triton_layer.Layer, tokens: list[int]) -> torch.Tensor:
    """y of some tokens under routing 0, in float32 from the exact values of weights and rounded activations."""
    p = layer.problem

    def rounded(v: torch.Tensor) -> torch.Tensor:
        if p.activation_quant == "mxfp4":
            return dequantize(quantize(v, p.scale_rule, p.rounding))
        return dequantize_fp8(quantize_fp8(v)) if p.activation_quant == "fp8" else v.float()

    y = torch.zeros(len(tokens), p.hidden, device="cuda")
    for i, t in enumerate(tokens):
        for w, e in zip(layer.weights[0][t].tolist(), layer.ids[0][t].tolist(), strict=True):
            gate_up, down = (dequantize(Packed(a.codes[e], a.scales[e])) for a in (layer.gate_up, layer.down))
            gate, up = (gate_up @ rounded(layer.x[t])).chunk(2)
            y[i] += w * (down @ rounded((torch.nn.functional.silu(gate) * up).to(layer.x.dtype)))
    return y


def checked(y: torch.Tensor, want: Rows, tolerance: float = 1e-2) -> float:
    """The relative error of y; raises if that is too large or some of y was not written."""
    rows = torch.stack([y[t].float() for t in want])
    right = torch.stack(list(want.values()))
    error = float((rows - right).norm() / right.norm())
    if not (error <= tolerance and bool(y.isfinite().all())):
        raise AssertionError(f"error {error:.1e}, expected at most {tolerance:.0e} and finite numbers")
    return error


def back_to_back_us(call, estimate_us: float) -> float:
    """Wall microseconds of a call, median of 5 runs of calls that are waited for together."""
    count = int(min(100, max(4, 60e3 / estimate_us)))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            y = call()
        y.block_until_ready()
        times.append((time.perf_counter() - start) / count * 1e6)
    return sorted(times)[2]


def arrays(layer: triton_layer.Layer, *, prepared: bool) -> testing.Case:
    """The call with routing 0 as JAX arrays in the same memory."""
    p = layer.problem
    x, *stacks, factors, ids = map(jax.dlpack.from_dlpack, layer.inputs(0, prepared))
    tag = {"layout": layout.TAG} if prepared else {}
    gate_up = Mxfp4Array(*stacks[:2], length=p.hidden, **tag)
    return testing.Case(x, MoeWeights(gate_up, Mxfp4Array(*stacks[2:], length=p.intermediate, **tag)), factors, ids)


def time_triton(layer: triton_layer.Layer, want: Rows) -> dict:
    """Of prepared weights, by both measures."""
    p = layer.problem
    facts = launches.Facts(p, config_of(p), True)
    buffers = triton_layer.buffers_of(facts)
    layer.y.fill_(float("nan"))
    triton_layer.call(layer, facts, buffers)
    torch.cuda.synchronize()
    assert triton_layer.routed(layer, buffers, facts), "rows are not sorted by expert"
    row = {"error": checked(layer.y, want, testing.tolerance(p)), "config": str(facts.config)}
    row["gpu_us"] = triton_layer.replay_us(
        [functools.partial(triton_layer.call, layer, facts, buffers, i) for i in range(layer.sets)]
    )
    call = jax.jit(functools.partial(mxfp4_moe, implementation="triton", bridge="graph", **testing.options(p)))
    call = functools.partial(call, *arrays(layer, prepared=True))
    for _ in range(5):
        y = jax.block_until_ready(call())
    checked(torch.from_dlpack(y), want, testing.tolerance(p))
    before = torch_call.counters()["calls"]
    row["jit_us"] = back_to_back_us(call, row["gpu_us"])
    row["python_calls"] = torch_call.counters()["calls"] - before
    return row


def time_routing(layer: triton_layer.Layer, want: Rows) -> dict:
    """Of step 1 without the programs of its launch that bring x to operand form."""
    p = layer.problem
    facts = launches.Facts(p, config_of(p), True)
    buffers = triton_layer.buffers_of(facts)

    def launch(kernel, grid, *args, **constants):
        shared = kernel.__name__ in ("route_few", "count_chunks")
        launches.launch(kernel, (grid[0] - p.tokens,) if shared else grid, *args, **constants)

    def once(i: int) -> None:
        operands = launches.tensors_of(p, layer.inputs(i, True))
        steps = launches.TritonSteps(facts, operands, buffers, layer.y, True, launch, triton_layer.overlaps())
        steps.route(operands.topk_ids)

    once(0)
    torch.cuda.synchronize()
    assert triton_layer.routed(layer, buffers, facts), "rows are not sorted by expert"
    return {"routing_us": triton_layer.replay_us([functools.partial(once, i) for i in range(layer.sets)] * 4)}


def time_ragged_dot(layer: triton_layer.Layer, want: Rows) -> dict:
    made = bench.plain_jax(layer.problem, arrays(layer, prepared=False), in_call=False)
    checked(torch.from_dlpack(jax.block_until_ready(made.run())), want)
    start = time.perf_counter()
    jax.block_until_ready(made.run())
    return {"ragged_dot_us": back_to_back_us(made.run, (time.perf_counter() - start) * 1e6)}


def time_grouped_mm(layer: triton_layer.Layer, want: Rows) -> dict:
    p = layer.problem
    gate_up, down = (
        torch.stack([dequantize(Packed(c, s)).bfloat16() for c, s in zip(*a, strict=True)]).transpose(1, 2)
        for a in (layer.gate_up, layer.down)
    )
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    experts = torch.arange(p.experts, device="cuda", dtype=torch.int32)

    def once(i: int) -> torch.Tensor:
        ids, order = layer.ids[i].flatten().sort(stable=True)
        ends = torch.searchsorted(ids, experts, right=True).int()
        tokens = order // p.top_k
        gate, up = grouped_mm(layer.x[tokens], gate_up, offs=ends).chunk(2, dim=1)
        rows = grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        rows = rows * layer.weights[i].flatten()[order, None]
        return torch.zeros(p.tokens, p.hidden, device="cuda").index_add_(0, tokens, rows).bfloat16()

    checked(once(0), want)
    return {"grouped_mm_us": triton_layer.replay_us([functools.partial(once, i) for i in range(layer.sets)])}


def attempt(measure, *args) -> dict:
    """What `measure` returns, or what went wrong with it, under a name of its own."""
    try:
        return measure(*args)
    except Exception as error:  # noqa: BLE001 - one figure less
        return {f"{measure.__name__}_failed": f"{type(error).__name__}: {str(error)[:300]}"}


def run_cases(cases: list[str], path: pathlib.Path) -> None:
    """Appends the rows of some cases, while no other process does."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for case in cases:
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
            problem, shared = triton_layer.problem_of(case, None)
            sets = 8 if problem.tokens <= 128 else 4 if problem.tokens <= 512 else 1
            layer = triton_layer.Layer(problem, shared, sets)
            bound, by, hit = layer.bound_us()
            tokens = sorted({i * (problem.tokens - 1) // 5 for i in range(6)})
            others: dict = {}
            for activations, quant in ACTIVATIONS.items():
                layer.problem = dataclasses.replace(problem, activation_quant=quant)
                row = {"case": case, "activations": activations, "bound_us": bound, "by": by, "hit": hit}
                if (reason := IMPLEMENTATIONS["triton"].why_not(layer.problem, "cuda")) is not None:
                    row["time_triton_failed"] = reason
                else:
                    want = dict(zip(tokens, expected(layer, tokens), strict=True))
                    row |= attempt(time_triton, layer, want) | attempt(time_routing, layer, want)
                    if quant is None:
                        others = attempt(time_grouped_mm, layer, want)
                        torch.cuda.empty_cache()
                        if problem.rows < 100_000:  # with more, a case would not end in its time
                            others |= attempt(time_ragged_dot, layer, want)
                with path.open("a", encoding="utf-8") as file:
                    print(json.dumps({**row, **others}), file=file)
                torch.cuda.empty_cache()
            faulthandler.cancel_dump_traceback_later()
            print(f"# {case} done", flush=True)


def others_of(path: pathlib.Path | None) -> dict[tuple[str, str], float]:
    """Best microseconds of another program, by (case, activations)."""
    best: dict[tuple[str, str], float] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else ():
        row = json.loads(line)
        if row.get("us") and row.get("ok") and str(row.get("peer", "")).startswith("a_"):
            key = (row["case"].replace("/M", "m"), "fp8" if "fp8" in row["peer"] else "bf16")
            best[key] = min(row["us"], best.get(key, float("inf")))
    return best


def print_table(path: pathlib.Path, others: dict[tuple[str, str], float]) -> None:
    print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in sorted(rows, key=lambda r: (list(ACTIVATIONS).index(r["activations"]), r["case"].rsplit("m", 1)[0])):
        gpu, jit, ragged = (row.get(name) for name in ("gpu_us", "jit_us", "ragged_dot_us"))

        def shown(value: float | None, form: str = ".1f") -> str:
            return "-" if value is None else format(value, form)

        cells = (
            row["case"], row["activations"], shown(row["bound_us"]), row["by"], shown(gpu), shown(gpu and gpu / row["bound_us"], ".2f"),
            shown(row.get("routing_us")), shown(jit),
            shown(ragged), shown(ragged and jit and ragged / jit), shown(row.get("grouped_mm_us")),
            shown(others.get((row["case"], row["activations"]))), shown(row.get("error"), ".1e"),
        )  # fmt: skip
        print("|", " | ".join(cells), "|")
        for name, why in row.items():
            if name.endswith("_failed"):
                print(f"  {row['case']} {row['activations']} {name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times whole layers on a GPU.")
    parser.add_argument("path", type=pathlib.Path, help="JSON lines are appended here")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--others", type=pathlib.Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = args.cases.split(",")
    args.path.touch()
    os.environ.update(ENVIRONMENT)  # before JAX looks for devices; the processes below inherit it
    if args.child:
        run_cases(cases, args.path)
        return
    end = time.perf_counter() + args.seconds
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "jax", jax.__version__, flush=True)
    jobs = []
    for case in cases:
        for quant in ACTIVATIONS.values():
            problem = triton_layer.problem_of(case, quant)[0]
            if IMPLEMENTATIONS["triton"].why_not(problem, "cuda") is None:
                jobs.append((problem, dict(config_of(problem).items), triton_layer.specs_of(problem), ""))
    triton_layer.warm_all(jobs)
    command = [sys.executable, __file__, str(args.path), "--child", "--cases"]
    weights = dict.fromkeys(case.rsplit("m", 1)[0] for case in cases)
    groups = [[c for c in cases if c.startswith(f"{w}m")] for w in weights]
    children = [subprocess.Popen([*command, ",".join(group)]) for group in groups]
    for child in children:
        try:
            child.wait(max(0.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            print("# out of time")
            child.kill()
    print_table(args.path, others_of(args.others))


if __name__ == "__main__":
    main()
