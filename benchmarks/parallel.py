"""How one layer scales over the devices of a machine: experts or columns divided over 1, 2, 4, ... devices.

For each number of devices, split and number of tokens, microseconds of
  layer     `sharded_mxfp4_moe` in a jit, on tokens that lie where its form wants them;
  compute   what the first device computes in it, alone on that device, without any collective;
and `communication`, the share of `layer` that `compute` leaves: collectives, waiting for slower devices, and moving rows.
Every row is checked before it is timed, on a sample of its tokens.

  ep-replicated, ep-all_to_all     an expert axis, in the two forms; the same weights for any number of devices
  tp                               a tensor axis

    python benchmarks/parallel.py [--small] [--tokens 16 128 4096] [--out FILE]

`--tokens` are for each device ("weak") with all_to_all, and in all for the others, as decode and prefill have them. The layer is
DeepSeek-R1's: 256 + 1 experts, hidden 7168, intermediate 2048, 8 + 1 experts a token; with --small 32 + 1 experts of 256 x 256.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mxfp4_moe import doctor, mxfp4_moe, testing
from jax_mxfp4_moe.parallel import DISPATCHES, ShardedMoeWeights, shard_weights, sharded_mxfp4_moe
from jax_mxfp4_moe.problem import MoeProblem

SHARED = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a layer that a CPU runs in milliseconds")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 1024, 4096, 16384])
    parser.add_argument("--activation-quant", choices=["mxfp4"], help="weights only if left out")
    parser.add_argument("--implementation", help="chosen by mxfp4_moe if left out")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", help="also append the rows to this file, as JSON lines")
    options = parser.parse_args()
    sizes = (33, 256, 256) if options.small else (257, 7168, 2048)
    problem = MoeProblem(max(options.tokens), 9, *sizes, activation_quant=options.activation_quant)
    header = {
        "devices": f"{jax.device_count()} x {doctor.machine()}",
        "versions": doctor.versions(),
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(header))
    lines = [header]
    case = testing.random_case(problem, shared_experts=SHARED)
    counts = [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    for count in counts:
        for form in ("ep-replicated", "ep-all_to_all", "tp"):
            if form == "ep-all_to_all" and count == 1:
                continue
            for row in measure(problem, case.weights, form, count, options):
                print(json.dumps(row), flush=True)
                lines.append(row)
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return int(any(row.get("wrong") for row in lines))


def measure(problem: MoeProblem, weights: object, form: str, count: int, options: argparse.Namespace) -> list[dict]:
    """The rows of one split over `count` devices."""
    axis, _, dispatch = form.partition("-")
    mesh = jax.make_mesh((count,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    split = {"expert_axis": axis} if axis == "ep" else {"tensor_axis": axis}
    sharded = shard_weights(
        weights, mesh, num_shared_experts=SHARED, implementation=options.implementation, **split
    )  # fmt: skip
    dispatch = dispatch or DISPATCHES[0]
    rows = []
    for tokens in options.tokens:
        total = tokens * count if dispatch == "all_to_all" else tokens
        one = MoeProblem(total, problem.top_k, 257 if not options.small else 33, problem.hidden, 32)
        small = testing.random_case(
            one, seed=total, shared_experts=SHARED
        )  # its tokens and routing; its weights are not used
        placed = NamedSharding(mesh, PartitionSpec(axis if dispatch == "all_to_all" else None))
        operands = jax.device_put((small.x, small.topk_weights, small.topk_ids), placed)

        def layer(x, w, topk_weights, topk_ids, d=dispatch):
            return sharded_mxfp4_moe(
                x, w, topk_weights, topk_ids, dispatch=d, implementation=options.implementation,
                activation_quant=options.activation_quant,
            )  # fmt: skip

        step = jax.jit(layer)
        call = (operands[0], sharded, *operands[1:])
        y = jax.block_until_ready(step(*call))
        sample = np.linspace(0, total - 1, min(total, 8)).astype(int)
        x, topk_weights, topk_ids = jax.device_put(
            [a[sample] for a in (small.x, small.topk_weights, small.topk_ids)], jax.devices()[0]
        )
        want = mxfp4_moe(
            x.astype(jnp.float32), weights, topk_weights, topk_ids, implementation="xla", activation_quant=options.activation_quant
        )  # fmt: skip
        error = testing.relative_error(np.asarray(y, np.float64)[sample], np.asarray(want, np.float64))
        bar = 2e-2 if options.activation_quant else 6e-3
        row = {"form": form, "devices": count, "tokens": total, "error": float(error)}
        if not error < bar:
            rows.append({**row, "wrong": f"error above {bar}"})
            continue
        alone, arguments = compute_of_first(sharded, dispatch, operands, options)
        jax.block_until_ready(alone(*arguments))
        times = testing.interleaved_us(
            {"layer": lambda s=step, c=call: s(*c), "compute": lambda a=alone, c=arguments: a(*c)},
            repeats=options.repeats,
        )
        us = {name: float(np.median(values)) for name, values in times.items()}
        rows.append(
            {
                **row,
                "layer_us": round(us["layer"], 1),
                "compute_us": round(us["compute"], 1),
                "communication": round(1 - us["compute"] / us["layer"], 3),
            }
        )
    return rows


def compute_of_first(sharded: ShardedMoeWeights, dispatch: str, operands: tuple, options: argparse.Namespace):
    """A jitted call with its arguments on the first device: the rows that reach it, through the weights it has."""
    split, first = sharded.split, jax.devices()[0]
    x, topk_weights, topk_ids = (np.asarray(a) for a in operands)
    own = len(x) if dispatch == "replicated" else len(x) // split.expert_ranks
    shared_tokens = np.arange(len(x)) < -(-len(x) // split.expert_ranks)
    routed = topk_ids < split.experts_per_rank
    shared = (topk_ids >= split.num_experts) & shared_tokens[:, None]
    ids = np.where(routed, topk_ids, np.where(shared, topk_ids - split.num_experts + split.experts_per_rank, -1))
    if dispatch == "all_to_all":
        needed = (ids >= 0).any(1) | (np.arange(len(x)) < own)
        x, topk_weights, ids = x[needed], topk_weights[needed], ids[needed]
    part = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data[0, 0], sharded.parts)
    arguments = jax.device_put((x, part, topk_weights, ids.astype(np.int32)), first)

    def alone(x, weights, topk_weights, ids):
        return mxfp4_moe(
            x, weights, topk_weights, ids, preferred_element_type=jnp.float32, implementation=options.implementation,
            activation_quant=options.activation_quant,
        )  # fmt: skip

    return jax.jit(alone), arguments


if __name__ == "__main__":
    sys.exit(main())
