"""`torch`: the same pipeline in plain torch operations, on XLA's buffers, through the bridge. Any device torch knows.

It reads expert sizes on the host to visit only the experts in use, so it cannot be recorded into a command buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.base import Config, Implementation, Operands, Pipeline
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan
from jax_mxfp4_moe.mxfp4 import BLOCK, E2M1_VALUES, SCALE_NAN
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.quantize import (
    FP8_LARGEST_STATIC_SCALE,
    FP8_LEAST_SCALE,
    FP8_MAX,
    FP8_NAN,
    ROUND_UP_FROM,
    SCALE_RULE_CARRY,
)

if TYPE_CHECKING:
    import torch


class Packed(NamedTuple):
    """MXFP4 values on the torch side: codes [..., n // 2] and scales [..., n // 32], uint8."""

    codes: torch.Tensor
    scales: torch.Tensor


class Fp8(NamedTuple):
    """`Fp8Array` on the torch side: codes [..., n] uint8 and scales [...] float32."""

    codes: torch.Tensor
    scales: torch.Tensor


class TorchWeights(NamedTuple):
    """`MoeWeights` on the torch side."""

    gate_up: Packed
    down: Packed
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation_scale: torch.Tensor | None


class TorchRouting(NamedTuple):
    """`order` as in `route.Routing`; `groups` lists (expert, first row, end row) of the experts that own a row, on the host."""

    order: torch.Tensor
    groups: list[tuple[int, int, int]]


def quantize(x: torch.Tensor, scale_rule: str, rounding: str) -> Packed:
    """`jax_mxfp4_moe.quantize` in torch; bitwise the same answer."""
    import torch

    bits = x.float().view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = magnitude.amax(dim=-1)
    scales = (((amax + SCALE_RULE_CARRY[scale_rule]) >> 23) - 2).clamp(0, SCALE_NAN - 1)
    scales = torch.where(amax >= 0x7F800000, SCALE_NAN, scales)

    field, mantissa, scale = magnitude >> 23, magnitude & 0x7FFFFF, scales[..., None]
    quotient = ((field - scale + 127).clamp(min=0) << 23) | mantissa
    power = ((127 - 22 - scale.clamp(max=64)) << 23).view(torch.float32)
    scaled = torch.where(field == 0, (mantissa.float() * power).view(torch.int32), quotient)
    codes = torch.bucketize(scaled, _thresholds(rounding, x.device), out_int32=True, right=True)
    codes = torch.where(scale == SCALE_NAN, 0, codes | (bits.view(magnitude.shape) < 0).int() << 3)
    codes = codes.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    return Packed((codes[..., 0] | codes[..., 1] << 4).to(torch.uint8), scales.to(torch.uint8))


@functools.cache
def _thresholds(rounding: str, device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(ROUND_UP_FROM[rounding], dtype=torch.int32, device=device)


def dequantize(packed: Packed) -> torch.Tensor:
    """Values of [..., n // 2] codes as float32 [..., n]; exact, also where scale or value is subnormal."""
    import torch

    pairs = torch.index_select(_pair_values(packed.codes.device), 0, packed.codes.reshape(-1).int())
    values = pairs.view(torch.float32).view(*packed.scales.shape, BLOCK)
    exponent = packed.scales.int()
    # Byte 0 is the subnormal 2 ** -127, whose exponent field is 0 with the top mantissa bit set.
    scale = torch.where(exponent == 0, 1 << 22, exponent << 23)
    scale = torch.where(exponent == SCALE_NAN, 0x7FC00000, scale).view(torch.float32)
    return values.mul_(scale[..., None]).view(*packed.codes.shape[:-1], 2 * packed.codes.shape[-1])


@functools.cache
def _pair_values(device: torch.device) -> torch.Tensor:
    """Both float32 values of every byte, as one int64 each, so that a single look-up decodes two codes."""
    import torch

    value = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack([value[byte & 0xF], value[byte >> 4]], dim=-1).view(torch.int64).flatten().to(device)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor | None = None) -> Fp8:
    """`jax_mxfp4_moe.quantize.quantize_fp8` in torch; bitwise the same answer."""
    import torch

    x = x.float()
    if scale is None:
        scales = (x.abs().amax(dim=-1) * (1 / FP8_MAX)).clamp(min=FP8_LEAST_SCALE)
        is_good = scales.isfinite()
    else:
        scales = scale.float().expand(x.shape[:-1])
        is_good = (scales >= FP8_LEAST_SCALE) & (scales <= FP8_LARGEST_STATIC_SCALE)
    codes = (x * (1 / scales)[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(x.isfinite(), codes, FP8_NAN)
    return Fp8(torch.where(is_good[..., None], codes, 0), torch.where(is_good, scales, torch.nan))


def dequantize_fp8(fp8: Fp8) -> torch.Tensor:
    """The values, float32 [..., n]."""
    import torch

    return fp8.codes.view(torch.float8_e4m3fn).float() * fp8.scales[..., None]


def activate(gate: torch.Tensor, up: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    """`stage1.activate` in torch."""
    import torch
    import torch.nn.functional as F

    name, alpha, limit = problem.activation, problem.activation_alpha, problem.activation_limit
    if name == "silu":
        return F.silu(gate) * up
    if name in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up
    assert limit is not None, name
    up = up.clamp(-limit, limit)
    if name == "swiglu_oai":
        assert alpha is not None
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "silu_clamped":
        return F.silu(gate.clamp(max=limit)) * up
    assert name == "silu_post_clamped", name
    return F.silu(gate).clamp(max=limit) * up


@dataclasses.dataclass(frozen=True)
class TorchSteps:
    """The five steps on torch tensors. `h` and `sums` are buffers of the call's workspace."""

    problem: MoeProblem
    h: torch.Tensor
    sums: torch.Tensor

    def route(self, topk_ids: torch.Tensor) -> TorchRouting:
        """Step 1."""
        import torch

        ids = topk_ids.flatten()
        ids = torch.where((ids < 0) | (ids >= self.problem.experts), self.problem.experts, ids)
        order = torch.argsort(ids, stable=True)
        groups, row = [], 0
        for expert, size in enumerate(torch.bincount(ids, minlength=self.problem.experts + 1).tolist()[:-1]):
            if size:
                groups.append((expert, row, row + size))
                row += size
        return TorchRouting(order, groups)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor | Packed:
        """Steps 2 and 4; fp8 activations are passed on as their values, in float32."""
        if self.problem.activation_quant is None:
            return x
        if self.problem.activation_quant == "fp8":
            return dequantize_fp8(quantize_fp8(x, scale))
        return quantize(x, self.problem.scale_rule, self.problem.rounding)

    def stage1(
        self,
        x: torch.Tensor | Packed,
        gate_up: Packed,
        bias: torch.Tensor | None,
        topk_weights: torch.Tensor,
        routing: TorchRouting,
    ) -> torch.Tensor:
        """Step 3; h [tokens * K, F] in the order of `routing`."""
        features = self.problem.intermediate
        factors = topk_weights.flatten()
        for expert, start, end in routing.groups:
            slots = routing.order[start:end]
            product = _rows(x, slots // self.problem.top_k) @ dequantize(_expert(gate_up, expert)).T
            if self.problem.apply_router_weight_on_input:
                product *= factors[slots, None]
            if bias is not None:
                product += bias[expert].float()
            self.h[start:end] = activate(product[:, :features], product[:, features:], self.problem)
        # Rows of skipped slots stay as they were found; nothing reads them.
        return self.h

    def stage2(
        self,
        h: torch.Tensor | Packed,
        down: Packed,
        bias: torch.Tensor | None,
        topk_weights: torch.Tensor,
        routing: TorchRouting,
    ) -> torch.Tensor:
        """Step 5; float32 sums [tokens, D]."""
        factors = topk_weights.flatten()
        self.sums.zero_()
        for expert, start, end in routing.groups:
            slots = routing.order[start:end]
            product = _rows(h, slice(start, end)) @ dequantize(_expert(down, expert)).T
            if bias is not None:
                product += bias[expert].float()
            if not self.problem.apply_router_weight_on_input:
                product *= factors[slots, None]
            self.sums.index_add_(0, slots // self.problem.top_k, product)
        return self.sums


def _expert(packed: Packed, expert: int) -> Packed:
    return Packed(packed.codes[expert], packed.scales[expert])


def _rows(x: torch.Tensor | Packed, rows: Any) -> torch.Tensor:
    if isinstance(x, Packed):
        return dequantize(Packed(x.codes[rows], x.scales[rows]))
    return x[rows].float()


class TorchImplementation(Implementation):
    """Plain torch operations. No config."""

    name = "torch"
    extra = "torch"

    def missing(self) -> str | None:
        """Needs torch."""
        if importlib.util.find_spec("torch") is None:
            return "is not installed: pip install 'jax_mxfp4_moe[torch]'"
        return None

    def why_not(self, problem: MoeProblem | None, platform: str) -> str | None:
        """Needs torch, built for the platform."""
        if (missing := self.missing()) is not None:
            return missing
        if platform == "cpu":
            return None
        if problem is not None and problem.deterministic:
            return "adds with atomics in no fixed order on a GPU, and deterministic=True was asked for"
        if platform not in ("cuda", "rocm"):
            return f"runs on cpu, cuda and rocm, found {platform}"
        import torch

        built_for = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
        if built_for != platform:
            return f"needs torch built for {platform}, found torch {torch.__version__} built for {built_for}"
        return None

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
        """Puts one custom call into the caller's computation, which runs the pipeline on torch tensors."""
        leaves, structure = jax.tree.flatten(operands)
        slots, workspace_bytes = torch_call.workspace_slots(_workspace(problem))
        plan = Plan(
            name=f"torch {problem}",
            key=("torch", problem, str(structure), tuple(str(leaf.dtype) for leaf in leaves)),
            run=functools.partial(_run_on_tensors, problem, slots, pipeline),
            inputs=tuple(BufferSpec(leaf.shape, str(leaf.dtype)) for leaf in leaves),
            outputs=(BufferSpec((problem.tokens, problem.hidden), problem.out_dtype),),
            workspace_bytes=workspace_bytes,
            capturable=self.capturable,
        )
        return torch_call.call(plan, *leaves, bridge=bridge)[0]


def _workspace(problem: MoeProblem) -> tuple[BufferSpec, BufferSpec]:
    """`h` and `sums` of `TorchSteps`."""
    return (
        BufferSpec((problem.rows, problem.intermediate), problem.dtype),
        BufferSpec((problem.tokens, problem.hidden), "float32"),
    )


def _run_on_tensors(
    problem: MoeProblem, slots: Any, pipeline: Pipeline, inputs: list, outputs: list, workspace: torch.Tensor
) -> None:
    """What the bridge calls: inputs in the order of `Operands`' leaves."""
    tensors = iter(inputs)
    x = next(tensors)
    gate_up, down = (Packed(next(tensors), next(tensors)) for _ in range(2))
    gate_up_bias = next(tensors) if problem.has_gate_up_bias else None
    down_bias = next(tensors) if problem.has_down_bias else None
    activation_scale = next(tensors) if problem.has_activation_scale else None
    weights = TorchWeights(gate_up, down, gate_up_bias, down_bias, activation_scale)
    topk_weights, topk_ids = tensors
    steps = TorchSteps(problem, *torch_call.carve(workspace, slots))
    outputs[0].copy_(pipeline(steps, Operands(x, weights, topk_weights, topk_ids)))  # type: ignore[arg-type]
