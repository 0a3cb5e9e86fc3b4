"""Problems for the tests of the layer: NumPy bytes and numbers, their expected result by the oracle, and the call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, mxfp4_moe
from jax_mxfp4_moe.device import platforms
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.problem import MoeProblem

X_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclasses.dataclass
class Case:
    """One problem in NumPy. `gate_up` and `down` are (codes, scales) bytes; everything else is as in `mxfp4_moe`."""

    x: np.ndarray
    gate_up: tuple[np.ndarray, np.ndarray]
    down: tuple[np.ndarray, np.ndarray]
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    @property
    def weights(self) -> MoeWeights:
        return MoeWeights(
            Mxfp4Array(*map(jnp.asarray, self.gate_up)),
            Mxfp4Array(*map(jnp.asarray, self.down)),
            None if self.gate_up_bias is None else jnp.asarray(self.gate_up_bias),
            None if self.down_bias is None else jnp.asarray(self.down_bias),
        )

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def problem(self, activation_quant: str | None = None, activation_scale: Any = None, **options: Any) -> MoeProblem:
        """The static facts of a call with these options; arrays among the options are none of them."""
        fields = {field.name for field in dataclasses.fields(MoeProblem)}
        return MoeProblem(
            tokens=int(np.prod(self.x.shape[:-1])),
            top_k=self.topk_ids.shape[-1],
            experts=self.gate_up[0].shape[0],
            hidden=self.x.shape[-1],
            intermediate=self.down[1].shape[-1] * 32,
            dtype=str(self.x.dtype),
            out_dtype=str(options.get("preferred_element_type") or self.x.dtype),
            activation_quant=activation_quant,
            has_gate_up_bias=self.gate_up_bias is not None,
            has_down_bias=self.down_bias is not None,
            has_activation_scale=activation_scale is not None,
            **{name: value for name, value in options.items() if name in fields},
        )

    def why_not(self, name: str, activation_quant: str | None = None, **options: Any) -> str | None:
        """The implementation's own sentence on this problem, by which a test skips."""
        return IMPLEMENTATIONS[name].why_not(self.problem(activation_quant, **options), platforms()[0])

    def expected(self, **options: Any) -> np.ndarray:
        """The oracle's answer in float64; `out_dtype` rounds it once."""
        return oracle.moe(
            self.x,
            oracle.dequantize(*self.gate_up),
            oracle.dequantize(*self.down),
            self.topk_weights,
            self.topk_ids,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            x_dtype=str(self.x.dtype),
            **options,
        )

    def run(self, *, jit: bool = True, weights: MoeWeights | None = None, **options: Any) -> jax.Array:
        """The package's answer. Arrays among the options are traced when `jit` is set."""
        names = ("activation_scale", "expert_map", "token_mask")
        traced = {name: options.pop(name) for name in names if options.get(name) is not None}
        arrays = jax.tree.map(jnp.asarray, (self.x, weights or self.weights, self.topk_weights, self.topk_ids, traced))
        return (_jitted if jit else _call)(*arrays, tuple(sorted(options.items())))


def _call(x, weights, topk_weights, topk_ids, traced, options):
    return mxfp4_moe(x, weights, topk_weights, topk_ids, **traced, **dict(options))


# One jitted function for all tests, so that calls of equal shapes and options share a compilation.
_jitted = jax.jit(_call, static_argnums=5)

# Compiled fast, not to run fast.
compiled_fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def random_bytes(rng: np.random.Generator, rows: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """All codes, scales that keep sums near 1, and a block of zeros under scale byte 0 in the first row."""
    codes = rng.integers(0, 256, (*rows, length // 2), dtype=np.uint8)
    center = 127 - round(np.log2(1.5 * np.sqrt(length)))
    scales = rng.integers(center - 2, center + 2, (*rows, length // 32)).astype(np.uint8)
    first = (0,) * len(rows)
    codes[first][:16] = 0
    scales[first][0] = 0
    return codes, scales


def random_ids(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """Distinct experts in every row, as long as there are enough of them."""
    if shape[-1] > experts:
        return rng.integers(0, experts, shape).astype(np.int32)
    order = rng.permuted(np.broadcast_to(np.arange(experts), (*shape[:-1], experts)), axis=-1)
    return order[..., : shape[-1]].astype(np.int32)


def random_case(
    *,
    seed: int = 0,
    tokens: int | tuple[int, ...] = 13,
    experts: int = 5,
    top_k: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    dtype: str = "float32",
    biases: bool = False,
) -> Case:
    rng = np.random.default_rng(seed)
    leading = (tokens,) if isinstance(tokens, int) else tokens
    x = rng.normal(size=(*leading, hidden))
    if x.size:
        x.reshape(-1, hidden)[0, :32] = 0  # a block of zeros among the activations too
    topk_weights = rng.uniform(0.1, 1, (*leading, top_k))
    case = Case(
        x=x.astype(X_DTYPES[dtype]),
        gate_up=random_bytes(rng, (experts, 2 * intermediate), hidden),
        down=random_bytes(rng, (experts, hidden), intermediate),
        topk_weights=topk_weights.astype(np.float32),
        topk_ids=random_ids(rng, (*leading, top_k), experts),
    )
    if biases:
        case.gate_up_bias = rng.normal(size=(experts, 2 * intermediate)).astype(np.float32)
        case.down_bias = rng.normal(size=(experts, hidden)).astype(np.float32)
    return case


def far_from_ties(make: Any, **options: Any) -> Case:
    """The first case of make(seed) whose intermediate no float32 noise can push over a rounding boundary.

    Between the stages h is rounded to MXFP4. Two float32 evaluations of h differ by some 1e-7 of its size; where that
    lies across a tie, one code flips and the results differ by a whole step, rightly so. A tolerance of float32 is a
    fair demand only where no element is that near to a tie, and this is checked with the oracle, not assumed.
    """
    for seed in range(50):
        case = make(seed)
        rows: list[np.ndarray] = []
        case.expected(intermediates=rows, **options)
        rule, rounding = options.get("scale_rule", "even"), options.get("rounding", "nearest_even")
        if all(oracle.is_far_from_ties(row, rule, rounding, 4e-6) for row in rows):
            return case
    raise AssertionError("no seed gives a case without near ties: make the case smaller")
