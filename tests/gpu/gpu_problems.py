"""Many small problems on a GPU: drawn there, evaluated there in float64, their kernels compiled on all cores beforehand."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, mxfp4_moe, testing
from jax_mxfp4_moe.device import platforms
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.torch import (
    Packed,
    activate,
    dequantize,
    dequantize_fp8,
    quantize,
    quantize_fp8,
)
from jax_mxfp4_moe.implementations.triton import layout
from jax_mxfp4_moe.problem import ACTIVATION_DEFAULTS, ACTIVATION_QUANTS, MoeProblem
from jax_mxfp4_moe.quantize import ROUNDINGS, SCALE_RULES

ROUTINGS = ("distinct", "any", "skewed", "skipped", "one expert", "none")


def random_problem(seed: int) -> MoeProblem:
    """Sizes, types and options by chance, of those that `triton` can do here; small enough for `evaluate`."""
    rng = np.random.default_rng(seed)

    def one_of(values: Any) -> Any:
        return values[rng.integers(len(values))]

    quant = one_of([q for q in ACTIVATION_QUANTS if why_not(MoeProblem(1, 1, 1, 32, 32, activation_quant=q)) is None])
    dtype = one_of(("bfloat16", "bfloat16", "float32", "float16"))
    activation = one_of(tuple(ACTIVATION_DEFAULTS))
    parameters: dict[str, Any] = {"activation_alpha": 1.702} if activation == "swiglu_oai" else {}
    if "limit" in ACTIVATION_DEFAULTS[activation]:
        parameters["activation_limit"] = one_of((0.5, 7.0))
    return MoeProblem(
        tokens=int(np.exp(rng.uniform(0, np.log(301)))),  # 1 to 300, log-uniform
        top_k=int(rng.integers(1, 17)),
        experts=int(rng.integers(1, 65)),
        hidden=32 * int(rng.integers(1, 17)),
        intermediate=32 * int(rng.integers(1, 11)),
        dtype=dtype,
        out_dtype=one_of((dtype, "float32")),
        activation=activation,
        activation_quant=quant,
        scale_rule=one_of(SCALE_RULES) if quant == "mxfp4" else "even",
        rounding=one_of(ROUNDINGS) if quant == "mxfp4" else "nearest_even",
        has_gate_up_bias=bool(rng.integers(2)),
        has_down_bias=bool(rng.integers(2)),
        apply_router_weight_on_input=bool(rng.integers(4) == 0),
        has_activation_scale=quant == "fp8" and bool(rng.integers(2)),
        **parameters,
    )


def why_not(problem: MoeProblem) -> str | None:
    """The sentence of `triton` on a problem here."""
    return IMPLEMENTATIONS["triton"].why_not(problem, platforms()[0])


class Tensors(NamedTuple):
    """The arguments of a call as torch tensors on the GPU."""

    x: torch.Tensor
    gate_up: Packed
    down: Packed
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation_scale: torch.Tensor | None
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def case(self) -> testing.Case:
        """The same memory as JAX arrays."""

        def array(t: torch.Tensor | None) -> jax.Array | None:
            return None if t is None else jax.dlpack.from_dlpack(t)

        torch.cuda.synchronize()
        gate_up, down = (Mxfp4Array(array(a.codes), array(a.scales)) for a in (self.gate_up, self.down))
        biases = map(array, (self.gate_up_bias, self.down_bias))
        weights = MoeWeights(gate_up, down, *biases, activation_scale=array(self.activation_scale))
        return testing.Case(array(self.x), weights, array(self.topk_weights), array(self.topk_ids))


def draw(problem: MoeProblem, seed: int, routing: str = "distinct", *, spread: bool = False) -> Tensors:
    """Random arguments.

    Args:
      problem, seed: the same arguments for the same ones.
      routing: of `ROUTINGS`: distinct experts, as far as there are enough; any; most rows on few experts; a third of the slots skipped, by
        ids on both sides; all on one expert; all skipped.
      spread: scales of a row over 33 binades instead of 10.
    """
    p = problem
    g = torch.Generator("cuda").manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda", generator=g)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g)

    def packed(*shape: int) -> Packed:
        rows, n = shape[:-1], shape[-1]
        codes = torch.randint(0, 256, (*rows, n // 2), dtype=torch.uint8, device="cuda", generator=g)
        noise = normal(*rows, n // 32) * 1.2
        if spread:
            noise = uniform(*rows, n // 32) * 33 - 30
            noise[..., -1] = 3  # rows as large as each other, as float8 wants the next stage's elements
        scales = (126 - round(float(np.log2(3 * np.sqrt(n)))) + noise.round().clamp(-30 if spread else -6, 3)).byte()
        codes[:, 0, :16], scales[:, 0, 0] = 0, 0  # a block of zeros as quantizers write it
        return Packed(codes, scales)

    x = normal(p.tokens, p.hidden) * torch.exp2((uniform(p.tokens, 1) * 5 - 4).round())
    x[0, :32] = 0
    shape = (p.tokens, p.top_k)
    if routing == "distinct" and p.top_k <= p.experts:
        ids = uniform(p.tokens, p.experts).topk(p.top_k).indices
    elif routing == "skewed":
        ids = uniform(*shape) ** 4 * p.experts
    elif routing in ("one expert", "none"):
        ids = torch.full(shape, seed % p.experts if routing == "one expert" else -1, device="cuda")
    else:
        ids = uniform(*shape) * p.experts
    ids = ids.int()
    if routing == "skipped":
        which = uniform(*shape)
        ids = torch.where(which < 0.2, -1 - ids, torch.where(which < 0.33, p.experts + ids, ids))
    return Tensors(
        x.to(getattr(torch, p.dtype)),
        packed(p.experts, 2 * p.intermediate, p.hidden),
        packed(p.experts, p.hidden, p.intermediate),
        normal(p.experts, 2 * p.intermediate) * 0.1 if p.has_gate_up_bias else None,
        normal(p.experts, p.hidden) * 0.1 if p.has_down_bias else None,
        torch.full((2,), 4 / 448, device="cuda") if p.has_activation_scale else None,
        (uniform(*shape) + 0.1) / p.top_k,
        ids.contiguous(),
    )


FEW = 1_000_000
"""Elements of h up to which a problem counts as small."""
NOISE = {"bfloat16": 5e-4, "float16": 2e-4, "float32": 2e-5}
"""Relative error of h by the type of x. bfloat16 goes through float8 sums, of which the tensor core keeps some 13 bits: emulated for
K = 320, they are 5.5e-4 of the products' root mean square off."""


class Expected(NamedTuple):
    """y [tokens, D] in float64, and how far from it noise in h may bring a small problem whose activations are rounded."""

    y: np.ndarray
    slack: float


def evaluate(problem: MoeProblem, t: Tensors) -> Expected:
    """The layer in float64, from every expert's whole product.

    Noise in h can push an element to the other of two neighbouring codes; among thousands that is lost in the tolerance, but in a small
    problem one code is much. There, `slack` is the distance between the results of h moved by `NOISE` one way and the other.
    """
    p = problem
    x_scale, h_scale = (None, None) if t.activation_scale is None else t.activation_scale
    ids = t.topk_ids.long()
    used = (ids >= 0) & (ids < p.experts)
    ids, factors = torch.where(used, ids, 0), torch.where(used, t.topk_weights.double(), 0.0)
    before, after = (factors, used.double()) if p.apply_router_weight_on_input else (used.double(), factors)
    gate_up, down = (dequantize(a).double() for a in (t.gate_up, t.down))

    def rounded(v: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        v = v.to(getattr(torch, p.dtype))
        if p.activation_quant == "mxfp4":
            return dequantize(quantize(v, p.scale_rule, p.rounding)).double()
        return (dequantize_fp8(quantize_fp8(v, scale)) if p.activation_quant == "fp8" else v).double()

    def second_half(h: torch.Tensor) -> torch.Tensor:
        h = rounded(h, h_scale) * after[..., None]
        # Rows of one expert meet the same weights: sum them first.
        sums = torch.zeros(p.tokens, p.experts, p.intermediate, dtype=torch.float64, device="cuda")
        sums.scatter_add_(1, ids[..., None].expand_as(h), h)
        y = sums.flatten(1) @ down.transpose(1, 2).flatten(0, 1)
        if t.down_bias is not None:
            y += (t.down_bias.double()[ids] * after[..., None]).sum(1)
        return y

    product = (rounded(t.x, x_scale) @ gate_up.flatten(0, 1).T).view(p.tokens, p.experts, -1)
    product = product.gather(1, ids[..., None].expand(-1, -1, 2 * p.intermediate)) * before[..., None]
    if t.gate_up_bias is not None:
        product += t.gate_up_bias.double()[ids]
    h = activate(*product.chunk(2, dim=-1), p)
    slack = 0.0
    if p.activation_quant is not None and h.numel() <= FEW:
        # Slots of a token on one expert are off in the same way.
        ways = torch.randn(
            p.tokens, 1, p.intermediate, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
        ).sign()
        noise = ways * NOISE[p.dtype] * (h.abs() + h.abs().mean(-1, keepdim=True))
        slack = float((second_half(h + noise) - second_half(h - noise)).norm())
    return Expected(second_half(h).cpu().numpy(), slack)


def wrong(problem: MoeProblem, y: object, expected: Expected) -> str | None:
    """What is wrong with y, or None: its error as a whole, or that of a single element if activations are not rounded."""
    y, want = np.asarray(y, np.float64), expected.y
    if y.shape != want.shape or not np.isfinite(y).all():
        return f"shape {y.shape}, {(~np.isfinite(y)).sum()} elements that are not finite"
    difference, size, tolerance = y - want, np.linalg.norm(want), testing.tolerance(problem)
    if np.linalg.norm(difference) > tolerance * size + expected.slack:
        return f"error {np.linalg.norm(difference) / max(size, 1e-300):.1e}, slack {expected.slack / max(size, 1e-300):.1e}"
    rows = np.sqrt(np.square(want).mean(axis=1, keepdims=True))
    worst = np.abs(difference) - 20 * tolerance * rows
    if problem.activation_quant is None and (worst > 0).any():
        return f"{(worst > 0).sum()} elements off by more than {20 * tolerance:.0e} of their row"
    return None


def layer(problem: MoeProblem, **how: Any) -> Any:
    """The jitted call of `problem` through `triton`; its arguments are those of a `testing.Case`."""
    return jax.jit(functools.partial(mxfp4_moe, implementation="triton", **testing.options(problem), **how))


class Job(NamedTuple):
    """A call whose kernels are to be compiled."""

    problem: MoeProblem
    prepared: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    """What differs from the default config."""


def compile_all(jobs: list[Job]) -> list[str]:
    """Compiles the kernels of each job in processes of their own, into Triton's cache on disk; returns what failed.

    A call that traces later finds them there, which takes milliseconds where compiling takes seconds.
    """
    jobs = list(dict.fromkeys(jobs))
    np.random.default_rng(0).shuffle(jobs)  # neighbours would compile the same kernels at the same time
    count = max(1, min(len(jobs), (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, context, _share_the_gpu) as pool:
        return [failure for failure in pool.map(_compile, jobs) if failure]


def _share_the_gpu() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def _compile(job: Job) -> str | None:
    """Traces one call, which compiles its kernels."""
    p = job.problem

    def arguments() -> testing.Case:
        def stack(rows: int, n: int) -> Mxfp4Array:
            a = Mxfp4Array(*(jnp.zeros((p.experts, rows, n // size), jnp.uint8) for size in (2, 32)))
            return layout.shuffle(a) if job.prepared else a

        weights = MoeWeights(
            stack(2 * p.intermediate, p.hidden),
            stack(p.hidden, p.intermediate),
            jnp.zeros((p.experts, 2 * p.intermediate)) if p.has_gate_up_bias else None,
            jnp.zeros((p.experts, p.hidden)) if p.has_down_bias else None,
            activation_scale=jnp.ones(2) if p.has_activation_scale else None,
        )
        routing = (jnp.zeros((p.tokens, p.top_k), dtype) for dtype in (jnp.float32, jnp.int32))
        return testing.Case(jnp.zeros((p.tokens, p.hidden), p.dtype), weights, *routing)

    try:
        jax.eval_shape(layer(p, config=dict(job.changes) or None), *jax.eval_shape(arguments))
    except Exception as error:  # noqa: BLE001 - reported by the test that asked
        return f"{job}: {type(error).__name__}: {str(error)[:500]}"
    return None
