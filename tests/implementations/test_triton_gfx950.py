"""Products of MXFP4 with MXFP4 and "fp8" activations in our Triton kernels, compiled for gfx950 and executed on a CPU."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from cases import X_DTYPES, random_case

torch = pytest.importorskip("torch")
import gfx950

from jax_mxfp4_moe import moe
from jax_mxfp4_moe.testing import TOLERANCES, relative_error


@pytest.fixture(scope="module", autouse=True)
def simulator():
    return gfx950.simulator()


def scattered(seed=0, dtype="bfloat16", **shape):
    """A case in which every block has a scale of its own, over a dozen powers of two; some 46 rows an expert."""
    case = random_case(
        **{"seed": seed, "tokens": 70, "experts": 3, "top_k": 2, "dtype": dtype, "biases": True, **shape}
    )
    rng = np.random.default_rng(seed)
    for _, scales in (case.gate_up, case.down):
        scales[...] += rng.integers(-9, 3, scales.shape).astype(np.uint8)
    case.gate_up[1][0, 0, 0] = case.down[1][0, 0, 0] = 0  # as it was
    tokens, hidden = case.x.shape
    x = case.x.astype(np.float64).reshape(tokens, -1, 32) * np.exp2(rng.integers(-8, 4, (tokens, hidden // 32, 1)))
    case.topk_ids[1, 0], case.topk_ids[2] = -1, case.gate_up[0].shape[0]  # a slot and a token without an expert
    return case.replace(x=x.reshape(tokens, hidden).astype(X_DTYPES[dtype]))


def check(y, expected, tolerance):
    """As a whole, and each row by itself."""
    assert relative_error(y, expected) <= tolerance
    assert not y[2].any()
    rows = np.delete(np.arange(len(y)), 2)
    worst = np.linalg.norm(y - expected, axis=1)[rows] / np.linalg.norm(expected, axis=1)[rows]
    assert worst.max() <= 3 * tolerance


WIDE, NARROW = "v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4"
# Odd sizes and whole ones; all rows of a tile and some; both shapes of the instruction; loads in one to three stages.
SCALED = {
    "160x96": (WIDE, {"hidden": 160, "intermediate": 96}, {}, {}),
    "416x160": (WIDE, {"hidden": 416, "intermediate": 160}, {"stages1": 1, "stages2": 2}, {"scale_rule": "rceil"}),
    "256x128": (NARROW, {"hidden": 256, "intermediate": 128}, {"tile_rows": 16}, {"rounding": "half_away"}),
    "96x64_float32": (WIDE, {"hidden": 96, "intermediate": 64, "dtype": "float32"}, {"warps1": 8, "warps2": 2}, {}),
    "512x32_float16": (NARROW, {"hidden": 512, "intermediate": 32, "dtype": "float16"}, {"tile_rows": 16}, {}),
}


@pytest.mark.parametrize("name", SCALED)
def test_gfx950_scaled_layer_equals_the_oracle(name):
    """On no other matrix instruction than the one that is meant; waves and work-groups in a shuffled order."""
    instruction, shape, changes, options = SCALED[name]
    case = scattered(len(name), **shape)
    launcher = gfx950.Launcher(seed=len(name))
    steps = gfx950.steps(case, "mxfp4", launcher, product="scaled", changes=changes, **options)
    moe.pipeline(steps, steps.operands)
    assert {n for n in launcher.instructions if "mfma" in n} == {instruction}
    expected = case.expected(activation_quant="mxfp4", **options)
    check(steps.y.double().numpy(), expected, TOLERANCES[str(case.x.dtype), "mxfp4"])


@pytest.mark.parametrize("scale", [None, (0.05, 0.5)], ids=["dynamic", "static"])
def test_gfx950_fp8_layer_equals_the_oracle(scale):
    case = scattered(1, hidden=160, intermediate=96)
    launcher = gfx950.Launcher(seed=1)
    steps = gfx950.steps(case, "fp8", launcher, activation_scale=scale)
    moe.pipeline(steps, steps.operands)
    expected = case.expected(activation_quant="fp8", activation_scale=scale)
    check(steps.y.double().numpy(), expected, TOLERANCES["bfloat16", "fp8"])


def test_gfx950_nan_and_infinity_in_scaled_products():
    """The rows that hold one are NaN, as those that need a NaN weight are; no other element is."""
    case = scattered(2, hidden=96, intermediate=64, tokens=40, experts=2, top_k=1)
    case.x[5, 40], case.x[7, 3], case.x[9, 95] = np.nan, np.inf, -np.inf
    case.down[1][:, 11, 1] = 255
    steps = gfx950.steps(case, "mxfp4", gfx950.Launcher(), product="scaled")
    moe.pipeline(steps, steps.operands)
    y, expected = steps.y.double().numpy(), case.expected(activation_quant="mxfp4")
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y).all(axis=1).sum() == 3
    assert np.isnan(y).any(axis=0)[11]
    assert np.isnan(y).all(axis=1)[[5, 7, 9]].all()
    assert relative_error(*np.where(np.isnan([y, expected]), 0, [y, expected])) <= TOLERANCES["bfloat16", "mxfp4"]


@pytest.mark.parametrize(("rule", "rounding", "k"), [("even", "nearest_even", 96), ("rceil", "half_away", 416)])
def test_gfx950_packed_rows_are_the_bytes_of_quantize(rule, rounding, k):
    """Codes and scales of rows of all sizes, with what is not finite; a row that is not owned stays."""
    from jax_mxfp4_moe.implementations.base import Config
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts
    from jax_mxfp4_moe.implementations.triton.quantize import split_rows

    rng = np.random.default_rng(k)
    x = (rng.normal(size=(8, k)) * np.exp2(rng.integers(-130, 120, (8, k // 32)).repeat(32, 1))).astype(
        ml_dtypes.bfloat16
    )
    x[0, :32], x[1, 33], x[2, 64], x[3, 5] = 0, np.nan, np.inf, -0.0
    problem = random_case(tokens=1, hidden=k, dtype="bfloat16").problem("mxfp4", scale_rule=rule, rounding=rounding)
    codes, scales = (torch.full((8, k // n), 0x7F, dtype=torch.uint8) for n in (2, 32))
    constants = Facts(problem, Config.of({"product": "scaled"})).splitting(k)
    count = torch.tensor([7], dtype=torch.int32)
    gfx950.Launcher(seed=1)(split_rows, (3,), gfx950.tensor(x), codes, scales, count, 8, **constants, PDL=False)
    for got, expected in zip((codes, scales), oracle.quantize(x[:7], rule, rounding), strict=True):
        np.testing.assert_array_equal(got[:7].numpy(), expected)
        assert (got[7] == 0x7F).all()


def test_gfx950_a_scale_of_another_operand_is_seen():
    """The negative control: in the compiled text one product takes the scales of its first operand for both."""
    case = scattered(3, hidden=96, intermediate=128)
    edit = ("stage2", r"(v_mfma_scale_f32_32x32x64_f8f6f4 (?:\S+ ){4})(\S+), \S+", r"\1\2, \2")
    steps = gfx950.steps(case, "mxfp4", gfx950.Launcher(edit=edit), product="scaled")
    moe.pipeline(steps, steps.operands)
    assert relative_error(steps.y.double().numpy(), case.expected(activation_quant="mxfp4")) > 0.1
