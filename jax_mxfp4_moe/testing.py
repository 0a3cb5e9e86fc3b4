"""Error measures, tolerances by recipe, and random problems, for tests, benchmarks and the tuner."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.weights import MoeWeights

TOLERANCES: dict[tuple[str, str | None], float] = {
    ("float32", None): 1e-5,
    ("bfloat16", None): 6e-3,
    ("float16", None): 1e-3,
    # Quantized activations: a value of h that differs in its last bit can round to the other of two neighbouring codes.
    ("float32", "mxfp4"): 2e-3,
    ("bfloat16", "mxfp4"): 2e-2,
    ("float16", "mxfp4"): 1e-2,
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
    return Case(
        x,
        MoeWeights(gate_up, down, biases["gate_up_bias"], biases["down_bias"]),
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
