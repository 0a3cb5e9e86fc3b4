"""Small checkpoints in each format that the readers know, written by hand with the truth beside them.

Imports nothing of the package. Files are put together from bytes (a JSON header between an eight-byte length and the data),
since no NumPy library writes F8_E8M0 and F4. Every function takes a folder, writes config.json, several shards and their
index, and returns a `Checkpoint`: the tensors as they lie in the files, and for each layer the codes, scales and values in the
canonical order (gate rows first, contraction axis last). Names and config fields are those of published models.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import oracle

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = (
    3,
    160,
    96,
    2,
)  # five and three blocks of 32: odd counts, as 2880 / 32 = 90 is not a power of two
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I64": np.dtype(np.int64),
}


# --- files -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, dtype: str, values: Any) -> Tensor:
        """Floats are rounded to `dtype` once, to nearest even."""
        array = np.asarray(values)
        if array.dtype != DTYPES[dtype]:
            array = array.view(DTYPES[dtype]) if dtype == "I8" else array.astype(DTYPES[dtype])
        return cls(dtype, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file: length of the header, header padded with spaces to eight bytes, data without holes in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(tensor.data)],
        }
        end += len(tensor.data)
    return with_header(json.dumps(header), b"".join(tensor.data for tensor in tensors.values()))


def with_header(header: str | bytes, data: bytes) -> bytes:
    """A file with this header, true or not."""
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_model(
    folder: pathlib.Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, *, shards: int = 3
) -> None:
    """Deals the tensors out to shards one by one, in lexicographic order, so that parts of one expert lie in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(tensors)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes({n: tensors[n] for n in names}, {"format": "pt"}))
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        (folder / file).write_bytes(safetensors_bytes({n: tensors[n] for n in mine}, {"format": "pt"}))
        weight_map.update(dict.fromkeys(mine, file))
    index = {
        "metadata": {"total_size": sum(len(t.data) for t in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


# --- truth -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stack:
    """Expert matrices [experts, rows, length] in canonical order: values, and codes (0..15, one an element) with scales if packed."""

    values: np.ndarray
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None

    @property
    def packed(self) -> np.ndarray:
        """[experts, rows, length // 2] bytes, the even element in the low nibble."""
        assert self.codes is not None, "stored as floats: quantize .values with the oracle"
        return oracle.pack(self.codes)


@dataclasses.dataclass
class Layer:
    """One layer, float64 where it is floats; gate rows before up rows everywhere."""

    gate_up: Stack
    down: Stack
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    router: np.ndarray | None = None
    router_bias: np.ndarray | None = None
    correction_bias: np.ndarray | None = None
    shared_gate_up: Stack | None = None
    shared_down: Stack | None = None
    input_scales: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Checkpoint:
    """What was written: `layers` by the number in the tensor names, dense layers left out."""

    path: pathlib.Path
    config: dict[str, Any]
    layers: dict[int, Layer]
    tensors: dict[str, Tensor]


def random_stack(rng: np.random.Generator, experts: int, rows: int, length: int, *, every_scale: bool = True) -> Stack:
    """All sixteen codes in the first block, and all 256 scale bytes if there is room; otherwise scales near 2 ** -5."""
    codes = rng.integers(0, 16, (experts, rows, length), dtype=np.uint8)
    codes[0, 0, :32] = np.tile(np.arange(16), 2)
    scales = rng.integers(119, 125, experts * rows * length // 32).astype(np.uint8)
    if every_scale and scales.size >= 256:
        scales[:256] = np.arange(256)
        scales = rng.permutation(scales)
    scales = scales.reshape(experts, rows, length // 32)
    return Stack(oracle.dequantize(oracle.pack(codes), scales), codes, scales)


def bfloat16_stack(rng: np.random.Generator, experts: int, rows: int, length: int) -> Stack:
    """Values of bfloat16, with a block of zeros."""
    values = rng.normal(size=(experts, rows, length)) / np.sqrt(length)
    values[0, 0, :32] = 0
    return Stack(oracle.round_to(values, "bfloat16"))


def floats(rng: np.random.Generator, *shape: int, dtype: str = "bfloat16") -> np.ndarray:
    return oracle.round_to(rng.normal(size=shape), dtype)


def interleave(rows: np.ndarray) -> np.ndarray:
    """[experts, 2F, ...] gate rows first -> gate rows at even places, up rows at odd ones."""
    half = rows.shape[1] // 2
    out = np.empty_like(rows)
    out[:, 0::2], out[:, 1::2] = rows[:, :half], rows[:, half:]
    return out


def _other_tensors(rng: np.random.Generator, hidden: int, layers: Iterable[int], prefix: str) -> dict[str, Tensor]:
    """What a model has besides its experts: a convert command must carry it over byte by byte."""
    tensors = {
        f"{prefix}embed_tokens.weight": Tensor.of("BF16", floats(rng, 11, hidden)),
        f"{prefix}norm.weight": Tensor.of("BF16", floats(rng, hidden)),
        "lm_head.weight": Tensor.of("BF16", floats(rng, 11, hidden)),
    }
    for layer in layers:
        tensors[f"{prefix}layers.{layer}.input_layernorm.weight"] = Tensor.of("BF16", floats(rng, hidden))
        tensors[f"{prefix}layers.{layer}.self_attn.q_proj.weight"] = Tensor.of("BF16", floats(rng, 32, hidden))
    return tensors


# --- gpt-oss ---------------------------------------------------------------------------------------------------------

_GPT_OSS_CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "num_experts_per_tok": TOP_K,
    "experts_per_token": TOP_K,
    "torch_dtype": "bfloat16",
}


def _gpt_oss_layer(rng: np.random.Generator, experts: int, hidden: int, intermediate: int, every_scale: bool) -> Layer:
    return Layer(
        gate_up=random_stack(rng, experts, 2 * intermediate, hidden, every_scale=every_scale),
        down=random_stack(rng, experts, hidden, intermediate, every_scale=every_scale),
        gate_up_bias=floats(rng, experts, 2 * intermediate),
        down_bias=floats(rng, experts, hidden),
        router=floats(rng, experts, hidden),
        router_bias=floats(rng, experts),
    )


def _gpt_oss_config(experts: int, hidden: int, intermediate: int, layers: int) -> dict[str, Any]:
    return {
        **_GPT_OSS_CONFIG,
        "num_local_experts": experts,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
    }


def gpt_oss(
    folder: pathlib.Path,
    *,
    seed: int = 0,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
) -> Checkpoint:
    """openai/gpt-oss with its Hugging Face names: stacked experts, gate and up rows interleaved, blocks of 16 bytes on an own axis."""
    rng = np.random.default_rng(seed)
    tensors = _other_tensors(rng, hidden, range(layers), "model.")
    truth = {}
    for number in range(layers):
        layer = truth[number] = _gpt_oss_layer(rng, experts, hidden, intermediate, True)
        mlp = f"model.layers.{number}.mlp."
        for name, stack, bias in (
            ("gate_up_proj", layer.gate_up, layer.gate_up_bias),
            ("down_proj", layer.down, layer.down_bias),
        ):
            order = interleave if name == "gate_up_proj" else np.asarray
            blocks = order(stack.packed)
            tensors[f"{mlp}experts.{name}_blocks"] = Tensor.of("U8", blocks.reshape(*blocks.shape[:2], -1, 16))
            tensors[f"{mlp}experts.{name}_scales"] = Tensor.of("U8", order(stack.scales))
            tensors[f"{mlp}experts.{name}_bias"] = Tensor.of("BF16", order(bias))
        tensors[f"{mlp}router.weight"] = Tensor.of("BF16", layer.router)
        tensors[f"{mlp}router.bias"] = Tensor.of("BF16", layer.router_bias)
    config = {
        **_gpt_oss_config(experts, hidden, intermediate, layers),
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


def gpt_oss_original(
    folder: pathlib.Path,
    *,
    seed: int = 1,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 1,
) -> Checkpoint:
    """openai/gpt-oss as its `original` folder has it: mlp1 and mlp2, and a config that says nothing of quantization."""
    rng = np.random.default_rng(seed)
    tensors = {"embedding.weight": Tensor.of("BF16", floats(rng, 11, hidden))}
    truth = {}
    for number in range(layers):
        layer = truth[number] = _gpt_oss_layer(rng, experts, hidden, intermediate, True)
        mlp = f"block.{number}.mlp."
        tensors[f"block.{number}.attn.norm.scale"] = Tensor.of("F32", floats(rng, hidden, dtype="float32"))
        tensors[f"{mlp}norm.scale"] = Tensor.of("F32", floats(rng, hidden, dtype="float32"))
        for name, stack, bias in (("mlp1", layer.gate_up, layer.gate_up_bias), ("mlp2", layer.down, layer.down_bias)):
            order = interleave if name == "mlp1" else np.asarray
            blocks = order(stack.packed)
            tensors[f"{mlp}{name}_weight.blocks"] = Tensor.of("U8", blocks.reshape(*blocks.shape[:2], -1, 16))
            tensors[f"{mlp}{name}_weight.scales"] = Tensor.of("U8", order(stack.scales))
            tensors[f"{mlp}{name}_bias"] = Tensor.of("BF16", order(bias))
        tensors[f"{mlp}gate.weight"] = Tensor.of("BF16", layer.router)
        tensors[f"{mlp}gate.bias"] = Tensor.of("BF16", layer.router_bias)
    config = {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "experts_per_token": TOP_K,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "swiglu_limit": 7.0,
        "vocab_size": 11,
    }
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


def gpt_oss_dequantized(
    folder: pathlib.Path,
    *,
    seed: int = 2,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
) -> Checkpoint:
    """gpt-oss saved in bfloat16: input-major [E, D, 2F] and [E, F, D], gate and up interleaved along the last axis.

    The values are those of MXFP4 numbers, so that quantizing them again loses nothing.
    """
    rng = np.random.default_rng(seed)
    tensors = _other_tensors(rng, hidden, range(layers), "model.")
    truth = {}
    for number in range(layers):
        layer = truth[number] = _gpt_oss_layer(rng, experts, hidden, intermediate, False)
        mlp = f"model.layers.{number}.mlp."
        for name, stack, bias in (
            ("gate_up_proj", layer.gate_up, layer.gate_up_bias),
            ("down_proj", layer.down, layer.down_bias),
        ):
            order = interleave if name == "gate_up_proj" else np.asarray
            tensors[f"{mlp}experts.{name}"] = Tensor.of("BF16", order(stack.values).swapaxes(1, 2).copy())
            tensors[f"{mlp}experts.{name}_bias"] = Tensor.of("BF16", order(bias))
        tensors[f"{mlp}router.weight"] = Tensor.of("BF16", layer.router)
        tensors[f"{mlp}router.bias"] = Tensor.of("BF16", layer.router_bias)
        layer.gate_up, layer.down = Stack(layer.gate_up.values), Stack(layer.down.values)
    config = _gpt_oss_config(experts, hidden, intermediate, layers)
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


# --- one tensor an expert and projection -----------------------------------------------------------------------------


def _config_of(style: str, experts: int, hidden: int, intermediate: int, layers: int, shared: bool) -> dict[str, Any]:
    """The fields of config.json that speak of experts, by model family."""
    sizes = {
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "intermediate_size": 2 * intermediate,  # of the dense layers: a reader that takes this for the experts is wrong
        "num_hidden_layers": layers,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if style == "qwen3":
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **sizes,
        }
    if style == "mixtral":
        del sizes["moe_intermediate_size"], sizes["norm_topk_prob"]
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            **sizes,
            "intermediate_size": intermediate,
        }
    deepseek = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2" if style == "kimi" else "deepseek_v3",
        "n_routed_experts": experts,
        "n_shared_experts": int(shared),
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        **sizes,
    }
    if style == "kimi_multimodal":
        return {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": {**deepseek, "model_type": "kimi_k2"},
        }
    return deepseek


def _prefix_of(style: str) -> str:
    return "language_model.model." if style == "kimi_multimodal" else "model."


def _has_shared(style: str) -> bool:
    return style in ("deepseek", "kimi", "kimi_multimodal")


def _per_expert(
    style: str,
    seed: int,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    add_packed: Callable[[dict[str, Tensor], str, np.ndarray, np.ndarray], None] | None,
    *,
    shared_packed: bool = True,
    mtp: bool = False,
) -> tuple[dict[str, Tensor], dict[int, Layer], dict[str, Any]]:
    """Qwen3, DeepSeek, Kimi and Mixtral names. `add_packed` says how a packed matrix is stored; None stores bfloat16."""
    rng = np.random.default_rng(seed)
    prefix, shared = _prefix_of(style), _has_shared(style)
    first = 1 if shared else 0  # the DeepSeek family begins with dense layers
    total = first + layers
    tensors = _other_tensors(rng, hidden, range(total), prefix)
    moe, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if style == "mixtral":
        moe, names = "block_sparse_moe", ("w1", "w3", "w2")
    for number in range(first):
        for name, rows, length in (
            ("gate_proj", 2 * intermediate, hidden),
            ("up_proj", 2 * intermediate, hidden),
            ("down_proj", hidden, 2 * intermediate),
        ):
            tensors[f"{prefix}layers.{number}.mlp.{name}.weight"] = Tensor.of("BF16", floats(rng, rows, length) / 16)

    def make(count: int, rows: int, length: int, packed: bool) -> Stack:
        return (random_stack if packed else bfloat16_stack)(rng, count, rows, length)

    def add(base: str, gate_up: Stack, down: Stack, expert: int, packed: bool) -> None:
        half = intermediate
        for name, stack, rows in (
            (names[0], gate_up, slice(0, half)),
            (names[1], gate_up, slice(half, None)),
            (names[2], down, slice(None)),
        ):
            if packed:
                assert add_packed is not None
                assert stack.scales is not None
                add_packed(tensors, base + name, stack.packed[expert, rows], stack.scales[expert, rows])
            else:
                tensors[f"{base}{name}.weight"] = Tensor.of("BF16", stack.values[expert, rows])

    truth = {}
    for number in range(first, total + mtp):
        packed = add_packed is not None and number < total  # the layer that predicts further tokens is left in bfloat16
        layer = truth[number] = Layer(
            make(experts, 2 * intermediate, hidden, packed), make(experts, hidden, intermediate, packed)
        )
        base = f"{prefix}layers.{number}.{moe}."
        for expert in range(experts):
            add(f"{base}experts.{expert}.", layer.gate_up, layer.down, expert, packed)
        layer.router = floats(rng, experts, hidden)
        tensors[f"{base}gate.weight"] = Tensor.of("BF16", layer.router)
        if shared:
            packed = packed and shared_packed
            layer.correction_bias = floats(rng, experts, dtype="float32")
            tensors[f"{base}gate.e_score_correction_bias"] = Tensor.of("F32", layer.correction_bias)
            layer.shared_gate_up = make(1, 2 * intermediate, hidden, packed)
            layer.shared_down = make(1, hidden, intermediate, packed)
            add(f"{base}shared_experts.", layer.shared_gate_up, layer.shared_down, 0, packed)
    config = _config_of(style, experts, hidden, intermediate, total, shared)
    if mtp:
        config["num_nextn_predict_layers"] = 1
    return tensors, truth, config


def with_quantization(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """Puts quantization_config where such a model has it: at the top, also when the sizes are in text_config."""
    return {**config, "quantization_config": quantization}


QUARK_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
    "round_method": "half_even",
    "is_dynamic": False,
    "symmetric": None,
    "observer_cls": "PerBlockMXObserver",
}
QUARK_FP8 = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_tensor",
    "group_size": None,
    "ch_axis": None,
    "scale_format": None,
    "scale_calculation_mode": None,
    "round_method": "half_even",
    "is_dynamic": False,
    "symmetric": True,
    "observer_cls": "PerTensorMinMaxObserver",
}


def quark_config(
    *, inputs: str | None = "mxfp4", scale_rule: str = "even", exclude: Iterable[str] = ()
) -> dict[str, Any]:
    """quantization_config as Quark exports it; `inputs` is how activations are quantized: "mxfp4", "fp8" or None."""
    weight = {**QUARK_MXFP4, "scale_calculation_mode": scale_rule}
    activations = {"mxfp4": {**weight, "is_dynamic": True}, "fp8": QUARK_FP8, None: None}[inputs]
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": "0.10",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": activations,
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "re:.*self_attn.*", "*mlp.gate", *exclude],
        "algo_config": None,
        "kv_cache_quant_config": {},
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
        },
    }


def _add_quark(tensors: dict[str, Tensor], base: str, packed: np.ndarray, scales: np.ndarray) -> None:
    tensors[f"{base}.weight"] = Tensor.of("U8", packed)
    tensors[f"{base}.weight_scale"] = Tensor.of("U8", scales)


def quark(
    folder: pathlib.Path,
    *,
    style: str = "deepseek",
    seed: int = 3,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
    inputs: str | None = "mxfp4",
    scale_rule: str = "even",
    shared_packed: bool = True,
    mtp: bool = False,
) -> Checkpoint:
    """AMD Quark: U8 `weight` and `weight_scale` for each expert and projection, gate and up apart.

    Args:
      style: "deepseek", "qwen3", "kimi" or "kimi_multimodal" (language_model. before every name).
      shared_packed: False leaves the shared experts in bfloat16, named in `exclude`.
      mtp: adds one layer beyond num_hidden_layers whose experts are bfloat16.
    """
    tensors, truth, config = _per_expert(
        style, seed, layers, experts, hidden, intermediate, _add_quark, shared_packed=shared_packed, mtp=mtp
    )
    exclude = [] if shared_packed else ["*mlp.shared_experts.*"]
    if mtp:
        exclude.append(f"re:model.layers.{max(truth)}.*")
    config = with_quantization(config, quark_config(inputs=inputs, scale_rule=scale_rule, exclude=exclude))
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


def quark_gpt_oss(
    folder: pathlib.Path,
    *,
    seed: int = 4,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
    inputs: str | None = "fp8",
) -> Checkpoint:
    """gpt-oss by AMD Quark: 2-D tensors for each expert, gate and up fused and still interleaved.

    With `inputs="fp8"` every projection has an `input_scale`, one float for the whole tensor.
    """
    rng = np.random.default_rng(seed)
    tensors = _other_tensors(rng, hidden, range(layers), "model.")
    truth = {}
    for number in range(layers):
        layer = truth[number] = _gpt_oss_layer(rng, experts, hidden, intermediate, True)
        mlp = f"model.layers.{number}.mlp."
        for name, stack, bias in (
            ("gate_up_proj", layer.gate_up, layer.gate_up_bias),
            ("down_proj", layer.down, layer.down_bias),
        ):
            order = interleave if name == "gate_up_proj" else np.asarray
            packed, scales, rows = order(stack.packed), order(stack.scales), order(bias)
            if inputs == "fp8":
                layer.input_scales[name] = oracle.round_to(rng.uniform(0.01, 0.1, experts), "float32")
            for expert in range(experts):
                base = f"{mlp}experts.{expert}.{name}"
                _add_quark(tensors, base, packed[expert], scales[expert])
                tensors[f"{base}.bias"] = Tensor.of("BF16", rows[expert])
                if inputs == "fp8":
                    tensors[f"{base}.input_scale"] = Tensor.of("F32", layer.input_scales[name][expert])
        tensors[f"{mlp}router.weight"] = Tensor.of("BF16", layer.router)
        tensors[f"{mlp}router.bias"] = Tensor.of("BF16", layer.router_bias)
    config = with_quantization(
        _gpt_oss_config(experts, hidden, intermediate, layers), quark_config(inputs=inputs, exclude=["*router*"])
    )
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


def compressed_tensors_config(*, inputs: str | None = None, ignore: Iterable[str] = ()) -> dict[str, Any]:
    """quantization_config as llm-compressor exports it; `inputs` "mxfp4" is its preset MXFP4, None its preset MXFP4A16."""
    numbers = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax"},
                "input_activations": {**numbers, "dynamic": True} if inputs == "mxfp4" else None,
                "output_activations": None,
                "format": "mxfp4-pack-quantized",
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", *ignore],
    }


def _add_compressed(tensors: dict[str, Tensor], base: str, packed: np.ndarray, scales: np.ndarray) -> None:
    tensors[f"{base}.weight_packed"] = Tensor.of("U8", packed)
    tensors[f"{base}.weight_scale"] = Tensor.of("U8", scales)


def compressed_tensors(
    folder: pathlib.Path,
    *,
    style: str = "qwen3",
    seed: int = 5,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
    inputs: str | None = None,
    shared_packed: bool = True,
) -> Checkpoint:
    """compressed-tensors `mxfp4-pack-quantized`: U8 `weight_packed` and `weight_scale` for each expert and projection."""
    tensors, truth, config = _per_expert(
        style, seed, layers, experts, hidden, intermediate, _add_compressed, shared_packed=shared_packed
    )
    ignore = [] if shared_packed else ["re:.*shared_experts.*"]
    config = with_quantization(config, compressed_tensors_config(inputs=inputs, ignore=ignore))
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


def deepseek_v4(
    folder: pathlib.Path,
    *,
    seed: int = 6,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
) -> Checkpoint:
    """DeepSeek-V4: I8 bytes and F8_E8M0 scales for w1 (gate), w3 (up), w2 (down); shared experts in fp8, 128 x 128 a scale."""
    rng = np.random.default_rng(seed)
    tensors = {"embed.weight": Tensor.of("BF16", floats(rng, 11, hidden))}
    truth = {}
    for number in range(layers):
        layer = truth[number] = Layer(
            random_stack(rng, experts, 2 * intermediate, hidden),
            random_stack(rng, experts, hidden, intermediate),
            router=floats(rng, experts, hidden),
            correction_bias=floats(rng, experts, dtype="float32"),
        )
        ffn = f"layers.{number}.ffn."
        parts = (
            ("w1", layer.gate_up, slice(0, intermediate)),
            ("w3", layer.gate_up, slice(intermediate, None)),
            ("w2", layer.down, slice(None)),
        )
        shared: dict[str, np.ndarray] = {}
        for name, stack, rows in parts:
            assert stack.scales is not None
            for expert in range(experts):
                tensors[f"{ffn}experts.{expert}.{name}.weight"] = Tensor.of("I8", stack.packed[expert, rows])
                tensors[f"{ffn}experts.{expert}.{name}.scale"] = Tensor.of("F8_E8M0", stack.scales[expert, rows])
            shape = stack.values[0, rows].shape
            elements = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
            scales = rng.integers(118, 124, tuple(-(-n // 128) for n in shape)).astype(np.uint8)
            tensors[f"{ffn}shared_experts.{name}.weight"] = Tensor("F8_E4M3", shape, elements.tobytes())
            tensors[f"{ffn}shared_experts.{name}.scale"] = Tensor.of("F8_E8M0", scales)
            tiles = oracle.SCALE_VALUES[scales].repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
            shared[name] = elements.astype(np.float64) * tiles
        layer.shared_gate_up = Stack(np.concatenate([shared["w1"], shared["w3"]])[None])
        layer.shared_down = Stack(shared["w2"][None])
        tensors[f"{ffn}gate.weight"] = Tensor.of("BF16", layer.router)
        tensors[f"{ffn}gate.bias"] = Tensor.of("F32", layer.correction_bias)
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


def bfloat16(
    folder: pathlib.Path,
    *,
    style: str = "mixtral",
    seed: int = 7,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    shards: int = 3,
) -> Checkpoint:
    """Not quantized: "mixtral" (w1 gate, w3 up, w2 down), "qwen3" or "deepseek" (shared experts, correction bias) names."""
    tensors, truth, config = _per_expert(style, seed, layers, experts, hidden, intermediate, None)
    write_model(folder, tensors, config, shards=shards)
    return Checkpoint(folder, config, truth, tensors)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_blocks(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., n // 2] bytes and [..., n // 32] scales -> [..., n // 32 * 17]: the scale, then elements j and j + 16 in byte j."""
    codes = oracle.unpack(packed).reshape(*scales.shape, 32)
    split = codes[..., :16] + 16 * codes[..., 16:]
    return np.concatenate([scales[..., None], split], axis=-1).astype(np.uint8).reshape(*scales.shape[:-1], -1)


def gguf(
    folder: pathlib.Path,
    *,
    seed: int = 8,
    layers: int = 2,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    architecture: str = "gpt-oss",
    metadata: Mapping[str, int | float] | None = None,
) -> Checkpoint:
    """GGUF as llama.cpp converts gpt-oss: gate, up and down apart, MXFP4 (type 39), biases and router in float32.

    Written by the `gguf` package. No scale byte 255, which ggml reads as 2 ** 128. `path` is the file.
    """
    import gguf as library

    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.gguf"
    writer = library.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(intermediate)
    for key, value in (metadata or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_token_list(["a", "b", "c"])  # an array among the metadata
    writer.add_tensor("token_embd.weight", rng.normal(size=(3, hidden)).astype(np.float32))
    truth = {}
    for number in range(layers):
        layer = truth[number] = Layer(
            random_stack(rng, experts, 2 * intermediate, hidden),
            random_stack(rng, experts, hidden, intermediate),
            gate_up_bias=floats(rng, experts, 2 * intermediate, dtype="float32"),
            down_bias=floats(rng, experts, hidden, dtype="float32"),
            router=floats(rng, experts, hidden, dtype="float32"),
            router_bias=floats(rng, experts, dtype="float32"),
        )
        for stack in (layer.gate_up, layer.down):
            assert stack.codes is not None
            assert stack.scales is not None
            stack.scales[stack.scales == 255] = 254
            stack.values = oracle.dequantize(stack.packed, stack.scales)
        assert layer.gate_up_bias is not None
        for name, stack, rows, bias in (
            ("gate", layer.gate_up, slice(0, intermediate), layer.gate_up_bias[:, :intermediate]),
            ("up", layer.gate_up, slice(intermediate, None), layer.gate_up_bias[:, intermediate:]),
            ("down", layer.down, slice(None), layer.down_bias),
        ):
            assert stack.scales is not None
            blocks = gguf_blocks(stack.packed[:, rows], stack.scales[:, rows])
            writer.add_tensor(
                f"blk.{number}.ffn_{name}_exps.weight", blocks, raw_dtype=library.GGMLQuantizationType.MXFP4
            )
            writer.add_tensor(f"blk.{number}.ffn_{name}_exps.bias", np.asarray(bias, np.float32))
        writer.add_tensor(f"blk.{number}.ffn_gate_inp.weight", np.asarray(layer.router, np.float32))
        writer.add_tensor(f"blk.{number}.ffn_gate_inp.bias", np.asarray(layer.router_bias, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(path, {}, truth, {})


FORMATS: dict[str, Callable[[pathlib.Path], Checkpoint]] = {
    "gpt_oss": gpt_oss,
    "gpt_oss_original": gpt_oss_original,
    "gpt_oss_dequantized": gpt_oss_dequantized,
    "quark_deepseek": lambda folder: quark(folder, style="deepseek"),
    "quark_qwen3": lambda folder: quark(folder, style="qwen3"),
    "quark_kimi": lambda folder: quark(folder, style="kimi", shared_packed=False),
    "quark_kimi_multimodal": lambda folder: quark(folder, style="kimi_multimodal"),
    "quark_gpt_oss": quark_gpt_oss,
    "quark_gpt_oss_weights_only": lambda folder: quark_gpt_oss(folder, inputs=None),
    "compressed_tensors": compressed_tensors,
    "compressed_tensors_kimi": lambda folder: compressed_tensors(folder, style="kimi_multimodal", inputs="mxfp4"),
    "deepseek_v4": deepseek_v4,
    "mixtral": lambda folder: bfloat16(folder, style="mixtral"),
    "qwen3": lambda folder: bfloat16(folder, style="qwen3"),
    "deepseek": lambda folder: bfloat16(folder, style="deepseek"),
    "gguf": gguf,
}
"""Every format under the name that a test id shows; each takes an empty folder."""
