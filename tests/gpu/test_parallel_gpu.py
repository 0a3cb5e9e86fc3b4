"""A layer over 2 and 4 GPUs through `triton`, against one GPU; each in a process of its own, under a watchdog for deadlocks."""

import pytest

PROGRAM = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from jax_mxfp4_moe import mxfp4_moe, testing
from jax_mxfp4_moe.parallel import shard_weights, sharded_mxfp4_moe
from jax_mxfp4_moe.problem import MoeProblem

bridge, sizes = sys.argv[1], dict(zip(("token", "expert", "tensor"), map(int, sys.argv[2:])))
mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3)
stop = False

def busy():
    while not stop:
        sum(range(10000))

thread = threading.Thread(target=busy, daemon=True)
thread.start()
for quant in (None, "mxfp4"):
    problem = MoeProblem(96, 5, 17, 512, 288, activation_quant=quant, has_gate_up_bias=False)
    case = testing.random_case(problem, shared_experts=1)
    # An id of the shared expert is 16; skip some slots.
    ids = jnp.where(jnp.arange(96 * 5).reshape(96, 5) % 11 == 0, -1, case.topk_ids)
    want = np.asarray(mxfp4_moe(case.x, case.weights, case.topk_weights, ids, activation_quant=quant, implementation="xla"), np.float64)
    weights = shard_weights(case.weights, mesh, expert_axis="expert", tensor_axis="tensor", num_shared_experts=1, implementation="triton")
    for dispatch in ("replicated", "all_to_all"):
        step = jax.jit(lambda x, w, *r: sharded_mxfp4_moe(
            x, w, *r, token_axis="token", dispatch=dispatch, activation_quant=quant, implementation="triton", bridge=bridge))
        for _ in range(20):
            y = step(case.x, weights, case.topk_weights, ids)
        error = testing.relative_error(np.asarray(y, np.float64), want)
        assert error < testing.tolerance(problem), (quant, dispatch, error)
        print(quant, dispatch, error)
stop = True
thread.join()
"""


def on_gpus(token: int, expert: int, tensor: int):
    """One set of ranks, with as many GPUs as it takes."""
    return pytest.param((token, expert, tensor), marks=pytest.mark.gpus(token * expert * tensor))


@pytest.mark.parametrize("bridge", ["eager", "graph"])
@pytest.mark.parametrize(
    "ranks",
    [on_gpus(1, 2, 1), on_gpus(1, 1, 2), on_gpus(2, 1, 1), on_gpus(1, 4, 1), on_gpus(2, 2, 1), on_gpus(1, 2, 2)],
)
def test_parallel_layer(python, bridge, ranks):
    done = python(PROGRAM, bridge, *map(str, ranks), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("replicated") == 2
