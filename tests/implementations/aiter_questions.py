"""Questions that a real aiter can answer without a GPU; the simulated one is asked the same.

Run as a program with two paths it unpickles a dict of inputs and pickles the answers; `answers` does the same in a process.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pickle
import sys
import types

import numpy as np
import torch

TOKENS = (0, 1, 3, 16, 17, 100, 1023, 1024, 1025, 2047, 2048, 5000, 16383, 16384, 20000, 32768, 131071, 131072, 200000)
SIGNATURES = {
    "aiter": (
        "moe_sorting_fwd",
        "moe_sorting_opus_fwd",
        "ck_moe_stage1_fwd",
        "ck_moe_stage2_fwd",
        "fused_dynamic_mxfp4_quant_moe_sort",
        "mxfp4_moe_sort_fwd",
    ),
    "aiter.fused_moe": (
        "get_2stage_cfgs",
        "MOEMetadata",
        "fused_moe",
        "moe_sorting",
        "ck_moe_stage1",
        "cktile_moe_stage1",
        "cktile_moe_stage2",
        "_flydsl_stage1_wrapper",
        "_flydsl_stage2_wrapper",
    ),
}


def answers(inputs: dict) -> dict:
    """The answers to every question, NumPy and plain Python only."""
    aiter = importlib.import_module("aiter")
    moe = importlib.import_module("aiter.fused_moe")
    result = {
        **numbers(aiter, inputs),
        "padded": {m: moe.get_padded_M(m) for m in TOKENS},
        "inter_dim": moe.get_inter_dim((33, 1024, 3584), (33, 7168, 256)),
        "signatures": signatures(),
        "resolved": {name: resolved(aiter, moe, shape) for name, shape in inputs["shapes"].items()},
        "registry": registry(),
    }
    if "injected" in inputs:
        result["injected"] = dict(enumerate(injected(inputs["injected"])))
    if "release" in inputs:
        release = importlib.import_module("jax_mxfp4_moe.implementations.aiter.release")
        result["release"] = dataclasses.asdict(release.load())
    if inputs.get("triton"):
        result["triton"] = triton_quantizer(inputs)
    return result


def numbers(aiter, inputs: dict) -> dict:
    """Bytes of the torch quantizer and of both shuffles."""
    quantize = aiter.get_torch_quant(aiter.QuantType.per_1x32)
    shuffle = importlib.import_module("aiter.ops.shuffle").shuffle_weight
    utils = importlib.import_module("aiter.utility.fp4_utils")
    codes, scales = quantize(torch.from_numpy(inputs["x"]))
    weights = torch.from_numpy(inputs["weights"]).view(aiter.dtypes.fp4x2)
    shuffled = shuffle(weights)
    rows, columns = inputs["scales"].shape
    swizzled = utils.e8m0_shuffle(torch.from_numpy(inputs["scales"]))
    return {
        "codes": codes.view(torch.uint8).numpy(),
        "block_scales": scales.view(torch.uint8).numpy(),
        "shuffled": shuffled.view(torch.uint8).numpy(),
        "is_shuffled": (shuffled.is_shuffled, shuffled.dtype == weights.dtype, hasattr(shuffled[0], "is_shuffled")),
        "swizzled": swizzled.view(torch.uint8).numpy(),
        "float4": str(aiter.dtypes.fp4x2),
        "padded_shape": tuple(utils.e8m0_shuffle(torch.zeros(rows + 1, columns + 1, dtype=torch.uint8)).shape),
    }


def signatures() -> dict[str, tuple[str, ...] | None]:
    """Parameter names, with a star where there is no default; None for what is not there."""
    found: dict[str, tuple[str, ...] | None] = {}
    for module, names in SIGNATURES.items():
        for name in names:
            value = getattr(importlib.import_module(module), name, None)
            parameters = () if value is None else inspect.signature(value).parameters.values()
            found[name] = None if value is None else tuple(p.name for p in parameters)
    return found


def resolved(aiter, moe, shape: dict) -> object:
    """What get_2stage_cfgs makes of a shape, or the name of the exception."""
    token = moe.get_padded_M(shape["tokens"])
    names = inspect.signature(moe.get_2stage_cfgs).parameters
    extra = {"bias1": None, "bias2": None} if "bias1" in names else {}
    fp4 = aiter.dtypes.fp4x2
    try:
        found = moe.get_2stage_cfgs(
            *(
                token,
                shape["hidden"],
                shape["intermediate"],
                shape["experts"],
                shape["top_k"],
                torch.bfloat16,
                fp4,
                fp4,
            ),
            *(aiter.QuantType.per_1x32, True, aiter.ActivationType.Silu, False, 0, 0),
            **extra,
        )
    except Exception as error:  # noqa: BLE001 - which one is the answer
        return type(error).__name__
    stages = []
    for stage in (found.stage1, found.stage2):
        kept = {name: value for name, value in stage.keywords.items() if isinstance(value, (str, int, float))}
        kept = {name: None if value != value else value for name, value in kept.items()}
        stages.append((stage.func.__name__, tuple(sorted(kept.items()))))
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)[2:]}
    return tuple(stages), tuple(fields.items())


def injected(cases: list[tuple[dict, dict]]) -> list[object]:
    """What this package's own injection gets for (fields of MoeProblem, config), or the error."""
    from jax_mxfp4_moe.implementations.aiter import inject, release
    from jax_mxfp4_moe.implementations.base import Config
    from jax_mxfp4_moe.problem import MoeProblem

    out = []
    for fields, values in cases:
        try:
            found = inject.resolve(MoeProblem(**fields), Config.of(values, "argument"), release.load())
        except (ValueError, NotImplementedError) as error:
            out.append((type(error).__name__, str(error).replace(release.load().version, "VERSION")))
            continue
        stages = tuple(
            (stage.func.__name__, stage.keywords.get("kernelName")) for stage in (found.stage1, found.stage2)
        )
        out.append((int(found.block_m), int(found.ksplit), stages))
    return out


def registry() -> object:
    """The FlyDSL kernels of this pipeline by name, or the name of the exception."""
    try:
        module = importlib.import_module("aiter.ops.flydsl.moe_kernels")
    except ImportError as error:
        return type(error).__name__
    names = (
        "flydsl_moe2_afp4_wfp4_bf16_t16x128x128_atomic",
        "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic",
        "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic_bnt2",
        "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic_sbm64",
        "flydsl_moe2_afp4_wfp4_bf16_t16x256x256_atomic_sbm32",
        "flydsl_moe2_afp4_wfp4_bf16_t32x256x256_reduce",
        "flydsl_moe1_afp4_wfp4_bf16_t32x128x256_w2",
        "flydsl_moe1_afp4_wfp4_bf16_t32x32x256_w3",
        "flydsl_moe1_afp4_wfp4_bf16_t64x128x256_w3_bnt0",
        "flydsl_moe1_afp4_wfp4_bf16_t32x128x256_fp4",
    )
    needed = ("a_dtype", "b_dtype", "out_dtype", "tile_m", "tile_n", "tile_k", "mode", "sort_block_m")
    found = {name: module.get_flydsl_kernel_params(name) for name in names}
    return {
        name: None if params is None else {key: params[key] for key in needed if key in params}
        for name, params in found.items()
    }


def triton_quantizer(inputs: dict) -> dict:
    """Codes, scales at the sorted positions below num_valid, and the shape of the scales, for both stages."""
    names = ("aiter.ops.triton.quant.fused_mxfp4_quant", "aiter.ops.triton.fused_mxfp4_quant")
    module = next(importlib.import_module(name) for name in names if _can_be_found(name))
    out = {}
    for stage, case in inputs["triton"].items():
        x = torch.from_numpy(case["x"]).to(torch.bfloat16)
        ids, valid = (torch.from_numpy(case[name]) for name in ("sorted_ids", "num_valid_ids"))
        codes, scale = module.fused_dynamic_mxfp4_quant_moe_sort(x, ids, valid, case["tokens"], case["top_k"], 32)
        r, c = np.arange(int(valid[0]))[:, None], np.arange(x.shape[1] // 32)
        columns = -(-len(c) // 8) * 8
        at = r // 32 * 32 * columns + c // 8 * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16
        out[f"codes {stage}"] = codes.view(torch.uint8).numpy()
        out[f"scales {stage}"] = scale.view(torch.uint8).numpy().reshape(-1)[at]
        out[f"shape {stage}"] = tuple(scale.shape)
        launched, scale = launched_by_us(x, ids, valid, case)
        out[f"launched codes {stage}"] = launched.view(torch.uint8).numpy()
        out[f"launched scales {stage}"] = scale.view(torch.uint8).numpy().reshape(-1)[at]
    return out


def launched_by_us(x, ids, valid, case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the same kernel as this package launches it for a recording, on buffers of its own."""
    from jax_mxfp4_moe.implementations.aiter import calls, release

    facts = types.SimpleNamespace(release=release.load(), problem=types.SimpleNamespace(tokens=case["tokens"]))
    codes = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8)
    scales = torch.zeros(-(-len(ids) // 32) * 32, x.shape[1] // 32, dtype=torch.uint8)
    order = calls.Sorted(ids, None, None, valid)
    return tuple(calls._launch_triton(facts, x, case["top_k"], order, codes, scales))


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def main(inputs_path: str, answers_path: str) -> None:
    with open(inputs_path, "rb") as file:
        inputs = pickle.load(file)
    for name, value in inputs.get("stubs", {}).items():
        getattr(importlib.import_module("aiter_stubs"), name)(value)
    result = answers(inputs)
    if inputs.get("reference"):
        result |= reference_layer(inputs["reference"])
    with open(answers_path, "wb") as file:
        pickle.dump(result, file)


def reference_layer(case: dict) -> dict:
    """aiter's own torch reference of the two stages, on raw weights and scales."""
    aiter, moe = importlib.import_module("aiter"), importlib.import_module("aiter.fused_moe")
    fp4, e8m0 = aiter.dtypes.fp4x2, aiter.dtypes.fp8_e8m0
    tensors = {name: torch.from_numpy(value) for name, value in case.items()}
    for name in ("a1", "w1", "w2"):
        tensors[name] = tensors[name].view(fp4)
    for name in ("a1_scale", "w1_scale", "w2_scale"):
        tensors[name] = tensors[name].view(e8m0)
    kind = {"dtype": torch.bfloat16, "quant_type": aiter.QuantType.per_1x32}
    h = moe.torch_moe_stage1(
        *(tensors[name] for name in ("a1", "w1", "w2", "topk_weights", "topk_ids")),
        **kind,
        activation=aiter.ActivationType.Silu,
        a1_scale=tensors["a1_scale"],
        w1_scale=tensors["w1_scale"],
        doweight=False,
    )
    codes, scale = aiter.get_torch_quant(aiter.QuantType.per_1x32)(h.view(-1, h.shape[-1]))
    y = moe.torch_moe_stage2(
        codes.view(*h.shape[:2], -1),
        *(tensors[name] for name in ("w1", "w2", "topk_weights", "topk_ids")),
        **kind,
        w2_scale=tensors["w2_scale"],
        a2_scale=scale,
        doweight=True,
    )
    return {"h": h.float().numpy(), "y": y.float().numpy()}


if __name__ == "__main__":
    main(*sys.argv[1:])
