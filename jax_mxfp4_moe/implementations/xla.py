"""`xla`: the steps in plain JAX. Runs on any platform, and defines what a correct answer is."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_mxfp4_moe.implementations.base import Config, Implementation, Operands, Pipeline
from jax_mxfp4_moe.mxfp4 import Mxfp4Array
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.quantize import dequantize_fp8, quantize, quantize_fp8
from jax_mxfp4_moe.route import Routing, route
from jax_mxfp4_moe.stage1 import stage1
from jax_mxfp4_moe.stage2 import stage2

TILE_ROWS = (1, 8, 16, 32, 64, 128)
"""Rows of one expert that are multiplied at a time: the choices of the `tile_rows` config."""


@dataclasses.dataclass(frozen=True)
class XlaSteps:
    """The five steps, with what is static in them."""

    problem: MoeProblem
    tile_rows: int
    dtype: Any

    def route(self, topk_ids: jax.Array) -> Routing:
        """Step 1."""
        return route(topk_ids, self.problem.experts)

    def quantize(self, x: jax.Array, scale: jax.Array | None = None) -> jax.Array | Mxfp4Array:
        """Steps 2 and 4; fp8 activations are passed on as their values, in float32."""
        if self.problem.activation_quant is None:
            return x
        if self.problem.activation_quant == "fp8":
            return dequantize_fp8(quantize_fp8(x, scale))
        return quantize(x, scale_rule=self.problem.scale_rule, rounding=self.problem.rounding)  # type: ignore[arg-type]

    def stage1(self, x: Any, gate_up: Any, bias: Any, topk_weights: jax.Array, routing: Routing) -> jax.Array:
        """Step 3."""
        return stage1(x, gate_up, bias, topk_weights, routing, self.problem, tile_rows=self.tile_rows, dtype=self.dtype)

    def stage2(self, h: Any, down: Any, bias: Any, topk_weights: jax.Array, routing: Routing) -> jax.Array:
        """Step 5."""
        return stage2(h, down, bias, topk_weights, routing, self.problem, tile_rows=self.tile_rows, dtype=self.dtype)


class XlaImplementation(Implementation):
    """Plain JAX. Config `tile_rows`: rows of one expert multiplied at a time."""

    name = "xla"

    def why_not(self, problem: MoeProblem | None, platform: str) -> str | None:
        """It runs everything everywhere."""
        return None

    def configs(self, problem: MoeProblem, platform: str) -> list[Config]:
        """The largest tile that the rows of an average expert fill, then the others."""
        average = problem.rows // max(1, min(problem.experts, problem.rows))
        tiles = [t for t in TILE_ROWS if t <= problem.rows] or [1]
        first = max((t for t in tiles if t <= average), default=1)
        return [Config.of({"tile_rows": t}) for t in [first, *(t for t in tiles if t != first)]]

    def run(
        self,
        operands: Operands,
        problem: MoeProblem,
        config: Config,
        *,
        platform: str,
        pipeline: Pipeline,
        bridge: str | None,
    ) -> jax.Array:
        """Traces the pipeline into the caller's computation."""
        # Every MXFP4 value is a bfloat16 value, so bfloat16 operands lose nothing unless x itself is wider, or an E4M3 value times its
        # scale. XLA's CPU products are fastest in float32.
        quant = problem.activation_quant
        narrow = platform != "cpu" and (quant == "mxfp4" or (quant is None and problem.dtype == "bfloat16"))
        steps = XlaSteps(problem, int(config["tile_rows"]), jnp.bfloat16 if narrow else jnp.float32)
        return pipeline(steps, operands)
