"""The top level of aiter: its compiled operations, and the small modules around them."""

from __future__ import annotations

import functools
import logging
import os

import numpy as np
import torch

from aiter_sim import config, numerics, sorting, stages
from aiter_sim.functions import ActivationType, QuantType, function, join

STAGE1_PARAMETERS = "hidden_states, w1, w2, sorted_token_ids, sorted_expert_ids, num_valid_ids, out, topk"
STAGE2_PARAMETERS = STAGE1_PARAMETERS.replace("hidden_states", "inter_states")
SORTING_PARAMETERS = (
    "topk_ids, topk_weights, sorted_token_ids, sorted_weights, sorted_expert_ids, num_valid_ids, moe_buf, num_experts, "
    "unit_size, local_expert_mask=None, num_local_tokens=None"
)


def fill_aiter(sim, module):
    """The top level: enums, dtypes and every compiled operation."""
    profile = sim.profile
    module.__simulated__ = True
    module.ActivationType, module.QuantType = ActivationType, QuantType
    module.logger = logging.getLogger("aiter")
    module.dtypes = sim.module("aiter.utility.dtypes")
    sim.module("aiter.jit.core")

    def recorded(name, body):
        def run(**arguments):
            sim.calls.append(name)
            return body(**arguments)

        return run

    def add(name, parameters, body):
        setattr(module, name, function(name, parameters, recorded(name, body)))

    def sort(workspace=None, local_topk_ids=None, m_indices=None, reverse_sorted=None, **arguments):
        sorting.moe_sorting_fwd(**arguments)

    add("moe_sorting_fwd", join(SORTING_PARAMETERS, "dispatch_policy=0"), sort)
    if profile.opus_sorting:
        workspace = "workspace=None" if profile.opus_has_workspace else ""
        extra = "local_topk_ids=None" if profile.moe_sorting_extra else ""
        extra = (
            join(extra, "m_indices=None, reverse_sorted=None") if "output_aux" in profile.moe_sorting_extra else extra
        )
        add("moe_sorting_opus_fwd", join(SORTING_PARAMETERS, workspace, "dispatch_policy=0", extra), sort)
    if profile.opus_has_workspace:
        size = "moe_sorting_opus_get_workspace_size"
        add(size, "tokens, num_experts, topk, dispatch_policy=0", lambda **_: 0)

    more = join(
        "splitk=1" if profile.ck_stage1_has_splitk else "",
        "use_non_temporal_load=False" if profile.ck_has_non_temporal else "",
        "dst_type=None" if profile.ck_stage1_has_splitk else "",
    )
    types_ = "quant_type=QuantType.No, activation=ActivationType.Silu"
    add(
        "ck_moe_stage1_fwd",
        join(
            STAGE1_PARAMETERS,
            'kernelName="", w1_scale=None, a1_scale=None, block_m=32, sorted_weights=None',
            types_,
            more,
        ),
        functools.partial(ck_stage1, sim),
    )
    more = "use_non_temporal_load=False" if profile.ck_has_non_temporal else ""
    add(
        "ck_moe_stage2_fwd",
        join(
            STAGE2_PARAMETERS,
            'kernelName="", w2_scale=None, a2_scale=None, block_m=32, sorted_weights=None',
            types_,
            more,
        ),
        functools.partial(ck_stage2, sim),
    )

    def torch_quant(kind):
        check_kind(kind)
        return function(
            "per_1x32_f4_quant", f"x, scale=None, quant_dtype={numerics.FLOAT4}, shuffle=False", quant_torch
        )

    def quant_torch(x, shuffle, **_):
        rows = x.reshape(-1, x.shape[-1]).float().numpy()
        codes, scales = numerics.quantize(rows, profile.torch_scale_rule, "nearest_even")
        scales = numerics.shuffle_scales(scales) if shuffle else scales
        codes = torch.from_numpy(codes).view(numerics.FLOAT4).view(*x.shape[:-1], -1)
        return codes, torch.from_numpy(scales).view(numerics.FLOAT8_E8M0)

    module.get_torch_quant = torch_quant

    def hip_quant(kind):
        check_kind(kind)
        parameters = f"x, scale=None, quant_dtype={numerics.FLOAT4}, shuffle=False"
        parameters = join(parameters, "num_rows=None, num_rows_factor=1" if profile.name != "wheel" else "")
        return function("per_1x32_f4_quant_hip", parameters, quant_hip)

    def quant_hip(x, shuffle, **_):
        codes = torch.empty((x.shape[0], x.shape[1] // 2), dtype=numerics.FLOAT4)
        shape = (x.shape[0], x.shape[1] // 32)
        shape = (-(-shape[0] // 256) * 256, -(-shape[1] // 8) * 8) if shuffle else shape
        scales = numerics.poisoned(shape, torch.uint8).view(numerics.FLOAT8_E8M0)
        module.dynamic_per_group_scaled_quant_fp4(codes, x, scales, 32, shuffle_scale=shuffle)
        return codes, scales

    def quant_into(out, input, scales, group_size, shuffle_scale, **_):
        assert group_size == 32
        packed, scale = numerics.quantize(numerics.floats(input), profile.hip_scale_rule, "nearest_even")
        numerics.raw(out)[:] = packed.reshape(-1)
        scale = numerics.shuffle_scales(scale) if shuffle_scale else scale
        numerics.raw(scales)[:] = scale.reshape(-1)

    add(
        "dynamic_per_group_scaled_quant_fp4",
        "out, input, scales, group_size=32, shuffle_scale=True, num_rows=None, num_rows_factor=1",
        quant_into,
    )
    module.get_hip_quant = hip_quant

    if profile.hip_fused:
        more = "sorted_weights=None" if profile.hip_sorted_weights else ""
        add(
            "fused_dynamic_mxfp4_quant_moe_sort",
            join("input, sorted_ids, num_valid_ids, token_num, topk, block_size, num_rows=None, group_size=32", more),
            lambda sorted_weights=None, **kw: sorting.fused_hip(**kw, scale_rule=profile.hip_scale_rule),
        )

        def sort_forward(scale, sorted_ids, num_valid_ids, token_num, cols):
            topk = numerics.raw(scale).size // (token_num * (cols // 32))
            return sorting.sort_scales(scale.reshape(-1, cols // 32), sorted_ids, num_valid_ids, token_num, topk)

        add("mxfp4_moe_sort_fwd", "scale, sorted_ids, num_valid_ids, token_num, cols", sort_forward)


def check_kind(kind):
    if kind.name != "per_1x32":
        raise NotImplementedError(f"aiter_sim: unsupported quant type {kind}")


def fill_version(sim, module):
    module.__version__ = sim.profile.version


def fill_dtypes(sim, module):
    module.fp4x2, module.fp8_e8m0 = numerics.FLOAT4, numerics.FLOAT8_E8M0
    module.bf16, module.fp16, module.fp32 = torch.bfloat16, torch.float16, torch.float32
    module.i8, module.u8, module.i32, module.fp8 = torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn


def fill_core(sim, module):
    """aiter.jit.core: which file the tuned configs come from, and when the environment is asked."""
    module.AITER_CONFIG_FMOE = os.environ.get("AITER_CONFIG_FMOE", str(sim.folder / "tuned_fmoe.csv"))
    if sim.profile.config_read_at_import:
        module.AITER_CONFIG_FMOE_FILE = config.config_file(sim.profile, sim.folder)
        return

    class AITER_CONFIG:  # noqa: N801 - aiter's name
        @property
        def AITER_CONFIG_FMOE_FILE(self):
            return self.get_config_file("AITER_CONFIG_FMOE", module.AITER_CONFIG_FMOE, "tuned_fmoe")

        @functools.lru_cache(maxsize=20)  # noqa: B019 - part of what is simulated
        def get_config_file(self, env_name, default_file, tuned_file_name):
            return config.config_file(sim.profile, sim.folder)

    module.AITER_CONFIG, module.AITER_CONFIGS = AITER_CONFIG, AITER_CONFIG()


def fill_chip_info(sim, module):
    module.get_gfx = module.get_gfx_runtime = lambda: config.GFX
    module.get_cu_num = config.cu_num


def fill_fp4_utils(sim, module):
    def e8m0_shuffle(scale):
        if scale is None or scale.dtype == torch.float32:
            return scale
        assert scale.ndim == 2, "scale must be a 2D tensor"
        return torch.from_numpy(numerics.shuffle_scales(numerics.raw(scale).reshape(scale.shape))).view(scale.dtype)

    def mxfp4_to_f32(x):
        codes = numerics.raw(x).reshape(x.shape)
        ones = np.full((*x.shape[:-1], x.shape[-1] // 16), 127, np.uint8)
        return torch.from_numpy(numerics.dequantize(codes, ones))

    def e8m0_to_f32(scale):
        return torch.from_numpy(numerics.E8M0[numerics.raw(scale).reshape(scale.shape)])

    def moe_mxfp4_sort(blockscale_e8m0, sorted_ids, num_valid_ids, token_num, block_size=32):
        assert block_size % 32 == 0
        topk = blockscale_e8m0.shape[1] if blockscale_e8m0.ndim == 3 else 1
        return sorting.sort_scales(
            blockscale_e8m0.reshape(-1, blockscale_e8m0.shape[-1]), sorted_ids, num_valid_ids, token_num, topk
        )

    module.e8m0_shuffle, module.mxfp4_to_f32, module.e8m0_to_f32 = e8m0_shuffle, mxfp4_to_f32, e8m0_to_f32
    module.moe_mxfp4_sort = moe_mxfp4_sort


def fill_shuffle(sim, module):
    def shuffle_weight(x, layout, **_):
        rows, columns = layout
        assert (rows, columns) == (16, 16), "aiter_sim: only 16 x 16"
        assert x.shape[-2] % 16 == 0
        assert x.shape[-1] % 32 == 0
        codes = numerics.raw(x).reshape(-1, *x.shape[-2:])
        out = torch.from_numpy(numerics.shuffle_codes(codes)).view(x.shape).view(x.dtype)
        out.is_shuffled = True
        return out

    more = "is_guinterleave=False, gate_up=False" if sim.profile.shuffle_has_gate_up else ""
    module.shuffle_weight = function("shuffle_weight", join("x, layout=(16, 16), use_int4=False", more), shuffle_weight)


# --- CK --------------------------------------------------------------------------------------------------------------


def ck_gemm(sim, stage, activations, scale, weight, weight_scale, shuffled, a):
    """What a CK instance reads and which rows each of its work-groups has.

    K is the last axis of the activations, and only float4 on both sides doubles it: bytes are taken for elements. The
    argument block_m bounds the grid and picks an instance where the name is none; the tile is the instance's own.
    """
    k = activations.shape[-1] * (2 if activations.dtype == weight.dtype == numerics.FLOAT4 != torch.uint8 else 1)
    w = stages.Weights(weight, weight_scale, shuffled=shuffled, k=k)
    tokens, topk, sorted_ids = activations.shape[0], a["topk"], a["sorted_token_ids"]
    columns, inter_dim = (w.rows // 2, w.rows // 2) if stage == 1 else (w.rows, k)
    tile_m, tile_n = stages.ck_tile(stage, a["kernelName"], a["block_m"], inter_dim)
    if columns % tile_n or k % 256:
        raise RuntimeError(
            "wrong! device_gemm with the specified compilation parameters does not support this GEMM problem"
        )
    limit = min(tokens * topk * a["block_m"], len(sorted_ids))
    walk = stages.tiles(sorted_ids, a["sorted_expert_ids"], a["num_valid_ids"], tokens, tile_m, tile_m, limit)
    return stages.Fp4Rows(activations, scale, k), w, walk


def is_empty(a, *names):
    if all(a[name].numel() for name in names):
        return False
    print("detect null ptr !")
    return True


def ck_stage1(sim, **a):
    """gemm1 of CK, from the compiled module for shuffled or for plain weights, as w1 says."""
    if not is_empty(a, "hidden_states", "w1", "w2", "out"):
        shuffled = getattr(a["w1"], "is_shuffled", False)
        rows, w, walk = ck_gemm(sim, 1, a["hidden_states"], a["a1_scale"], a["w1"], a["w1_scale"], shuffled, a)
        stages.stage1(rows, w, walk, a["out"], a["topk"], router_weights=a["sorted_weights"])
    return a["out"]


def ck_stage2(sim, **a):
    """gemm2 of CK, adding to `out`."""
    if not is_empty(a, "inter_states", "w1", "w2", "out"):
        shuffled = getattr(a[sim.profile.stage2_shuffled_from], "is_shuffled", False)
        rows, w, walk = ck_gemm(sim, 2, a["inter_states"], a["a2_scale"], a["w2"], a["w2_scale"], shuffled, a)
        stages.stage2(rows, w, walk, a["out"], a["topk"], a["sorted_weights"])
    return a["out"]
