"""Tests of every Triton kernel on a CPU, under the interpreter; `test_triton.py` runs them in a process of their own."""

import functools

import interpreter  # noqa: F401 - before any kernel is defined
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
import triton
import triton.language as tl
from cases import X_DTYPES, random_case

from jax_mxfp4_moe import Mxfp4Array, moe, testing
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.implementations.triton import layout, pipeline
from jax_mxfp4_moe.implementations.triton.decode import shuffled_to_e4m3, spread, to_e4m3
from jax_mxfp4_moe.implementations.triton.implementation import default_config
from jax_mxfp4_moe.quantize import SCALE_RULES
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
    """y of a call."""
    problem = case.problem(activation_quant, **options)
    facts = facts_of(problem, product, shuffled, **(changes or {}))
    weights = case.weights
    stacks = [weights.gate_up, weights.down]
    if shuffled:
        assert all(layout.fits(a) for a in stacks)
        stacks = [layout.shuffle(a) for a in stacks]
    floats = [case.gate_up_bias, case.down_bias, options.get("activation_scale")]
    floats = [np.asarray(a, np.float32) for a in floats if a is not None]
    flat = (problem.tokens, problem.top_k)
    inputs = [case.x.reshape(problem.tokens, -1), *(part for a in stacks for part in (a.codes, a.scales)), *floats]
    inputs = list(map(to_torch, [*inputs, case.topk_weights.reshape(flat), case.topk_ids.reshape(flat)]))
    y = torch.full((problem.tokens, problem.hidden), float("nan"), dtype=getattr(torch, problem.out_dtype))
    operands = pipeline.tensors_of(problem, inputs)
    moe.pipeline(pipeline.TritonSteps(facts, operands, poisoned(facts), y, ptx=False), operands)
    return y.float().numpy().reshape(case.x.shape)


PATHS = {
    "scaled": ("scaled", False, {}),
    "bits": ("bits", False, {}),
    "e4m3": ("e4m3", False, {}),
    "shuffled": ("e4m3", True, {}),
    "one column tile a program": ("e4m3", True, {"span": 1}),
    "expanded": ("e4m3", True, {"expand": 1}),
    "wide": ("bits", True, {}),
}


@functools.cache
def layer_case(activation_quant, hidden, intermediate, scale):
    """Slots and a token without an expert, an expert with more rows than a narrow tile has, one twice in a token; and y by the oracle."""
    case = random_case(dtype="bfloat16", hidden=hidden, intermediate=intermediate, experts=3, biases=True)
    case.topk_ids[4:, 0], case.topk_ids[4:, 1] = 1, 2 * (np.arange(9) % 2)
    case.topk_ids[1, 0], case.topk_ids[2], case.topk_ids[3] = -1, 3, 2
    return case, case.expected(activation_quant=activation_quant, activation_scale=scale)


@pytest.mark.parametrize(
    ("activation_quant", "path", "hidden", "intermediate", "scale"),
    [
        *((None, path, 96, 160, None) for path in PATHS if path != "scaled"),
        *(("mxfp4", path, 416, 64, None) for path in PATHS),
        ("mxfp4", "scaled", 128, 96, None),
        *(("fp8", path, 128, 96, None) for path in ("bits", "shuffled", "expanded")),
        *(("fp8", path, 128, 96, (0.01, 0.004)) for path in ("e4m3", "shuffled", "wide")),
    ],
)
def test_layer(activation_quant, path, hidden, intermediate, scale):
    product, shuffled, changes = PATHS[path]
    case, expected = layer_case(activation_quant, hidden, intermediate, scale)
    y = run(case, activation_quant, product, shuffled, changes, activation_scale=scale)
    assert relative_error(y, expected) <= TOLERANCES["bfloat16", activation_quant]
    assert (y[2] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_wider_types(dtype, shuffled):
    case = random_case(dtype=dtype, hidden=160, intermediate=96, tokens=3, experts=2)
    y = run(case, None, "bits", shuffled)
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
    y = run(case, None, "bits", activation=activation, **options)
    problem = case.problem(activation=activation, **options)
    arguments = testing.Case(
        *map(jnp.asarray, (case.x,)), case.weights, *map(jnp.asarray, (case.topk_weights, case.topk_ids))
    )
    expected = testing.reference(problem, arguments)
    assert relative_error(y, expected) <= TOLERANCES["float32", None]


def test_router_weight_on_input():
    case = random_case(tokens=6, biases=True)
    y = run(case, None, "bits", apply_router_weight_on_input=True)
    assert relative_error(y, case.expected(apply_router_weight_on_input=True)) <= TOLERANCES["float32", None]


@pytest.mark.parametrize("spans", [True, False])
def test_a_row_of_zeros_with_the_largest_scale(spans):
    """Its products are 0, whatever factor the rows of h have: factors are not multiplied with each other."""
    from jax_mxfp4_moe.implementations.triton import quantize, stage2

    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (1, 64, 64)).astype(np.uint8), np.full((1, 64, 4), 120, np.uint8)
    codes[0, 3], scales[0, 3] = 0, 254
    packed = Mxfp4Array(jnp.asarray(codes), jnp.asarray(scales), length=128)
    assert layout.fits(packed)
    down = layout.shuffle(packed)
    h = torch.from_numpy(rng.normal(size=(16, 128))).bfloat16() * 2.0**15
    planes, factors = torch.zeros(16, 2, 128, dtype=torch.float8_e4m3fn), torch.zeros(16)
    lists = [torch.tensor(v, dtype=torch.int32) for v in (range(16), [0, 16], [0], [0], [1])]
    splitting = {
        "K": 128,
        "PADDED": 128,
        "PLANES": 2,
        "BLOCKS": 4,
        "MODE": 3,
        "QUANT": 0,
        "CARRY": 0,
        "HALF_AWAY": False,
    }
    quantize.split_rows[(1,)](h, planes, factors, lists[1][1:], 16, **splitting, PDL=False)
    out = torch.full((16, 64), float("nan"))
    operands = (planes, factors, to_torch(down.codes), to_torch(down.scales))
    shapes = {
        "K": 128,
        "D": 64,
        "PLANES": 2,
        "STACK": 2,
        "WEIGHTED": True,
        "TILE": 16,
        "BLOCK_D": 64,
        "BLOCK_K": 128,
        "MODE": 3,
    }
    shapes |= {"ROW_SCALES": 1, "PTX": False, "STAGES": 2, "PDL": False}
    if spans:
        stage2.stage2_spans[(1,)](*operands, torch.ones(16), *lists, out, SPAN=2, **shapes)
    else:
        stage2.stage2[(1,)](*operands, None, torch.ones(16), *lists, out, HAS_BIAS=False, GROUP=1, **shapes)
    assert torch.equal(out[:, 3], torch.zeros(16))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (7, 3, 5), (15, 16, 33), (18, 64, 40)])
def test_routing(tokens, top_k, experts, monkeypatch):
    """The same order as the reference, by each of the three ways; every row in one tile, of its expert."""
    monkeypatch.setattr(
        pipeline, "LIST_ROWS", 100
    )  # the second and the third way are for more rows, which take long here
    monkeypatch.setattr(pipeline, "FEW_ROWS", 1000)
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


@pytest.mark.parametrize("chunks", [1, 16, 37])
def test_counts_of_many_chunks_are_added(chunks):
    """Each chunk's first row among those of its expert, and where experts start."""
    from jax_mxfp4_moe.implementations.triton.route import add_chunks

    counts = np.random.default_rng(chunks).integers(0, 30, (chunks, 128)).astype(np.int32)
    buffers = [
        torch.from_numpy(counts.copy()),
        *(torch.full((n,), -7, dtype=torch.int32) for n in (101, 16384, 16384, 1)),
    ]
    add_chunks[(1,)](*buffers, chunks, EXPERTS=100, WIDTH=128, TILE=16, PDL=False)
    np.testing.assert_array_equal(buffers[0].numpy(), counts.cumsum(0) - counts)
    starts = np.concatenate([[0], counts[:, :100].sum(0).cumsum()])
    np.testing.assert_array_equal(buffers[1].numpy(), starts)
    rows = [row for e in range(100) for row in range(starts[e], starts[e + 1], 16)]
    np.testing.assert_array_equal(buffers[3][: int(buffers[4])].numpy(), rows)


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


@pytest.mark.parametrize("product", ["bits", "e4m3", "scaled"])
@pytest.mark.parametrize("quant", [None, "mxfp4", "fp8"])
def test_rows_in_pieces_give_the_bytes_of_whole_ones(product, quant):
    """Rows that one step does not hold are read again for every step."""
    from jax_mxfp4_moe.implementations.triton.quantize import split_rows

    if product == "scaled" and quant != "mxfp4":
        pytest.skip("scaled products are of MXFP4 rows")
    x = to_torch(awkward_rows("bfloat16"))
    facts = facts_of(random_case(tokens=1, hidden=96, dtype="bfloat16").problem(quant), product)
    whole = facts.splitting(96)
    results = []
    for blocks in (whole["BLOCKS"], 2, 1):
        rows, factors = torch.full((24, 2 * 96 * 2), 0x55, dtype=torch.uint8), torch.full((24, 4), 7, dtype=torch.uint8)
        planes = (
            rows if product == "scaled" else rows.view(torch.bfloat16 if product == "bits" else torch.float8_e4m3fn)
        )
        scales = factors if product == "scaled" else factors.view(torch.float32)
        count = torch.tensor([24], dtype=torch.int32)
        split_rows[(5,)](x, planes, scales, count, 24, **{**whole, "BLOCKS": blocks}, PDL=False)
        results.append((rows, factors))
    assert whole["BLOCKS"] >= 3
    for rows, factors in results[1:]:
        assert torch.equal(rows, results[0][0])
        assert torch.equal(factors, results[0][1])


@pytest.mark.parametrize(
    ("dtype", "rounding", "scale_rule"),
    [
        *(("bfloat16", "nearest_even", rule) for rule in SCALE_RULES),
        ("bfloat16", "half_away", "even"),
        ("float16", "nearest_even", "even"),
        ("float32", "half_away", "rceil"),
    ],
)
def test_quantization_is_that_of_the_reference(dtype, rounding, scale_rule):
    """Bit by bit, as the values that the product reads, and as the bytes."""
    from jax_mxfp4_moe.implementations.triton.quantize import split_rows

    x = awkward_rows(dtype)
    problem = random_case(tokens=1, hidden=96, dtype=dtype).problem("mxfp4", scale_rule=scale_rule, rounding=rounding)
    planes = torch.zeros(24, 1, 96, dtype=torch.bfloat16)
    count = torch.tensor([24], dtype=torch.int32)
    split_rows[(5,)](
        to_torch(x), planes, torch.zeros(24), count, 24, **facts_of(problem, "bits").splitting(96), PDL=False
    )
    codes, scales = oracle.quantize(x, scale_rule, rounding)
    packed = torch.zeros(25, 48, dtype=torch.uint8), torch.zeros(25, 3, dtype=torch.uint8)
    split_rows[(5,)](to_torch(x), *packed, count, 24, **facts_of(problem, "scaled").splitting(96), PDL=False)
    np.testing.assert_array_equal(packed[0].numpy(), np.pad(codes, ((0, 1), (0, 0))))
    np.testing.assert_array_equal(packed[1].numpy(), np.pad(scales, ((0, 1), (0, 0))))
    with np.errstate(over="ignore"):
        expected = oracle.dequantize(codes, scales).astype(X_DTYPES["bfloat16"])
    k = np.arange(96)
    got = planes.view(torch.int16).numpy()[:, 0, (k & 1) * 48 + (k >> 1)]
    nan = np.isnan(expected.astype(np.float32))
    tiny = np.abs(expected.astype(np.float32)) < 2.0**-126  # zero in a product
    np.testing.assert_array_equal(np.isnan(torch.from_numpy(got.copy()).view(torch.bfloat16).float().numpy()), nan)
    np.testing.assert_array_equal(np.where(nan | tiny, 0, got), np.where(nan | tiny, 0, expected.view(np.int16)))


@pytest.mark.parametrize(
    ("dtype", "product", "scale"),
    [
        ("bfloat16", "bits", None),
        ("float32", "bits", 0.37),
        ("float16", "e4m3", None),
        ("bfloat16", "e4m3", 2.0**-100),
        ("float32", "e4m3", 2.0**101),
        ("bfloat16", "bits", float("nan")),
    ],
)
def test_fp8_quantization_is_that_of_the_reference(dtype, product, scale):
    """Bit by bit, codes and scales; all ties too."""
    from jax_mxfp4_moe.implementations.triton.quantize import split_rows

    x = awkward_rows(dtype)
    ties = (oracle.E4M3_MAGNITUDES[1:] + oracle.E4M3_MAGNITUDES[:-1]) / 2
    x[8], x[9] = [448, *ties[:95]], [-448, *-ties[31:]]
    problem = random_case(tokens=1, hidden=96, dtype=dtype).problem("fp8", activation_scale=scale)
    planes = torch.zeros(24, 1, 96, dtype=torch.bfloat16 if product == "bits" else torch.float8_e4m3fn)
    scales = torch.zeros(24) if scale is None else torch.tensor(scale)
    count = torch.tensor([24], dtype=torch.int32)
    split_rows[(5,)](to_torch(x), planes, scales, count, 24, **facts_of(problem, product).splitting(96), PDL=False)
    codes, expected_scales = oracle.quantize_fp8(x, scale)
    k = np.arange(96)
    at = (k & 1) * 48 + (k >> 1) if product == "bits" else ((k >> 2) & 1) * 48 + (k >> 3) * 4 + (k & 3)
    got, expected = planes.double().numpy()[:, 0, at], oracle.E4M3_VALUES[codes]
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])
    if scale is None:
        np.testing.assert_array_equal(scales.numpy(), expected_scales)


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
    if mode == 3:
        d[:, 0] = 11  # the largest of each row is its base
    values = oracle.dequantize(codes, d + 122)
    if mode == 3:
        shuffled = layout.shuffle(layout.Mxfp4Array(jnp.asarray(codes[None]), jnp.asarray(d[None] + 122, jnp.uint8)))
        codes = np.asarray(shuffled.codes)[0].reshape(16, 64)
    out = torch.empty(16, 128)
    _decode[(1,)](to_torch(codes), to_torch(d), out, mode)
    k = np.arange(128)
    at = ((k >> 2) & 1) * 64
    at += ((k >> 3) & 3) * 16 + ((k >> 5) & 3) * 4 + (k & 3) if mode == 3 else (k >> 3) * 4 + (k & 3)
    np.testing.assert_array_equal(out.numpy()[:, at], values)


def test_float8_weights_with_scales_far_apart():
    """In the packed layout a row's scales may have any span: blocks are then summed by ranges of twelve binades."""
    case = random_case(dtype="bfloat16", hidden=128, intermediate=96, tokens=2, experts=2)
    case.gate_up[1][:, ::2, 1] -= 24
    case.gate_up[1][:, ::3, 2] -= 13
    case.gate_up[1][:, ::5, 3] -= 40
    case.down[1][:, ::2, 1] -= 30
    y = run(case, None, "e4m3")
    assert relative_error(y, case.expected()) <= TOLERANCES["bfloat16", None]


@pytest.mark.parametrize(("activation_quant", "product"), [(None, "bits"), (None, "e4m3"), ("mxfp4", "scaled")])
def test_nan_scales(activation_quant, product):
    case = random_case(dtype="bfloat16", tokens=3, experts=2)
    case.down[1][:, 5, 0] = 255
    y = run(case, activation_quant, product)
    assert np.isnan(y[:, 5]).all()
    assert not np.isnan(np.delete(y, 5, axis=1)).any()


@pytest.mark.parametrize(
    ("activation_quant", "product", "scale"),
    [("mxfp4", "scaled", None), ("fp8", "bits", None), ("fp8", "e4m3", (0.01, float("nan")))],
)
def test_what_is_not_finite_becomes_nan(activation_quant, product, scale):
    """In the rows of the tokens that hold it, or in all rows under a static scale that is none."""
    case = random_case(dtype="bfloat16", tokens=3, experts=2)
    case.x[0, 40], case.x[2, 3] = np.nan, -np.inf
    y = run(case, activation_quant, product, activation_scale=scale)
    assert np.isnan(y).all(axis=1).tolist() == [True, scale is not None, True]
    assert np.isnan(y).any(axis=1).tolist() == [True, scale is not None, True]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    raise SystemExit(pytest.main([__file__, "-q"]))
