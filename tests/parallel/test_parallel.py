"""Layers over a mesh: what one device can show here, and `parallel_cases.py` in a process with 8 virtual devices."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import random_case
from jax.sharding import AxisType

from jax_mxfp4_moe import Mxfp4Array
from jax_mxfp4_moe.parallel import Split, shard_weights, sharded_mxfp4_moe

HERE = pathlib.Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "multi_host.py"


def test_parallel_on_eight_devices():
    """The number of virtual devices is fixed when JAX starts."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "OMP_NUM_THREADS": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "parallel_cases.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_parallel_processes():
    """Two processes of `jax.distributed` with one device each, as on two hosts, under a watchdog."""
    command = [sys.executable, str(EXAMPLE), "--spawn", "2"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.count("RESULT max_relative_error") == 4  # two forms, by each of two processes


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1, 1), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_parallel_on_a_mesh_of_one(mesh):
    case = random_case(tokens=5)
    weights = shard_weights(case.weights, mesh, expert_axis="expert", tensor_axis="tensor")
    for dispatch in ("replicated", "all_to_all"):
        y = sharded_mxfp4_moe(case.x, weights, case.topk_weights, case.topk_ids, dispatch=dispatch)
        np.testing.assert_allclose(y, case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_axis": "experts"}, "expert_axis='experts' given with a mesh of axes ('expert', 'tensor')"),
        ({"expert_axis": "expert", "tensor_axis": "expert"}, "are both 'expert'; expected two axes"),
        ({"num_shared_experts": 6}, "num_shared_experts=6 given with 5 experts in all; expected 0 to 5"),
    ],
)
def test_parallel_wrong_splits(mesh, options, text):
    with pytest.raises(ValueError, match="shard_weights: ") as error:
        shard_weights(random_case().weights, mesh, **options)
    assert text in str(error.value)


def test_parallel_prepared_weights_cannot_be_cut(mesh):
    weights = random_case().weights
    prepared = weights.replace(
        gate_up=Mxfp4Array(weights.gate_up.codes, weights.gate_up.scales, length=64, layout="triton:e4m3"),
        down=Mxfp4Array(weights.down.codes, weights.down.scales, length=96, layout="triton:e4m3"),
    )
    with pytest.raises(ValueError, match=r"cannot be cut\. Pass the packed weights and implementation='triton'"):
        shard_weights(prepared, mesh, expert_axis="expert")


@pytest.mark.parametrize(
    ("change", "options", "kind", "text"),
    [
        ({}, {"token_axis": "data"}, ValueError, "token_axis='data' given with a mesh of axes ('expert', 'tensor')"),
        ({}, {"token_axis": "expert"}, ValueError, "'expert' divides the weights; expected another axis"),
        ({}, {"dispatch": "ring"}, ValueError, "expected one of replicated, all_to_all, or None"),
        ({}, {"expert_map": np.arange(5)}, ValueError, "topk_ids are global, and each rank's map is made here"),
        ({"x": np.zeros((13, 32), np.float32)}, {}, ValueError, "expected x [..., 64] and both [..., K]"),
        ({"topk_ids": np.zeros((13, 2), np.float32)}, {}, TypeError, "topk_ids of dtype float32"),
        ({}, {"token_mask": np.zeros(4, bool)}, ValueError, "token_mask bool[4] given; expected bool[13]"),
        ({}, {"activation": "relu"}, ValueError, "activation='relu'"),
    ],
)
def test_parallel_wrong_calls(mesh, change, options, kind, text):
    case = random_case()
    weights = shard_weights(case.weights, mesh, expert_axis="expert")
    case = case.replace(**change)
    with pytest.raises(kind) as error:
        sharded_mxfp4_moe(case.x, weights, case.topk_weights, case.topk_ids, **options)
    assert text in str(error.value)


def test_parallel_plain_weights_and_no_expert_axis(mesh):
    case = random_case()
    with pytest.raises(TypeError, match=r"expected ShardedMoeWeights\. Call shard_weights"):
        sharded_mxfp4_moe(case.x, case.weights, case.topk_weights, case.topk_ids)
    weights = shard_weights(case.weights, mesh, tensor_axis="tensor")
    with pytest.raises(ValueError, match="weights that no expert axis divides"):
        sharded_mxfp4_moe(case.x, weights, case.topk_weights, case.topk_ids, dispatch="all_to_all")


def test_parallel_case_15_blocks():
    """Columns go in whole blocks: 2880 are 90 blocks, 12 for each of 8 ranks but the last, which has 6."""
    mesh = jax.sharding.AbstractMesh((8,), ("tensor",))
    split = Split(mesh, None, "tensor", 4, 0, 64, 2880)
    assert split.width == 384
    assert [split.columns_of(rank) for rank in (0, 6, 7)] == [(0, 384), (2304, 2688), (2688, 2880)]
