"""Error measures, tolerances by recipe, and random problems, for tests, benchmarks and the tuner."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array, dequantize
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.quantize import dequantize_fp8, quantize, quantize_fp8
from jax_mxfp4_moe.weights import MoeWeights

TOLERANCES: dict[tuple[str, str | None], float] = {
    ("float32", None): 1e-5,
    ("bfloat16", None): 6e-3,
    ("float16", None): 1e-3,
    # Quantized activations: a value of h that differs in its last bit can round to the other of two neighbouring codes.
    ("float32", "mxfp4"): 2e-3,
    ("bfloat16", "mxfp4"): 2e-2,
    ("float16", "mxfp4"): 1e-2,
    ("float32", "fp8"): 2e-3,
    ("bfloat16", "fp8"): 1e-2,
    ("float16", "fp8"): 4e-3,
}
"""Largest relative error of y against a float64 evaluation, by (type of x, activation_quant)."""


def relative_error(actual: Any, expected: Any) -> float:
    """Frobenius norm of the difference over that of `expected`; infinite where `actual` is NaN or shapes differ."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or np.isnan(actual).any():
        return float("inf")
    difference, size = float(np.linalg.norm(actual - expected)), float(np.linalg.norm(expected))
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def tolerance(problem: MoeProblem) -> float:
    """The entry of `TOLERANCES` for `problem`."""
    return TOLERANCES[problem.dtype, problem.activation_quant]


class Case(NamedTuple):
    """Arguments of one `mxfp4_moe` call."""

    x: jax.Array
    weights: MoeWeights
    topk_weights: jax.Array
    topk_ids: jax.Array


def random_case(problem: MoeProblem, seed: int = 0, *, shared_experts: int = 0) -> Case:
    """Random x, routing and weights for `problem`: the last `shared_experts` ids are in every row, with weight 1.

    Weights are random codes and scales, drawn in packed form, so that a problem of any size needs no float copy. Their magnitude
    keeps h and y near 1. Routed ids of a token are distinct and uniform.
    """
    rng = np.random.default_rng(seed)
    tokens, experts, routed = problem.tokens, problem.experts - shared_experts, problem.top_k - shared_experts
    gate_up = random_packed(rng, (problem.experts, 2 * problem.intermediate, problem.hidden))
    down = random_packed(rng, (problem.experts, problem.hidden, problem.intermediate))
    scores = rng.random((tokens, experts), dtype=np.float32)
    ids = np.argpartition(scores, routed - 1, axis=1)[:, :routed] if routed < experts else np.argsort(scores, axis=1)
    ids = np.concatenate([ids, np.broadcast_to(experts + np.arange(shared_experts), (tokens, shared_experts))], axis=1)
    weights = rng.random((tokens, routed), dtype=np.float32) + 0.1
    weights = np.concatenate(
        [weights / weights.sum(1, keepdims=True), np.ones((tokens, shared_experts), np.float32)], axis=1
    )
    x = jnp.asarray(rng.standard_normal((tokens, problem.hidden), dtype=np.float32)).astype(problem.dtype)
    biases = {
        name: jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)) if wanted else None
        for name, wanted, shape in (
            ("gate_up_bias", problem.has_gate_up_bias, (problem.experts, 2 * problem.intermediate)),
            ("down_bias", problem.has_down_bias, (problem.experts, problem.hidden)),
        )
    }
    # The largest magnitudes of normal numbers, with a little saturation.
    scale = jnp.asarray([4 / 448, 4 / 448], jnp.float32) if problem.has_activation_scale else None
    return Case(
        x,
        MoeWeights(gate_up, down, biases["gate_up_bias"], biases["down_bias"], activation_scale=scale),
        jnp.asarray(weights),
        jnp.asarray(ids.astype(np.int32)),
    )


def random_packed(rng: np.random.Generator, shape: tuple[int, ...]) -> Mxfp4Array:
    """Random codes, and scales spread over ten powers of two, such that a dot product with a unit normal row is about 1.

    Uniform codes have a root mean square of 2.93, and the spread of the scales doubles it.
    """
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    centre = 126 - round(float(np.log2(3 * np.sqrt(shape[-1]))))
    spread = np.clip(np.rint(rng.standard_normal((*shape[:-1], shape[-1] // 32), dtype=np.float32) * 1.2), -6, 3)
    return Mxfp4Array(jnp.asarray(codes), jnp.asarray((centre + spread).astype(np.uint8)), layout=PACKED)


def options(problem: MoeProblem) -> dict[str, Any]:
    """The keyword arguments with which `mxfp4_moe` on a `Case` of `problem` is that problem."""
    names = (
        "activation", "activation_alpha", "activation_limit", "activation_quant", "scale_rule", "rounding",
        "apply_router_weight_on_input", "deterministic",
    )  # fmt: skip
    return {**{name: getattr(problem, name) for name in names}, "preferred_element_type": problem.out_dtype}


def sample_tokens(problem: MoeProblem, *, weights: int = 2**30, flops: int = 2**36) -> np.ndarray:
    """Evenly spread tokens, as many as `reference` can do while it expands and multiplies no more than this: all, if it can."""
    expert = 3 * problem.hidden * problem.intermediate
    count = flops // (2 * expert * problem.top_k)
    if problem.experts * expert > weights:
        count = min(count, weights // (expert * problem.top_k))
    count = min(max(count, 1), problem.tokens)
    return np.linspace(0, problem.tokens - 1, count).astype(np.int64)


def reference(problem: MoeProblem, case: Case, tokens: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """The layer in float64 NumPy, for the rows of `tokens` (all if None): [len(tokens), D], not rounded.

    One expert is expanded at a time. Only codes and scales go through the package's own functions, which the tests compare
    byte by byte with an oracle; products, activations and sums do not.
    """
    rows = np.arange(problem.tokens) if tokens is None else np.asarray(tokens)
    x_scale, h_scale = (None, None) if case.weights.activation_scale is None else case.weights.activation_scale
    x = _rounded(problem, np.asarray(case.x)[rows], x_scale)
    ids, factors = np.asarray(case.topk_ids)[rows], np.asarray(case.topk_weights)[rows].astype(np.float64)
    slots = {e: np.nonzero(ids == e) for e in np.unique(ids[(ids >= 0) & (ids < problem.experts)])}
    before, after = (
        (factors, np.ones_like(factors)) if problem.apply_router_weight_on_input else (np.ones_like(factors), factors)
    )
    h = np.zeros((*ids.shape, problem.intermediate))
    for (e, at), weights in zip(slots.items(), _expanded(case.weights.gate_up, slots), strict=True):
        product = x[at[0]] @ weights.T * before[at][:, None] + _bias(case.weights.gate_up_bias, e)
        h[at] = _activated(problem, *np.split(product, 2, axis=1))
    h = _rounded(problem, h.astype(jnp.dtype(problem.dtype)), h_scale)
    y = np.zeros((len(rows), problem.hidden))
    for (e, at), weights in zip(slots.items(), _expanded(case.weights.down, slots), strict=True):
        np.add.at(y, at[0], (h[at] @ weights.T + _bias(case.weights.down_bias, e)) * after[at][:, None])
    return y


def _expanded(stack: Mxfp4Array, experts: Iterable[int]) -> Iterator[np.ndarray]:
    """Each expert's matrix in float64, one after the other."""
    codes, scales = np.asarray(stack.codes), np.asarray(stack.scales)
    for e in experts:
        yield np.asarray(_to_float32(Mxfp4Array(codes[e], scales[e]))).astype(np.float64)


_to_float32 = jax.jit(functools.partial(dequantize, dtype=jnp.float32))


def _bias(bias: jax.Array | None, expert: int) -> Any:
    return 0.0 if bias is None else np.asarray(bias)[expert].astype(np.float64)


def _rounded(problem: MoeProblem, x: np.ndarray, scale: Any) -> np.ndarray:
    """What the next product reads of x: x itself, or its nearest MXFP4 or E4M3 values."""
    if problem.activation_quant is None:
        return x.astype(np.float64)
    if problem.activation_quant == "fp8":
        scale = scale if problem.has_activation_scale else None
        return np.asarray(jax.jit(lambda a: dequantize_fp8(quantize_fp8(a, scale)))(x)).astype(np.float64)
    assert problem.activation_quant == "mxfp4", problem
    rules = {"scale_rule": problem.scale_rule, "rounding": problem.rounding}
    return np.asarray(jax.jit(lambda a: dequantize(quantize(a, **rules), jnp.float32))(x)).astype(np.float64)  # type: ignore[arg-type]


def _activated(problem: MoeProblem, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """`stage1.activate` once more, in float64."""
    from scipy.special import expit, ndtr  # type: ignore[import-untyped]

    name, alpha, limit = problem.activation, problem.activation_alpha, problem.activation_limit
    if name == "gelu":
        return gate * ndtr(gate) * up
    if name == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if name == "silu":
        return gate * expit(gate) * up
    assert limit is not None, problem
    up = np.clip(up, -limit, limit)
    if name == "silu_post_clamped":
        return np.minimum(gate * expit(gate), limit) * up
    gate = np.minimum(gate, limit)
    if name == "silu_clamped":
        return gate * expit(gate) * up
    assert name == "swiglu_oai", problem
    assert alpha is not None, problem
    return gate * expit(alpha * gate) * (up + 1)


def interleaved_us(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int | None = None, seconds: float = 2.0
) -> dict[str, np.ndarray]:
    """Microseconds of each call, one entry a round, each blocked until its result is ready.

    A round runs every call once, so that entry i of all of them met the same other work on the machine: compare calls by the
    medians, or more sharply by the ratio within a round.

    Args:
      calls: functions of no arguments; each has run once, so that nothing is compiled here.
      repeats: rounds; as many as fit into `seconds`, from 7 to 101, if None.
    """

    def once(call: Callable[[], Any]) -> float:
        # Worker threads of XLA and of torch keep spinning for a while after a call; the next one shall not pay for it.
        time.sleep(0.002)
        start = time.perf_counter()
        jax.block_until_ready(call())
        return (time.perf_counter() - start) * 1e6

    warm = sum(once(call) for call in calls.values()) or 1.0
    rounds = repeats or int(np.clip(seconds * 1e6 / warm, 7, 101))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 else -1]:  # to and fro: no call always follows the same other one
            times[name].append(once(calls[name]))
    return {name: np.asarray(values) for name, values in times.items()}
