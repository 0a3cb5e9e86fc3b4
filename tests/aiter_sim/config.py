"""How each release turns a shape into kernels: files, tables, heuristics. The order of the questions is aiter's own."""

from __future__ import annotations

import csv
import functools
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from aiter_sim import numerics

GFX = "gfx950"
CU_NUM = 256
GFX_OF_CU_NUM = {256: "gfx950", 304: "gfx942", 80: "gfx942"}
ANY_ACTIVATION = "__ignore__"
TIERS = (32768, 131072)
INDEX = (
    "cu_num",
    "token",
    "model_dim",
    "inter_dim",
    "expert",
    "topk",
    "act_type",
    "dtype",
    "q_dtype_a",
    "q_dtype_w",
    "q_type",
    "use_g1u1",
    "doweight_stage1",
)
COLUMNS = (
    *INDEX,
    *(
        "block_m",
        "ksplit",
        "us1",
        "kernelName1",
        "err1",
        "us2",
        "kernelName2",
        "err2",
        "us",
        "run_1stage",
        "tflops",
        "bw",
    ),
)


def cu_num() -> int:
    return int(os.environ.get("CU_NUM", CU_NUM))


# --- numbers ---------------------------------------------------------------------------------------------------------


def power_of_two(m: int) -> int:
    return 1 if m <= 1 else 1 << (m - 1).bit_length()


def _steps(m: int, small_is_16: bool, from_1024: tuple[tuple[int, int], ...]) -> int:
    if small_is_16 and 1 <= m <= 16:
        return 16
    if m < 1024:
        return power_of_two(m)
    return next(padded for below, padded in reversed(from_1024) if m >= below)


_TO_16384 = ((1024, 1024), (2048, 2048), (16384, 16384))
PADDED_M = {
    "to_1024": lambda m: _steps(m, True, ((1024, 1024),)),
    "to_16384_from_16": lambda m: _steps(m, True, _TO_16384),
    "to_16384": lambda m: _steps(m, False, _TO_16384),
    "to_32768": lambda m: min(power_of_two(m), 32768),
    "to_131072": lambda m: 131072 if m >= 131072 else min(power_of_two(m), 32768),
}


def block_size_m(token: int, topk: int, expert: int, inter_dim: int) -> int:
    """The rows of a block for which the last round over the compute units is the fullest."""
    columns = -(-inter_dim // 128)
    best = []
    for rows in (32, 64, 128):
        groups = columns * (token * topk + expert * rows - topk + rows - 1) // rows
        best.append((-(-groups // cu_num()), cu_num() - groups % cu_num(), rows))
    return min(best, key=lambda entry: entry[:2])[2]


def heuristic_ksplit(token: int, topk: int, expert: int, inter_dim: int, model_dim: int) -> int:
    asked = int(os.environ.get("AITER_KSPLIT", "0"))
    if asked:
        return asked
    groups = -(-inter_dim // 128) * token * topk
    if token * topk > expert or groups >= cu_num():
        return 0
    splits = range(-(-cu_num() // groups), 1, -1)
    return next((n for n in splits if model_dim % n == 0 and model_dim // n % 256 == 0), 0)


def non_temporal(token: int, topk: int, expert: int) -> bool:
    asked = int(os.environ.get("AITER_USE_NT", "-1"))
    return bool(asked) if asked != -1 else token * topk // expert < 64


# --- files -----------------------------------------------------------------------------------------------------------


def read_csv(path: str) -> list[dict[str, Any]]:
    """Rows of a file with the types that pandas gives: a column is int, float, bool or text, and an empty cell is NaN."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for name in rows[0] if rows else ():
        for row, value in zip(rows, _typed([row[name] for row in rows]), strict=True):
            row[name] = value
    return rows


def _typed(texts: list[str]) -> list[Any]:
    empty = [text in (None, "", "nan", "NaN", "None", "NA", "null") for text in texts]
    filled = [text for text, is_empty in zip(texts, empty, strict=True) if not is_empty]
    convert: Any = str
    if filled and not any(empty) and set(filled) <= {"True", "False"}:
        return [text == "True" for text in texts]
    for candidate in (int, float):
        try:
            for text in filled:
                candidate(text)
        except ValueError:
            continue
        convert = float if candidate is int and any(empty) else candidate
        break
    return [float("nan") if is_empty else convert(text) for text, is_empty in zip(texts, empty, strict=True)]


def config_file(profile: Any, folder: pathlib.Path) -> str:
    """The file that AITER_CONFIG_FMOE, as it is now, selects. One path is taken as it is; several are merged.

    Newer releases take two rows of one shape for an error, and before they raise it write the files anew, each shape in one of them.
    """
    asked = os.environ.get("AITER_CONFIG_FMOE")
    paths = asked.split(os.pathsep) if asked else []
    if len(paths) == 1:
        return paths[0]
    out = folder / "tuned_fmoe.csv"
    files = {path: read_csv(path) for path in paths}
    rows = [row for own in files.values() for row in own] if paths else vendor_rows(profile)
    best: dict[tuple, dict[str, Any]] = {}
    twice: tuple | None = None
    for row in rows:
        key = (*(row[name] for name in INDEX), row.get("_tag") or "")
        twice = key if key in best else twice
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    if twice and profile.merge_rejects_duplicates:
        kept = {id(row) for row in best.values()}
        for path, own in files.items():
            _write_csv(path, list(own[0]), [row for row in own if id(row) in kept])
        raise RuntimeError(f"Found duplicate shape entries during merge of 'tuned_fmoe': {twice}")
    _write_csv(out, COLUMNS, best.values())
    return str(out)


def _write_csv(path: str | pathlib.Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def row(token, model_dim, inter_dim, expert, topk, **values) -> dict[str, Any]:
    """One row of a table, of this pipeline's types. `values` may set any column."""
    fields = dict.fromkeys(COLUMNS, 0)
    fields |= {
        "cu_num": 256,
        "token": token,
        "model_dim": model_dim,
        "inter_dim": inter_dim,
        "expert": expert,
        "topk": topk,
    }
    fields |= {
        "act_type": "ActivationType.Silu",
        "dtype": "torch.bfloat16",
        "q_type": "QuantType.per_1x32",
        "use_g1u1": 1,
    }
    fields |= {"q_dtype_a": str(numerics.FLOAT4), "q_dtype_w": str(numerics.FLOAT4), "err1": "0.0%", "err2": "0.0%"}
    return fields | values


def vendor_rows(profile: Any) -> list[dict[str, Any]]:
    """aiter's own FP4 rows for 257 experts: (tokens, kernelName1, us1, kernelName2, us2)."""
    from aiter_sim.stages import ck_name

    def flydsl(stage: int, rest: str) -> str:
        return f"flydsl_moe{stage}_afp4_wfp4_bf16_{rest}"

    g1_small, g2_small = ck_name(1, "64x32x32x128_1x1"), ck_name(2, "64x32x32x128_1x1")
    if not profile.flydsl_stages:
        table = []
    elif profile.flydsl_stages == (2,):
        table = [
            (16, g1_small, 40.8894, g2_small, 27.8142),
            (128, ck_name(1, "256x32x128x128_1x4"), 87.2657, g2_small, 52.5931),
            (512, g1_small, 97.693, g2_small, 70.2081),
        ]
    else:
        newer = "route_bucket" in dict(profile.metadata_fields)
        table = [
            (16, flydsl(1, "t32x128x256_w3"), 40.5338, flydsl(2, "t32x128x256_reduce"), 24.9519)
            if newer
            else (16, flydsl(1, "t32x64x256_w4"), 52.7618, flydsl(2, "t16x256x256_atomic_sbm32"), 30.7153),
            (128, flydsl(1, "t32x32x256_w3"), 87.5346, g2_small, 54.4124),
            (512, flydsl(1, "t32x32x256_w3"), 91.2564, flydsl(2, "t32x256x256_atomic"), 70.2575),
        ]
    return [
        row(m, 7168, 256, 257, 9, block_m=32, kernelName1=k1, us1=us1, kernelName2=k2, us2=us2, us=us1 + us2)
        for m, k1, us1, k2, us2 in table
    ]


# --- tables ----------------------------------------------------------------------------------------------------------


def load_table(profile: Any, path: str) -> Any:
    """What aiter.fused_moe.cfg_2stages becomes."""
    rows = _with_gfx(profile, read_csv(path))
    kept = {
        "all": lambda tag: True,
        "empty": lambda tag: tag in ("", None) or tag != tag,
        "not_fallback": lambda tag: tag != "flydsl_fallback",
    }[profile.tags_kept]
    rows = [entry for entry in rows if kept(entry.get("_tag", ""))]
    if not profile.table_is_pair:
        return _indexed(profile, rows, keep_first=False)
    ignoring = [{**entry, "act_type": ANY_ACTIVATION} for entry in rows]
    return _indexed(profile, rows, keep_first=True), _indexed(profile, ignoring, keep_first=True)


def fallback_table(profile: Any, path: str) -> dict[tuple, dict[str, Any]]:
    rows = [entry for entry in _with_gfx(profile, read_csv(path)) if entry.get("_tag") == "flydsl_fallback"]
    if profile.table_is_pair:
        rows = [{**entry, "act_type": ANY_ACTIVATION} for entry in rows]
    return _indexed(profile, rows, keep_first=profile.table_is_pair)


def _with_gfx(profile: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not profile.key_has_gfx:
        return rows
    for entry in rows:
        if str(entry.get("gfx", "0")) in ("0", "", "nan", "None"):
            entry["gfx"] = GFX_OF_CU_NUM.get(entry["cu_num"], "gfx942")
    return rows


def _indexed(profile: Any, rows: list[dict[str, Any]], *, keep_first: bool) -> dict[tuple, dict[str, Any]]:
    names = ("gfx", *INDEX) if profile.key_has_gfx else INDEX
    table: dict[tuple, dict[str, Any]] = {}
    for entry in rows:
        key = tuple(entry[name] for name in names)
        if key in table:
            if keep_first:
                continue
            raise ValueError("DataFrame index must be unique for orient='index'.")
        table[key] = {name: value for name, value in entry.items() if name not in names}
    return table


# --- resolution ------------------------------------------------------------------------------------------------------


def lookup(profile: Any, table: Any, key: tuple, activation: Any) -> dict[str, Any] | None:
    """The row of a key (which has the activation's place empty), or None."""
    if not table:
        return None
    place, token_place = key.index(None), 2 if profile.key_has_gfx else 1

    def with_activation(value: Any, token: int) -> tuple:
        parts = list(key)
        parts[place], parts[token_place] = value, token
        return tuple(parts)

    own = activation if profile.key_has_enum else str(activation)
    token = key[token_place]
    if not profile.table_is_pair:
        return table.get(with_activation(own, token))
    primary, fallback = table
    lower = [tier for tier in reversed(TIERS) if tier < token] if token in TIERS else []
    for tier in (token, *lower):
        for found in (primary.get(with_activation(own, tier)), fallback.get(with_activation(ANY_ACTIVATION, tier))):
            if found is not None:
                return found
    return None


def resolve(sim: Any, arguments: dict[str, Any]) -> Any:
    """get_2stage_cfgs: the metadata for one shape."""
    profile, module = sim.profile, sim.module("aiter.fused_moe")
    argument = dict(arguments)
    token, topk, expert = argument["token"], argument["topk"], argument["expert"]
    model_dim, inter_dim = argument["model_dim"], argument["inter_dim"]
    is_shuffled = argument.get("is_shuffled", True)
    if str(argument["q_type"]) != "QuantType.per_1x32" or str(argument["activation"]) != "ActivationType.Silu":
        raise NotImplementedError("aiter_sim: only per_1x32 with SiLU")

    path = sim.config_path()
    if module.cfg_2stages is None:
        module.cfg_2stages = load_table(profile, path)
    key_topk = topk - int(argument.get("is_ep", False))
    key: tuple = (cu_num(), token, model_dim, inter_dim, expert, key_topk, None)
    key += tuple(str(argument[name]) for name in ("dtype", "q_dtype_a", "q_dtype_w", "q_type"))
    key += (argument["use_g1u1"], argument["doweight_stage1"])
    key = (GFX, *key) if profile.key_has_gfx else key
    found = lookup(profile, module.cfg_2stages, key, argument["activation"])
    if found is not None and profile.has_fallback_rows and not sim.flydsl:
        names = (str(found.get("kernelName1", "")), str(found.get("kernelName2", "")))
        if any(name.startswith("flydsl_") for name in names):
            table = fallback_table(profile, path)
            found = lookup(profile, (table, table) if profile.table_is_pair else table, key, argument["activation"])

    ksplit, name1, name2, run_1stage, use_nt = 0, "", "", False, False
    if found is None or (profile.bypass_variable and int(os.environ.get("AITER_BYPASS_TUNE_CONFIG", "0"))):
        block_m = block_size_m(token, topk, expert, inter_dim)
        if profile.heuristic_ksplit:
            ksplit = heuristic_ksplit(token, topk, expert, inter_dim, model_dim)
            use_nt = non_temporal(token, topk, expert)
    else:
        block_m, ksplit = found["block_m"], found["ksplit"]
        name1, name2, run_1stage = found["kernelName1"], found["kernelName2"], bool(found.get("run_1stage", False))
        if not profile.policy_is_bool and os.environ.get("AITER_KSPLIT") == "-1":
            ksplit = 0
    return _metadata(sim, argument, block_m, ksplit, name1, name2, run_1stage, use_nt, is_shuffled)


def _metadata(sim, argument, block_m, ksplit, name1, name2, run_1stage, use_nt, is_shuffled):
    profile, module = sim.profile, sim.module("aiter.fused_moe")
    aiter = sim.module("aiter")
    token, inter_dim = argument["token"], argument["inter_dim"]
    quant_and_activation = {"activation": argument["activation"], "quant_type": argument["q_type"]}
    non_temporal_argument = {"use_non_temporal_load": use_nt} if profile.ck_has_non_temporal else {}
    hidden_pad, intermediate_pad = argument["hidden_pad"], argument["intermediate_pad"]
    pads = {"inter_dim_pad": intermediate_pad, "model_dim_pad": hidden_pad}
    pads = pads if "inter_dim_pad" in profile.flydsl_stage2_extra else {}

    def made(stage1, stage2, block_m, ksplit, **extra):
        return module.MOEMetadata(stage1, stage2, block_m, ksplit, **extra)

    def ck1():
        if profile.ck_stage1_wrapper is None:
            return functools.partial(aiter.ck_moe_stage1_fwd, kernelName=name1, **quant_and_activation)
        more = {"dtype": argument["dtype"]} if profile.ck_has_non_temporal else {}
        return functools.partial(
            module.ck_moe_stage1,
            kernelName=name1,
            **quant_and_activation,
            splitk=ksplit,
            **non_temporal_argument,
            **more,
        )

    def ck2(**more):
        return functools.partial(aiter.ck_moe_stage2_fwd, kernelName=name2, **quant_and_activation, **more)

    def flydsl1(name):
        more = {"activation": argument["activation"], **pads}
        return functools.partial(module._flydsl_stage1_wrapper, kernelName=name, **more)

    def flydsl2(name):
        return functools.partial(module._flydsl_stage2_wrapper, kernelName=name, **pads)

    if "output_aux" in dict(profile.metadata_fields) and any(
        str(n).startswith("flydsl_mxmoe_") for n in (name1, name2)
    ):
        stage = functools.partial(sim.unsupported, "the flydsl_mxmoe protocol")
        return made(stage, stage, int(block_m), int(ksplit), fuse_quant="fp4", output_aux=True, prequant=False)
    if run_1stage:
        return made(functools.partial(sim.unsupported, "one-stage kernels"), None, block_m, ksplit, run_1stage=True)

    # From v0.1.14 on FlyDSL's stages are said to take a bias in this precision, whatever the activation.
    declares_bias = "stage2_has_bias" in dict(profile.metadata_fields)
    is_flydsl1 = is_flydsl2 = False
    if 1 in profile.flydsl_stages:
        if profile.name_test == "isinstance":
            is_flydsl1, is_flydsl2 = (isinstance(n, str) and n.startswith("flydsl_") for n in (name1, name2))
        else:  # an empty cell is a float here, and has no startswith
            is_flydsl1, is_flydsl2 = (bool(n) and n.startswith("flydsl_") for n in (name1, name2))
    if (is_flydsl1 or is_flydsl2) and sim.flydsl:
        fused: dict[str, Any] = {}
        if "fuse_fp4_quant" in dict(profile.metadata_fields):
            fused["fuse_fp4_quant"] = is_flydsl1 and "_fq" in name1
        elif is_flydsl1:
            last = name1.split("_t")[-1]
            fused["fuse_quant"] = "fp8" if "_fp8" in last else "fp4" if "_fp4" in last else ""
        if "skip_inter_quant" in dict(profile.metadata_fields):
            fused["skip_inter_quant"] = "_moe2_layout_" in str(name2)
        if declares_bias:
            fused |= {"has_bias": is_flydsl1, "stage2_has_bias": is_flydsl2}
        stage1 = flydsl1(name1) if is_flydsl1 else ck1()
        return made(
            stage1, flydsl2(name2) if is_flydsl2 else ck2(**non_temporal_argument), block_m, int(ksplit), **fused
        )

    forced = profile.flydsl_forced and sim.flydsl and os.environ.get("AITER_FLYDSL_FORCE", "1") == "1"
    if forced and is_shuffled and not argument["doweight_stage1"]:
        tile_m, suffix1, suffix2 = next(
            choice
            for below, *choice in (
                (2048, 32, "_w2", "_bnt2"),
                (4096, 64, "_w3_bnt0", ""),
                (16384, 128, "_w2_bnt0", ""),
                (float("inf"), 64, "_w4_bnt0", ""),
            )
            if token < below
        )
        kernels = sim.module("aiter.ops.flydsl.moe_kernels")
        tile_k = 128 if inter_dim % 256 and profile.name not in ("v0.1.16", "v0.1.16.post6") else 256
        base1 = kernels.flydsl_kernel_name(1, "fp4", "fp4", "bf16", tile_m, 128, 256)
        base2 = kernels.flydsl_kernel_name(2, "fp4", "fp4", "bf16", tile_m, 128, tile_k, "atomic")
        name1, name2 = (
            base + suffix if kernels.get_flydsl_kernel_params(base + suffix) else base
            for base, suffix in ((base1, suffix1), (base2, suffix2))
        )
        biases = {"has_bias": True, "stage2_has_bias": True} if declares_bias else {}
        return made(flydsl1(name1), flydsl2(name2), tile_m, -1, **biases)

    if profile.cktile_split_k and ksplit > 1 and is_shuffled:
        more = {"dtype": argument["dtype"], "post_activation_layout": "auto"} if profile.cktile_layout == "auto" else {}
        stage1 = functools.partial(
            module.cktile_moe_stage1,
            n_pad_zeros=intermediate_pad // 64 * 64 * 2,
            k_pad_zeros=hidden_pad // 128 * 128,
            activation=argument["activation"],
            split_k=ksplit,
            **more,
        )
        stage2 = functools.partial(
            module.cktile_moe_stage2,
            n_pad_zeros=hidden_pad // 64 * 64,
            k_pad_zeros=intermediate_pad // 128 * 128,
            activation=argument["activation"],
        )
        return made(stage1, stage2, 16 if token < 2048 else 32 if token < 16384 else 64, ksplit)

    # The oldest releases look for the text first, which fails for a float; later ones let an empty text through.
    if profile.name_test == "in":
        is_ck = "ck2stages" in name1 or argument["q_dtype_w"] == numerics.FLOAT4
    else:
        is_ck = (name1 and "ck2stages" in name1) or not name1
    if is_ck:
        stage2 = (
            flydsl2(name2)
            if profile.flydsl_stages and name2 and name2.startswith("flydsl_") and sim.flydsl
            else ck2(**non_temporal_argument)
        )
        return made(ck1(), stage2, block_m, int(ksplit))
    allowed = (16, 32, 64, 128) if profile.heuristic_ksplit else (32, 64, 128)
    if block_m not in allowed:
        block_m = next((size for size in allowed if block_m < size), 128)
    return made(
        functools.partial(module.asm_stage1, kernelName=name1, **quant_and_activation),
        ck2(**(non_temporal_argument if profile.table_is_pair else {})),
        block_m,
        ksplit,
    )
