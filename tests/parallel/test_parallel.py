"""Layers over a mesh: what one device can show here, and `..._cases.py` in processes with 8 virtual devices."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_case
from flax import nnx
from jax.sharding import AxisType

from jax_mxfp4_moe import Mxfp4Array, parallel
from jax_mxfp4_moe.layers import Mxfp4Moe, Mxfp4MoeLinen
from jax_mxfp4_moe.parallel import Split, all_to_all_from_tokens, shard_weights, sharded_mxfp4_moe

HERE = pathlib.Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "multi_host.py"
BENCHMARK = HERE.parents[1] / "benchmarks" / "checkpoint.py"


@pytest.mark.parametrize("cases", ["parallel_cases.py", "layer_cases.py"])
def test_parallel_on_eight_devices(cases):
    """The number of virtual devices is fixed when JAX starts."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "OMP_NUM_THREADS": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_parallel_processes():
    """Two processes of `jax.distributed` with one device each, as on two hosts, under a watchdog."""
    command = [sys.executable, str(EXAMPLE), "--spawn", "2"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.count("RESULT max_relative_error") == 4  # two forms, by each of two processes


@pytest.mark.parametrize("axis", ["expert", "tensor"])
def test_parallel_loading_reads_a_process_s_part_only(axis):
    """Host memory that two processes take at their peak, as a share of a checkpoint of 0.2 GB. One that reads everything has 1."""
    command = [sys.executable, str(BENCHMARK), "--gigabytes", "0.2", "--processes", "2", "--axis", axis]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    shares = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert len(shares) == 2
    assert all(0.45 < share < 0.65 for share in shares), result.stdout


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
        (
            {"topk_ids": np.zeros((13, 2), np.float32)},
            {},
            TypeError,
            "expected an integer type. topk_weights come before topk_ids.",
        ),
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


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_parallel_dispatch_by_the_number_of_tokens(ranks):
    split = Split(jax.sharding.AbstractMesh((ranks,), ("expert",)), "expert", None, 64, 0, 64, 64)
    limit = all_to_all_from_tokens(ranks)
    chosen = [parallel._dispatch("", split, None, tokens) for tokens in (limit - 1, limit)]
    assert chosen == (["replicated", "replicated"] if ranks == 1 else ["replicated", "all_to_all"])
    assert parallel._dispatch("", split, "replicated", limit) == "replicated"


SMALL = {"hidden_size": 32, "intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
TWO = jax.sharding.AbstractMesh((2, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tensor_axis": "x"}, "tensor_axis='x' given without a mesh"),
        ({"tensor_axis": "z", "mesh": TWO}, "tensor_axis='z' given with a mesh of axes ('x', 'y')"),
        ({"tensor_axis": "x", "expert_axis": "x", "mesh": TWO}, "expert_axis and tensor_axis are both 'x'"),
        ({"tensor_axis": "x", "mesh": TWO}, "intermediate_size=96 given with 2 devices on tensor_axis='x'; expected equally many"),
        (
            {"tensor_axis": "x", "mesh": TWO, "intermediate_size": 64, "shared_intermediate_size": 32},
            "shared_intermediate_size=32 given with 2 devices",
        ),
        ({"dispatch": "ring", "expert_axis": "x", "mesh": TWO}, "dispatch='ring' and expert_axis='x' given; expected one of replicated"),
        ({"dispatch": "replicated", "mesh": TWO}, "dispatch='replicated' and expert_axis=None given"),
    ],
    ids=str,
)  # fmt: skip
def test_parallel_fields_that_no_layer_can_have(change, text):
    fields = {**SMALL, **change}
    with pytest.raises(ValueError, match="Mxfp4Moe: ") as error:
        Mxfp4Moe(**fields, rngs=nnx.Rngs(0))
    assert text in str(error.value)
    with pytest.raises(ValueError, match="Mxfp4MoeLinen: ") as error:
        Mxfp4MoeLinen(**fields).init(jax.random.key(0), jnp.zeros((1, 32)))
    assert text in str(error.value)
