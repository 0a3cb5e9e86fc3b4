"""Checks and times `triton` through `jax.jit`, calls back to back: python benchmarks/triton_jit.py [workload ...]"""

import functools
import sys
import time

import jax
import numpy as np

from jax_mxfp4_moe import mxfp4_moe, prepare, testing, workloads
from jax_mxfp4_moe.implementations import torch_call

for name in sys.argv[1:]:
    workload = workloads.get(name)
    problem = workload.problem
    case = workload.case()
    tokens = testing.sample_tokens(problem)[:: max(1, problem.tokens // 4)][:4]
    want = testing.reference(problem, case, tokens)
    prepared = prepare(case.weights, "triton")
    layer = jax.jit(functools.partial(mxfp4_moe, implementation="triton", bridge="graph", **testing.options(problem)))
    eager = jax.jit(functools.partial(mxfp4_moe, implementation="triton", bridge="eager", **testing.options(problem)))
    row = [name, prepared.layout]
    results = []
    for call in (eager, layer):
        arguments = (case.x, prepared, case.topk_weights, case.topk_ids)
        y = call(*arguments)
        for _ in range(5):
            y = call(*arguments)
        results.append(np.asarray(y))
        row.append(f"error {testing.relative_error(np.asarray(y)[tokens], want):.1e}")
        before = torch_call.counters()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(40):
                y = call(*arguments)
            y.block_until_ready()
            times.append((time.perf_counter() - start) / 40 * 1e6)
        after = torch_call.counters()
        row.append(f"{min(times):.1f} us")
        row.append({k: after[k] - before[k] for k in after if after[k] != before[k]})
    row.append(f"eager and captured equal: {(results[0] == results[1]).all()}")
    print(*row, sep="  ", flush=True)
