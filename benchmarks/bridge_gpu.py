"""What a call through each bridge costs on a GPU: host microseconds, and GPU microseconds beyond the kernel's own time.

The work is one elementwise torch kernel that writes into the output buffer. Variants:
  torch        the same calls from Python on torch tensors, no JAX
  native       the same work as an XLA fusion: what a jit costs without any bridge
  loop         graph inside lax.fori_loop, 50 iterations: by default XLA does not record loops, and Python runs in each
  loop-while   the same with --xla_gpu_enable_command_buffer=+WHILE and the minimum graph size 1: the whole loop is recorded
  eager        our custom call; Python runs in every call
  graph        our custom call, recorded by XLA; Python does not run in a replay
  graph-min1   the same with --xla_gpu_graph_min_graph_size=1
  stubbed      eager, a callable that gets 12 tensors and launches nothing: the bridge alone
  buffer_callback   jax.experimental.buffer_callback + torch.from_dlpack
  pure_callback     jax.pure_callback + numpy

Each row runs in its own process, since XLA reads its flags once. For 1 and for 50 calls in one jit: wall time back to back (20 runs
queued without waiting, the quickest of many such batches), and the time per call by which a program with 50 calls exceeds one with 1.
The native program of one call is timed in every process, in turn with the variant's own.

    python benchmarks/bridge_gpu.py [--out FILE]

Bars: stubbed at most 8 us of host time a call; graph (50 calls) at most 2 us a call over the kernel's own time, and graph-min1 (one
call) at most 2 us over native, with no Python in a replay; pure_callback at least 50 times graph.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

VARIANTS = (
    "torch",
    "native",
    "loop",
    "loop-while",
    "eager",
    "graph",
    "graph-min1",
    "stubbed",
    "buffer_callback",
    "pure_callback",
)
SHAPE = (16, 7168)
FEW, MANY = 1, 50


def measure(variant: str) -> dict:
    """Runs in the child process of one variant."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

    from jax_mxfp4_moe.implementations import torch_call
    from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan

    spec = BufferSpec(SHAPE, "float32")
    small = BufferSpec((16, 32), "float32")
    python_calls = 0

    def kernel(inputs, outputs, workspace):
        nonlocal python_calls
        python_calls += 1
        torch.add(inputs[0], 1, out=outputs[0])

    def nothing(inputs, outputs, workspace):
        pass

    def buffer_body(context, outputs, x):
        with torch.cuda.stream(torch.cuda.ExternalStream(context.stream)):
            torch.add(torch.from_dlpack(x), 1, out=torch.from_dlpack(outputs))

    def host_body(x):
        return np.asarray(x) + 1

    def program(calls: int):
        if variant == "stubbed":
            plan = Plan("stubbed", ("benchmark",), nothing, (small,) * 10, (small,) * 2)
            one = lambda x: torch_call.call(plan, *([x] * 10), bridge="eager")[0]  # noqa: E731
        elif variant == "native":
            one = lambda x: jax.lax.optimization_barrier(x + 1)  # noqa: E731
        elif variant in ("eager", "graph", "graph-min1", "loop", "loop-while"):
            plan = Plan("add", ("benchmark",), kernel, (spec,), (spec,), capturable=True)
            one = lambda x: torch_call.call(plan, x, bridge="eager" if variant == "eager" else "graph")[0]  # noqa: E731
        elif variant == "buffer_callback":
            from jax.experimental import buffer_callback

            one = buffer_callback.buffer_callback(buffer_body, jax.ShapeDtypeStruct(SHAPE, jnp.float32))
        else:
            one = lambda x: jax.pure_callback(host_body, jax.ShapeDtypeStruct(SHAPE, jnp.float32), x)  # noqa: E731

        def run(x):
            if variant.startswith("loop"):
                return jax.lax.fori_loop(0, calls, lambda i, x: one(x), x)
            for _ in range(calls):
                x = one(x)
            return x

        return jax.jit(run)

    def torch_program(calls: int):
        buffers = [torch.zeros(SHAPE, device="cuda") for _ in range(2)]

        def run(x):
            for i in range(calls):
                torch.add(buffers[i % 2], 1, out=buffers[1 - i % 2])
            return x

        return run

    finish = (lambda y: torch.cuda.synchronize()) if variant == "torch" else jax.block_until_ready
    x = jnp.zeros(small.shape if variant == "stubbed" else SHAPE)

    def wall_us(*programs, seconds: float = 3.0) -> list[float]:
        for f in programs:
            for _ in range(6):
                y = f(x)
            finish(y)
        rounds, best, end = 20, [float("inf")] * len(programs), time.perf_counter() + seconds
        while time.perf_counter() < end:
            for i, f in enumerate(programs):
                start = time.perf_counter()
                for _ in range(rounds):
                    y = f(x)
                finish(y)
                best[i] = min(best[i], (time.perf_counter() - start) / rounds * 1e6)
        return best

    make = torch_program if variant == "torch" else program
    few, many = make(FEW), make(MANY)
    if variant not in ("torch", "stubbed"):
        np.testing.assert_array_equal(many(x), np.full(SHAPE, MANY))
    one_us, many_us, native_us = wall_us(few, many, few if variant == "torch" else jax.jit(lambda x: x + 1))
    for _ in range(40):  # every set of addresses that blocked calls use is recorded by now
        finish(many(x))
    calls_before = python_calls
    finish(many(x))
    replay_calls = python_calls - calls_before

    # The kernel's own time, and everything else the GPU did, from the profiler. XLA does not record while one is active, so the
    # recorded programs are timed by wall only.
    gpu: dict = {}
    if variant in ("eager", "buffer_callback", "torch"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            finish(many(x))
            torch.cuda.synchronize()
        events = [
            e for e in profile.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA
        ]
        kernels = [e for e in events if "elementwise" in e.name()]
        gpu = {
            "kernel_us": float(np.median([e.duration_ns() for e in kernels])) / 1e3,
            "gpu_operations": len(events),
            "copies": sum("memcpy" in e.name().lower() for e in events),
        }
    return {
        "variant": variant,
        "us_1_call": one_us,
        "us_1_native": native_us,
        "us_50_calls": many_us / MANY,
        "us_marginal": (many_us - one_us) / (MANY - FEW),
        "python_calls_in_a_replay": replay_calls,
        **gpu,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="write the rows as JSON lines, with device and versions")
    arguments = parser.parse_args()
    if arguments.variant:
        print("ROW " + json.dumps(measure(arguments.variant)))
        return 0
    import importlib.metadata

    rows = []
    for variant in VARIANTS:
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
        flags = {
            "graph-min1": "--xla_gpu_graph_min_graph_size=1",
            "loop-while": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE",
        }
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags.get(variant, '')}".strip()
        done = subprocess.run(
            [sys.executable, __file__, "--variant", variant],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("ROW ")), None)
        if line is None:
            print(f"{variant}: failed\n{done.stderr[-2000:]}")
            continue
        rows.append(json.loads(line[4:]))
        print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    by = {row["variant"]: row for row in rows}
    if len(by) != len(VARIANTS):
        return 1
    kernel = by["torch"]["kernel_us"]
    checks = {
        "stubbed_us": (by["stubbed"]["us_marginal"], 8.0),
        "graph_50_calls_over_kernel_us": (by["graph"]["us_marginal"] - kernel, 2.0),
        "graph_min1_1_call_over_native_us": (by["graph-min1"]["us_1_call"] - by["graph-min1"]["us_1_native"], 2.0),
        "python_calls_in_a_graph_replay": (float(by["graph"]["python_calls_in_a_replay"]), 0.0),
        "python_calls_in_a_recorded_loop": (float(by["loop-while"]["python_calls_in_a_replay"]), 1.0),
        "copies_in_the_eager_profile": (float(by["eager"]["copies"]), 0.0),
        "graph_over_pure_callback": (by["graph"]["us_marginal"] / by["pure_callback"]["us_marginal"], 1 / 50),
    }
    for name, (value, limit) in checks.items():
        print(f"RESULT {name} {value:.4f} limit {limit:.4f} {'met' if value <= limit else 'NOT met'}")
    if arguments.out:
        import torch

        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "torch", "triton")}
        head = {
            "command": "python benchmarks/bridge_gpu.py",
            "device": torch.cuda.get_device_name(),
            "python": sys.version.split()[0],
            **versions,
        }
        with open(arguments.out, "w", encoding="utf-8") as file:
            for row in (head, *rows):
                file.write(json.dumps(row) + "\n")
    return int(any(value > limit for value, limit in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
