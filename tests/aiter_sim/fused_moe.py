"""aiter.fused_moe: stages as the metadata binds them, the metadata itself, and the entry points."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import torch

from aiter_sim import config, numerics, sorting, stages
from aiter_sim.functions import QuantType, function, join
from aiter_sim.operations import STAGE1_PARAMETERS, STAGE2_PARAMETERS

COMMON_PARAMETERS = (
    "token, model_dim, inter_dim, expert, topk, dtype, q_dtype_a, q_dtype_w, q_type, use_g1u1, activation, doweight_stage1, "
    "hidden_pad, intermediate_pad"
)
FUSED_MOE_PARAMETERS = (
    "hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=ActivationType.Silu, quant_type=QuantType.No, "
    "doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, block_size_M=None, "
    "num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None, hidden_pad=0, intermediate_pad=0, bias1=None, bias2=None"
)


def fill_fused_moe(sim, module):
    profile = sim.profile
    aiter = sim.module("aiter")
    module.cfg_2stages = None
    if "config_file" in profile.trailing_parameters:
        module.cfg_2stages_by_file = {}
    fields = [(name, Any, dataclasses.field(default=default)) for name, default in profile.metadata_fields]
    needed = [("stage1", Any), ("stage2", Any), ("block_m", int), ("ksplit", int)]
    module.MOEMetadata = dataclasses.make_dataclass("MOEMetadata", [*needed, *fields])
    module.get_padded_M = lambda M: config.PADDED_M[profile.padded_m](M)

    @functools.lru_cache(maxsize=profile.get_2stage_cfgs_cache)
    def get_inter_dim(w1_shape, w2_shape):
        experts, model_dim, inter_dim = w2_shape
        return experts, model_dim, inter_dim * (model_dim // w1_shape[-1])

    module.get_inter_dim = get_inter_dim
    plain = function(
        "get_2stage_cfgs",
        join(COMMON_PARAMETERS, profile.trailing_parameters),
        lambda **arguments: config.resolve(sim, arguments),
    )
    module.get_2stage_cfgs = functools.lru_cache(maxsize=profile.get_2stage_cfgs_cache)(plain)

    if profile.ck_stage1_wrapper is not None:
        wrapped = join(STAGE1_PARAMETERS, 'block_m, a1_scale, w1_scale, kernelName="", sorted_weights=None')

        def ck_moe_stage1(dtype=None, splitk=1, **arguments):
            more = {"dst_type": arguments["out"].dtype} if profile.ck_stage1_has_splitk else {}
            aiter.ck_moe_stage1_fwd(**arguments, splitk=0, **more)
            return arguments["out"]

        module.ck_moe_stage1 = function("ck_moe_stage1", join(wrapped, profile.ck_stage1_wrapper), ck_moe_stage1)

    parameters = join(STAGE1_PARAMETERS, 'kernelName="", a1_scale=None, w1_scale=None, block_m=32, **kwargs')

    def asm_stage1(out, **_):
        sim.calls.append("asm_stage1")
        numerics.raw(out)[:] = numerics.GARBAGE
        return out

    module.asm_stage1 = function("asm_stage1", parameters, asm_stage1)
    _add_cktile(sim, module)
    _add_flydsl_wrappers(sim, module)
    _add_entry_points(sim, module, aiter)


def _add_cktile(sim, module):
    """The bfloat16 stages. Releases without an FP4 split-K have them too, for other activations; they are not simulated."""
    profile = sim.profile
    stage1 = join(
        STAGE1_PARAMETERS, "block_m, a1_scale, w1_scale, sorted_weights=None, n_pad_zeros=0, k_pad_zeros=0, bias1=None"
    )
    stage2 = join(STAGE1_PARAMETERS.replace("hidden_states", "a2"), "w2_scale, a2_scale, block_m")
    stage2_rest = "sorted_weights=None, zeros_out=False, n_pad_zeros=0, k_pad_zeros=0, bias2=None"
    if not profile.cktile_split_k:
        more = "dtype=torch.bfloat16" if profile.name == "v0.1.9" else ""
        unsupported = lambda **_: sim.unsupported("cktile without split-K")  # noqa: E731
        module.cktile_moe_stage1 = function("cktile_moe_stage1", join(stage1, more), unsupported)
        module.cktile_moe_stage2 = function("cktile_moe_stage2", join(stage2, stage2_rest), unsupported)
        return
    kernel_name = 'kernel_name=""' if 1 in profile.flydsl_stages else ""
    auto = profile.cktile_layout == "auto"
    more = join(
        "topk_ids=None" if auto else "",
        "activation=ActivationType.Silu, split_k=1, dtype=torch.bfloat16",
        kernel_name,
        'post_activation_layout="auto"' if auto else "",
    )

    def split_k_stage1(a, *, interleaved):
        """gemm1 into a bfloat16 scratch, then the activation on two halves or on alternating groups of 16 columns."""
        sim.calls.append("cktile_moe_stage1")
        tokens, inter_dim = a["hidden_states"].shape[0], a["w1"].shape[1] // 2
        shape = (tokens, a["topk"], inter_dim)
        out = a["out"]
        if not (
            profile.cktile_reuses_out and out is not None and tuple(out.shape) == shape and out.dtype == a["dtype"]
        ):
            out = numerics.poisoned(shape, a["dtype"])
        w = stages.Weights(a["w1"], a["w1_scale"])
        limit = len(a["sorted_token_ids"])
        walk = stages.tiles(
            *(
                a["sorted_token_ids"],
                a["sorted_expert_ids"],
                a["num_valid_ids"],
                tokens,
                a["block_m"],
                a["block_m"],
                limit,
            )
        )
        rows = stages.Bf16Rows(a["hidden_states"], w.k)
        raw, _ = stages.gate_up_rows(rows, w, walk, tokens, a["topk"])
        raw = raw.astype(numerics.floats(out).dtype).astype(np.float32).reshape(-1, 2 * inter_dim)  # a bfloat16 scratch
        if interleaved:
            if profile.cktile_silu_needs_flydsl:
                sim.module("aiter.ops.flydsl.moe_kernels").flydsl_silu_and_mul_interleaved  # noqa: B018 - fails without flydsl
            groups = raw.reshape(-1, inter_dim // 16, 2, 16)
            gate, up = (groups[:, :, i].reshape(-1, inter_dim) for i in (0, 1))
        else:
            gate, up = raw[:, :inter_dim], raw[:, inter_dim:]
        view = numerics.floats(out)
        view[:] = stages.silu_and_mul(gate, up).reshape(shape).astype(view.dtype)
        return out

    def in_halves(**a):
        return split_k_stage1(a, interleaved=False)

    def by_type(**a):
        return split_k_stage1(a, interleaved=a["w1"].dtype == torch.float4_e2m1fn_x2)

    def as_told(**a):
        layout = a["post_activation_layout"]
        if layout not in ("auto", "interleaved", "standard"):
            raise ValueError(f"Unsupported CK-Tile post activation layout: {layout}")
        return split_k_stage1(a, interleaved=layout == "interleaved") if layout != "auto" else by_type(**a)

    chosen = {"halves": in_halves, "interleaved": by_type, "auto": as_told}[profile.cktile_layout]
    module.cktile_moe_stage1 = function("cktile_moe_stage1", join(stage1, more), chosen)

    def cktile_moe_stage2(**a):
        sim.calls.append("cktile_moe_stage2")
        w = stages.Weights(a["w2"], a["w2_scale"])
        tokens, limit = a["a2"].shape[0], len(a["sorted_token_ids"])
        walk = stages.tiles(
            *(
                a["sorted_token_ids"],
                a["sorted_expert_ids"],
                a["num_valid_ids"],
                tokens,
                a["block_m"],
                a["block_m"],
                limit,
            )
        )
        stages.stage2(stages.Bf16Rows(a["a2"], w.k), w, walk, a["out"], a["topk"], a["sorted_weights"])
        return a["out"]

    parameters = join(stage2, "activation=ActivationType.Swiglu", stage2_rest, kernel_name)
    module.cktile_moe_stage2 = function("cktile_moe_stage2", parameters, cktile_moe_stage2)


def _add_flydsl_wrappers(sim, module):
    profile = sim.profile

    def params(name):
        found = sim.module("aiter.ops.flydsl.moe_kernels").get_flydsl_kernel_params(name)
        if found is None:
            raise ValueError(f"Invalid FlyDSL kernel name: {name}")
        if "_moe2_layout_" in name or "fp8" in (found["a_dtype"], found["b_dtype"]):
            sim.unsupported(name)
        return found

    def walk(a, tile_m, rows_per_expert_id, tokens):
        limit = len(a["sorted_expert_ids"]) * rows_per_expert_id
        return stages.tiles(
            *(
                a["sorted_token_ids"],
                a["sorted_expert_ids"],
                a["num_valid_ids"],
                tokens,
                tile_m,
                rows_per_expert_id,
                limit,
            )
        )

    def stage1(**a):
        found = params(a["kernelName"])
        sim.calls.append(a["kernelName"])
        w = stages.Weights(a["w1"], a["w1_scale"])
        tokens, inter_dim = a["hidden_states"].shape[0], w.rows // 2
        fused = found["out_dtype"] == "fp4" or a["kernelName"].endswith("_fq")
        out = (
            numerics.poisoned((tokens, a["topk"], inter_dim), torch.bfloat16) if fused or a["out"] is None else a["out"]
        )
        rows = stages.Fp4Rows(a["hidden_states"], a["a1_scale"], w.k)
        stages.stage1(rows, w, walk(a, found["tile_m"], max(32, found["tile_m"]), tokens), out, a["topk"])
        if not fused:
            return out
        codes, scales = numerics.quantize(
            numerics.floats(out).reshape(-1, inter_dim), profile.flydsl_scale_rule, "nearest_even"
        )
        return torch.from_numpy(codes), sorting.sort_scales(
            torch.from_numpy(scales), a["sorted_token_ids"], a["num_valid_ids"], tokens, a["topk"]
        )

    def stage2(**a):
        found = params(a["kernelName"])
        sim.calls.append(a["kernelName"])
        w = stages.Weights(a["w2"], a["w2_scale"])
        tokens, out = a["inter_states"].shape[0], a["out"]
        if profile.flydsl_zeroes_out:
            numerics.raw(out)[:] = 0
        halved = not profile.flydsl_has_sort_block_m and (found["tile_m"] // 32 == 0 or found["tile_k"] // 256 == 0)
        foreign = profile.flydsl_has_sort_block_m and found["tile_k"] not in profile.flydsl_tiles_k
        if foreign and not profile.flydsl_copies_to_lds and w.k > 2 * found["tile_k"]:
            raise TypeError('Invalid attribute value for the key "value" when attempting to create the operation')
        if foreign and profile.flydsl_copies_to_lds:  # 16 rows of 128 elements come to lie in wrong places
            numerics.raw(out)[:] = numerics.GARBAGE
        elif not halved:  # otherwise no multiplication is left in the loop, and nothing is stored
            rows_per_expert_id = found.get("sort_block_m", 0) if profile.flydsl_has_sort_block_m else 0
            tiles = walk(a, found["tile_m"], rows_per_expert_id or found["tile_m"], tokens)
            rows = stages.Fp4Rows(a["inter_states"], a["a2_scale"], w.k)
            accumulate = found.get("mode", "atomic") == "atomic"
            mode = {"accumulate": accumulate, "knows_skips": a.get("expert_mask") is not None}
            stages.stage2(rows, w, tiles, out, a["topk"], a["sorted_weights"], **mode)
        return out if profile.flydsl_stage2_returns_out else None

    if 1 in profile.flydsl_stages:
        first = 'kernelName="", activation=ActivationType.Silu, w1_scale=None, a1_scale=None, sorted_weights=None'
        parameters = join(STAGE1_PARAMETERS, first, profile.flydsl_stage1_extra, "**_kwargs")
        module._flydsl_stage1_wrapper = function("_flydsl_stage1_wrapper", parameters, stage1)
    if 2 in profile.flydsl_stages:
        first = 'kernelName="", w2_scale=None, a2_scale=None, sorted_weights=None'
        parameters = join(STAGE2_PARAMETERS, first, profile.flydsl_stage2_extra, "**_kwargs")
        module._flydsl_stage2_wrapper = function("_flydsl_stage2_wrapper", parameters, stage2)


def _add_entry_points(sim, module, aiter):
    """moe_sorting, which allocates, and fused_moe, which does all."""
    profile = sim.profile

    def moe_sorting(
        topk_ids, topk_weights, num_experts, model_dim, moebuf_dtype, block_size, expert_mask, num_local_tokens, **a
    ):
        if a.get("flat") or a.get("output_aux") or a.get("return_local_topk_ids"):
            sim.unsupported("these outputs of moe_sorting")
        tokens, topk = topk_ids.shape
        length = tokens * topk + num_experts * block_size - topk
        outputs = (
            numerics.poisoned((length,), torch.int32),
            numerics.poisoned((length,), torch.float32),
            numerics.poisoned((-(-length // block_size),), torch.int32),
            numerics.poisoned((2,), torch.int32),
            numerics.poisoned((tokens, model_dim), moebuf_dtype),
        )
        aiter.moe_sorting_fwd(
            *(
                topk_ids,
                topk_weights,
                *outputs,
                num_experts,
                int(block_size),
                expert_mask,
                num_local_tokens,
                a["dispatch_policy"],
            )
        )
        return outputs

    first = "topk_ids, topk_weights, num_experts, model_dim, moebuf_dtype, block_size=32, expert_mask=None, num_local_tokens=None"
    parameters = join(first, "dispatch_policy=0", profile.moe_sorting_extra)
    module.moe_sorting = function("moe_sorting", parameters, moe_sorting)

    def quantize(x, ids, valid, tokens, topk, block_m):
        """The release's own choice between its quantizers."""
        if profile.default_quant == "hip":
            return aiter.fused_dynamic_mxfp4_quant_moe_sort(x, ids, valid, tokens, topk, block_m)
        rows_per_token = x.shape[0] // tokens
        if profile.default_quant == "triton" and tokens <= 1024:
            wrapper = sim.module(f"aiter.ops.triton.{profile.triton_package}fused_mxfp4_quant")
            return wrapper.fused_dynamic_mxfp4_quant_moe_sort(x, ids, valid, tokens, rows_per_token, block_m)
        codes, scale = aiter.get_hip_quant(QuantType.per_1x32)(x)
        scale = scale.view(tokens, rows_per_token, -1) if rows_per_token > 1 else scale
        return codes, sim.module("aiter.utility.fp4_utils").moe_mxfp4_sort(scale, ids, valid, tokens, block_m)

    def fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, **a):
        if (
            a["quant_type"] != QuantType.per_1x32
            or a["doweight_stage1"]
            or a["bias1"] is not None
            or w1.dtype != numerics.FLOAT4
        ):
            sim.unsupported("other arguments of fused_moe")
        sim.calls.append("fused_moe")
        policy = a["moe_sorting_dispatch_policy"]
        policy = int(bool(policy)) if profile.policy_is_bool else policy
        experts, model_dim, inter_dim = module.get_inter_dim(w1.shape, w2.shape)
        tokens, topk = topk_ids.shape
        dtype = a["dtype"] or hidden_states.dtype
        shuffled = getattr(w1, "is_shuffled", False) or (profile.table_is_pair and getattr(w2, "is_shuffled", False))
        trailing = {"is_shuffled": shuffled, "is_ep": a["expert_mask"] is not None}
        names = inspect.signature(module.get_2stage_cfgs).parameters
        trailing = {name: value for name, value in trailing.items() if name in names}
        trailing |= dict.fromkeys(("bias1", "bias2") if "bias1" in names else ())
        fp4, pads = numerics.FLOAT4, (a["hidden_pad"], a["intermediate_pad"])
        metadata = module.get_2stage_cfgs(
            *(
                module.get_padded_M(tokens),
                model_dim,
                inter_dim,
                experts,
                topk,
                dtype,
                fp4,
                fp4,
                QuantType.per_1x32,
                True,
            ),
            *(a["activation"], False, *pads),
            **trailing,
        )
        block_m = int(a["block_size_M"] or metadata.block_m)
        all_experts = experts if a["expert_mask"] is None else a["expert_mask"].numel()
        ids, weights_, expert_ids, valid, out = module.moe_sorting(
            *(topk_ids, topk_weight, all_experts, model_dim, dtype, block_m, a["expert_mask"], a["num_local_tokens"]),
            dispatch_policy=policy,
        )
        plain = metadata.ksplit > 1 and shuffled and profile.cktile_split_k
        fused = getattr(metadata, "fuse_quant", "") or getattr(metadata, "fuse_fp4_quant", False)
        a1, a1_scale = (hidden_states, None) if plain else quantize(hidden_states, ids, valid, tokens, topk, block_m)
        a2 = None if fused else numerics.poisoned((tokens, topk, inter_dim), dtype)
        a2 = metadata.stage1(
            *(a1, w1, w2, ids, expert_ids, valid, a2, topk),
            block_m=block_m,
            a1_scale=a1_scale,
            w1_scale=a["w1_scale"].view(numerics.FLOAT8_E8M0),
            sorted_weights=None,
        )
        if isinstance(a2, tuple):
            a2, a2_scale = a2[0].view(numerics.FLOAT4).view(tokens, topk, -1), a2[1]
        elif plain:
            a2_scale = None
        else:
            a2, a2_scale = quantize(a2.view(-1, inter_dim), ids, valid, tokens, topk, block_m)
            a2 = a2.view(tokens, topk, -1)
        metadata.stage2(
            *(a2, w1, w2, ids, expert_ids, valid, out, topk),
            w2_scale=a["w2_scale"].view(numerics.FLOAT8_E8M0),
            a2_scale=a2_scale,
            block_m=block_m,
            sorted_weights=weights_,
        )
        return out

    module.fused_moe = function("fused_moe", join(FUSED_MOE_PARAMETERS, profile.fused_moe_extra), fused_moe)
