"""route, topk_routing and append_shared_experts: which rows go to which expert, with nothing quantized."""

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_softmax_then_top_k(top_k, renormalize, dtype):
    logits = jnp.asarray(np.random.default_rng(top_k).normal(size=(2, 5, 8)) * 3, dtype)
    weights, ids = topk_routing(logits, top_k, renormalize=renormalize)
    expected_weights, expected_ids = oracle.topk_softmax(np.asarray(logits, np.float64), top_k, renormalize)
    assert weights.shape == ids.shape == (2, 5, top_k)
    assert weights.dtype == jnp.float32
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


def test_renormalised_softmax_is_softmax_of_the_chosen():
    logits = np.random.default_rng(1).normal(size=(7, 16))
    weights, ids = topk_routing(jnp.asarray(logits, jnp.float32), 4)
    chosen = np.exp(np.take_along_axis(logits, np.asarray(ids), -1))
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_sigmoid_scores(renormalize):
    logits = np.random.default_rng(2).normal(size=(7, 16))
    weights, ids = topk_routing(jnp.asarray(logits, jnp.float32), 4, scoring="sigmoid", renormalize=renormalize)
    expected_ids = np.argsort(-logits, axis=-1, kind="stable")[:, :4]
    expected = np.take_along_axis(1 / (1 + np.exp(-logits)), expected_ids, -1)
    if renormalize:
        expected = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


def test_equal_logits_choose_ascending_ids():
    weights, ids = topk_routing(jnp.zeros((2, 6)), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_extreme_logits_give_finite_weights_and_distinct_ids(scoring, renormalize):
    """NaN counts as the lowest logit, and no row yields NaN or one expert twice."""
    inf, nan = np.inf, np.nan
    logits = jnp.asarray(
        [
            [nan, 1, nan, 0],
            [nan, nan, nan, nan],
            [-inf, -inf, -inf, -inf],
            [inf, inf, 0, 0],
            [-inf, 3, nan, -inf],
            [1e38, -1e38, 3e38, 0],
            [-200, -300, -250, -400],
        ],
        jnp.float32,
    )
    weights, ids = topk_routing(logits, 2, scoring=scoring, renormalize=renormalize)
    assert np.isfinite(weights).all()
    assert (np.asarray(weights) >= 0).all()
    assert (np.asarray(ids)[:, 0] != np.asarray(ids)[:, 1]).all()
    assert ids[0].tolist() == [1, 3]
    assert ids[4, 0] == 1
    assert sorted(ids[3].tolist()) == [0, 1]
    assert ids[5].tolist() == [2, 0]
    assert ids[6].tolist() == [0, 2]
    if renormalize:
        np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "top_k", "keywords", "error", "texts"),
    [
        (np.zeros((3, 4), np.int32), 2, {}, TypeError, ["int32", "expected a floating-point", "Cast"]),
        (np.zeros((3, 4), np.float32), 5, {}, ValueError, ["5", "(3, 4)", "expected"]),
        (np.zeros((3, 4), np.float32), 0, {}, ValueError, ["0", "(3, 4)", "expected"]),
        (np.float32(1), 1, {}, ValueError, ["()", "expected"]),
        (np.zeros((3, 4), np.float32), 2.0, {}, (TypeError, ValueError), ["num_experts_per_tok=2.0 given", "expected"]),
        (np.zeros((3, 4), np.float32), "2", {}, (TypeError, ValueError), ["num_experts_per_tok='2' given", "expected"]),
        (np.zeros((3, 4), np.float32), None, {}, (TypeError, ValueError), ["num_experts_per_tok=None", "expected"]),
        (np.zeros((3, 4), np.float32), 2, {"scoring": "relu"}, ValueError, ["'relu'", "'softmax'", "'sigmoid'"]),
    ],
    ids=["integers", "too_many", "none", "rank_0", "float_k", "text_k", "none_k", "scoring"],
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
