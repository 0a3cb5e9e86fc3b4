"""Step 1: which rows go to which expert.

`topk_routing` turns router logits into weights and ids; `route` sorts the (token, expert) pairs by expert, so that each
expert's rows lie together for the two grouped products.
"""

from __future__ import annotations

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
    offsets = jnp.searchsorted(ids[order], jnp.arange(experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    is_hit = offsets[1:] > offsets[:-1]
    hit = jnp.nonzero(is_hit, size=experts, fill_value=0)[0].astype(jnp.int32)
    return Routing(order, offsets, hit, is_hit.sum(dtype=jnp.int32))


def topk_routing(
    logits: Any, num_experts_per_tok: int, *, scoring: str = "softmax", renormalize: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts from router logits.

    Args:
      logits: [..., experts] floating point; computed in float32.
      num_experts_per_tok: K, how many experts a token uses.
      scoring: "softmax" (over all experts, before the choice) or "sigmoid".
      renormalize: divide the chosen scores by their sum. With "softmax" this equals a softmax over the chosen logits.

    Returns:
      topk_weights [..., K] float32 and topk_ids [..., K] int32, largest score first, equal scores by ascending id. A NaN logit
      counts as the lowest, so that ids stay distinct and weights finite.

    Raises:
      ValueError: K is not in 1..experts, or scoring is unknown.
      TypeError: logits are not floating point.
    """
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"topk_routing: logits of dtype {logits.dtype} given; expected a floating-point type. Cast them."
        )
    count = num_experts_per_tok
    if logits.ndim == 0 or not hasattr(count, "__index__") or not 1 <= count <= logits.shape[-1]:
        raise ValueError(
            f"topk_routing: num_experts_per_tok={count!r} given with logits of shape {logits.shape}; expected "
            "logits [..., experts] and an integer 1 <= num_experts_per_tok <= experts."
        )
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"topk_routing: scoring={scoring!r} given; expected 'softmax' or 'sigmoid'.")
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits.astype(jnp.float32))
    logits = jnp.clip(logits, jnp.finfo(jnp.float32).min, jnp.finfo(jnp.float32).max)
    scores = jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)
    # Chosen by logit, which has the order of the score without its ties at 0 and 1.
    _, ids = jax.lax.top_k(logits, num_experts_per_tok)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        total = weights.sum(axis=-1, keepdims=True)
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 1 / num_experts_per_tok)
    return weights, ids.astype(jnp.int32)


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
