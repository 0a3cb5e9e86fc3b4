"""How large the errors of quantization and of arithmetic are: the tables of "Error sizes" in docs/numerics.md. Nothing is timed.

python benchmarks/numerics.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe import dequantize, mxfp4_moe, quantize
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.quantize import FP8_MAX, SCALE_RULES, dequantize_fp8, quantize_fp8
from jax_mxfp4_moe.testing import options, random_case, reference, relative_error

TOKENS, HIDDEN, INTERMEDIATE = 128, 512, 512


@functools.partial(jax.jit, static_argnames=("scale_rule", "rounding"))
def _mxfp4(x: jax.Array, **rules: str) -> jax.Array:
    return dequantize(quantize(x, **rules), jnp.float32)  # type: ignore[arg-type]


@jax.jit
def _fp8(x: jax.Array, scale: float | None) -> jax.Array:
    return dequantize_fp8(quantize_fp8(x, scale))


def as_mxfp4(x: np.ndarray, **rules: str) -> np.ndarray:
    """The MXFP4 values nearest to x, in float64."""
    return np.asarray(_mxfp4(x.astype(np.float32), **rules), np.float64)


def as_fp8(x: np.ndarray) -> np.ndarray:
    """The E4M3 values nearest to x, a scale a row."""
    return np.asarray(_fp8(x.astype(np.float32), None), np.float64)


def as_static_fp8(x: np.ndarray) -> np.ndarray:
    """The E4M3 values nearest to x, one scale for all, of the largest magnitude there is."""
    return np.asarray(_fp8(x.astype(np.float32), np.float32(np.abs(x).max() / FP8_MAX)), np.float64)


QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{f"MXFP4, `{rule}`": lambda x, rule=rule: as_mxfp4(x, scale_rule=rule) for rule in SCALE_RULES},  # type: ignore[misc]
    "E4M3, a scale a row": as_fp8,
    "E4M3, one scale": as_static_fp8,
}


def samples() -> dict[str, np.ndarray]:
    """Normal numbers, and the same with one column in 64 that is 30 times as large, as activations of language models have."""
    x = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN))
    return {"normal": x, "with large columns": x * np.where(np.arange(HIDDEN) % 64 == 5, 30, 1)}


def numbers_table() -> list[str]:
    """Lines of Markdown: the error of rounded numbers."""
    columns = samples()
    lines = [f"| rounding | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, round_ in QUANTIZERS.items():
        errors = " | ".join(f"{relative_error(round_(x), x):.3f}" for x in columns.values())
        lines.append(f"| {name} | {errors} |")
    return lines


def expert(x: np.ndarray, weights: list[np.ndarray], round_: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """One expert in float64, its activations rounded before each product."""
    gate, up, down = weights
    x = round_(x)
    gate_product, up_product = x @ gate.T, x @ up.T
    return round_(gate_product / (1 + np.exp(-gate_product)) * up_product) @ down.T


def layer_table() -> list[str]:
    """Lines of Markdown: the error of a layer's result, by what its weights and its activations are rounded to."""
    rng = np.random.default_rng(1)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    exact = [rng.standard_normal(shape) / np.sqrt(shape[1]) for shape in shapes]
    rounded = [as_mxfp4(w) for w in exact]
    recipes = {
        "None": lambda x: x,
        '"fp8", a scale a row': as_fp8,
        '"fp8", static scales': as_static_fp8,
        '"mxfp4"': as_mxfp4,
    }
    columns = samples()
    heads = [f"{column}, {of}" for of in ("of the activations", "in all") for column in columns]
    lines = [f"| `activation_quant` | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name, round_ in recipes.items():
        errors = [
            relative_error(expert(x, rounded, round_), expert(x, reference, recipes["None"]))
            for reference in (rounded, exact)
            for x in columns.values()
        ]
        lines.append(f"| {name} | {' | '.join(f'{error:.3f}' for error in errors)} |")
    return lines


def arithmetic_table(implementation: str = "xla") -> list[str]:
    """Lines of Markdown: the largest error of an implementation over four problems, against the same recipe in float64."""
    quants = (None, "mxfp4", "fp8")
    lines = [f"| type of x and y | {' | '.join(map(str, quants))} |", f"|---|{'---|' * len(quants)}"]
    for dtype in ("float32", "bfloat16", "float16"):
        errors = []
        for quant in quants:
            problem = MoeProblem(16, 2, 8, 256, 128, dtype, dtype, activation_quant=quant)
            call = jax.jit(functools.partial(mxfp4_moe, implementation=implementation, **options(problem)))
            cases = [random_case(problem, seed) for seed in range(4)]
            errors.append(max(relative_error(call(*case), reference(problem, case)) for case in cases))
        lines.append(f"| {dtype} | {' | '.join(f'{error:.0e}' for error in errors)} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*numbers_table(), "", *layer_table(), "", *arithmetic_table()]))
