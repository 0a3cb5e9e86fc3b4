"""What differs between aiter's releases, as data. Each profile is the one before it with the changes of its release."""

from __future__ import annotations

import dataclasses
from dataclasses import replace


@dataclasses.dataclass(frozen=True)
class Profile:
    """One generation of aiter's interface. The defaults are those of the one wheel on PyPI, 0.1.7.post2.dev18."""

    name: str
    version: str
    # get_2stage_cfgs and its result
    trailing_parameters: str = "bias1, bias2"
    metadata_fields: tuple[tuple[str, object], ...] = (("run_1stage", False),)
    padded_m: str = "to_1024"  # a key of config.PADDED_M
    get_2stage_cfgs_cache: int = 1024
    # the table of tuned configs
    config_read_at_import: bool = True
    table_is_pair: bool = False
    key_has_gfx: bool = False
    key_has_enum: bool = False
    tags_kept: str = "all"  # "all", "empty", "not_fallback"
    has_fallback_rows: bool = False
    merge_rejects_duplicates: bool = False
    name_test: str = "in"  # what is done to a kernel name first: "in", "truthy", "startswith", "isinstance"
    heuristic_ksplit: bool = False
    bypass_variable: bool = False
    ksplit_variable: bool = False
    # CK
    ck_stage1_wrapper: str | None = None
    ck_stage1_has_splitk: bool = False
    ck_has_non_temporal: bool = False
    stage2_shuffled_from: str = "w1"
    # CK-Tile split-K
    cktile_split_k: bool = False
    cktile_layout: str = "halves"  # "halves", "interleaved", "auto" (a parameter)
    cktile_reuses_out: bool = False
    cktile_silu_needs_flydsl: bool = False
    # FlyDSL
    flydsl_stages: tuple[int, ...] = ()
    flydsl_version: str = ""
    flydsl_import_needs_package: bool = False
    flydsl_forced: bool = False
    flydsl_tiles_m: tuple[int, ...] = ()
    flydsl_tiles_k: tuple[int, ...] = ()
    flydsl_t16_registered: bool = False
    flydsl_options: tuple[int, ...] = ()  # stages with _bnt in names
    flydsl_suffixes: tuple[str, ...] = ()
    flydsl_has_sort_block_m: bool = False
    flydsl_copies_to_lds: bool = False  # stage 2 copies 16 bytes a thread into LDS, whatever its tile
    flydsl_zeroes_out: bool = False
    flydsl_stage2_returns_out: bool = True
    flydsl_scale_rule: str = "even"  # of a stage 1 that quantizes
    flydsl_stage1_extra: str = ""
    flydsl_stage2_extra: str = ""
    # quantize and sort
    triton_package: str | None = None  # "" or "quant.": where under aiter.ops.triton the wrapper is
    triton_kernel_has_rows: bool = True  # the argument M_i
    triton_padded_width: bool = False
    hip_fused: bool = False
    hip_sorted_weights: bool = False
    hip_scale_rule: str = "hip_half_up"
    torch_scale_rule: str = "half_up"
    default_quant: str = "separate"  # "separate", "triton" (up to 1024 tokens), "hip"
    # sorting
    moe_sorting_extra: str = ""
    opus_sorting: bool = False
    opus_has_workspace: bool = False
    # the rest
    enum_module: str = "module_aiter_enum"
    fused_moe_extra: str = ""
    policy_is_bool: bool = True
    shuffle_has_gate_up: bool = False


WHEEL = Profile("wheel", "0.1.7.post2.dev18")

V8 = replace(
    WHEEL,
    name="v0.1.8",
    version="0.1.8",
    padded_m="to_16384_from_16",
    get_2stage_cfgs_cache=2048,
    config_read_at_import=False,
    triton_package="",
    default_quant="triton",
)
V9 = replace(
    V8,
    name="v0.1.9",
    version="0.1.9",
    trailing_parameters="",
    metadata_fields=(*V8.metadata_fields, ("has_bias", False)),
    padded_m="to_16384",
    bypass_variable=True,
    ksplit_variable=True,
    ck_stage1_wrapper="quant_type=QuantType.No, activation=ActivationType.Gelu, splitk=1, dtype=None",
    ck_stage1_has_splitk=True,
    fused_moe_extra="splitk=0",
)
V10 = replace(
    V9,
    name="v0.1.10.post3",
    version="0.1.10.post3",
    trailing_parameters="is_shuffled=True",
    metadata_fields=(*V9.metadata_fields, ("use_non_temporal_load", True)),
    name_test="truthy",
    heuristic_ksplit=True,
    ck_stage1_wrapper=(
        "quant_type=QuantType.No, activation=ActivationType.Gelu, splitk=1, use_non_temporal_load=False, dtype=None"
    ),
    ck_has_non_temporal=True,
    stage2_shuffled_from="w2",
    cktile_split_k=True,
    triton_package="quant.",
)
V11 = replace(
    V10,
    name="v0.1.11",
    version="0.1.11",
    tags_kept="empty",
    has_fallback_rows=True,
    flydsl_stages=(2,),
    flydsl_version="0.0.1.dev95158637",
    flydsl_tiles_m=(32, 64),
    flydsl_tiles_k=(256,),
    flydsl_zeroes_out=True,
    flydsl_stage2_returns_out=False,
    opus_sorting=True,
)
V12 = replace(
    V11,
    name="v0.1.12",
    version="0.1.12",
    metadata_fields=(*V11.metadata_fields, ("fuse_fp4_quant", False)),
    padded_m="to_32768",
    merge_rejects_duplicates=True,
    name_test="startswith",
    flydsl_stages=(1, 2),
    flydsl_version="0.1.2",
    flydsl_import_needs_package=True,
    flydsl_tiles_m=(16, 32, 64, 128),
    flydsl_options=(1,),
    flydsl_suffixes=("_fq", r"_sbm\d+"),
    flydsl_has_sort_block_m=True,
    flydsl_zeroes_out=False,
    flydsl_stage2_returns_out=True,
    flydsl_stage1_extra="fuse_fp4_quant=False, fuse_sort_scale=False",
    triton_kernel_has_rows=False,
    enum_module="module_aiter_core",
)
V12_POST2 = replace(V12, name="v0.1.12.post2", version="0.1.12.post2", hip_fused=True, default_quant="hip")
V13 = replace(
    V12_POST2,
    name="v0.1.13",
    version="0.1.13",
    metadata_fields=(*V11.metadata_fields, ("fuse_quant", "")),
    flydsl_version="0.1.4",
    flydsl_import_needs_package=False,
    flydsl_options=(1, 2),
    flydsl_suffixes=("_fp4", "_fp8", r"_sbm\d+"),
    flydsl_copies_to_lds=True,
    flydsl_stage1_extra="out_scale=None, out_scale_sorted=None, bias1=None",
    flydsl_stage2_extra="bias2=None",
    policy_is_bool=False,
)
V13_POST1 = replace(
    V13,
    name="v0.1.13.post1",
    version="0.1.13.post1",
    cktile_layout="interleaved",
    flydsl_zeroes_out=True,
)
V14 = replace(
    V13_POST1,
    name="v0.1.14",
    version="0.1.14",
    trailing_parameters='is_shuffled=True, gate_mode="separated"',
    metadata_fields=(*V13.metadata_fields, ("stage2_has_bias", False)),
    padded_m="to_131072",
    table_is_pair=True,
    key_has_enum=True,
    cktile_layout="auto",
    cktile_reuses_out=True,
    flydsl_version="0.1.7",
    flydsl_scale_rule="half_up",
    flydsl_stage1_extra="out_scale=None, out_scale_sorted=None, bias1=None, topk_ids=None, swiglu_limit=0.0",
    opus_has_workspace=True,
    fused_moe_extra='splitk=0, swiglu_limit=0.0, gate_mode="separated"',
    shuffle_has_gate_up=True,
)
V15 = replace(
    V14,
    name="v0.1.15",
    version="0.1.15",
    flydsl_version="0.1.9.dev599",
    flydsl_zeroes_out=False,
    flydsl_stage1_extra=V14.flydsl_stage1_extra + ", inter_dim_pad=0, model_dim_pad=0",
    flydsl_stage2_extra="bias2=None, inter_dim_pad=0, model_dim_pad=0",
    moe_sorting_extra="return_local_topk_ids=False",
)
V16 = replace(
    V15,
    name="v0.1.16",
    version="0.1.16",
    trailing_parameters=V15.trailing_parameters + ", is_ep=False",
    metadata_fields=(*V15.metadata_fields, ("flat", False)),
    key_has_gfx=True,
    flydsl_version="0.2.0",
    flydsl_forced=True,
    flydsl_tiles_k=(128, 256),
    flydsl_t16_registered=True,
    flydsl_stage2_extra=V15.flydsl_stage2_extra + ", expert_mask=None, topk_ids=None",
    triton_padded_width=True,
    hip_scale_rule="rceil",
    torch_scale_rule="rceil",
    moe_sorting_extra="return_local_topk_ids=False, accumulate=True, flat=False",
)
V16_POST6 = replace(
    V16,
    name="v0.1.16.post6",
    version="0.1.16.post6",
    metadata_fields=(*V16.metadata_fields, ("output_aux", False), ("prequant", True)),
    tags_kept="not_fallback",
    name_test="isinstance",
    hip_sorted_weights=True,
    moe_sorting_extra=V16.moe_sorting_extra + ", output_aux=False",
)
_ROUTE_BUCKET = (
    ("skip_inter_quant", False),
    ("route_bucket", ""),
    ("expected_sorted_blocks", None),
    ("min_sorted_blocks", None),
    ("max_sorted_blocks", None),
)
V17 = replace(
    V16,
    name="v0.1.17",
    version="0.1.17",
    trailing_parameters=V16.trailing_parameters + ", has_stage2_bias=False",
    metadata_fields=(*V16.metadata_fields, *_ROUTE_BUCKET),
    flydsl_version="0.2.2",
    flydsl_suffixes=(*V16.flydsl_suffixes, r"_kw\d+"),
    cktile_silu_needs_flydsl=True,
    hip_sorted_weights=True,
    fused_moe_extra='splitk=0, swiglu_limit=None, gate_mode="separated"',
)
V19 = replace(
    V17,
    name="v0.1.19",
    version="0.1.19",
    metadata_fields=(*V16_POST6.metadata_fields, *_ROUTE_BUCKET),
    key_has_enum=False,
    tags_kept="not_fallback",
    has_fallback_rows=False,
    name_test="isinstance",
    flydsl_version="0.2.4",
    flydsl_import_needs_package=True,
    flydsl_stage1_extra=V14.flydsl_stage1_extra
    + ", situ_beta=1.0, situ_linear_beta=1.0, inter_dim_pad=0, model_dim_pad=0",
    moe_sorting_extra=V16_POST6.moe_sorting_extra,
    fused_moe_extra='splitk=0, swiglu_limit=None, beta=None, linear_beta=None, gate_mode="separated"',
)
V18 = replace(
    V19,
    name="v0.1.18",
    version="0.1.18",
    flydsl_stage1_extra=V17.flydsl_stage1_extra,
    fused_moe_extra=V17.fused_moe_extra,
)
V19_POST2 = replace(
    V19,
    name="v0.1.19.post2",
    version="0.1.19.post2",
    key_has_enum=True,
    flydsl_stage1_extra=V19.flydsl_stage1_extra + ', out_dtype="", v2_output_layout=False',
    fused_moe_extra=V19.fused_moe_extra
    + ", shared_w1=None, shared_w2=None, shared_w1_scale=None, shared_w2_scale=None, shared_expert_id=-1",
)
V20 = replace(
    V19_POST2,
    name="v0.1.20.post1",
    version="0.1.20.post1",
    trailing_parameters=V19_POST2.trailing_parameters + ", opus_weights_shuffled=None",
    flydsl_version="0.3.1",
)
HEAD = replace(
    V20,
    name="HEAD",
    version="0.1.21.dev0",
    trailing_parameters=V20.trailing_parameters + ", config_file=None",
    fused_moe_extra=V20.fused_moe_extra + ", stage2_scatter=None",
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        WHEEL,
        V8,
        V9,
        V10,
        V11,
        V12,
        V12_POST2,
        V13,
        V13_POST1,
        V14,
        V15,
        V16,
        V16_POST6,
        V17,
        V18,
        V19,
        V19_POST2,
        V20,
        HEAD,
    )
}

CASES: tuple[tuple[str, bool], ...] = tuple(
    (name, flydsl)
    for name, profile in PROFILES.items()
    for flydsl in ((False, True) if profile.flydsl_stages else (False,))
)
"""Every profile with and, where it can use it, without the package flydsl."""
