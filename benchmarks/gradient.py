"""What a derivative costs on a CPU: backward over forward time on the CPU workloads, beside a dense layer that JAX differentiates.

`forward` is `mxfp4_moe`; `both` its result and the cotangents of x and the router weights; the backward time is the median of the
difference within a round. `dense` has its weights dequantized to float32 beforehand and goes through `jax.lax.ragged_dot`.

    python benchmarks/gradient.py [--seconds 2] [workload ...]
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe import dequantize, mxfp4_moe, workloads
from jax_mxfp4_moe.doctor import versions
from jax_mxfp4_moe.testing import interleaved_us, options, relative_error


def dense_layer(x, gate_up, down, topk_weights, topk_ids):
    """Float experts, rows sorted by expert; silu."""
    ids, tokens = topk_ids.reshape(-1), jnp.arange(topk_ids.size) // topk_ids.shape[-1]
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(ids, length=gate_up.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(jax.lax.ragged_dot(x[tokens[order]].astype(jnp.float32), gate_up, sizes), 2, axis=1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes) * topk_weights.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[tokens[order]].add(y).astype(x.dtype)


def with_gradient(layer):
    """Result and cotangents of x and the router weights, for a cotangent of ones."""

    def both(x, topk_weights, *rest):
        def loss(x, topk_weights):
            y = layer(x, topk_weights, *rest)
            return y.astype(jnp.float32).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, topk_weights)

    return jax.jit(both)


def measure(name: str, seconds: float) -> None:
    problem, case = workloads.get(name).problem, workloads.get(name).case()
    ours = functools.partial(mxfp4_moe, implementation="xla", **options(problem))
    experts = [jnp.swapaxes(dequantize(w, jnp.float32), 1, 2).copy() for w in (case.weights.gate_up, case.weights.down)]
    layers = {
        "xla": (lambda x, w, weights, ids: ours(x, weights, w, ids), (case.weights, case.topk_ids)),
        "dense": (lambda x, w, gate_up, down, ids: dense_layer(x, gate_up, down, w, ids), (*experts, case.topk_ids)),
    }
    calls, found, memory = {}, {}, {}
    for which, (layer, rest) in layers.items():
        arguments = (case.x, case.topk_weights, *rest)
        programs = {"forward": jax.jit(layer), "both": with_gradient(layer)}
        for what, program in programs.items():
            calls[which, what] = functools.partial(program.lower(*arguments).compile(), *arguments)
        found[which] = calls[which, "both"]()[1]
        memory[which] = programs["both"].lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    times = interleaved_us({f"{which} {what}": call for (which, what), call in calls.items()}, seconds=seconds)
    for which in layers:
        forward, both = times[f"{which} forward"], times[f"{which} both"]
        ratio = float(np.median((both - forward) / forward))
        print(
            f"{name:17} {which:6} forward {np.median(forward):10.1f} us   both {np.median(both):10.1f} us   "
            f"backward/forward {ratio:5.2f}   temp {memory[which] / 1e6:7.2f} MB"
        )
        if which == "xla":
            print(f"RESULT {name}_backward_over_forward {ratio:.3f}")
    if problem.activation_quant is None:  # or else the two are different functions
        errors = [relative_error(a, b) for a, b in zip(found["xla"], found["dense"], strict=True)]
        limit = 1e-4 if problem.dtype == "float32" else 2e-2  # the dense layer does not round h to bfloat16
        if not max(errors) < limit:
            sys.exit(f"{name}: gradients differ from those of the dense layer by {max(errors):.1e}; expected {limit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=workloads.CPU_WORKLOADS)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each workload")
    arguments = parser.parse_args()
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for name in arguments.workloads:
        measure(name, arguments.seconds)


if __name__ == "__main__":
    main()
