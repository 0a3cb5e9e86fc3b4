"""Step 5: the grouped down product and the weighted sum over each token's experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_mxfp4_moe.mxfp4 import Mxfp4Array, dequantize_halves
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.route import Routing
from jax_mxfp4_moe.stage1 import contract, varying_like


def stage2(
    h: jax.Array | Mxfp4Array,
    down: Mxfp4Array,
    bias: jax.Array | None,
    topk_weights: jax.Array,
    routing: Routing,
    problem: MoeProblem,
    *,
    tile_rows: int,
    dtype: Any,
) -> jax.Array:
    """Computes `y[token] = sum over its experts of router weight * (h @ down.T + bias)`.

    Args:
      h: [tokens * K + tile_rows, F] in the order of `routing`, as `stage1` returned it, or quantized.
      down: [E, D, F]. bias: [E, D] or None; it is multiplied by the router weight like the product.
      topk_weights: [tokens, K] float32, taken as 1 with `apply_router_weight_on_input`.
      tile_rows, dtype: as for `stage1`.

    Returns:
      y [tokens, D] in `problem.out_dtype`, rounded once; sums are float32, by ascending expert. A token without experts gets zeros.
    """
    order = jnp.pad(routing.order, (0, tile_rows))
    factors = jnp.ones_like(topk_weights) if problem.apply_router_weight_on_input else topk_weights
    factors = factors.reshape(-1)

    def rows_from(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        block = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, row, tile_rows), h)
        if isinstance(block, Mxfp4Array):
            return dequantize_halves(block.codes, block.scales, dtype)
        return block[:, 0::2].astype(dtype), block[:, 1::2].astype(dtype)

    def visit(i: jax.Array, y: jax.Array) -> jax.Array:
        expert = routing.hit[i]
        weights = dequantize_halves(down.codes[expert], down.scales[expert], dtype)
        end = routing.offsets[expert + 1]

        def tile(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row, y = carry
            slots = lax.dynamic_slice(order, (row,), (tile_rows,))
            product = contract(rows_from(row), weights)
            if bias is not None:
                product = product + bias[expert].astype(jnp.float32)[None]
            product = product * factors[slots][:, None]
            # Rows past the expert's own are dropped, not multiplied by zero: they may hold NaN.
            own = row + jnp.arange(tile_rows, dtype=jnp.int32) < end
            tokens = jnp.where(own, slots // problem.top_k, problem.tokens)
            return row + tile_rows, y.at[tokens].add(product, mode="drop")

        return lax.while_loop(lambda c: c[0] < end, tile, (routing.offsets[expert], y))[1]

    y = varying_like(jnp.zeros((problem.tokens, problem.hidden), jnp.float32), (h, down, bias, topk_weights, routing))
    return lax.fori_loop(0, routing.num_hit, visit, y).astype(problem.out_dtype)
