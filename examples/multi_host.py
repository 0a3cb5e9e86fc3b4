"""A whole mixture-of-experts layer over several processes, each with its own devices, as on several hosts.

    python examples/multi_host.py --spawn 2                    two processes on this machine
    python examples/multi_host.py --coordinator HOST:PORT --processes N --process I      one of them, on each host

Experts are divided over all devices; the layer runs in both forms, with tokens replicated (decode) and with tokens exchanged (prefill), and
each process checks its share of the result. Random weights are made whole in every process here, for that check; `load_sharded` reads
only the parts of a process's own devices from a checkpoint.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawn", type=int, metavar="N", help="start N processes on this machine")
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--device", type=int, help="the one device of this machine to use; all of them if left out")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    if options.spawn:
        return spawn(options.spawn, options.tokens)
    return run(options.coordinator, options.processes, options.process, options.device, options.tokens)


def spawn(count: int, tokens: int) -> int:
    """Starts the processes and waits; one that fails takes the others down, which would wait for it forever."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable,
        __file__,
        "--coordinator",
        coordinator,
        "--processes",
        str(count),
        "--tokens",
        str(tokens),
    ]
    running = [subprocess.Popen([*command, "--process", str(i), "--device", str(i)]) for i in range(count)]
    failed = 0
    while running and not failed:
        for process in list(running):
            try:
                status = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            running.remove(process)
            failed = failed or status
    for process in running:
        process.kill()
    return int(failed != 0)


def run(coordinator: str, processes: int, process: int, device: int | None, tokens: int) -> int:
    import jax

    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process, local_device_ids=device)

    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from jax_mxfp4_moe import append_shared_experts, mxfp4_moe, topk_routing
    from jax_mxfp4_moe.parallel import shard_weights, sharded_mxfp4_moe
    from jax_mxfp4_moe.problem import MoeProblem
    from jax_mxfp4_moe.testing import random_case, relative_error

    devices, routed = jax.device_count(), 4 * jax.device_count()
    problem = MoeProblem(tokens, 3, routed + 1, hidden=128, intermediate=96, dtype="float32", out_dtype="float32")
    case = random_case(problem, shared_experts=1)
    logits = np.random.default_rng(1).normal(size=(tokens, routed)).astype(np.float32)
    topk_weights, topk_ids = append_shared_experts(*topk_routing(logits, 2), routed, 1)
    want = np.asarray(mxfp4_moe(case.x, case.weights, topk_weights, topk_ids, implementation="xla"))

    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,))
    weights = shard_weights(case.weights, mesh, expert_axis="expert", num_shared_experts=1)
    sharding = NamedSharding(mesh, PartitionSpec("expert"))
    operands = [
        jax.make_array_from_callback(a.shape, sharding, a.__getitem__)
        for a in map(np.asarray, (case.x, topk_weights, topk_ids))
    ]

    worst = 0.0
    for dispatch in ("replicated", "all_to_all"):  # decode, prefill
        step = jax.jit(lambda w, x, *routing, d=dispatch: sharded_mxfp4_moe(x, w, *routing, dispatch=d))
        y = jax.block_until_ready(step(weights, *operands))
        error = max(relative_error(np.asarray(s.data), want[s.index]) for s in y.addressable_shards)
        worst = max(worst, error)
        print(f"RESULT max_relative_error {error:.3g} {dispatch} process {process} of {processes}", flush=True)
    jax.distributed.shutdown()
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
