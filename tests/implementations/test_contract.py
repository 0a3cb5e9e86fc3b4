"""The contract that every implementation keeps: the same numbers as the oracle, whatever the shapes and the ids.

A new implementation is one more name in NAMES. Routing and quantization are tested densely in their own files; here
they are crossed thinly.
"""

import concurrent.futures
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, far_from_ties, random_case, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_mxfp4_moe import mxfp4_moe, prepare, stage1, testing
from jax_mxfp4_moe.device import platforms
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.mxfp4 import PACKED
from jax_mxfp4_moe.problem import resolve_activation
from jax_mxfp4_moe.testing import relative_error

NAMES = ("xla", "torch", "triton")
# Float32 problems with quantized activations are drawn far from every tie (see far_from_ties), so that no code may flip
# and the tolerance of plain float32 holds for them too.
TOLERANCES = {**testing.TOLERANCES, ("float32", "mxfp4"): testing.TOLERANCES["float32", None]}
RECIPES = (("float32", None), ("bfloat16", None), ("float32", "mxfp4"), ("bfloat16", "mxfp4"))
FP8_RECIPES = (("float32", "fp8"), ("bfloat16", "fp8"))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def skip_unless_able(case: Case, name: str, activation_quant, **options) -> None:
    sentence = case.why_not(name, activation_quant, **options)
    if sentence is not None:
        pytest.skip(f"{name} {sentence}")


def make_case(dtype, activation_quant, *, adjust=lambda case: case, options=None, **shape) -> Case:
    def make(seed):
        return adjust(random_case(seed=seed, dtype=dtype, **shape))

    if (dtype, activation_quant) == ("float32", "mxfp4"):
        return far_from_ties(make, activation_quant=activation_quant, **(options or {}))
    return make(0)


def check(case: Case, name: str, activation_quant, **options) -> jax.Array:
    """Runs the implementation under jit and compares with the oracle by the recipe's tolerance."""
    skip_unless_able(case, name, activation_quant, **options)
    dtype = str(case.x.dtype)
    y = case.run(implementation=name, activation_quant=activation_quant, **options)
    assert y.shape == case.x.shape
    out_dtype = options.pop("preferred_element_type", dtype)
    assert y.dtype == jnp.dtype(out_dtype)
    expected = case.expected(activation_quant=activation_quant, **options)
    assert relative_error(np.asarray(y, np.float64), expected) <= TOLERANCES[dtype, activation_quant]
    return y


def sums_in_float8(case: Case, name: str, activation_quant) -> bool:
    """Whether the implementation multiplies this on float8 tensor cores here."""
    problem = case.problem(activation_quant)
    config = dict(IMPLEMENTATIONS[name].configs(problem, platforms()[0])[0].items)
    return config.get("product") == "e4m3"


# --- shapes ----------------------------------------------------------------------------------------------------------


def with_ids(choose):
    """Replaces the ids by what choose(rng, shape, experts) gives."""

    def adjust(case):
        rng = np.random.default_rng(99)
        ids = choose(rng, case.topk_ids.shape, case.gate_up[0].shape[0])
        return case.replace(topk_ids=np.asarray(ids, np.int32))

    return adjust


def ids_on_one_expert(rng, shape, experts):
    return np.full(shape, 3)


def ids_leaving_experts_empty(rng, shape, experts):
    return np.stack([np.full(shape[0], 1), np.full(shape[0], 4)], axis=-1)


def ids_with_duplicates(rng, shape, experts):
    return rng.integers(0, 2, (*shape[:-1], 4))[..., : shape[-1]]


def ids_with_skips(rng, shape, experts):
    ids = rng.integers(-2, experts + 2, shape)
    ids[0] = -1  # a token without any expert
    ids[1] = [experts, *ids[1, 1:]]
    ids[2] = [np.iinfo(np.int32).min, np.iinfo(np.int32).max, *ids[2, 2:]]
    return ids


SHAPES = {
    "ragged_tail": {"tokens": 13},
    "one_token": {"tokens": 1},
    "more_tokens_than_a_tile": {"tokens": 150, "intermediate": 32},
    "every_token_on_one_expert": {"adjust": with_ids(ids_on_one_expert)},
    "empty_experts": {"adjust": with_ids(ids_leaving_experts_empty)},
    "duplicate_ids": {"top_k": 3, "adjust": with_ids(ids_with_duplicates)},
    "skipped_ids": {"top_k": 3, "adjust": with_ids(ids_with_skips)},
    "one_expert_in_all": {"experts": 1, "top_k": 1},
    "top_1": {"top_k": 1},
    "top_4": {"top_k": 4, "tokens": 7},
    "more_slots_than_experts": {"experts": 2, "top_k": 4, "tokens": 7, "adjust": with_ids(ids_with_duplicates)},
    "leading_axes": {"tokens": (2, 3)},
    "one_row_without_leading_axes": {"tokens": ()},
    "32x32": {"hidden": 32, "intermediate": 32},
    "96x160": {"hidden": 96, "intermediate": 160},
    "416x96": {"hidden": 416, "intermediate": 96, "tokens": 5},
    "64x2880": {"hidden": 64, "intermediate": 2880, "experts": 2, "tokens": 3},
    "biases": {"biases": True},
    "biases_and_skips": {"biases": True, "top_k": 3, "adjust": with_ids(ids_with_skips)},
}


QUANTIZED_TOO = (
    "ragged_tail",
    "one_token",
    "empty_experts",
    "skipped_ids",
    "leading_axes",
    "416x96",
    "biases_and_skips",
)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(name, shape):
    """Field cases 7, 9, 10, 19 and 20 among others: see the names of SHAPES."""
    check(make_case(*RECIPES[0], **SHAPES[shape]), name, RECIPES[0][1])


@pytest.mark.parametrize("shape", QUANTIZED_TOO)
def test_shapes_with_quantized_activations(name, shape):
    check(make_case(*RECIPES[3], **SHAPES[shape]), name, RECIPES[3][1])


@pytest.mark.parametrize("shape", ["one_token", "biases_and_skips"])
def test_shapes_with_fp8_activations(name, shape):
    check(make_case(*FP8_RECIPES[1], **SHAPES[shape]), name, "fp8")


@pytest.mark.parametrize(
    ("dtype", "activation_quant"),
    [*RECIPES, *FP8_RECIPES, ("float16", None), ("float16", "mxfp4"), ("float16", "fp8")],
)
def test_recipes(name, dtype, activation_quant):
    check(make_case(dtype, activation_quant, biases=True), name, activation_quant)


@pytest.mark.parametrize(
    ("dtype", "activation_quant"), [("bfloat16", None), ("bfloat16", "mxfp4"), ("bfloat16", "fp8")]
)
def test_bfloat16_rounds_where_it_is_said_to(name, dtype, activation_quant):
    """h and y are rounded to bfloat16 once each, and nothing else is.

    With the oracle rounding in the same places only values beside a rounding boundary differ, so that the error is
    far below the tolerance of the recipe: a missing or a further rounding (each some 1e-3) would show.
    """
    case = random_case(dtype=dtype, tokens=16)
    skip_unless_able(case, name, activation_quant)
    y = case.run(implementation=name, activation_quant=activation_quant)
    expected = case.expected(activation_quant=activation_quant, out_dtype=dtype)
    differing = np.mean(np.asarray(y, np.float64) != expected)
    assert differing < (0.1 if sums_in_float8(case, name, activation_quant) else 0.02)  # 13 bits of a partial sum


@pytest.mark.parametrize(
    ("scale_rule", "rounding"), [*((rule, "nearest_even") for rule in oracle.SCALE_RULES), ("even", "half_away")]
)
def test_scale_rules_and_roundings(name, scale_rule, rounding):
    """Every rule reaches both quantizations; the float32 recipe tells the rules apart."""
    options = {"scale_rule": scale_rule, "rounding": rounding}
    shape = {"tokens": 3, "hidden": 32, "intermediate": 32}
    check(make_case("float32", "mxfp4", options=options, adjust=_with_ties, **shape), name, "mxfp4", **options)


def _with_ties(case):
    """Activations with ties in every block and largest magnitudes on which the rules differ."""
    x = case.x.copy()
    x[:, :8] = [0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 1.5]
    x[:, 8] = [6.5, 7.0, 6.0]
    return case.replace(x=x)


@pytest.mark.parametrize("activation_quant", [None, "mxfp4"])
def test_no_tokens(name, activation_quant):
    """M = 0: an empty result of the right shape, also behind leading axes."""
    for tokens in (0, (2, 0)):
        case = random_case(tokens=tokens)
        skip_unless_able(case, name, activation_quant)
        y = case.run(implementation=name, activation_quant=activation_quant)
        assert y.shape == case.x.shape
        assert y.dtype == jnp.float32


def test_nothing_but_skipped_slots(name):
    case = random_case(tokens=4, biases=True)
    case = case.replace(topk_ids=np.full_like(case.topk_ids, -1))
    skip_unless_able(case, name, "mxfp4")
    assert (np.asarray(case.run(implementation=name, activation_quant="mxfp4")) == 0).all()


def test_no_experts(name):
    """E = 0, the share of a device that holds none of the experts: zeros, and every id skips."""
    case = random_case(tokens=4, experts=3, biases=True)
    empty = case.replace(
        gate_up=tuple(part[:0] for part in case.gate_up),
        down=tuple(part[:0] for part in case.down),
        gate_up_bias=case.gate_up_bias[:0],
        down_bias=case.down_bias[:0],
    )
    skip_unless_able(empty, name, None)
    expert_map = np.full(3, -1, np.int32)
    for options in ({}, {"expert_map": expert_map}, {"activation_quant": "mxfp4"}, {"jit": False}):
        y = empty.run(implementation=name, **options)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, np.zeros_like(case.x))


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "activation_quant"), [RECIPES[0], RECIPES[3]])
def test_expert_map(name, dtype, activation_quant):
    """Global ids over 12 experts, five of them here; an id outside the map skips as well."""
    expert_map = np.full(12, -1, np.int32)
    expert_map[[7, 2, 9, 0, 11]] = np.arange(5)

    def adjust(case):
        ids = random_ids(np.random.default_rng(1), case.topk_ids.shape, 12)
        ids[0, 0], ids[1, 0], ids[2, 0] = -3, 12, 2**31 - 1
        return case.replace(topk_ids=ids)

    options = {"expert_map": expert_map}
    case = make_case(dtype, activation_quant, adjust=adjust, options=options, biases=True, top_k=3)
    check(case, name, activation_quant, **options)


@pytest.mark.parametrize(
    ("dtype", "experts", "rows"),
    [
        ("int8", 200, [127, 3, -1, 126, -128, 0]),
        ("uint8", 300, [255, 3, 254, 44, 128, 0]),
        ("uint8", 200, [255, 3, 199, 200, 128, 0]),
    ],
)
def test_expert_map_of_a_narrow_type(name, dtype, experts, rows):
    """E does not fit into the type of the map, or the map's largest value is beyond E: nothing wraps."""
    expert_map = np.array(rows, dtype)
    case = random_case(tokens=6, experts=experts, top_k=2, hidden=32, intermediate=32)
    case = case.replace(topk_ids=np.array([[0, 1], [2, 1], [3, 5], [4, 0], [5, 6], [1, -1]], np.int32))
    check(case, name, None, expert_map=expert_map)


def test_ids_of_a_type_that_cannot_hold_all_experts(name):
    case = random_case(tokens=3, experts=200, top_k=2, hidden=32, intermediate=32)
    check(case.replace(topk_ids=np.array([[127, 0], [3, -128], [126, 2]], np.int8)), name, None)


@pytest.mark.parametrize(("dtype", "activation_quant"), [RECIPES[0], RECIPES[3], FP8_RECIPES[1]])
def test_masked_rows_are_never_read(name, dtype, activation_quant):
    """Field case 6: NaN and infinity in rows 5..7 of 8 reach nobody, by mask or by ids of -1; rows 0..4 are bit-equal."""
    case = random_case(tokens=8, dtype=dtype, biases=True)
    skip_unless_able(case, name, activation_quant)
    run = {"implementation": name, "activation_quant": activation_quant}
    x = case.x.copy()
    x[5], x[6], x[7, ::3] = np.nan, np.inf, -np.inf
    mask = np.arange(8) < 5
    ids = np.where(mask[:, None], case.topk_ids, -1)
    clean = np.asarray(case.run(token_mask=mask, **run))
    by_mask = np.asarray(case.replace(x=x).run(token_mask=mask, **run))
    np.testing.assert_array_equal(by_mask, clean)
    assert (by_mask[5:] == 0).all()
    clean = np.asarray(case.replace(topk_ids=ids).run(**run))
    by_ids = np.asarray(case.replace(x=x, topk_ids=ids).run(**run))
    np.testing.assert_array_equal(by_ids, clean)
    np.testing.assert_array_equal(by_ids, by_mask)
    # A call with five tokens may be tiled otherwise: the same numbers, not the same bits.
    short = case.replace(x=x[:5], topk_weights=case.topk_weights[:5], topk_ids=case.topk_ids[:5])
    assert relative_error(by_mask[:5], np.asarray(short.run(**run))) <= TOLERANCES[dtype, activation_quant]
    # Weight 0 alone does not hide a row: its NaN stays in the row.
    unmasked = case.replace(x=x, topk_weights=np.where(mask[:, None], case.topk_weights, 0).astype(np.float32))
    zero_weight = np.asarray(unmasked.run(**run))
    assert relative_error(zero_weight[:5], by_mask[:5]) <= TOLERANCES[dtype, activation_quant]


def test_nan_in_the_weights_of_a_skipped_slot_is_not_read(name):
    case = random_case(tokens=6)
    skip_unless_able(case, name, None)
    ids = case.topk_ids.copy()
    ids[:, 1] = -1
    weights = case.topk_weights.copy()
    weights[:, 1] = np.nan
    check(case.replace(topk_ids=ids, topk_weights=weights), name, None)


@pytest.mark.parametrize(("dtype", "activation_quant"), [RECIPES[0], RECIPES[3], FP8_RECIPES[0]])
def test_router_weight_on_input(name, dtype, activation_quant):
    """The router weight multiplies the stage 1 product instead of the result; the biases are then not weighted."""
    options = {"apply_router_weight_on_input": True}
    case = make_case(dtype, activation_quant, options=options, biases=True, top_k=2)
    check(case, name, activation_quant, **options)


@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
def test_preferred_element_type(name, dtype, out):
    case = random_case(dtype=dtype)
    skip_unless_able(case, name, None, preferred_element_type=out)
    y = case.run(implementation=name, activation_quant=None, preferred_element_type=out)
    assert y.dtype == jnp.dtype(out)
    expected = case.expected()
    assert relative_error(np.asarray(y, np.float64), expected) <= TOLERANCES["bfloat16", None]
    if out == "float32":  # the sum is not rounded to bfloat16 on the way
        # One bf16 rounding of h may fall otherwise; float8 tensor cores keep some 13 bits of a partial sum.
        limit = 1e-3 if sums_in_float8(case, name, None) else 3e-4
        assert relative_error(np.asarray(y, np.float64), expected) <= limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_dtypes(name, dtype):
    case = random_case(dtype="float32", biases=True)
    if dtype == "bfloat16":
        case.gate_up_bias = case.gate_up_bias.astype(jnp.bfloat16)
        case.down_bias = case.down_bias.astype(jnp.bfloat16)
    check(case, name, None)


@pytest.mark.parametrize("which", ["gate_up_bias", "down_bias"])
def test_one_bias_alone(name, which):
    check(random_case(biases=True).replace(**{which: None}), name, None)


def test_weights_say_which_recipe(name):
    """activation_quant="auto", the default, is what the weights were made for; an argument overrides it."""
    case = make_case("float32", "mxfp4", tokens=4)
    skip_unless_able(case, name, "mxfp4")
    weights = case.weights
    made_for_mxfp4 = type(weights)(weights.gate_up, weights.down, activation_quant="mxfp4")
    run = {"implementation": name, "jit": False}
    np.testing.assert_array_equal(case.run(**run), case.run(activation_quant=None, **run))
    auto = case.run(weights=made_for_mxfp4, **run)
    np.testing.assert_array_equal(auto, case.run(activation_quant="mxfp4", **run))
    assert (np.asarray(auto) != np.asarray(case.run(**run))).any()
    overridden = case.run(weights=made_for_mxfp4, activation_quant=None, **run)
    np.testing.assert_array_equal(overridden, case.run(**run))


# --- fp8 activations -------------------------------------------------------------------------------------------------

SCALES = (3 / 448, 1 / 448)  # the second of them small, so that values of h saturate


def test_static_scales(name):
    """One scale for all of x and one for all of h, not mixed up, and not the scales of rows."""
    case = random_case(biases=True)
    y = check(case, name, "fp8", activation_scale=SCALES)
    expected = case.expected(activation_quant="fp8", activation_scale=SCALES)
    for others in (None, SCALES[::-1], (SCALES[0], SCALES[0])):
        other = case.expected(activation_quant="fp8", activation_scale=others)
        assert relative_error(other, expected) > 3 * TOLERANCES["float32", "fp8"]
    array = case.run(implementation=name, activation_quant="fp8", activation_scale=np.array(SCALES, np.float32))
    np.testing.assert_array_equal(array, y)


def test_scales_that_the_weights_hold(name):
    """Static scales of a checkpoint travel with the weights; an argument goes before them, and other recipes ignore them."""
    case = random_case(tokens=6)
    skip_unless_able(case, name, "fp8", activation_scale=SCALES)
    run = {"implementation": name, "jit": False}
    weights = case.weights.replace(activation_quant="fp8", activation_scale=jnp.asarray(SCALES, jnp.float32))
    expected = case.run(activation_quant="fp8", activation_scale=SCALES, **run)
    np.testing.assert_array_equal(case.run(weights=weights, **run), expected)
    prepared = case.run(weights=prepare(weights, name), **run)  # another order of sums, where there is a layout
    assert (
        relative_error(np.asarray(prepared, np.float64), np.asarray(expected, np.float64))
        <= TOLERANCES["float32", "fp8"]
    )
    np.testing.assert_array_equal(
        case.run(weights=weights, activation_scale=SCALES[::-1], **run),
        case.run(activation_quant="fp8", activation_scale=SCALES[::-1], **run),
    )
    np.testing.assert_array_equal(case.run(weights=weights, activation_quant=None, **run), case.run(**run))
    dynamic = case.run(weights=weights.replace(activation_scale=None), **run)
    np.testing.assert_array_equal(dynamic, case.run(activation_quant="fp8", **run))
    assert (np.asarray(dynamic) != np.asarray(expected)).any()


def test_static_scales_are_traced(name):
    """One compilation for all scales; a scan over layers takes each layer's own, [2] out of [L, 2]."""
    layers = [random_case(seed=seed, tokens=4, hidden=32, intermediate=32) for seed in range(2)]
    first = layers[0]
    skip_unless_able(first, name, "fp8", activation_scale=SCALES)
    scales = [np.array(SCALES, np.float32), np.array(SCALES, np.float32) * 3]
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        *(
            case.weights.replace(activation_scale=jnp.asarray(scale))
            for case, scale in zip(layers, scales, strict=True)
        ),
    )
    assert stacked.activation_scale.shape == (2, 2)

    @jax.jit
    def model(x, stacked):
        def block(x, weights):
            y = mxfp4_moe(x, weights, first.topk_weights, first.topk_ids, activation_quant="fp8", implementation=name)
            return y, y

        return jax.lax.scan(block, x, stacked)[1]

    x = first.x
    for case, scale, y in zip(layers, scales, model(first.x, stacked), strict=True):
        case = case.replace(x=np.asarray(x), topk_weights=first.topk_weights, topk_ids=first.topk_ids)
        expected = case.expected(activation_quant="fp8", activation_scale=scale)
        assert relative_error(y, expected) <= TOLERANCES["float32", "fp8"]
        x = y


def test_a_row_that_is_not_finite_stays_alone(name):
    """NaN in a row that is not masked is NaN in that row of y, whole, and in no other; a bad static scale is NaN in all."""
    case = random_case(tokens=5)
    skip_unless_able(case, name, "fp8")
    run = {"implementation": name, "activation_quant": "fp8"}
    x = case.x.copy()
    x[1, 3], x[4, 0] = np.nan, -np.inf
    clean = np.asarray(case.run(**run))
    for scale in (None, SCALES):
        y = np.asarray(case.replace(x=x).run(activation_scale=scale, **run))
        assert np.isnan(y[[1, 4]]).all()
        assert np.isfinite(y[[0, 2, 3]]).all()
        if scale is None:
            np.testing.assert_array_equal(y[[0, 2, 3]], clean[[0, 2, 3]])
    for scale in ((0.0, 0.1), (0.1, -1.0)):
        assert np.isnan(np.asarray(case.run(activation_scale=scale, **run))).all()


# --- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": {"activation": "silu"},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swiglu_oai": {"activation": "swiglu_oai"},
    "swiglu_oai_of_another_model": {"activation": "swiglu_oai", "activation_alpha": 0.75, "activation_limit": 3.0},
    "silu_clamped": {"activation": "silu_clamped", "activation_limit": 4.0},
    "silu_post_clamped": {"activation": "silu_post_clamped", "activation_limit": 4.0},
}


def with_rows_times(powers):
    """Multiplies the gate_up rows by 2 to these powers, repeated along the intermediate axis."""

    def adjust(case):
        codes, scales = case.gate_up
        power = np.tile(np.resize(powers, scales.shape[1] // 2), 2)[:, None]
        x = case.x.copy()
        x[0] = x[1]  # instead of a block of zeros
        return case.replace(x=x, gate_up=(codes, np.maximum(scales + power, 0).astype(np.uint8)))

    return adjust


def gate_and_up(case):
    """Both of every token and its first expert, in float64."""
    weights = oracle.dequantize(*case.gate_up)
    rows = [weights[ids[0]] @ x.astype(np.float64) for ids, x in zip(case.topk_ids, case.x, strict=True)]
    return np.split(np.stack(rows), 2, axis=1)


@pytest.mark.parametrize(
    ("activation", "dtype", "activation_quant"),
    [*((activation, *RECIPES[0]) for activation in ACTIVATIONS), ("swiglu_oai", *RECIPES[3])],
)
def test_activations(name, activation, dtype, activation_quant):
    """Every activation; those with limits beyond them both ways in every token; no other one would pass in its place."""
    options = ACTIVATIONS[activation]
    has_limit = activation not in ("silu", "gelu", "gelu_tanh")
    # The two gelu differ most where the gate is about 2.
    adjust = with_rows_times([-2, -1, 0, 1, 2] if has_limit else [-1])
    shape = {"tokens": 5, "hidden": 32, "intermediate": 96}
    case = make_case(dtype, activation_quant, adjust=adjust, options=options, **shape)
    if has_limit:
        for part in gate_and_up(case):
            assert (part.max(axis=1) > 7).all()
            assert (part.min(axis=1) < -7).all()
    check(case, name, activation_quant, **options)
    if activation_quant is None:
        expected = case.expected(**options)
        for other in ACTIVATIONS:
            if other != activation:
                assert relative_error(case.expected(**ACTIVATIONS[other]), expected) > 5 * TOLERANCES["float32", None]


def jax_activation(gate, up, problem):
    return np.asarray(jax.jit(stage1.activate, static_argnums=2)(gate, up, problem))


def torch_activation(gate, up, problem):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'jax_mxfp4_moe[torch]'")
    from jax_mxfp4_moe.implementations.torch import activate

    return activate(torch.from_numpy(gate), torch.from_numpy(up), problem).numpy()


@pytest.mark.parametrize("run", [jax_activation, torch_activation], ids=["xla", "torch"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_edges_of_their_clamps(run, activation):
    """At a limit, one float32 beside it and far beyond it, either way; a NaN passes every clamp."""
    options = ACTIVATIONS[activation]
    name = options["activation"]
    alpha, limit = resolve_activation("test", name, options.get("activation_alpha"), options.get("activation_limit"))
    resolved = {"activation": name, "activation_alpha": alpha, "activation_limit": limit}
    problem = random_case(tokens=1).problem(None, **resolved)
    edge = np.float32(limit or 4)
    beside = [np.nextafter(edge, np.float32(np.inf)), np.nextafter(edge, np.float32(0))]
    values = np.array([0, 1e-30, 0.5, 1, 2, *beside, edge, 8, 30, 1e4], np.float32)
    values = np.concatenate([-values[1:], values])
    gate, up = (part.ravel().copy() for part in np.meshgrid(values, values))
    expected = oracle.activate(gate, up, name, alpha, limit)
    actual = run(gate, up, problem)
    # Both gelu are float32 roundings of 1 + erf or 1 + tanh, which cancel where the gate is negative.
    size = np.abs(gate.astype(np.float64) * up) if limit is None else 0.0
    assert (np.abs(actual - expected) <= 2e-6 * np.abs(expected) + 2e-7 * size + 1e-37).all()
    if limit is not None:
        beyond = run(np.array([1e30, np.inf], np.float32), np.array([np.inf, 1e30], np.float32), problem)
        assert np.isfinite(beyond).all()
        np.testing.assert_allclose(beyond, oracle.activate(1e30, 1e30, name, alpha, limit), rtol=1e-6)
    nan, one = np.array([np.nan, 1], np.float32), np.array([1, np.nan], np.float32)
    assert np.isnan(run(nan, one, problem)).all()


# --- under transformations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "activation_quant"), [RECIPES[0], RECIPES[3]])
def test_jit_and_eager_agree(name, dtype, activation_quant):
    case = make_case(dtype, activation_quant, biases=True)
    skip_unless_able(case, name, activation_quant)
    run = {"implementation": name, "activation_quant": activation_quant}
    eager = np.asarray(case.run(jit=False, **run), np.float64)
    # XLA may order a float32 sum otherwise when it fuses: equal to a rounding, not to the bit.
    assert relative_error(eager, np.asarray(case.run(**run), np.float64)) <= TOLERANCES[dtype, activation_quant]
    assert (
        relative_error(eager, case.expected(activation_quant=activation_quant)) <= TOLERANCES[dtype, activation_quant]
    )


def test_repeated_calls_are_bit_equal(name):
    case = random_case(tokens=40, top_k=4)
    skip_unless_able(case, name, None)
    first, second = (np.asarray(case.run(implementation=name, deterministic=True)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_inputs_that_are_donated_transposed_or_sliced(name):
    """Whatever layout XLA gives an operand, the implementation sees the logical array; no input is written to."""
    case = random_case(tokens=6)
    skip_unless_able(case, name, None)
    expected, weights = case.expected(), case.weights
    tolerance = TOLERANCES["float32", None]

    def layer(x, topk_ids=case.topk_ids):
        return mxfp4_moe(x, weights, case.topk_weights, topk_ids, implementation=name)

    transposed = jnp.asarray(np.repeat(case.x, 2, axis=0).T.copy())
    ids = jnp.asarray(case.topk_ids.T.copy())
    y = jax.jit(lambda x, ids: layer(x.T[::2], ids.T))(transposed, ids)
    assert relative_error(y, expected) <= tolerance
    whole = jax.jit(layer)
    assert relative_error(whole(transposed.T[1::2]), expected) <= tolerance
    x = jnp.asarray(case.x)
    residual = jax.jit(lambda x: x + layer(x), donate_argnums=0)(x + 0)
    assert relative_error(residual, case.x + expected) <= tolerance
    np.testing.assert_array_equal(whole(x), whole(x))
    np.testing.assert_array_equal(np.asarray(x), case.x)


def test_layers_inside_scan(name):
    """Weights of three layers, stacked, scanned over with the token as the carry."""
    layers = [random_case(seed=seed, tokens=4, hidden=32, intermediate=32, biases=True) for seed in range(3)]
    first = layers[0]
    skip_unless_able(first, name, None)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(case.weights for case in layers))

    @jax.jit
    def model(x, stacked):
        def block(x, weights):
            return mxfp4_moe(x, weights, first.topk_weights, first.topk_ids, implementation=name), None

        return jax.lax.scan(block, x, stacked)[0]

    x = first.x
    for case in layers:
        x = case.replace(x=x.astype(np.float32), topk_weights=first.topk_weights, topk_ids=first.topk_ids).expected()
    assert relative_error(model(first.x, stacked), x) <= 3 * TOLERANCES["float32", None]  # three layers in a row


def test_calls_inside_cond_and_while(name):
    case = random_case(tokens=4, hidden=32, intermediate=32)
    skip_unless_able(case, name, None)
    weights = case.weights

    def layer(x):
        return mxfp4_moe(x, weights, case.topk_weights, case.topk_ids, implementation=name)

    @jax.jit
    def model(x, flag):
        x = jax.lax.cond(flag, layer, lambda x: x, x)
        return jax.lax.fori_loop(0, 2, lambda _, x: layer(x), x)

    x = case.expected()
    for _ in range(2):
        x = case.replace(x=x.astype(np.float32)).expected()
    assert relative_error(model(case.x, True), x) <= 3 * TOLERANCES["float32", None]  # three layers in a row


def test_vmap_over_x(name):
    """A batch of tokens over one set of weights, each with its own routing: what a loop gives."""
    case = random_case(tokens=(3, 4), hidden=32, intermediate=32, biases=True)
    skip_unless_able(case, name, None)

    def layer(x, topk_weights, topk_ids):
        return mxfp4_moe(x, case.weights, topk_weights, topk_ids, implementation=name)

    y = jax.jit(jax.vmap(layer))(case.x, case.topk_weights, case.topk_ids)
    assert relative_error(y, case.expected()) <= TOLERANCES["float32", None]
    first = jax.vmap(lambda x: layer(x, case.topk_weights[0], case.topk_ids[0]))(case.x)
    shared = case.replace(topk_weights=case.topk_weights[[0] * 3], topk_ids=case.topk_ids[[0] * 3])
    assert relative_error(first, shared.expected()) <= TOLERANCES["float32", None]


def test_vmap_over_a_stack_of_weights(name):
    """Three layers side by side on the same x and ids."""
    layers = [random_case(seed=seed, tokens=4, hidden=32, intermediate=32, biases=True) for seed in range(3)]
    first = layers[0]
    skip_unless_able(first, name, None)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(case.weights for case in layers))

    def layer(weights):
        return mxfp4_moe(first.x, weights, first.topk_weights, first.topk_ids, implementation=name)

    route = {"x": first.x, "topk_weights": first.topk_weights, "topk_ids": first.topk_ids}
    expected = np.stack([case.replace(**route).expected() for case in layers])
    assert relative_error(jax.jit(jax.vmap(layer))(stacked), expected) <= TOLERANCES["float32", None]


def test_calls_from_two_threads_at_once(name):
    """Each of two threads gets the answers to its own calls; both trace, compile and run the same two shapes meanwhile."""
    cases = [random_case(seed=seed, tokens=6 + seed % 2, hidden=32, intermediate=32, biases=True) for seed in range(4)]
    skip_unless_able(cases[0], name, None)
    expected = [case.expected() for case in cases]
    start = threading.Barrier(2, timeout=60)

    def work(mine):
        start.wait()
        return [
            relative_error(cases[i].run(implementation=name, jit=False), expected[i]) for _ in range(10) for i in mine
        ]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        errors = [error for part in pool.map(work, ([0, 1], [2, 3])) for error in part]
    assert max(errors) <= TOLERANCES["float32", None]


def test_eval_shape_agrees(name):
    """Field case 20: the abstract result is the concrete one, at sizes that a kernel would pad."""
    for dtype, out in itertools.product(("float32", "bfloat16"), (None, "float32")):
        case = random_case(tokens=(2, 3), hidden=96, intermediate=96, dtype=dtype, biases=True)
        skip_unless_able(case, name, None, preferred_element_type=out)
        shape = jax.eval_shape(lambda: case.run(implementation=name, preferred_element_type=out))  # noqa: B023
        assert shape.shape == (2, 3, 96)
        assert shape.dtype == jnp.dtype(out or dtype)


def test_with_x64(name):
    """A program that enables 64-bit types elsewhere gets the same answer."""
    case = random_case(tokens=4, hidden=32, intermediate=32)
    skip_unless_able(case, name, "mxfp4")
    run = {"implementation": name, "activation_quant": "mxfp4", "jit": False}
    expected = np.asarray(case.run(**run))
    with jax.enable_x64(True):
        y = case.run(**run)
    assert y.dtype == jnp.float32
    assert relative_error(y, expected) <= TOLERANCES["float32", None]


# --- preparation -----------------------------------------------------------------------------------------------------


def test_prepared_weights_give_the_same(name):
    """prepare changes the layout, never a number; to prepare twice is to prepare once."""
    case = random_case(biases=True)
    skip_unless_able(case, name, None)
    prepared = prepare(case.weights, name)
    y, expected = case.run(weights=prepared, implementation=name), case.run(implementation=name)
    if prepared.layout == PACKED:
        np.testing.assert_array_equal(y, expected)
    assert relative_error(y, expected) <= TOLERANCES["float32", None]  # another layout may sum in another order
    again = prepare(prepared, name)
    assert jax.tree.structure(again) == jax.tree.structure(prepared)
    jax.tree.map(np.testing.assert_array_equal, again, prepared)


# --- properties ------------------------------------------------------------------------------------------------------

_property_case = random_case(tokens=6, top_k=3, hidden=32, intermediate=32, biases=True)


@settings(max_examples=12)
@given(
    ids=st.lists(st.one_of(st.integers(-3, 8), st.sampled_from([-(2**31), 2**31 - 1])), min_size=18, max_size=18),
    weights=st.lists(st.floats(-2, 2, width=32), min_size=18, max_size=18),
)
def test_any_ids_and_weights(ids, weights):
    """Negative, too large and repeated ids and any weights, for all implementations; one shape, one compilation."""
    case = _property_case.replace(
        topk_ids=np.array(ids, np.int32).reshape(6, 3), topk_weights=np.array(weights, np.float32).reshape(6, 3)
    )
    expected = case.expected()
    for name in NAMES:
        if case.why_not(name) is None:
            y = np.asarray(case.run(implementation=name), np.float64)
            # Weights of both signs may cancel: the error is measured against the size of the terms.
            size = np.linalg.norm(case.replace(topk_weights=np.abs(case.topk_weights)).expected())
            assert np.linalg.norm(y - expected) <= TOLERANCES["float32", None] * max(size, 1e-30)


@settings(max_examples=12)
@given(scales=st.lists(st.integers(0, 200), min_size=8, max_size=8), codes=st.binary(min_size=32, max_size=32))
def test_any_scale_bytes(scales, codes):
    """Scale bytes far from 127 in the weights of one row: the result is finite and the oracle's."""
    case = _property_case
    gate_up, down = (tuple(part.copy() for part in pair) for pair in (case.gate_up, case.down))
    down[1][0, :8, 0] = np.minimum(scales, 150)
    down[0][0, :2] = np.frombuffer(codes, np.uint8).reshape(2, 16)
    gate_up[1][1, :8, 0] = np.minimum(scales, 140)
    case = case.replace(gate_up=gate_up, down=down)
    expected = case.expected()
    for name in NAMES:
        if case.why_not(name) is None:
            y = np.asarray(case.run(implementation=name), np.float64)
            error = np.linalg.norm(y - expected, axis=0) / np.maximum(np.linalg.norm(expected, axis=0), 1)
            assert error.max() <= 1e-4  # by column, so that a huge column does not hide the others; sums cancel


@settings(max_examples=8)
@given(
    tokens=st.integers(0, 9),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 4),
    hidden=st.integers(1, 4),
    intermediate=st.integers(1, 4),
    biases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_small_shape(tokens, experts, top_k, hidden, intermediate, biases, seed):
    """Sizes that no one chose, for all implementations. Each example compiles, so there are few."""
    sizes = {"tokens": tokens, "experts": experts, "top_k": top_k}
    case = random_case(seed=seed, hidden=32 * hidden, intermediate=32 * intermediate, biases=biases, **sizes)
    expected = case.expected()
    for name in NAMES:
        if case.why_not(name) is None:
            y = case.run(implementation=name)
            assert y.shape == case.x.shape
            assert relative_error(y, expected) <= TOLERANCES["float32", None]
