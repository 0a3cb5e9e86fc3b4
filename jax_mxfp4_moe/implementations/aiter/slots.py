"""Routing as aiter's sorting can take it, in JAX, so that XLA fuses it into one small kernel before the call.

aiter's sorting wants every row to name each of its experts once, and every id to be of an expert. Rows that say otherwise are right
here: a skipped slot adds nothing, and an expert named twice counts with both weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def merge(topk_weights: jax.Array, topk_ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Lets an expert's first slot in a row carry the weights of all of its slots there.

    Args:
      topk_weights: [tokens, K] float32.
      topk_ids: [tokens, K] int32; what is not in 0..experts - 1 is skipped.

    Returns:
      weights [tokens, K] float32, 0 where kept is False; kept [tokens, K] bool: first slots of experts, of which no row has one twice.
    """
    valid = (topk_ids >= 0) & (topk_ids < experts)
    same = (topk_ids[:, :, None] == topk_ids[:, None, :]) & valid[:, :, None]
    before = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
    kept = valid & ~(same & before).any(axis=-1)
    weights = jnp.where(same, topk_weights[:, None, :], 0).sum(axis=-1)
    return jnp.where(kept, weights, 0), kept


def to_masked_experts(
    topk_weights: jax.Array, topk_ids: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sends the slots that add nothing to experts of their own, which are masked.

    Returns:
      topk_weights, topk_ids with ids in 0..experts + K - 1, none twice in a row; mask [experts + K] int32, 1 for the real experts.
    """
    top_k = topk_ids.shape[1]
    weights, kept = merge(topk_weights, topk_ids, experts)
    # One masked expert for each slot: the sorting loses count when a row names any expert twice.
    ids = jnp.where(kept, topk_ids, experts + jnp.arange(top_k, dtype=jnp.int32))
    return weights, ids, (jnp.arange(experts + top_k) < experts).astype(jnp.int32)


def to_unnamed_experts(
    topk_weights: jax.Array, topk_ids: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sends the slots that add nothing to experts that their row does not name, with weight 0; `experts` is at least K.

    For functions that take no mask. The work is done and counts 0 times, so a token without any slot must be taken out afterwards: its
    x may hold anything.

    Returns:
      topk_weights, topk_ids with ids in 0..experts - 1, none twice in a row; used [tokens] bool: tokens with a slot that counts.
    """
    top_k = topk_ids.shape[1]
    weights, kept = merge(topk_weights, topk_ids, experts)
    # Of the first K experts as many are unnamed as slots add nothing: the other slots name at most one each.
    named = (kept[:, :, None] & (topk_ids[:, :, None] == jnp.arange(top_k))).any(axis=1)
    unnamed = lax.top_k((~named).astype(jnp.float32), top_k)[1].astype(jnp.int32)
    turn = jnp.cumsum(~kept, axis=1) - 1
    substitute = jnp.take_along_axis(unnamed, jnp.maximum(turn, 0), axis=1)
    return weights, jnp.where(kept, topk_ids, substitute), kept.any(axis=1)
