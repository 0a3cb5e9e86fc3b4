"""The five steps as calls of aiter's operations on torch tensors, and the delegation to aiter's own `fused_moe`.

Imports torch and aiter when called; `implementation.py` does neither. Rules that the calls keep, each against a fault seen in the
field: the sorting uses the block_m that aiter resolved, not the row's; every view of the weights is marked `is_shuffled`, since marks are
lost with the view; stage 1's return value is used, since some of its functions ignore the buffer they are given; stage 2's is not, since
some return nothing; the result is zeroed by the sorting of the same call, since stage 2 adds to it; nothing outlives the call.

aiter's functions allocate, so calls are not recorded unless that is asked for, and then only where none of them does: the sorting by one
kernel, the Triton quantizer's own kernel on buffers of the caller's, and CK's two stages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

from jax_mxfp4_moe.implementations.aiter import kernels
from jax_mxfp4_moe.implementations.aiter.layout import SCALE_COLUMNS, SCALE_ROWS, padded
from jax_mxfp4_moe.implementations.aiter.release import Release
from jax_mxfp4_moe.implementations.base import Operands, Pipeline
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, carve
from jax_mxfp4_moe.mxfp4 import BLOCK
from jax_mxfp4_moe.problem import MoeProblem

TRITON_KERNEL = "_fused_dynamic_mxfp4_quant_moe_sort_kernel"
"""The kernel that the fused Triton quantizer launches, by its name in the quantizer's module."""


class Stack(NamedTuple):
    """One weight stack as aiter takes it: codes [E, N, K / 2] float4, marked `is_shuffled`; scales [E * N, K / 32] E8M0."""

    codes: Any
    scales: Any


class AiterWeights(NamedTuple):
    """`MoeWeights` on the torch side."""

    gate_up: Stack
    down: Stack
    gate_up_bias: None = None
    down_bias: None = None
    activation_scale: None = None


class Quantized(NamedTuple):
    """Activations in MXFP4: codes in the order of their rows, scales in the order of sorted positions."""

    codes: Any
    scales: Any


class Sorted(NamedTuple):
    """What aiter's sorting writes: for each position token and slot, and its router weight; for each block its expert; the counts."""

    ids: Any
    weights: Any
    experts: Any
    valid: Any


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is static in the calls of one problem.

    Attributes:
      problem: true sizes.
      release: the installed aiter.
      metadata: what `get_2stage_cfgs` resolved for it; `kernels.unsupported` found no fault.
      dispatch_policy: of the sorting: 0 aiter chooses, 1 one kernel, 2 several.
      recorded: the calls go into a command buffer: `allocates` is None, and nothing is allocated.
    """

    problem: MoeProblem
    release: Release
    metadata: Any
    dispatch_policy: int
    recorded: bool = False

    @functools.cached_property
    def block_m(self) -> int:
        """Rows of one expert's block: aiter's answer, which need not be what its table was given."""
        return int(self.metadata.block_m)

    @functools.cached_property
    def quantizer(self) -> str | None:
        """Which of aiter's quantizers rounds the activations; None where they stay in bfloat16."""
        if kernels.splits_k(self.metadata):
            return None
        return self.release.activation_rules[self.problem.scale_rule, self.problem.rounding]

    @functools.cached_property
    def allocates(self) -> str | None:
        """What in these calls allocates memory of torch's, which a recording must not, as a clause; None if nothing has to."""
        if kernels.splits_k(self.metadata):
            return "its split-K stage 1 allocates what it sums into"
        if not kernels.writes_what_is_given(self.metadata):
            return "its FlyDSL stages allocate tensors of their own"
        if self.quantizer != "triton":
            return "its HIP quantizer allocates what it returns (scale_rule='even', rounding='half_away' goes by one that need not)"
        if self.dispatch_policy == 2:
            return "its sorting by several kernels (dispatch_policy 2) allocates a workspace"
        unknown = (
            set(_triton_kernel(self.release).arg_names) - _triton_arguments(self, 1, 1, BLOCK, None, None, None).keys()
        )
        return (
            f"its Triton quantizer has arguments that are not known: {', '.join(sorted(unknown))}" if unknown else None
        )

    @functools.cached_property
    def stage1_options(self) -> dict[str, Any]:
        """How split K's stage 1 is told that the gate rows come first, where it would take them for interleaved."""
        asked = kernels.splits_k(self.metadata) and self.release.split_k == "choice"
        return {"post_activation_layout": "standard"} if asked else {}

    @functools.cached_property
    def stage2_takes_mask(self) -> bool:
        """Whether stage 2 can be told of masked experts."""
        return kernels.takes_mask(self.metadata)

    @property
    def sorted_experts(self) -> int:
        """Experts that the sorting is told of: the real ones, then a masked one for each slot, where skipped slots go."""
        return self.problem.experts + self.problem.top_k

    @property
    def positions(self) -> int:
        """Most sorted positions of any routing."""
        p = self.problem
        return p.rows + self.sorted_experts * self.block_m - p.top_k

    @functools.cached_property
    def buffers(self) -> dict[str, BufferSpec]:
        """Everything that aiter's functions write into buffers of the caller's; their other allocations are torch's."""
        p = self.problem
        quantized = {}
        for name, rows, length in (("x", p.tokens, padded(p.hidden)), ("h", p.rows, padded(p.intermediate))):
            sorted_rows = -(-self.positions // SCALE_ROWS) * SCALE_ROWS
            quantized[f"{name}_codes"] = BufferSpec((rows, length // 2), "uint8")
            quantized[f"{name}_scales"] = BufferSpec((sorted_rows, length // BLOCK), "uint8")
        return {
            "ids": BufferSpec((self.positions,), "int32"),
            "weights": BufferSpec((self.positions,), "float32"),
            "experts": BufferSpec((-(-self.positions // self.block_m),), "int32"),
            "valid": BufferSpec((2,), "int32"),
            "h": BufferSpec((p.tokens, p.top_k, padded(p.intermediate)), "bfloat16"),
            **(quantized if self.recorded else {}),
        }


class AiterSteps:
    """The five steps. `operands` are those of the call on the torch side, `mask` says which of the sorted experts are real.

    Args:
      facts: see there.
      operands: x [tokens, D padded] bfloat16, weights, topk_weights float32 and topk_ids int32 in 0..E + K - 1, no expert twice in a row.
      mask: [E + K] int32, 1 for the real experts.
      buffers: those of `facts.buffers`.
      y: [tokens, D padded] bfloat16, the result.
    """

    def __init__(self, facts: Facts, operands: Operands, mask: Any, buffers: dict[str, Any], y: Any):
        self.facts, self.operands, self.mask, self.y = facts, operands, mask, y
        self.h, self.buffers = buffers["h"], buffers
        self.sorted = Sorted(*(buffers[name] for name in ("ids", "weights", "experts", "valid")))

    def route(self, topk_ids: Any) -> Sorted:
        """Step 1; also zeroes y."""
        import aiter

        facts, order = self.facts, self.sorted
        aiter.moe_sorting_fwd(
            topk_ids, self.operands.topk_weights, *order, self.y,
            facts.sorted_experts, facts.block_m, self.mask, None, 1 if facts.recorded else facts.dispatch_policy,
        )  # fmt: skip
        return order

    def quantize(self, x: Any, scale: None = None) -> Any:
        """Steps 2 and 4: rows of x, which are tokens before stage 1 and pairs of token and slot before stage 2."""
        quantizer = self.facts.quantizer
        if quantizer is None:
            return x
        first = x is self.operands.x
        top_k = 1 if first else self.facts.problem.top_k
        if self.facts.recorded:
            codes, scales = (self.buffers[f"{'x' if first else 'h'}_{part}"] for part in ("codes", "scales"))
            return _launch_triton(self.facts, x.view(-1, x.shape[-1]), top_k, self.sorted, codes, scales)
        return _QUANTIZERS[quantizer](self.facts, x.view(-1, x.shape[-1]), top_k, self.sorted)

    def stage1(self, x: Any, gate_up: Stack, bias: None, topk_weights: Any, routing: Sorted) -> Any:
        """Step 3; h [tokens, K, F padded] bfloat16."""
        facts = self.facts
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        return facts.metadata.stage1(
            codes, gate_up.codes, self.operands.weights.down.codes, routing.ids, routing.experts, routing.valid, self.h,
            facts.problem.top_k, block_m=facts.block_m, a1_scale=scales, w1_scale=gate_up.scales, sorted_weights=None,
            **facts.stage1_options,
        )  # fmt: skip

    def stage2(self, h: Any, down: Stack, bias: None, topk_weights: Any, routing: Sorted) -> Any:
        """Step 5; adds to y."""
        facts, shape = self.facts, (self.facts.problem.tokens, self.facts.problem.top_k, -1)
        codes, scales = h if isinstance(h, Quantized) else (h, None)
        masked = {"expert_mask": self.mask, "topk_ids": self.operands.topk_ids} if facts.stage2_takes_mask else {}
        facts.metadata.stage2(
            codes.view(shape), self.operands.weights.gate_up.codes, down.codes, routing.ids, routing.experts, routing.valid, self.y,
            facts.problem.top_k, w2_scale=down.scales, a2_scale=scales, block_m=facts.block_m,
            sorted_weights=routing.weights, **masked,
        )  # fmt: skip
        return self.y


def _quantize_triton(facts: Facts, rows: Any, top_k: int, order: Sorted) -> Quantized:
    """The fused Triton kernel, which is told of one slot a row before stage 1."""
    assert facts.release.triton_quant is not None
    fused = importlib.import_module(facts.release.triton_quant).fused_dynamic_mxfp4_quant_moe_sort
    return Quantized(*fused(rows, **_sorting(facts, order), topk=top_k, block_size=max(facts.block_m, SCALE_ROWS)))


def _triton_kernel(release: Release) -> Any:
    return getattr(importlib.import_module(str(release.triton_quant)), TRITON_KERNEL)


def _triton_arguments(
    facts: Facts, rows: int, top_k: int, length: int, x: Any, codes_and_scales: Any, order: Sorted | None
) -> dict[str, Any]:
    """All arguments that the Triton kernel has in any release, for `rows` rows of `length`; tensors may be None."""
    codes, scales = codes_and_scales or (None, None)
    blocks = length // BLOCK
    row_tile = -(-blocks // SCALE_COLUMNS) * SCALE_ROWS * SCALE_COLUMNS
    return {
        "x_ptr": x, "x_fp4_ptr": codes, "sorted_ids_ptr": order and order.ids, "num_valid_ids_ptr": order and order.valid,
        "blockscale_e8m0_sorted_ptr": scales, "Mx": rows, "Nx": length, "scaleNx": blocks, "M_i": rows, "N_i": blocks,
        "stride_x_m": length, "stride_x_n": 1, "stride_x_fp4_m": length // 2, "stride_x_fp4_n": 1,
        # Of the scales as [tiles of rows, tiles of blocks, 4, 16, 4], outermost first.
        "stride_o3": row_tile, "stride_o2": 256, "stride_o1": 64, "stride_o0": 4, "stride_o4": 1,
        "token_num": facts.problem.tokens, "MXFP4_QUANT_BLOCK_SIZE": BLOCK, "BLOCK_SIZE_Mx": 32 if rows <= 32 else 128,
        "BLOCK_SIZE_M": SCALE_ROWS // 2, "BLOCK_SIZE_N": SCALE_COLUMNS // 2, "TOPK": top_k,
    }  # fmt: skip


def _launch_triton(facts: Facts, rows: Any, top_k: int, order: Sorted, codes: Any, scales: Any) -> Quantized:
    """What the fused Triton quantizer does, with its results in buffers of the caller's: uint8, of `Facts.buffers`."""
    import aiter

    kernel = _triton_kernel(facts.release)
    given = _triton_arguments(facts, len(rows), top_k, rows.shape[1], rows, (codes, scales), order)
    quantizing = -(-given["Mx"] // given["BLOCK_SIZE_Mx"]) * given["N_i"]
    sorting = -(-len(order.ids) // SCALE_ROWS) * -(-given["N_i"] // SCALE_COLUMNS)
    kernel[(quantizing + sorting,)](**{name: given[name] for name in kernel.arg_names})
    return Quantized(codes.view(aiter.dtypes.fp4x2), scales.view(aiter.dtypes.fp8_e8m0))


def _quantize_hip(facts: Facts, rows: Any, top_k: int, order: Sorted) -> Quantized:
    """The HIP operation, which is told of all slots and tells the stages apart by the number of rows; or the two that it succeeded."""
    import aiter

    if facts.release.hip_quant == "fused":
        fused, all_slots = aiter.fused_dynamic_mxfp4_quant_moe_sort, facts.problem.top_k
        return Quantized(*fused(rows, **_sorting(facts, order), topk=all_slots, block_size=facts.block_m))
    codes, scales = aiter.get_hip_quant(aiter.QuantType.per_1x32)(rows, scale=None, quant_dtype=aiter.dtypes.fp4x2)
    if top_k > 1:
        scales = scales[: len(rows)].view(facts.problem.tokens, top_k, -1)
    sort = importlib.import_module("aiter.utility.fp4_utils").moe_mxfp4_sort
    return Quantized(codes, sort(scales, **_sorting(facts, order), block_size=max(facts.block_m, SCALE_ROWS)))


def _sorting(facts: Facts, order: Sorted) -> dict[str, Any]:
    """What all quantizers are told. Those in Triton also want a block of 32 rows or more, of which they make no use."""
    return {"sorted_ids": order.ids, "num_valid_ids": order.valid, "token_num": facts.problem.tokens}


_QUANTIZERS = {"triton": _quantize_triton, "hip": _quantize_hip}


def weights_of(codes_and_scales: Any) -> AiterWeights:
    """aiter's views of the four weight buffers of one call: uint8 gate_up codes and scales, down codes and scales."""
    import aiter

    gate_up, gate_up_scales, down, down_scales = codes_and_scales

    def stack(codes: Any, scales: Any) -> Stack:
        codes = codes.view(aiter.dtypes.fp4x2)
        codes.is_shuffled = True
        return Stack(codes, scales.view(-1, scales.shape[-1]).view(aiter.dtypes.fp8_e8m0))

    return AiterWeights(stack(gate_up, gate_up_scales), stack(down, down_scales))


def run(facts: Facts, slots: Any, pipeline: Pipeline, inputs: list, outputs: list, workspace: Any) -> None:
    """What the bridge calls: x, four weight buffers, topk_weights, topk_ids, mask."""
    x, *stacks, topk_weights, topk_ids, mask = inputs
    buffers = dict(zip(facts.buffers, carve(workspace, slots), strict=True))
    operands = Operands(x, weights_of(stacks), topk_weights, topk_ids)  # type: ignore[arg-type]
    pipeline(AiterSteps(facts, operands, mask, buffers, outputs[0]), operands)


def warm(facts: Facts, slots: Any, workspace_bytes: int, pipeline: Pipeline, device: Any) -> None:
    """Runs the calls of a recording once, ahead of it: aiter compiles kernels and loads modules when they are first used.

    The tensors are of the recording's sizes, but for the weights, which are of as many experts as one token names.
    """
    import torch

    p, hidden, intermediate = facts.problem, padded(facts.problem.hidden), padded(facts.problem.intermediate)
    experts = min(p.experts, p.top_k)

    def stack(rows: int, length: int) -> list[Any]:
        shapes = (experts, rows, length // 2), (experts, rows, length // BLOCK)
        return [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]

    slot = torch.arange(p.top_k, dtype=torch.int32, device=device)
    ids = torch.where(slot < experts, slot, p.experts + slot).expand(p.tokens, -1).contiguous()
    mask = (torch.arange(facts.sorted_experts, device=device) < p.experts).to(torch.int32)
    x = torch.zeros((p.tokens, hidden), dtype=torch.bfloat16, device=device)
    topk_weights = torch.zeros(ids.shape, dtype=torch.float32, device=device)
    inputs = [x, *stack(2 * intermediate, hidden), *stack(hidden, intermediate), topk_weights, ids, mask]
    workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
    run(facts, slots, pipeline, inputs, [torch.empty_like(x)], workspace)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def run_vendor(inputs: list, outputs: list, workspace: None) -> None:
    """aiter's public `fused_moe`, with kernels and rounding of its own choice; inputs as for `run`, without the mask."""
    import aiter
    from aiter.fused_moe import fused_moe

    x, *stacks, topk_weights, topk_ids = inputs
    weights = weights_of(stacks)
    y = fused_moe(
        x, weights.gate_up.codes, weights.down.codes, topk_weights, topk_ids,
        activation=aiter.ActivationType.Silu, quant_type=aiter.QuantType.per_1x32,
        w1_scale=weights.gate_up.scales, w2_scale=weights.down.scales,
    )  # fmt: skip
    outputs[0].copy_(y)
