"""Our Triton kernels, compiled for gfx950 and executed instruction by instruction on a CPU: rounding as aiter does it, and the layer."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from cases import random_case

torch = pytest.importorskip("torch")
import gfx950
from aiter_sim import numerics, sorting

from jax_mxfp4_moe import moe, quantize
from jax_mxfp4_moe.implementations.aiter import layout as aiter_layout
from jax_mxfp4_moe.quantize import SCALE_RULE_CARRY
from jax_mxfp4_moe.route import route
from jax_mxfp4_moe.testing import TOLERANCES, relative_error

# aiter's rules in our words: its fused Triton kernel, its HIP operation before v0.1.16, and that one since.
RULES = {
    "triton": ("even", "half_away", "even"),
    "hip_to_v0.1.15": ("half_up", "nearest_even", "half_up"),
    "hip_from_v0.1.16": ("rceil", "nearest_even", "rceil"),
}
AMAX = (
    0,
    2.0**-126,
    0.5,
    0.75,
    1,
    1.4375,
    1.5,
    1.5078125,
    1.75,
    2,
    3,
    3.015625,
    3.5,
    4,
    5,
    6,
    6.03125,
    6.96875,
    7,
    8,
    448,
)


@pytest.fixture(scope="module")
def simulator():
    return gfx950.simulator()


def awkward_rows(k, rows):
    """Blocks of one element each, all ties of both signs, zeros, and blocks whose sizes differ by 2 to the 40."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, k // 32, 32)) * 2.0 ** rng.integers(-20, 20, (rows, k // 32, 1))
    flat = x.reshape(-1, 32)
    flat[: len(AMAX)] = 0
    flat[: len(AMAX), 5] = AMAX
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    flat[len(AMAX)] = [*ties, *(-value for value in ties), *(4 * value for value in ties), -0.0, *np.zeros(7)]
    flat[len(AMAX) + 1] = 0
    return x.reshape(rows, k).astype(ml_dtypes.bfloat16)


def as_torch(x):
    return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [96, 416])
def test_gfx950_quantizer_rounds_as_aiter_does(simulator, rule, k):
    """`split_rows` in float values, against aiter's rule and against `quantize`, exactly; a row that is not owned stays."""
    from jax_mxfp4_moe.implementations.triton import decode
    from jax_mxfp4_moe.implementations.triton.quantize import split_rows

    scale_rule, rounding, theirs = RULES[rule]
    rows = 13 if k == 96 else 5
    x = awkward_rows(k, rows + 1)
    planes = torch.full((rows + 1, 1, k), float("nan"), dtype=torch.bfloat16)
    gfx950.Launcher(seed=1)(
        split_rows, (3,), as_torch(x), planes, torch.zeros(rows + 1), torch.tensor([rows], dtype=torch.int32), rows + 1,
        K=k, PADDED=k, PLANES=1, BLOCKS=16, MODE=decode.BITS.value, QUANT=True,
        CARRY=SCALE_RULE_CARRY[scale_rule], HALF_AWAY=rounding == "half_away", PDL=False, num_warps=4,
    )  # fmt: skip
    planes = planes.float().numpy().reshape(rows + 1, 2, k // 2)  # the even elements, then the odd ones
    found = np.stack([planes[:, 0], planes[:, 1]], axis=-1).reshape(rows + 1, k)
    expected = numerics.dequantize(*numerics.quantize(x, theirs, rounding))
    np.testing.assert_array_equal(found[:rows], expected[:rows])
    np.testing.assert_array_equal(np.signbit(found[:rows]), np.signbit(expected[:rows]))
    assert np.isnan(found[rows]).all()
    ours = quantize(x, scale_rule=scale_rule, rounding=rounding)
    np.testing.assert_array_equal(oracle.dequantize(np.asarray(ours.codes), np.asarray(ours.scales)), expected)


def test_sorted_scales_are_those_of_aiter():
    """`layout.sort_scales` of our rounding against the order that aiter's Triton kernel gives, as far as num_valid."""
    rng = np.random.default_rng(2)
    tokens, top_k, experts, block_m, hidden = 21, 3, 5, 32, 512
    x = (rng.normal(size=(tokens, hidden)) * 2.0 ** rng.integers(-9, 9, (tokens, 16)).repeat(32, 1)).astype(
        ml_dtypes.bfloat16
    )
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    length = tokens * top_k + experts * block_m - top_k
    sorted_ids, valid = torch.full((length,), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    sorting.moe_sorting_fwd(
        torch.from_numpy(ids), torch.ones(tokens, top_k), sorted_ids, torch.zeros(length),
        torch.zeros(-(-length // block_m), dtype=torch.int32), valid, torch.zeros(tokens, hidden), experts, block_m,
    )  # fmt: skip
    codes, scale = sorting.fused_triton(as_torch(x), sorted_ids, valid, tokens, 1, padded_width=False)
    ours = quantize(x, scale_rule="even", rounding="half_away")
    np.testing.assert_array_equal(ours.codes, codes.view(torch.uint8).numpy())
    source = sorted_ids.numpy() & 0xFFFFFF
    ordered = np.asarray(aiter_layout.sort_scales(ours.scales, source))
    theirs = scale.view(torch.uint8).numpy().reshape(-1, hidden // 32)
    both = int(valid[0]) // 32 * 32
    np.testing.assert_array_equal(ordered[:both], theirs[:both])
    back = np.asarray(aiter_layout.unshuffle_scales(theirs))
    real = np.flatnonzero((np.arange(length) < int(valid[0])) & (source < tokens))
    np.testing.assert_array_equal(back[real], np.asarray(ours.scales)[source[real]])


# --- the other kernels, and the whole layer --------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(7, 3, 5), (200, 4, 33)])
def test_gfx950_routing(simulator, tokens, top_k, experts):
    """By both ways of few rows: the reference's order, every row in one tile of its expert."""
    from jax_mxfp4_moe.implementations.triton import pipeline

    ids = np.random.default_rng(tokens).integers(-1, experts + 1, (tokens, top_k)).astype(np.int32)
    case = random_case(dtype="bfloat16", tokens=tokens, top_k=top_k, experts=experts, hidden=32, intermediate=32)
    launcher = gfx950.Launcher(seed=2)
    steps = gfx950.steps(case.replace(topk_ids=ids), None, launcher, changes={"tile_rows": 16})
    assert isinstance(steps, pipeline.TritonSteps)
    steps.route(steps.operands.topk_ids)
    assert launcher.kernels == (["route_few"] if tokens == 7 else ["route_few", "list_few"])
    expected = route(jnp.asarray(ids), experts)
    offsets, buffers = np.asarray(expected.offsets), steps.buffers
    np.testing.assert_array_equal(buffers["offsets"].numpy(), offsets)
    np.testing.assert_array_equal(buffers["order"].numpy()[: offsets[-1]], np.asarray(expected.order)[: offsets[-1]])
    want = [(e, row) for e in range(experts) for row in range(offsets[e], offsets[e + 1], 16)]
    count = int(buffers["tile_count"])
    got = zip(buffers["tile_expert"][:count].tolist(), buffers["tile_row"][:count].tolist(), strict=True)
    assert list(got) == want


# Odd sizes, and one whose sizes are all multiples of 128; 46 rows an expert, so that tiles of 32 rows are full and half full.
LAYERS = {
    "160x96": ({"hidden": 160, "intermediate": 96, "biases": True}, "bfloat16", None, {}),
    "416x160_mxfp4": ({"hidden": 416, "intermediate": 160}, "bfloat16", "mxfp4", {"scale_rule": "rceil"}),
    "256x128_mxfp4": ({"hidden": 256, "intermediate": 128}, "bfloat16", "mxfp4", {"rounding": "half_away"}),
    "96x64_float32": ({"hidden": 96, "intermediate": 64, "tokens": 13}, "float32", None, {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gfx950_layer_equals_the_oracle(simulator, name):
    """Every element of y, with the matrix instruction that is meant; waves and work-groups in a shuffled order."""
    shape, dtype, activation_quant, options = LAYERS[name]
    case = random_case(**{"tokens": 70, "experts": 3, "top_k": 2, "dtype": dtype, **shape})
    case.topk_ids[1, 0], case.topk_ids[2] = -1, 3  # a slot and a token without an expert
    launcher = gfx950.Launcher(seed=len(name))
    steps = gfx950.steps(case, activation_quant, launcher, **options)
    moe.pipeline(steps, steps.operands)
    assert launcher.kernels == ["route_few", "stage1", "split_rows", "stage2", "combine"]
    assert launcher.instructions["v_mfma_f32_32x32x16_bf16"] > 0
    expected = case.expected(activation_quant=activation_quant, **options)
    y = steps.y.double().numpy()
    assert relative_error(y, expected) <= TOLERANCES[dtype, activation_quant]
    assert not y[2].any()
    worst = np.abs(y - expected).max(axis=1) / np.maximum(np.abs(expected).max(axis=1), 1e-30)
    assert worst[np.abs(expected).max(axis=1) > 0].max() < 0.1  # no single row is another's


def test_gfx950_a_changed_instruction_is_seen(simulator):
    """The negative control: one operand of the products taken twice, in the compiled text, and nothing agrees any more."""
    case = random_case(dtype="bfloat16", tokens=40, experts=2, top_k=1, hidden=64, intermediate=32)
    launcher = gfx950.Launcher(edit=("stage2", r"(v_mfma_f32_32x32x16_bf16 \S+ )(\S+ )\S+ ", r"\1\2\2"))
    steps = gfx950.steps(case, None, launcher)
    moe.pipeline(steps, steps.operands)
    assert relative_error(steps.y.double().numpy(), case.expected()) > 0.1
