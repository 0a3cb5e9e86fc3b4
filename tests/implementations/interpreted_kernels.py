"""Tests of every Triton kernel on a CPU, under the interpreter; `test_triton.py` runs them in a process of their own."""

import itertools

import interpreter  # noqa: F401 - before any kernel is defined
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import X_DTYPES, random_case

from jax_mxfp4_moe import moe, testing
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.implementations.triton import layout, pipeline
from jax_mxfp4_moe.implementations.triton.decode import shuffled_to_e4m3, spread, to_e4m3
from jax_mxfp4_moe.implementations.triton.implementation import default_config
from jax_mxfp4_moe.mxfp4 import dequantize
from jax_mxfp4_moe.quantize import ROUNDINGS, SCALE_RULES, quantize
from jax_mxfp4_moe.route import route
from jax_mxfp4_moe.testing import TOLERANCES, relative_error


def to_torch(a):
    a = np.asarray(a)
    if a.dtype == jnp.bfloat16:
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(a.copy())


def facts_of(problem, product, shuffled=False, **changes):
    return pipeline.Facts(problem, Config.of({**dict(default_config(problem, product).items), **changes}), shuffled)


def poisoned(facts):
    """Buffers whose bytes are 0x7f: NaN in E4M3, and large or NaN elsewhere."""
    buffers = {}
    for name, spec in facts.buffers().items():
        raw = torch.full((max(16, spec.nbytes),), 0x7F, dtype=torch.uint8)
        buffers[name] = raw[: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
    return buffers


def run(case, activation_quant, product, shuffled=False, changes=None, **options):
    """y and the buffers of a call."""
    problem = case.problem(activation_quant, **options)
    facts = facts_of(problem, product, shuffled, **(changes or {}))
    weights = case.weights
    stacks = [weights.gate_up, weights.down]
    if shuffled:
        assert all(layout.fits(a) for a in stacks)
        stacks = [layout.shuffle(a) for a in stacks]
    biases = [b for b in (case.gate_up_bias, case.down_bias) if b is not None]
    flat = (problem.tokens, problem.top_k)
    inputs = [case.x.reshape(problem.tokens, -1), *(part for a in stacks for part in (a.codes, a.scales)), *biases]
    inputs = list(map(to_torch, [*inputs, case.topk_weights.reshape(flat), case.topk_ids.reshape(flat)]))
    y = torch.full((problem.tokens, problem.hidden), float("nan"), dtype=getattr(torch, problem.out_dtype))
    operands, buffers = pipeline.tensors_of(problem, inputs), poisoned(facts)
    moe.pipeline(pipeline.TritonSteps(facts, operands, buffers, y, ptx=False), operands)
    return y.float().numpy().reshape(case.x.shape), buffers


PATHS = {
    "bits": ("bits", False, {}),
    "e4m3": ("e4m3", False, {}),
    "shuffled": ("e4m3", True, {}),
    "one column tile a program": ("e4m3", True, {"span": 1}),
    "expanded": ("e4m3", True, {"expand": 1}),
    "wide": ("bits", True, {}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("activation_quant", "hidden", "intermediate"), [(None, 96, 160), ("mxfp4", 128, 96), ("mxfp4", 416, 64)]
)
def test_layer(path, activation_quant, hidden, intermediate):
    product, shuffled, changes = PATHS[path]
    case = random_case(dtype="bfloat16", hidden=hidden, intermediate=intermediate, biases=True, top_k=3)
    case.topk_ids[1, 0], case.topk_ids[2] = -1, 5
    case.topk_ids[3] = 2
    y, _ = run(case, activation_quant, product, shuffled, changes)
    expected = case.expected(activation_quant=activation_quant)
    assert relative_error(y, expected) <= TOLERANCES["bfloat16", activation_quant]
    assert (y[2] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_wider_types(dtype, shuffled):
    case = random_case(dtype=dtype, hidden=160, intermediate=96, tokens=5)
    y, _ = run(case, None, "bits", shuffled)
    assert relative_error(y, case.expected()) <= TOLERANCES[dtype, None]


@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("gelu", {}),
        ("gelu_tanh", {}),
        ("swiglu_oai", {"activation_alpha": 1.702, "activation_limit": 0.7}),
        ("silu_clamped", {"activation_limit": 0.5}),
        ("silu_post_clamped", {"activation_limit": 0.25}),
    ],
)
def test_activations(activation, options):
    case = random_case(tokens=6, biases=True)
    y, _ = run(case, None, "bits", activation=activation, **options)
    problem = case.problem(activation=activation, **options)
    arguments = testing.Case(
        *map(jnp.asarray, (case.x,)), case.weights, *map(jnp.asarray, (case.topk_weights, case.topk_ids))
    )
    expected = testing.reference(problem, arguments)
    assert relative_error(y, expected) <= TOLERANCES["float32", None]


def test_router_weight_on_input():
    case = random_case(tokens=6, biases=True)
    y, _ = run(case, None, "bits", apply_router_weight_on_input=True)
    assert relative_error(y, case.expected(apply_router_weight_on_input=True)) <= TOLERANCES["float32", None]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (7, 3, 5), (200, 4, 33), (520, 16, 40)])
def test_routing(tokens, top_k, experts):
    """The same order as the reference, by each of the three ways; every row in one tile, of its expert."""
    problem = random_case(tokens=1, hidden=32, intermediate=32).problem()
    problem = type(problem)(tokens, top_k, experts, 32, 32)
    ids = np.random.default_rng(tokens).integers(-1, experts + 1, (tokens, top_k)).astype(np.int32)
    facts = facts_of(problem, "bits", tile_rows=16)
    buffers = poisoned(facts)
    x = torch.zeros(tokens, 32, dtype=torch.bfloat16)
    operands = pipeline.Operands(x, None, None, to_torch(ids))
    pipeline.TritonSteps(facts, operands, buffers, None, ptx=False).route(operands.topk_ids)
    expected = route(jnp.asarray(ids), experts)
    offsets = np.asarray(expected.offsets)
    np.testing.assert_array_equal(buffers["offsets"].numpy(), offsets)
    np.testing.assert_array_equal(buffers["order"].numpy()[: offsets[-1]], np.asarray(expected.order)[: offsets[-1]])
    want = [(e, row) for e in range(experts) for row in range(offsets[e], offsets[e + 1], 16)]
    count = int(buffers["tile_count"])
    got = zip(buffers["tile_expert"][:count].tolist(), buffers["tile_row"][:count].tolist(), strict=True)
    assert list(got) == want


def awkward_rows(dtype):
    """Normal numbers, ties, zeros, subnormals, the largest and the not finite, a block each."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(24, 96)) * np.exp2(rng.integers(-30, 30, (24, 1)))
    x[0, :32], x[1, :32] = 0, -0.0
    x[2, :16] = [0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0, 0.75, 0.5, -0.25, 7, 6.5, -7.5, 0.1, 4]
    x[3, :32] = np.ldexp(rng.normal(size=32), -140)
    x[4, 40], x[5, 70], x[6, 3] = np.nan, np.inf, -np.inf
    x[7, :32] = 3e38 * np.sign(rng.normal(size=32))
    with np.errstate(over="ignore"):
        return x.astype(X_DTYPES[dtype])


@pytest.mark.parametrize(
    ("dtype", "rounding", "scale_rule"),
    [
        *itertools.product(["bfloat16"], ROUNDINGS, SCALE_RULES),
        *itertools.product(["float32", "float16"], ROUNDINGS, ["even"]),
    ],
)
def test_quantization_is_that_of_the_reference(dtype, rounding, scale_rule):
    """Bit by bit, as the values that the product reads."""
    from jax_mxfp4_moe.implementations.triton.quantize import split_rows

    x = awkward_rows(dtype)
    case = random_case(tokens=1, hidden=96, dtype=dtype)
    facts = facts_of(case.problem("mxfp4", scale_rule=scale_rule, rounding=rounding), "bits")
    planes = torch.zeros(24, 1, 96, dtype=torch.bfloat16)
    count = torch.tensor([24], dtype=torch.int32)
    split_rows[(5,)](to_torch(x), planes, torch.zeros(24), count, 24, **facts.splitting(96))
    expected = np.asarray(dequantize(quantize(jnp.asarray(x), scale_rule=scale_rule, rounding=rounding), jnp.bfloat16))
    k = np.arange(96)
    got = planes.view(torch.int16).numpy()[:, 0, (k & 1) * 48 + (k >> 1)]
    nan = np.isnan(expected.astype(np.float32))
    tiny = np.abs(expected.astype(np.float32)) < 2.0**-126  # zero in a product
    np.testing.assert_array_equal(np.isnan(torch.from_numpy(got.copy()).view(torch.bfloat16).float().numpy()), nan)
    np.testing.assert_array_equal(np.where(nan | tiny, 0, got), np.where(nan | tiny, 0, expected.view(np.int16)))


@triton.jit
def _decode(codes, d, out, MODE: tl.constexpr):
    i = tl.arange(0, 64)
    j = tl.arange(0, 4)
    r = tl.arange(0, 16)
    c = tl.load(codes + r[:, None] * 64 + i[None, :])
    f = tl.load(d + r[:, None] * 4 + j[None, :])
    if MODE == 3:
        a, b = shuffled_to_e4m3(c, f, 16, 4, False)
    else:
        a, b = to_e4m3(c, spread((f * 8).to(tl.int8), 16, 4), 16, 64, False)
    tl.store(out + r[:, None] * 128 + i[None, :], a.to(tl.float32))
    tl.store(out + 64 + r[:, None] * 128 + i[None, :], b.to(tl.float32))


@pytest.mark.parametrize("mode", [2, 3])
def test_float8_weights_are_exact(mode):
    """All bytes, all twelve exponents: code * 2 ** (d - 5), in the order of `decode.quad_position`."""
    rng = np.random.default_rng(0)
    codes = np.concatenate([np.arange(256), rng.integers(0, 256, 768)]).astype(np.uint8).reshape(16, 64)
    d = (np.arange(64) % 12).reshape(16, 4).astype(np.int32)
    values = np.asarray(dequantize(layout.Mxfp4Array(jnp.asarray(codes), jnp.asarray(d + 122, jnp.uint8)), jnp.float32))
    if mode == 3:
        d[:, 0] = 11  # the largest of each row is its base
        a = layout.Mxfp4Array(jnp.asarray(codes[None]), jnp.asarray(d[None] + 122, jnp.uint8))
        values = np.asarray(dequantize(a, jnp.float32))[0]
        shuffled = layout.shuffle(a)
        codes = np.asarray(shuffled.codes)[0].reshape(16, 64)
    out = torch.empty(16, 128)
    _decode[(1,)](to_torch(codes), to_torch(d), out, mode)
    k = np.arange(128)
    at = ((k >> 2) & 1) * 64
    at += ((k >> 3) & 3) * 16 + ((k >> 5) & 3) * 4 + (k & 3) if mode == 3 else (k >> 3) * 4 + (k & 3)
    np.testing.assert_array_equal(out.numpy()[:, at], values)


def test_float8_weights_with_scales_far_apart():
    """In the packed layout a row's scales may have any span: blocks are then summed by ranges of twelve binades."""
    case = random_case(dtype="bfloat16", hidden=256, intermediate=96, tokens=4)
    case.gate_up[1][:, :, 1] = 20
    case.gate_up[1][:, ::3, 2] -= 13
    case.gate_up[1][:, ::5, 3] = 0
    case.down[1][:, ::2, 1] -= 30
    y, _ = run(case, None, "e4m3")
    assert relative_error(y, case.expected()) <= TOLERANCES["bfloat16", None]


@pytest.mark.parametrize("product", ["bits", "e4m3"])
def test_nan_scales(product):
    case = random_case(dtype="bfloat16", tokens=3)
    case.down[1][:, 5, 0] = 255
    y, _ = run(case, None, product)
    assert np.isnan(y[:, 5]).all()
    assert not np.isnan(np.delete(y, 5, axis=1)).any()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    raise SystemExit(pytest.main([__file__, "-q"]))
