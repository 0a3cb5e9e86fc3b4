"""The derivative of the layer, for every implementation: cotangents of x, of the router weights and of the biases.

The MXFP4 weights are frozen, and what the forward pass rounds (h to the type of x, activations to MXFP4) has the derivative
of the identity: the straight-through estimator. Nothing is kept from the forward pass: each expert's rows go forward once
more here, up to h, and then back. As in `stage1`, the stacks are never expanded: a loop visits the experts that own a row,
decodes one, and takes its rows a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_mxfp4_moe.mxfp4 import dequantize_halves
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.route import route
from jax_mxfp4_moe.stage1 import Halves, activate, contract, row_gatherer, varying_like
from jax_mxfp4_moe.weights import MoeWeights


class Cotangents(NamedTuple):
    """Derivatives of a scalar with respect to what can be trained.

    Attributes:
      x: [tokens, D] in the type of x.
      topk_weights: [tokens, K] float32; anything where the slot is skipped, whose weight is a constant 0.
      gate_up_bias, down_bias: [groups, E, 2F] and [groups, E, D] float32, or None where the weights have none.
    """

    x: jax.Array
    topk_weights: jax.Array
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None


def backward(
    x: jax.Array,
    weights: MoeWeights,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    dy: jax.Array,
    problem: MoeProblem,
    quantize: Callable[[jax.Array, jax.Array | None], Any],
    *,
    groups: int,
    tile_rows: int,
    dtype: Any,
) -> Cotangents:
    """Computes the cotangents that belong to `dy`.

    Args:
      x, weights, topk_weights, topk_ids: as in `Operands`; the weights packed.
      dy: [tokens, D], the cotangent of y.
      quantize: what the forward pass does to x and to h before it multiplies them: its step of that name.
      groups: the tokens are this many equal runs, and the cotangents of the biases are summed over each run by itself.
      tile_rows: rows of one expert that are taken at a time.
      dtype: type of the operands of the products, float32 or bfloat16; sums are float32 in any case.

    Returns:
      The cotangents. Extra memory is one expert in `dtype` and the cotangents in float32.
    """
    routing = route(topk_ids, problem.experts)
    order = jnp.pad(routing.order, (0, tile_rows))
    factors = topk_weights.reshape(-1)
    x_scale, h_scale = (None, None) if weights.activation_scale is None else weights.activation_scale
    gather = row_gatherer(quantize(x, x_scale), dtype)
    features, per_group = problem.intermediate, problem.tokens // groups

    def sum_by_group(rows: jax.Array, own: jax.Array, tokens: jax.Array) -> jax.Array:
        # Rows that are not the expert's own are replaced, not multiplied by zero: they may hold NaN.
        rows = jnp.where(own[:, None], rows, 0)
        if groups == 1:
            return rows.sum(axis=0, keepdims=True)
        return jax.ops.segment_sum(rows, tokens // per_group, num_segments=groups)

    def visit(i: jax.Array, sums: _Sums) -> _Sums:
        expert = routing.hit[i]
        gate_up = dequantize_halves(weights.gate_up.codes[expert], weights.gate_up.scales[expert], dtype)
        down = dequantize_halves(weights.down.codes[expert], weights.down.scales[expert], dtype)
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert].astype(jnp.float32)
            for bias in (weights.gate_up_bias, weights.down_bias)
        )
        end = routing.offsets[expert + 1]

        def tile(carry: tuple[jax.Array, _Sums]) -> tuple[jax.Array, _Sums]:
            row, sums = carry
            slots = lax.dynamic_slice(order, (row,), (tile_rows,))
            tokens, factor = slots // problem.top_k, factors[slots][:, None]
            own = row + jnp.arange(tile_rows, dtype=jnp.int32) < end

            product = contract(gather(tokens), gate_up)
            gates = product * factor if problem.apply_router_weight_on_input else product
            if gate_up_bias is not None:
                gates = gates + gate_up_bias
            h, through_activation = jax.vjp(
                lambda gates: activate(gates[:, :features], gates[:, features:], problem), gates
            )
            h_read = row_gatherer(quantize(h.astype(problem.dtype), h_scale), jnp.float32)(slice(None))

            dout = dy[tokens].astype(jnp.float32)
            dh_halves = spread(dout.astype(dtype), down)
            if problem.apply_router_weight_on_input:
                (dgates,) = through_activation(_interleave(dh_halves))
                dfactor, dproduct = (dgates * product).sum(axis=1), dgates * factor
            else:
                # dout . (down @ h + bias), without that product: the cotangent of h holds dout @ down already.
                dfactor = sum((dh * h).sum(axis=1) for dh, h in zip(dh_halves, h_read, strict=True))
                if down_bias is not None:
                    dfactor = dfactor + dout @ down_bias
                dout = dout * factor
                (dgates,) = through_activation(_interleave(dh_halves) * factor)
                dproduct = dgates

            dx = spread(dproduct.astype(dtype), gate_up)
            into = jnp.where(own, tokens, problem.tokens)
            return row + tile_rows, _Sums(
                tuple(total.at[into].add(part, mode="drop") for total, part in zip(sums.x, dx, strict=True)),
                # The last tile of an expert runs into the rows of the next one, which writes them after it.
                lax.dynamic_update_slice(sums.factors, dfactor, (row,)),
                None
                if gate_up_bias is None
                else sums.gate_up_bias.at[:, expert].add(sum_by_group(dgates, own, tokens)),
                None if down_bias is None else sums.down_bias.at[:, expert].add(sum_by_group(dout, own, tokens)),
            )

        return lax.while_loop(lambda c: c[0] < end, tile, (routing.offsets[expert], sums))[1]

    half = jnp.zeros((problem.tokens, problem.hidden // 2), jnp.float32)
    zeros = _Sums(
        (half, half),
        jnp.zeros(problem.rows + tile_rows, jnp.float32),
        *(
            None if bias is None else jnp.zeros((groups, *bias.shape), jnp.float32)
            for bias in (weights.gate_up_bias, weights.down_bias)
        ),
    )
    zeros = jax.tree.map(lambda a: varying_like(a, (x, weights, topk_weights, routing, dy)), zeros)
    sums = lax.fori_loop(0, routing.num_hit, visit, zeros)
    dfactors = jnp.zeros_like(factors).at[routing.order].set(sums.factors[: problem.rows])
    return Cotangents(
        _interleave(sums.x).astype(x.dtype), dfactors.reshape(topk_weights.shape), sums.gate_up_bias, sums.down_bias
    )


class _Sums(NamedTuple):
    """What the loops carry: halves of x [tokens, D / 2], factors [tokens * K + tile_rows] in the order of the routing, biases."""

    x: tuple[jax.Array, ...]
    factors: jax.Array
    gate_up_bias: Any
    down_bias: Any


def spread(a: jax.Array, b: Halves) -> Halves:
    """The product of a [m, n] and b [n, k], as halves [m, k / 2] of k: back through `contract`."""
    even, odd = (
        lax.dot_general(
            a, half, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        for half in b
    )
    return even, odd


def _interleave(halves: tuple[jax.Array, ...]) -> jax.Array:
    """[m, k] of its even and odd columns."""
    even, odd = halves
    return jnp.stack(halves, axis=-1).reshape(even.shape[0], even.shape[1] + odd.shape[1])
