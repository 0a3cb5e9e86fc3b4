"""Step 3: the grouped gate and up product and the gated activation.

The stacks are never expanded: a loop visits only the experts that own a row, decodes one expert's weights, and multiplies
that expert's rows a tile at a time. Extra memory is one expert in float32 plus the result; time follows the experts and rows in use.
(XLA's `ragged_dot` needs every expert dequantized beforehand; `benchmarks/results/cpu.md` has both side by side.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_mxfp4_moe.mxfp4 import Mxfp4Array, dequantize_halves
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.route import Routing

Halves = tuple[jax.Array, jax.Array]
"""Even and odd elements along the contraction axis."""


def activate(gate: jax.Array, up: jax.Array, problem: MoeProblem) -> jax.Array:
    """The gated activation in float32. With a = activation_alpha and L = activation_limit:

    | name                | formula                                                              | models                |
    |---------------------|----------------------------------------------------------------------|-----------------------|
    | `silu`              | silu(gate) * up                                                      | DeepSeek, Qwen3, Kimi |
    | `gelu`, `gelu_tanh` | gelu(gate) * up, with erf and with the tanh approximation            |                       |
    | `swiglu_oai`        | g * sigmoid(a * g) * (clip(up, -L, L) + 1), g = min(gate, L)         | gpt-oss               |
    | `silu_clamped`      | silu(min(gate, L)) * clip(up, -L, L): clamped before silu            | DeepSeek-V4           |
    | `silu_post_clamped` | min(silu(gate), L) * clip(up, -L, L): clamped after silu             | Step-3.5              |
    """
    name, alpha, limit = problem.activation, problem.activation_alpha, problem.activation_limit
    if name == "silu":
        return jax.nn.silu(gate) * up
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(gate, approximate=name == "gelu_tanh") * up
    assert limit is not None, name
    up = jnp.clip(up, -limit, limit)
    if name == "swiglu_oai":
        assert alpha is not None
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
    if name == "silu_clamped":
        return jax.nn.silu(jnp.minimum(gate, limit)) * up
    assert name == "silu_post_clamped", name
    return jnp.minimum(jax.nn.silu(gate), limit) * up


def stage1(
    x: jax.Array | Mxfp4Array,
    gate_up: Mxfp4Array,
    bias: jax.Array | None,
    topk_weights: jax.Array,
    routing: Routing,
    problem: MoeProblem,
    *,
    tile_rows: int,
    dtype: Any,
) -> jax.Array:
    """Computes `activation(x @ gate.T + bias, x @ up.T + bias)` for every row of `routing`.

    Args:
      x: [tokens, D], a float array or, when activations are quantized, an Mxfp4Array.
      gate_up: [E, 2F, D], gate rows first. bias: [E, 2F] or None.
      topk_weights: [tokens, K] float32; used only with `apply_router_weight_on_input`, where it multiplies the product
        before the bias is added.
      tile_rows: rows multiplied at a time.
      dtype: type of the operands of the product, float32 or bfloat16; sums are float32 in any case.

    Returns:
      h [tokens * K + tile_rows, F] in the type of x (`problem.dtype`), in the order of `routing`. Rows that no expert owns hold anything.
    """
    features = problem.intermediate
    gather = row_gatherer(x, dtype)
    order = jnp.pad(routing.order, (0, tile_rows))

    def visit(i: jax.Array, h: jax.Array) -> jax.Array:
        expert = routing.hit[i]
        weights = dequantize_halves(gate_up.codes[expert], gate_up.scales[expert], dtype)

        def tile(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row, h = carry
            slots = lax.dynamic_slice(order, (row,), (tile_rows,))
            product = contract(gather(slots // problem.top_k), weights)
            if problem.apply_router_weight_on_input:
                product = product * topk_weights.reshape(-1)[slots][:, None]
            if bias is not None:
                product = product + bias[expert].astype(jnp.float32)[None]
            y = activate(product[:, :features], product[:, features:], problem)
            # The last tile of an expert runs into the rows of the next one, which writes them after it.
            return row + tile_rows, lax.dynamic_update_slice(h, y.astype(h.dtype), (row, jnp.int32(0)))

        return lax.while_loop(lambda c: c[0] < routing.offsets[expert + 1], tile, (routing.offsets[expert], h))[1]

    h = jnp.zeros((problem.rows + tile_rows, features), problem.dtype)
    h = varying_like(h, (x, gate_up, bias, topk_weights, routing))
    return lax.fori_loop(0, routing.num_hit, visit, h)


def varying_axes(operands: Any) -> frozenset[str]:
    """The mesh axes that any of `operands` varies over, inside of `jax.shard_map`."""
    # JAX keeps them in `mat.varying` of the type, and kept them in `vma` before.
    types = [jax.typeof(a) for a in jax.tree.leaves(operands)]
    return frozenset().union(*(t.mat.varying if hasattr(t, "mat") else getattr(t, "vma", ()) for t in types))


def varying_like(start: jax.Array, operands: Any) -> jax.Array:
    """Marks the start of a loop as varying over the mesh axes that `operands` vary over, which `jax.shard_map` checks."""
    axes = varying_axes(operands) - varying_axes(start)
    return lax.pcast(start, tuple(sorted(axes)), to="varying") if axes else start


def row_gatherer(x: jax.Array | Mxfp4Array, dtype: Any) -> Any:
    """Returns a function from row numbers to those rows of x, as halves of `dtype`."""
    if isinstance(x, Mxfp4Array):
        return lambda rows: dequantize_halves(x.codes[rows], x.scales[rows], dtype)
    even, odd = x[:, 0::2], x[:, 1::2]
    return lambda rows: (even[rows].astype(dtype), odd[rows].astype(dtype))


def contract(a: Halves, b: Halves) -> jax.Array:
    """[m, n] float32: the product of rows a [m, k] and b [n, k], given as halves of k."""
    along_last = (((1,), (1,)), ((), ()))
    parts = [
        lax.dot_general(x, y, along_last, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        for x, y in zip(a, b, strict=True)
    ]
    return parts[0] + parts[1]
