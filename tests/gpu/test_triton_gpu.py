"""`triton` on a GPU where sizes are the danger: odd ones, many experts, offsets beyond 32 bits, many tokens."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jax_mxfp4_moe import mxfp4_moe, prepare, testing
from jax_mxfp4_moe.device import platforms
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.problem import MoeProblem

# (tokens, top_k, experts, hidden, intermediate), activation_quant, shared experts
CASES = {
    "odd": ((129, 4, 8, 416, 96), None, 0),
    "many_tokens": ((16384, 9, 33, 7168, 2048), None, 1),
    "many_tokens_quantized": ((16384, 9, 33, 7168, 2048), "mxfp4", 1),
    "case_12b_weights_beyond_32_bits": ((64, 8, 512, 4096, 1024), None, 0),
    "case_12a_rows_beyond_32_bits": ((40000, 8, 16, 1024, 4096), None, 0),
}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_large_and_odd(name, prepared):
    """Tokens at the start, in the middle and at the end equal the float64 reference; nothing is left unwritten."""
    sizes, quant, shared = CASES[name]
    problem = MoeProblem(*sizes, activation_quant=quant)
    why_not = IMPLEMENTATIONS["triton"].why_not(problem, platforms()[0])
    if why_not is not None:
        pytest.skip(why_not)
    case = testing.random_case(problem, shared_experts=shared)
    weights = prepare(case.weights, "triton") if prepared else case.weights
    call = jax.jit(functools.partial(mxfp4_moe, implementation="triton", **testing.options(problem)))
    y = np.asarray(call(case.x, weights, case.topk_weights, case.topk_ids), np.float32)
    tokens = np.array([0, problem.tokens // 2, problem.tokens - 1])
    assert testing.relative_error(y[tokens], testing.reference(problem, case, tokens)) <= testing.tolerance(problem)
    assert np.isfinite(y).all()
