"""`aiter`: AMD's two-stage MXFP4 kernels (CK and FlyDSL) on XLA's buffers, through the bridge. MI355X (gfx950).

aiter's Python functions allocate and look things up, so the calls are not recorded into command buffers, and every call runs this
Python; with bridge='graph', those rows are recorded whose functions need not allocate. Weights must be prepared: their layout is
aiter's own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_mxfp4_moe import device
from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.aiter import calls, inject, kernels, layout, release, slots, tables
from jax_mxfp4_moe.implementations.aiter.release import Release
from jax_mxfp4_moe.implementations.base import Config, Implementation, Operands, Pipeline
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.weights import MoeWeights

if TYPE_CHECKING:
    from types import ModuleType

ARCH = "gfx950"
MAX_TOKENS = 2**24 - 1
"""A sorted position packs its token into 24 bits."""
MAX_TOP_K = 127
"""It packs the slot into the 8 bits above, of which aiter's quantizers take the highest for a sign."""


class AiterImplementation(Implementation):
    """aiter's operations.

    Config:
      pipeline: "two_stage" (sorting, quantizations and products are called one by one) or "vendor" (aiter's `fused_moe` does it all).
      block_m, ksplit, kernel_name1, kernel_name2: those of aiter's own tables; block_m 0 leaves them all to aiter.
      dispatch_policy: how the sorting runs: 0 aiter chooses, 1 one kernel, 2 several.
    """

    name = "aiter"
    layouts = (layout.TAG,)
    presets = tables.PRESETS

    def missing(self) -> str | None:
        """Needs aiter and torch."""
        if importlib.util.find_spec("torch") is None:
            return "needs torch built for ROCm, which is not installed: see docs/mi355x.md"
        if "aiter" not in sys.modules and importlib.util.find_spec("aiter") is None:
            return f"is not installed: install amd-aiter {release.FIRST} or later for this ROCm, see docs/mi355x.md"
        return None

    def why_not(self, problem: MoeProblem | None, platform: str) -> str | None:
        """Needs a gfx950, torch for ROCm with float4, one HIP runtime in the process, and an aiter that gives the numbers asked for."""
        simulated = _simulated_aiter()
        if platform != "rocm" and not (simulated and platform == "cpu"):
            return f"needs a ROCm device ({ARCH}), found {platform}"
        if (missing := self.missing()) is not None:
            return missing
        return (
            (None if simulated else _device_problem(platform))
            or _dtype_problem()
            or device.hip_runtime_conflict()
            or (found := release.load()).unusable
            or (None if problem is None else _refusal(problem, found))
        )

    def prepare(self, weights: MoeWeights) -> MoeWeights:
        """Shuffles codes and scales into aiter's layout, padding both dimensions to multiples of 256; see `layout`."""
        return layout.shuffle(weights)

    def unprepare(self, weights: MoeWeights) -> MoeWeights:
        """The inverse of `prepare`."""
        return layout.unshuffle(weights)

    def configs(self, problem: MoeProblem, platform: str) -> list[Config]:
        """The best row of the tables that the installed aiter can run, or aiter's own choice where they have none for the shape."""
        found = release.load()
        row = tables.select(problem, found)
        if (
            row is not None
            and row.pipeline == tables.VENDOR
            and _vendor_refusal(problem, row.config(), found) is not None
        ):
            row = tables.select(problem, found, vendor=False)
        if row is None:
            row = tables.select(problem, found, tables.OWN_CHOICE)
            assert row is not None
            own = tables.own_row(problem, found)
            if own is None:
                row = dataclasses.replace(row, source="no row for the shape")
            elif inject.difference(own, inject.resolve(problem, row.config(), found)) is not None:
                row = dataclasses.replace(row, source=f"aiter's own choice, which is not its row ({own.table})")
            else:
                row = dataclasses.replace(
                    row, table=own.table, us=own.us, source="aiter's own row, which it chooses itself"
                )
        return [_named(row, found)]

    def preset(self, name: str, problem: MoeProblem, platform: str) -> Config:
        """The row of a preset for `problem`; "vendor" has every shape."""
        found = release.load()
        row = tables.select(problem, found, name)
        assert row is not None, name
        if row.pipeline == tables.VENDOR:
            _check_vendor(name, problem, row.config(), found)
        return _named(row, found)

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
        """Puts one custom call into the caller's computation, between the padding of x and the trimming of y."""
        found = release.load()
        x, weights, topk_weights, topk_ids = operands
        hidden = layout.padded(problem.hidden)
        x = jnp.pad(x, ((0, 0), (0, hidden - problem.hidden)))
        stacks = (weights.gate_up.codes, weights.gate_up.scales, weights.down.codes, weights.down.scales)
        vendor = config["pipeline"] == tables.VENDOR
        if vendor:  # whoever chose it: a preset and the tables were asked before, a mapping was not
            _check_vendor(dict(config.items), problem, config, found)
        route = slots.to_unnamed_experts if vendor else slots.to_masked_experts
        topk_weights, topk_ids, extra = route(topk_weights, topk_ids, problem.experts)
        leaves = (x, *stacks, topk_weights, topk_ids, *(() if vendor else (extra,)))
        plan = functools.partial(
            Plan,
            name=f"aiter {problem}",
            inputs=tuple(BufferSpec(leaf.shape, str(leaf.dtype)) for leaf in leaves),
            outputs=(BufferSpec((problem.tokens, hidden), "bfloat16"),),
        )
        key = ("aiter", problem, config.items, found)
        recorded = (bridge or os.environ.get(torch_call.ENVIRONMENT_VARIABLE)) == "graph"
        if vendor:
            if recorded:
                raise _cannot_be_recorded("its fused_moe allocates", config, problem, found)
            y = torch_call.call(plan(key=key, run=calls.run_vendor), *leaves, bridge=bridge)[0]
            y = jnp.where(extra[:, None], y, 0)
        else:
            facts = calls.Facts(problem, found, _resolve(problem, config, found), config["dispatch_policy"], recorded)
            if recorded and facts.allocates is not None:
                raise _cannot_be_recorded(facts.allocates, config, problem, found)
            buffer_slots, workspace_bytes = torch_call.workspace_slots(tuple(facts.buffers.values()))
            two_stage = plan(
                key=(*key, kernels.identity(facts.metadata), recorded),
                run=functools.partial(calls.run, facts, buffer_slots, pipeline),
                workspace_bytes=workspace_bytes,
                capturable=recorded,
                warm=functools.partial(calls.warm, facts, buffer_slots, workspace_bytes, pipeline)
                if recorded
                else None,
            )
            y = torch_call.call(two_stage, *leaves, bridge=bridge)[0]
        return y[:, : problem.hidden]


def _simulated_aiter() -> bool:
    """Whether a simulated aiter has been put in the place of a real one. Imports nothing: a real one may not import here."""
    module: ModuleType | None = sys.modules.get("aiter")
    return getattr(module, "__simulated__", False) is True


def _device_problem(platform: str) -> str | None:
    import torch

    if torch.version.hip is None:
        built_for = "CUDA" if torch.version.cuda else "CPUs"
        return f"needs torch built for ROCm, found torch {torch.__version__} built for {built_for}: install torch's ROCm wheel"
    if (arch := device.arch(platform)) != ARCH:
        return f"needs {ARCH} (MI350X, MI355X), found {arch}"
    return None


def _dtype_problem() -> str | None:
    import torch

    for dtype, version in (("float8_e8m0fnu", "2.7"), ("float4_e2m1fn_x2", "2.8")):
        if not hasattr(torch, dtype):
            return (
                f"needs torch.{dtype}, which torch {torch.__version__} does not have (aiter then takes bytes for numbers): install torch "
                f"{version} or later for ROCm"
            )
    return None


def _refusal(problem: MoeProblem, found: Release) -> str | None:
    """Why these kernels cannot give what `problem` asks for."""
    if problem.activation != "silu":
        return f"has activation 'silu' only, found {problem.activation!r}"
    if problem.has_gate_up_bias or problem.has_down_bias:
        return "adds no biases with activation 'silu'"
    if problem.apply_router_weight_on_input:
        return "multiplies by the router weight after stage 2, and apply_router_weight_on_input=True was asked for"
    if problem.deterministic:
        return "adds in bfloat16 with atomics, in no fixed order, and deterministic=True was asked for"
    if (problem.dtype, problem.out_dtype) != ("bfloat16", "bfloat16"):
        return f"takes and gives bfloat16, found {problem.dtype} to {problem.out_dtype}: cast x, leave preferred_element_type unset"
    if problem.tokens > MAX_TOKENS:
        return f"packs the number of a token into 24 bits, found {problem.tokens} tokens: call it on parts of x"
    if problem.top_k > MAX_TOP_K:
        return f"takes at most {MAX_TOP_K} slots a token, found {problem.top_k}"
    if problem.activation_quant is None:
        if found.split_k_is_right:
            return None
        return (
            f"cannot keep activations in bfloat16 with aiter {found.version}, whose kernels for that "
            + ("pair gate and up columns in another order" if found.split_k else "do not exist")
            + ": pass activation_quant='mxfp4', or install another release"
        )
    if problem.activation_quant != "mxfp4":
        return f"cannot quantize activations to {problem.activation_quant!r}, only to 'mxfp4'"
    rules = found.activation_rules
    if (problem.scale_rule, problem.rounding) not in rules:
        named = " or ".join(f"scale_rule={scale!r}, rounding={rounding!r}" for scale, rounding in rules) or "no rule"
        return (
            f"quantizes activations by {named} with aiter {found.version}, found scale_rule={problem.scale_rule!r}, "
            f"rounding={problem.rounding!r}: pass what it has"
        )
    return None


def _vendor_refusal(problem: MoeProblem, config: Config, found: Release) -> str | None:
    """Why aiter's own `fused_moe` must not run `problem`, as a clause that ends in the remedy."""
    if problem.experts < problem.top_k:
        return f"takes no skipped slot, and {problem.experts} experts for {problem.top_k} slots a token leave some: leave config unset"
    metadata = inject.resolve(problem, config, found)
    if (name := kernels.taken_for_assembly(metadata)) is not None:
        return f"would look for {name} among its kernels in assembly: install the flydsl that it names, or leave config unset"
    if (missing := kernels.missing_flydsl(metadata, found)) is not None:
        return f"would fail with the row that it has for this shape, since {missing}, or leave config unset"
    if (switch := kernels.rounds_slots(metadata)) is not None:
        return f"may round every slot's result before the sum, as {switch}=1 lets it: unset {switch}, or leave config unset"
    if kernels.splits_k(metadata):
        if found.split_k == "halves":
            return None
        return (
            "would run its kernels for split K, which pair gate and up columns in another order than these weights: set AITER_KSPLIT=-1, "
            "or leave config unset"
        )
    if problem.activation_quant is None:
        return "quantizes activations, and activation_quant=None was asked for: pass activation_quant='mxfp4', or leave config unset"
    asked = f"scale_rule={problem.scale_rule!r}, rounding={problem.rounding!r} were asked for"
    if kernels.rounds_by_own_rule(metadata):
        return f"quantizes inside stage 1 by FlyDSL's own rule, and {asked}: leave config unset"
    if getattr(metadata, "run_1stage", False):
        return f"quantizes inside one kernel for both stages, by a rule that could not be told, and {asked}: leave config unset"
    if (wrong := kernels.wrong_anyhow(metadata, layout.padded(problem.intermediate), found)) is not None:
        return f"would give wrong numbers with the row that it has for this shape, since {wrong}: correct the row, or leave config unset"
    rule = tables.vendor_rule(found, problem.tokens)
    if rule is None:
        return f"quantizes activations by a rule that could not be told, and {asked}: leave config unset"
    if (problem.scale_rule, problem.rounding) == rule:
        return None
    return f"quantizes activations by scale_rule={rule[0]!r}, rounding={rule[1]!r}, and {asked}: pass its own, or leave config unset"


def _check_vendor(given: object, problem: MoeProblem, config: Config, found: Release) -> None:
    """Raises ValueError, with the config as it was given, if aiter's own `fused_moe` must not run `problem`."""
    if (reason := _vendor_refusal(problem, config, found)) is not None:
        raise ValueError(
            f"mxfp4_moe: config={given!r} given with aiter {found.version}, for {problem}: its fused_moe {reason}."
        )


def _named(row: tables.Row, found: Release) -> Config:
    """The row's config, with the aiter that it was chosen for among its words: another aiter is another config."""
    config = row.config()
    return dataclasses.replace(config, source=f"{config.source} (aiter {found.version})")


def _cannot_be_recorded(why: str, config: Config, problem: MoeProblem, found: Release) -> NotImplementedError:
    return NotImplementedError(
        f"mxfp4_moe: bridge='graph' was asked for {config} on {problem} with aiter {found.version}, which cannot be recorded: {why}. Use "
        "bridge='eager', or leave it unset."
    )


def _resolve(problem: MoeProblem, config: Config, found: Release) -> object:
    """What aiter makes of the config; raises before anything is launched if that must not run."""
    metadata = inject.resolve(problem, config, found)
    reason = kernels.unsupported(metadata, layout.padded(problem.intermediate), found)
    if reason is not None:
        raise NotImplementedError(f"mxfp4_moe: aiter {found.version} was given {config} for {problem}; {reason}.")
    return metadata
