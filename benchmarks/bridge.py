"""Host overhead of one bridge call on a CPU: marginal microseconds in one jitted function, 10 inputs and 2 outputs.

Each row is (time of a program with 17 calls - time of a program with 1 call) / 16. Rows marked with * must be met:
ours at most 4 us, and at most 0.4 times buffer_callback with torch.from_dlpack in the same run.

    python benchmarks/bridge.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import buffer_callback

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan

NUM_INPUTS, NUM_OUTPUTS = 10, 2
SPEC = BufferSpec((16, 32), "float32")
FEW, MANY = 1, 17
ROUND_SECONDS = 1e-3
LIMIT_US, LIMIT_RATIO = 4.0, 0.4
REFERENCE_US = 16.0  # buffer_callback + torch.from_dlpack on the two-core machine on which 4 us was set as the limit

Call = Callable[..., Sequence[jax.Array]]


def nothing(inputs, outputs, workspace):
    pass


def plan_call(mode: str, bridge: str = "eager") -> Call:
    specs = (SPEC,) * NUM_INPUTS, (SPEC,) * NUM_OUTPUTS
    plan = Plan("benchmark", (mode,), nothing, *specs, mode=mode)
    return lambda *operands: torch_call.call(plan, *operands, bridge=bridge)


def shapes() -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(SPEC.shape, SPEC.numpy_dtype)] * NUM_OUTPUTS


def from_dlpack(context, outputs, *inputs) -> None:
    for buffer in (*inputs, *outputs):
        torch.from_dlpack(buffer)


def buffer_callback_call(body: Callable) -> Call:
    return buffer_callback.buffer_callback(body, shapes())


def host_nothing(*inputs):
    return [np.zeros(SPEC.shape, SPEC.numpy_dtype)] * NUM_OUTPUTS


def pure_callback_call(*operands):
    return jax.pure_callback(host_nothing, shapes(), *operands, vmap_method="sequential")


def program(one_call: Call, calls: int) -> Callable:
    """`calls` calls in a chain, so that none can be dropped or merged."""

    def chained(*operands):
        operands = list(operands)
        for _ in range(calls):
            operands[0], operands[1] = one_call(*operands)
        return operands[0], operands[1]

    return jax.jit(chained)


def marginal_us(one_call: Call, *, rounds: int) -> float:
    """Marginal time of one call, from the fastest of many short rounds: other work on the machine only adds time."""
    operands = [jnp.zeros(SPEC.shape, SPEC.numpy_dtype) for _ in range(NUM_INPUTS)]
    programs = {calls: program(one_call, calls) for calls in (FEW, MANY)}

    def seconds(compiled: Callable, loops: int) -> float:
        start = time.perf_counter()
        for _ in range(loops):
            result = compiled(*operands)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / loops

    best = {}
    for calls, compiled in programs.items():
        seconds(compiled, 3)  # compiles
        loops = max(1, int(ROUND_SECONDS / seconds(compiled, 3)))
        best[calls] = min(seconds(compiled, loops) for _ in range(rounds))
    return (best[MANY] - best[FEW]) / (MANY - FEW) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 100 if parser.parse_args().quick else 1000

    why_not = torch_call.why_not("eager")
    if why_not is not None:
        print(f"nothing to measure: {why_not}")
        return 1

    rows: dict[str, float] = {}

    def measure(name: str, one_call: Call) -> None:
        rows[name] = marginal_us(one_call, rounds=rounds)

    measure("noop", plan_call("noop"))
    measure("gil", plan_call("gil"))
    measure("python_pointers", plan_call("pointers"))
    measure("tensors", plan_call("torch"))
    route = torch_call.bridge_state()["tensor_route"]
    torch_call._bind_torch(route="capsule")
    measure("tensors_capsule", plan_call("torch"))
    torch_call._bind_torch(route="default")
    measure("buffer_callback", buffer_callback_call(lambda context, outputs, *inputs: None))
    measure("buffer_callback_from_dlpack", buffer_callback_call(from_dlpack))
    measure("pure_callback", pure_callback_call)

    labels = {
        "noop": "C++ handler, frame checked",
        "gil": "+ interpreter lock",
        "python_pointers": "+ Python callable, 12 raw pointers",
        "tensors": f"* + 12 torch tensors ({route})",
        "tensors_capsule": "the same through capsules",
        "buffer_callback": "buffer_callback, no tensors",
        "buffer_callback_from_dlpack": "buffer_callback + torch.from_dlpack",
        "pure_callback": "pure_callback, no tensors",
    }
    print(f"jax {jax.__version__}, torch {torch.__version__}, python {sys.version.split()[0]}")
    print(f"{'us a call':>9}  variant")
    for name, value in rows.items():
        print(f"{value:9.2f}  {labels[name]}")
        print(f"RESULT bridge_{name}_us {value:.3f}")
    ratio = rows["tensors"] / rows["buffer_callback_from_dlpack"]
    print(f"RESULT bridge_ratio_to_buffer_callback {ratio:.3f}")
    scaled = ratio * REFERENCE_US
    print(f"RESULT bridge_tensors_us_scaled {scaled:.3f}")
    met = rows["tensors"] <= LIMIT_US and ratio <= LIMIT_RATIO
    print(
        f"limits: {rows['tensors']:.2f} us of {LIMIT_US}, {ratio:.2f} of {LIMIT_RATIO} times buffer_callback: "
        f"{'met' if met else 'NOT met'}; on a machine where buffer_callback takes {REFERENCE_US} us, ours would take {scaled:.2f}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
