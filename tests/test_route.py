"""route, topk_routing and append_shared_experts: which rows go to which expert, with nothing quantized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mxfp4_moe import topk_routing
from jax_mxfp4_moe.route import append_shared_experts, route

_route = jax.jit(route, static_argnums=1)


def check_routing(ids, experts, run=_route) -> None:
    """Every law of Routing, by loops over slots."""
    ids = np.asarray(ids)
    routing = run(jnp.asarray(ids), experts)
    order, offsets, hit = (np.asarray(part) for part in (routing.order, routing.offsets, routing.hit))
    slots = ids.reshape(-1).tolist()
    assert sorted(order.tolist()) == list(range(len(slots)))
    assert len(offsets) == experts + 1
    assert offsets[0] == 0
    rows = []
    for expert in range(experts):
        mine = [slot for slot, id_ in enumerate(slots) if id_ == expert]
        assert order[offsets[expert] : offsets[expert + 1]].tolist() == mine
        rows += mine
    assert offsets[experts] == len(rows)
    assert sorted(order[len(rows) :].tolist()) == [s for s, id_ in enumerate(slots) if not 0 <= id_ < experts]
    used = sorted({slots[slot] for slot in rows})
    assert int(routing.num_hit) == len(used)
    assert hit.tolist() == used + [0] * (experts - len(used))
    assert {part.dtype for part in routing} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 1], [2, 3]],
        [[3, 2], [3, 1], [3, 0]],  # tokens keep their order inside an expert
        [[3, 3], [3, 3]],
        [[0, 0], [0, 0]],  # expert 0 is an expert like the others
        [[3, -1], [-1, -1], [-7, 1]],
        [[4, 0], [5, 2**31 - 1], [-(2**31), 1]],
        [[-1, -1], [4, 4]],
        [[2]],
        [[-1]],
        [[1, 1, 1], [2, 1, 2]],
    ],
    ids=str,
)
def test_route(ids):
    """Field cases 7, 8, 9 and 10: skipped, foreign and repeated ids, empty experts and a full one."""
    check_routing(np.array(ids, np.int32), 4)
    check_routing(np.array(ids, np.int32), 4, run=route)


def test_route_without_rows():
    check_routing(np.zeros((0, 2), np.int32), 3)


def test_route_a_single_expert():
    check_routing(np.array([[0, -1, 1, 0]], np.int32), 1)


@given(st.lists(st.integers(-3, 9), min_size=24, max_size=24))
def test_route_any_ids(ids):
    check_routing(np.array(ids, np.int32).reshape(8, 3), 7)


def test_route_many_experts_at_random():
    rng = np.random.default_rng(0)
    check_routing(rng.integers(-20, 300, (257, 8)).astype(np.int32), 256)


def test_route_under_vmap():
    ids = np.random.default_rng(0).integers(-1, 5, (3, 6, 2)).astype(np.int32)
    mapped = jax.vmap(lambda part: route(part, 4))(jnp.asarray(ids))
    for i in range(3):
        one = _route(jnp.asarray(ids[i]), 4)
        for a, b in zip(mapped, one, strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_route_is_int32_at_sizes_whose_products_are_not():
    """Field case 12 (b): M = 40000, K = 8 and E = 512 by shapes alone, and no index of a slot leaves int32."""
    routing = jax.eval_shape(lambda ids: route(ids, 512), jax.ShapeDtypeStruct((40000, 8), jnp.int32))
    assert routing.order.shape == (320000,)
    assert routing.offsets.shape == (513,)
    assert {part.dtype for part in routing} == {jnp.dtype(jnp.int32)}


# --- topk_routing ----------------------------------------------------------------------------------------------------

# What the models pass, at a size of eight experts.
MODELS = {
    "softmax": {},
    "softmax, not renormalized": {"renormalize": False},
    "gpt-oss": {"scoring": "softmax_after_topk"},
    "DeepSeek-V2": {"num_groups": 4, "topk_groups": 2, "renormalize": False, "routed_scaling_factor": 16.0},
    "DeepSeek-V3": {
        "scoring": "sigmoid",
        "bias": True,
        "num_groups": 4,
        "topk_groups": 2,
        "routed_scaling_factor": 2.5,
    },
    "Kimi-K2": {"scoring": "sigmoid", "bias": True, "num_groups": 1, "topk_groups": 1, "routed_scaling_factor": 2.827},
    "DeepSeek-V4": {"scoring": "sqrtsoftplus", "bias": True, "routed_scaling_factor": 1.5},
    "Llama 4": {"scoring": "sigmoid", "renormalize": False},
    "ERNIE": {"bias": True},
    "best of a group by max with a bias": {"bias": True, "num_groups": 2, "topk_groups": 1, "group_score": "max"},
    "best two of a group without a bias": {"num_groups": 2, "topk_groups": 1, "group_score": "top2_sum"},
}


def model_options(name, experts=8):
    options = dict(MODELS[name])
    if options.pop("bias", False):
        options["correction_bias"] = np.random.default_rng(7).normal(size=experts).astype(np.float32) / 4
    return options


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_routing_of_models(model, top_k):
    """Weights and ids of every way to route, against loops over sorted lists in float64."""
    options = model_options(model)
    logits = np.random.default_rng(top_k).normal(size=(2, 40, 8)).astype(np.float32) * 3
    weights, ids = jax.jit(lambda logits: topk_routing(logits, top_k, **options))(logits)
    expected_weights, expected_ids = oracle.topk_routing(logits, top_k, **options)
    assert weights.shape == ids.shape == (2, 40, top_k)
    assert weights.dtype == jnp.float32
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=3e-6)


def test_the_ways_to_route_differ():
    """No way stands for another one on these logits, so that the test above can tell them apart."""
    logits = np.random.default_rng(3).normal(size=(80, 8)) * 3
    results = [oracle.topk_routing(logits, 3, **model_options(model)) for model in MODELS]
    dense = [np.zeros((80, 8)) for _ in results]
    for out, (weights, ids) in zip(dense, results, strict=True):
        np.put_along_axis(out, ids, weights, axis=-1)
    for i, one in enumerate(dense):
        for j, other in enumerate(dense[:i]):
            # The softmax of the chosen is the renormalised softmax: two ways to say the same.
            same = {"softmax", "gpt-oss"} == {list(MODELS)[i], list(MODELS)[j]}
            assert np.allclose(one, other, rtol=1e-3) == same, (list(MODELS)[i], list(MODELS)[j])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_logits_are_computed_in_float32(dtype):
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(5, 8)) * 3, dtype)
    weights, ids = topk_routing(logits, 8, renormalize=False)
    expected_weights, expected_ids = oracle.topk_routing(np.asarray(logits, np.float64), 8, renormalize=False)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=3e-6)


def test_the_correction_bias_changes_the_choice_and_not_the_weights():
    """By figure: sigmoid(0) = .5 everywhere; the bias lifts experts 3 and 1, whose weights stay equal."""
    logits, bias = np.zeros((1, 4), np.float32), np.array([0, 0.1, 0, 0.2], np.float32)
    weights, ids = topk_routing(logits, 2, scoring="sigmoid", correction_bias=bias, renormalize=False)
    assert ids.tolist() == [[3, 1]]
    assert weights.tolist() == [[0.5, 0.5]]
    weights, _ = topk_routing(logits, 2, scoring="sigmoid", correction_bias=bias, routed_scaling_factor=2.5)
    assert weights.tolist() == [[1.25, 1.25]]  # the factor comes after the renormalization


def test_group_scores_by_figure():
    """Group 0 has the best expert, group 1 the best two; outside of the group chosen nobody is, however negative the rest."""
    logits = np.log(np.array([[0.6, 0.01, 0.19, 0.2]], np.float32))
    for group_score, expected in (("max", [0, 1]), ("top2_sum", [0, 1])):
        _, ids = topk_routing(logits, 2, num_groups=2, topk_groups=1, group_score=group_score)
        assert ids.tolist() == [expected]
    logits = np.log(np.array([[0.4, 0.01, 0.29, 0.3]], np.float32))
    for group_score, expected in (("max", [0, 1]), ("top2_sum", [3, 2])):
        _, ids = topk_routing(logits, 2, num_groups=2, topk_groups=1, group_score=group_score)
        assert ids.tolist() == [expected]
    # Biased scores below 0 in the chosen group: an expert outside of it would win against them with a score of 0.
    bias = np.array([-3, -4, -5, -6], np.float32)
    _, ids = topk_routing(logits, 2, scoring="sigmoid", correction_bias=bias, num_groups=2, topk_groups=1)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("model", MODELS)
def test_equal_logits_choose_ascending_ids(model):
    options = model_options(model)
    if "correction_bias" in options:
        options["correction_bias"] = jnp.zeros(8)
    weights, ids = topk_routing(jnp.zeros((2, 8)), 3, **options)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert (np.asarray(weights) == np.asarray(weights)[0, 0]).all()


@pytest.mark.parametrize("model", MODELS)
def test_extreme_logits_give_finite_weights_and_distinct_ids(model):
    """A NaN counts as the lowest logit, and no row yields NaN, an expert twice, or one outside of the groups."""
    inf, nan = np.inf, np.nan
    rows = [
        [nan, 1, nan, 0, nan, nan, nan, nan],
        [nan] * 8,
        [-inf] * 8,
        [inf, inf, 0, 0, 0, 0, 0, 0],
        [inf] * 8,
        [-inf, 3, nan, -inf, -inf, -inf, nan, nan],
        [1e38, -1e38, 3e38, 0, -3e38, 0, 0, 0],
        [-200, -300, -250, -400, -500, -600, -700, -800],
    ]
    options = model_options(model)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def route_and_sum(logits):
        weights, ids = topk_routing(logits, 2, **options)
        return weights[:, 0].sum(), (weights, ids)

    (_, (weights, ids)), derivative = jax.jit(route_and_sum)(jnp.asarray(rows, jnp.float32))
    assert np.isfinite(derivative).all()
    assert np.isfinite(weights).all()
    assert (np.asarray(weights) >= 0).all()
    assert (np.asarray(ids)[:, 0] != np.asarray(ids)[:, 1]).all()
    assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 8)).all()
    if "num_groups" in options:
        groups = np.asarray(ids) // (8 // options["num_groups"])
        assert all(len(set(row)) <= options["topk_groups"] for row in groups.tolist())
    if not {"correction_bias", "num_groups"} & set(options):
        assert ids[0].tolist() == [1, 3]
        assert ids[5, 0] == 1
        assert sorted(ids[3].tolist()) == [0, 1]
        assert ids[6].tolist() == [2, 0]
        assert ids[7].tolist() == [0, 2]
        if options.get("renormalize", True) and options.get("scoring") != "sigmoid":
            np.testing.assert_allclose(np.asarray(weights)[:7].sum(-1), 1, rtol=1e-6)


def test_a_bias_that_is_nan_ranks_last():
    bias = np.array([np.nan, 0, 0, np.nan], np.float32)
    weights, ids = topk_routing(np.zeros((1, 4), np.float32), 3, scoring="sigmoid", correction_bias=bias)
    assert ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("model", ["gpt-oss", "DeepSeek-V2", "DeepSeek-V3", "DeepSeek-V4"])
def test_gradients_reach_the_logits_through_the_weights(model):
    """By differences of the oracle in float64; the correction bias gets none."""
    logits = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    direction = np.random.default_rng(1).normal(size=(4, 3))
    step = np.random.default_rng(2).normal(size=(4, 8))
    options = model_options(model)
    bias = options.pop("correction_bias", None)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(logits, bias):
        return (topk_routing(logits, 3, correction_bias=bias, **options)[0] * direction).sum()

    of_logits, of_bias = gradients(logits, bias)
    up, down = (
        oracle.topk_routing(logits.astype(np.float64) + sign * 1e-6 * step, 3, correction_bias=bias, **options)[0]
        for sign in (1, -1)
    )
    np.testing.assert_allclose((np.asarray(of_logits) * step).sum(), ((up - down) * direction).sum() / 2e-6, rtol=1e-4)
    assert of_bias is None or (np.asarray(of_bias) == 0).all()


LOGITS = np.zeros((3, 4), np.float32)
GROUPS = {"num_groups": 2, "topk_groups": 1}


@pytest.mark.parametrize(
    ("logits", "top_k", "keywords", "error", "texts"),
    [
        (np.zeros((3, 4), np.int32), 2, {}, TypeError, ["int32", "expected a floating-point", "Cast"]),
        (LOGITS, 5, {}, ValueError, ["5", "(3, 4)", "expected"]),
        (LOGITS, 0, {}, ValueError, ["0", "(3, 4)", "expected"]),
        (np.float32(1), 1, {}, ValueError, ["()", "expected"]),
        (LOGITS, 2.0, {}, ValueError, ["num_experts_per_tok=2.0 given", "expected"]),
        (LOGITS, "2", {}, ValueError, ["num_experts_per_tok='2' given", "expected"]),
        (LOGITS, None, {}, ValueError, ["num_experts_per_tok=None", "expected"]),
        (LOGITS, 2, {"scoring": "relu"}, ValueError, ["'relu'", "'softmax'", "'sigmoid'", "'softmax_after_topk'"]),
        (LOGITS, 2, {"correction_bias": np.zeros(3, np.float32)}, ValueError, ["(3,)", "(3, 4)", "expected (4,)"]),
        (LOGITS, 2, {"correction_bias": np.zeros(4, int)}, TypeError, ["correction_bias", "expected a floating-point"]),
        (
            LOGITS,
            2,
            {"correction_bias": np.zeros(4, np.float32), "scoring": "softmax_after_topk"},
            ValueError,
            ["correction_bias given", "expected None", "add it to them"],
        ),
        (LOGITS, 3, GROUPS, ValueError, ["num_groups=2", "topk_groups=1", "num_experts_per_tok=3", "found 2"]),
        (LOGITS, 1, {"num_groups": 3, "topk_groups": 1}, ValueError, ["num_groups=3", "4 experts", "to divide"]),
        (LOGITS, 1, {"num_groups": 2, "topk_groups": 3}, ValueError, ["topk_groups=3", "topk_groups <= num_groups"]),
        (LOGITS, 1, {"num_groups": 2, "topk_groups": 0}, ValueError, ["topk_groups=0", "1 <= topk_groups"]),
        (LOGITS, 1, {"num_groups": 0, "topk_groups": 0}, ValueError, ["num_groups=0", "1 <= topk_groups"]),
        (LOGITS, 1, {"num_groups": 2}, ValueError, ["topk_groups=None", "expected two integers"]),
        (LOGITS, 1, {"topk_groups": 2}, ValueError, ["num_groups=None", "expected two integers"]),
        (LOGITS, 1, {**GROUPS, "group_score": "sum"}, ValueError, ["'sum'", "'max'", "'top2_sum'"]),
        (LOGITS, 1, {"group_score": "max"}, ValueError, ["group_score='max'", "without num_groups"]),
        (
            LOGITS,
            1,
            {"num_groups": 4, "topk_groups": 1, "group_score": "top2_sum"},
            ValueError,
            ["num_groups=4", "at least 2 experts a group", "'max'"],
        ),
    ],
)
def test_topk_routing_refuses(logits, top_k, keywords, error, texts):
    with pytest.raises(error) as caught:
        topk_routing(logits, top_k, **keywords)
    for text in ("topk_routing", *texts):
        assert text in str(caught.value)


def test_top_k_may_be_a_numpy_integer():
    """A K read from an array or a checkpoint's header is as good as a Python int."""
    logits = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for a, b in zip(topk_routing(logits, np.int64(2)), topk_routing(logits, 2), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", [(8, -1), (-1, 2)])
def test_append_shared_experts_refuses(sizes):
    """A negative number would shorten nothing and number the ids wrongly."""
    weights, ids = np.ones((3, 2), np.float32), np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match=r"append_shared_experts: .*=-1.* given; .*negative"):
        append_shared_experts(weights, ids, *sizes)


def test_append_shared_experts():
    """Ids E..E+S-1 with weight 1 behind the routed ones, whatever the leading axes and the types."""
    weights = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 3, 2)), jnp.float32)
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 8, (2, 3, 2)), jnp.int32)
    more_weights, more_ids = append_shared_experts(weights, ids, 8, 2)
    assert more_ids.dtype == ids.dtype
    assert more_weights.dtype == weights.dtype
    np.testing.assert_array_equal(more_ids[..., :2], ids)
    np.testing.assert_array_equal(more_weights[..., :2], weights)
    assert np.broadcast_to([8, 9], (2, 3, 2)).tolist() == more_ids[..., 2:].tolist()
    assert (np.asarray(more_weights)[..., 2:] == 1).all()
    none_weights, none_ids = append_shared_experts(weights, ids, 8, 0)
    np.testing.assert_array_equal(none_ids, ids)
    np.testing.assert_array_equal(none_weights, weights)
