"""Step 1: which rows go to which expert.

`topk_routing` turns router logits into weights and ids; `route` sorts the (token, expert) pairs by expert, so that each
expert's rows lie together for the two grouped products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Rows sorted by expert.

    Row p of the sorted order is slot `order[p]` of the flattened [tokens, top_k] ids, that is token `order[p] // top_k`.
    Expert e owns rows `offsets[e]` to `offsets[e + 1]`, in the order of their slots. Rows from `offsets[experts]` on
    belong to skipped slots and are not computed.

    Attributes:
      order: [tokens * top_k] int32, a permutation of the slots.
      offsets: [experts + 1] int32, ascending.
      hit: [experts] int32: the experts that own a row, ascending, first; the rest is filled with 0.
      num_hit: [] int32, how many of `hit` count.
    """

    order: jax.Array
    offsets: jax.Array
    hit: jax.Array
    num_hit: jax.Array


def route(topk_ids: jax.Array, experts: int) -> Routing:
    """Sorts the slots of `topk_ids` by expert, stably.

    Args:
      topk_ids: [tokens, top_k] int32; ids outside of 0..experts-1 mark skipped slots.
      experts: number of experts whose weights are here.
    """
    ids = topk_ids.reshape(-1)
    ids = jnp.where((ids < 0) | (ids >= experts), experts, ids)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    # Counted, not searched for in ids[order]: JAX cannot trace jnp.searchsorted where some of the mesh axes are Manual and others Auto.
    sizes = jnp.zeros(experts + 1, jnp.int32).at[ids].add(1)[:experts]
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    is_hit = sizes > 0
    hit = jnp.nonzero(is_hit, size=experts, fill_value=0)[0].astype(jnp.int32)
    return Routing(order, offsets, hit, is_hit.sum(dtype=jnp.int32))


def topk_routing(
    logits: Any,
    num_experts_per_tok: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Any = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    group_score: str | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts from router logits. Everything is computed in float32, in this order:

    1. a score for each expert: `softmax` over all of them, `sigmoid`, or `sqrtsoftplus`, sqrt(log(1 + exp(logit)));
    2. the choice: the K experts with the largest score + correction_bias, within the best groups if there are groups;
    3. the weights: the scores of the chosen, without the bias; `renormalize` divides them by their sum + 1e-20;
    4. times `routed_scaling_factor`.

    With scoring "softmax_after_topk" the choice is by logit and the weights are the softmax over the K chosen logits.

    | models                           | arguments                                                                              |
    |----------------------------------|----------------------------------------------------------------------------------------|
    | Mixtral, Qwen3                   | the defaults (`renormalize` is `norm_topk_prob`)                                       |
    | gpt-oss                          | scoring="softmax_after_topk"; the router's bias is part of the logits                  |
    | DeepSeek-V2                      | num_groups, topk_groups, renormalize=False, routed_scaling_factor                      |
    | DeepSeek-V3 and R1, Kimi-K2      | scoring="sigmoid", correction_bias, num_groups, topk_groups, routed_scaling_factor     |
    | DeepSeek-V4                      | scoring="sqrtsoftplus", correction_bias, routed_scaling_factor                         |
    | Llama 4                          | scoring="sigmoid", renormalize=False, K = 1, with `apply_router_weight_on_input`       |

    As in the models' own code: `inference/model.py` of deepseek-ai/DeepSeek-V3, and the routers of deepseek_v2, deepseek_v3, deepseek_v4,
    gpt_oss, mixtral, qwen3_moe and llama4 in transformers. Experts outside of the chosen groups are ruled out, as in the former; where
    the latter give them the score 0, they can win against a negative biased score.

    Args:
      logits: [..., experts] floating point.
      num_experts_per_tok: K, how many experts a token uses.
      scoring: "softmax", "sigmoid", "sqrtsoftplus" or "softmax_after_topk".
      renormalize: makes the weights of a token sum to 1; without effect on "softmax_after_topk", whose weights do.
      correction_bias: [experts] or None: `e_score_correction_bias`, which balances load: it changes the choice and not the weights.
      num_groups, topk_groups: `n_group` and `topk_group`: experts form `num_groups` groups of neighbouring ids, and only those in
        the best `topk_groups` groups can be chosen.
      group_score: what ranks a group: "max", its best expert, or "top2_sum", the sum of its best two, correction_bias included.
        None is "top2_sum" with a correction_bias and "max" without, as in DeepSeek-V3 and V2.
      routed_scaling_factor: multiplies the weights, last.

    Returns:
      topk_weights [..., K] float32 and topk_ids [..., K] int32, best first, equal ones by ascending id. A NaN logit or biased score counts
      as the lowest, so that ids stay distinct and weights finite.

    Raises:
      ValueError: K is not in 1..experts or is more than the chosen groups hold, groups do not divide the experts, or a name is unknown.
      TypeError: logits or correction_bias are not floating point.
    """
    where = "topk_routing"
    logits = jnp.asarray(logits)
    correction_bias = None if correction_bias is None else jnp.asarray(correction_bias)
    for name, array in (("logits", logits), ("correction_bias", correction_bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{where}: {name} of dtype {array.dtype} given; expected a floating-point type. Cast {name}."
            )
    count = num_experts_per_tok
    if logits.ndim == 0 or not hasattr(count, "__index__") or not 1 <= count <= logits.shape[-1]:
        raise ValueError(
            f"{where}: num_experts_per_tok={count!r} given with logits of shape {logits.shape}; expected "
            "logits [..., experts] and an integer 1 <= num_experts_per_tok <= experts."
        )
    if scoring not in SCORINGS:
        raise ValueError(f"{where}: scoring={scoring!r} given; expected one of {', '.join(map(repr, SCORINGS))}.")
    if correction_bias is not None and correction_bias.shape != logits.shape[-1:]:
        raise ValueError(
            f"{where}: correction_bias of shape {correction_bias.shape} given with logits of shape {logits.shape}; expected "
            f"{logits.shape[-1:]}, one entry an expert."
        )
    if correction_bias is not None and scoring == "softmax_after_topk":
        raise ValueError(
            f"{where}: correction_bias given with scoring='softmax_after_topk'; expected None. A bias of the router itself, as in "
            "gpt-oss, is part of the logits: add it to them."
        )
    group_score = _check_groups(where, logits, count, correction_bias, num_groups, topk_groups, group_score)

    logits = _finite(logits.astype(jnp.float32))
    scores = SCORINGS[scoring](logits)
    # Without a bias the logits have the order of the scores, without the ties at 0 and 1.
    choice = logits if correction_bias is None else _finite(scores + correction_bias.astype(jnp.float32))
    if num_groups is not None:
        assert topk_groups is not None
        ranked = scores if correction_bias is None and group_score == "top2_sum" else choice
        choice = jnp.where(_in_best_groups(ranked, num_groups, topk_groups, group_score), choice, -jnp.inf)
    _, ids = jax.lax.top_k(choice, count)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if scoring == "softmax_after_topk":
        weights = jax.nn.softmax(weights, axis=-1)
    elif renormalize:
        # Times a power of two, which changes nothing but keeps 1 / sum ** 2, a factor of the derivative, finite.
        total = weights.sum(axis=-1, keepdims=True) + 1e-20
        weights = (weights * 2.0**33) / (total * 2.0**33)
    return weights * jnp.float32(routed_scaling_factor), ids.astype(jnp.int32)


def _sqrtsoftplus(logits: jax.Array) -> jax.Array:
    # The root has no derivative at 0, where softplus underflows.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(jnp.float32).tiny))


SCORINGS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
    "softmax_after_topk": lambda logits: logits,
}
"""The scores of all experts, of their logits; those of "softmax_after_topk" wait for the choice."""

GROUP_SCORES = ("max", "top2_sum")


def _finite(x: jax.Array) -> jax.Array:
    """NaN as the lowest number, so that a sort is one and -inf is left for what must not be chosen."""
    info = jnp.finfo(jnp.float32)
    return jnp.clip(jnp.where(jnp.isnan(x), -jnp.inf, x), info.min, info.max)


def _in_best_groups(ranked: jax.Array, num_groups: int, topk_groups: int, group_score: str) -> jax.Array:
    """[..., experts] bool: whether an expert is in one of its token's `topk_groups` best groups."""
    groups = ranked.reshape(*ranked.shape[:-1], num_groups, ranked.shape[-1] // num_groups)
    # Halves, because the sum of two largest finite numbers is not finite.
    best = groups.max(axis=-1) if group_score == "max" else (jax.lax.top_k(groups, 2)[0] / 2).sum(axis=-1)
    _, chosen = jax.lax.top_k(best, topk_groups)
    is_chosen = (chosen[..., None] == jnp.arange(num_groups)).any(axis=-2)
    return jnp.repeat(is_chosen, groups.shape[-1], axis=-1)


def _check_groups(
    where: str,
    logits: jax.Array,
    count: int,
    correction_bias: jax.Array | None,
    num_groups: int | None,
    topk_groups: int | None,
    group_score: str | None,
) -> str:
    """Returns group_score with its default filled in."""
    experts = logits.shape[-1]
    given = f"{where}: num_groups={num_groups!r} and topk_groups={topk_groups!r} given with {experts} experts"
    if group_score is not None and group_score not in GROUP_SCORES:
        raise ValueError(
            f"{where}: group_score={group_score!r} given; expected one of {', '.join(map(repr, GROUP_SCORES))}."
        )
    if num_groups is None and topk_groups is None:
        if group_score is not None:
            raise ValueError(
                f"{where}: group_score={group_score!r} given without num_groups and topk_groups; expected all three."
            )
        return "max"
    if not all(hasattr(n, "__index__") for n in (num_groups, topk_groups)):
        raise ValueError(f"{given}; expected two integers, or None for both.")
    assert num_groups is not None
    assert topk_groups is not None
    if not 1 <= topk_groups <= num_groups or experts % num_groups:
        raise ValueError(f"{given}; expected 1 <= topk_groups <= num_groups, and num_groups to divide the experts.")
    size = experts // num_groups
    if count > topk_groups * size:
        raise ValueError(
            f"{given}; expected at least num_experts_per_tok={count} experts in the chosen groups, found {topk_groups * size}. "
            "Choose more groups."
        )
    group_score = group_score or ("max" if correction_bias is None else "top2_sum")
    if group_score == "top2_sum" and size < 2:
        raise ValueError(f"{given}; expected at least 2 experts a group for group_score='top2_sum'. Use 'max'.")
    return group_score


def append_shared_experts(
    topk_weights: jax.Array, topk_ids: jax.Array, num_experts: int, num_shared_experts: int
) -> tuple[jax.Array, jax.Array]:
    """Adds shared experts, which every token uses with weight 1, as ids num_experts .. num_experts + num_shared_experts - 1.

    Their weights stand behind those of the routed experts in one `MoeWeights`, so that one call computes both.

    Args:
      topk_weights, topk_ids: [..., K].

    Returns:
      [..., K + num_shared_experts] each.
    """
    if any(not hasattr(n, "__index__") or n < 0 for n in (num_experts, num_shared_experts)):
        raise ValueError(
            f"append_shared_experts: num_experts={num_experts!r} and num_shared_experts={num_shared_experts!r} given; expected integers "
            "that are not negative."
        )
    lead = topk_ids.shape[:-1]
    shared = jnp.arange(num_experts, num_experts + num_shared_experts, dtype=topk_ids.dtype)
    ids = jnp.concatenate([topk_ids, jnp.broadcast_to(shared, (*lead, num_shared_experts))], axis=-1)
    ones = jnp.ones((*lead, num_shared_experts), topk_weights.dtype)
    return jnp.concatenate([topk_weights, ones], axis=-1), ids
