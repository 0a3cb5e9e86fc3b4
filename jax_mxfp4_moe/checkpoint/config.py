"""What a model's configuration says of its expert layers, in the words of this package.

A configuration is untrusted input too: every value is checked before it is used. A word that this package lacks (an activation, a
scoring function, a scale rule) is passed on as it is, and the function that it is meant for refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def tables(config: Config) -> list[Config]:
    """The tables that may hold a field, in order of precedence: multimodal models keep those of the language model apart."""
    text = config.get("text_config")
    return [text, config] if isinstance(text, Mapping) else [config]


def first(config: Config, *keys: str) -> tuple[str, Any] | None:
    """The first of `keys` that the configuration has, with its value; null counts as absent."""
    for table in tables(config):
        for key in keys:
            if table.get(key) is not None:
                return key, table[key]
    return None


def integer(config: Config, *keys: str, least: int = 0) -> int | None:
    """A checked integer."""
    found = first(config, *keys)
    if found is None:
        return None
    key, value = found
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise _error(key, value, f"an integer from {least} to {2**31 - 1}")
    return value


def number(config: Config, *keys: str) -> float | None:
    """A checked finite number."""
    found = first(config, *keys)
    if found is None:
        return None
    key, value = found
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e30:
        raise _error(key, value, "a number")
    return float(value)


def word(config: Config, *keys: str) -> str | None:
    """A checked string, short enough to be shown."""
    found = first(config, *keys)
    if found is not None and not (isinstance(found[1], str) and len(found[1]) <= 200):
        raise _error(*found, "a string of at most 200 characters")
    return found[1] if found else None


def flag(config: Config, *keys: str) -> bool | None:
    """A checked boolean."""
    found = first(config, *keys)
    if found is not None and not isinstance(found[1], bool):
        raise _error(*found, "true or false")
    return found[1] if found else None


def table(config: Config, *keys: str) -> Config:
    """A checked table; empty if absent."""
    found = first(config, *keys)
    if found is not None and not isinstance(found[1], Mapping):
        raise _error(*found, "an object")
    return found[1] if found else {}


def _error(key: str, value: Any, expected: str) -> ValueError:
    text = "an integer of more than 64 bits" if isinstance(value, int) and abs(value) >= 2**64 else repr(value)[:80]
    return ValueError(f"configuration: {key}={text} found; expected {expected}. Correct config.json.")


def expert_count(config: Config) -> int | None:
    """The number of routed experts, if the configuration states it."""
    architecture = config.get("general.architecture")
    return integer(
        config, "num_experts", "n_routed_experts", "num_local_experts", f"{architecture}.expert_count", least=1
    )


def quantization(config: Config) -> Config:
    """The table `quantization_config`, empty if there is none."""
    return table(config, "quantization_config")


def check_method(where: str, config: Config, format: str, *methods: str) -> Config:
    """Returns `quantization_config` if it is absent or names one of `methods`; otherwise raises ValueError."""
    found = quantization(config)
    method = word(found, "quant_method")
    if found and method not in methods:
        raise ValueError(
            f"load: {where} has the tensor names of format {format!r}, but quantization_config.quant_method={method!r}; expected "
            f"{' or '.join(map(repr, methods))}. config.json belongs to another checkpoint."
        )
    shuffled = next((key for key, value in found.items() if "shuffle" in key and value), None)
    if shuffled:
        raise ValueError(
            f"load: {where} is marked {shuffled}={str(found[shuffled])[:80]} in quantization_config; expected weights in the order of "
            "their format. Load the checkpoint that it was made from, and let prepare() make the layout of the machine."
        )
    return found


# --- activation and routing ------------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_CLAMPED_BEFORE = ("deepseek_v4", "glm5_moe", "glm_moe_dsa", "hy_v4")
"""Model types whose `swiglu_limit` clamps gate and up before silu. Others may clamp after it, which is another function."""

_SOFTMAX, _SOFTMAX_TO_1 = ("softmax", False), ("softmax", True)

_ROUTINGS = {
    "deepseek_v2": _SOFTMAX, "deepseek_v3": ("sigmoid", True), "deepseek_v4": ("sqrtsoftplus", True), "glm4_moe": ("sigmoid", True),
    "gpt_oss": ("softmax_after_topk", True), "kimi_k2": ("sigmoid", True), "llama4": ("sigmoid", False), "llama4_text": ("sigmoid", False),
    "mixtral": _SOFTMAX_TO_1, "qwen2_moe": _SOFTMAX, "qwen3_5_moe": _SOFTMAX_TO_1, "qwen3_5_moe_text": _SOFTMAX_TO_1,
    "qwen3_moe": _SOFTMAX, "qwen3_next": _SOFTMAX_TO_1, "qwen3_vl_moe": _SOFTMAX_TO_1, "qwen3_vl_moe_text": _SOFTMAX_TO_1,
}  # fmt: skip
"""Scoring and renormalization of a model type where its configuration does not state them."""

_GGUF_ROUTINGS = {
    "deepseek2": _SOFTMAX, "gpt-oss": ("softmax_after_topk", True), "llama": _SOFTMAX_TO_1, "llama4": ("sigmoid", False),
    "qwen2moe": _SOFTMAX, "qwen3moe": _SOFTMAX_TO_1, "qwen3next": _SOFTMAX_TO_1, "qwen3vlmoe": _SOFTMAX_TO_1,
}  # fmt: skip
"""The same by the architecture of a GGUF file."""

_WEIGHT_ON_INPUT = ("llama4", "llama4_text")
"""Model types, and GGUF architectures, whose router weights multiply the input of an expert and not its result."""

_GGUF_SCORINGS = {1: "softmax", 2: "sigmoid", 3: "softmax_after_topk", 4: "sqrtsoftplus"}


def model_options(config: Config, format: str, *, has_correction_bias: bool) -> dict[str, Any]:
    """Activation and routing options of a model: fields of `load.Description`."""
    architecture = word(config, "general.architecture")
    if architecture is not None:
        return _gguf_options(config, architecture)
    notes: list[str] = []
    model_type = word(config, "model_type") or ("gpt_oss" if format == "gpt_oss" else None)
    if not config:
        notes.append("There is no config.json: activation and routing are assumptions.")
    activation, alpha, limit = _activation(config, model_type)
    scoring = word(config, "scoring_func", "score_function", "moe_router_activation_func")
    renormalize = flag(config, "norm_topk_prob", "moe_renormalize")
    if model_type in ("gpt_oss", *_WEIGHT_ON_INPUT):  # their code has no other, whatever a configuration says
        scoring, renormalize = _ROUTINGS[model_type]
    guess = ("sigmoid" if has_correction_bias else "softmax", True)
    routing = _routing(
        scoring, renormalize, _ROUTINGS.get(model_type or ""), guess, f"model_type={model_type!r}", notes
    )
    groups, topk_groups = integer(config, "n_group", "num_expert_group"), integer(config, "topk_group")
    method = word(config, "topk_method")
    if method == "noaux_tc" and not has_correction_bias:
        notes.append(
            "topk_method='noaux_tc' chooses experts with a correction bias, and there is no such tensor: without it the choice is another."
        )
    scaling = number(config, "routed_scaling_factor")
    if groups is None or groups <= 1 or method == "greedy":
        groups = topk_groups = None
    return {
        "num_experts_per_tok": integer(
            config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", least=1
        ),
        "activation": activation,
        "activation_alpha": alpha,
        "activation_limit": limit,
        **routing,
        "model_type": model_type,
        "apply_router_weight_on_input": model_type in _WEIGHT_ON_INPUT,
        "num_groups": groups,
        "topk_groups": topk_groups,
        "group_score": "max" if groups and method == "group_limited_greedy" else None,
        "routed_scaling_factor": 1.0 if scaling is None else scaling,
        "notes": notes,
    }


def _routing(
    scoring: str | None,
    renormalize: bool | None,
    known: tuple[str, bool] | None,
    guess: tuple[str, bool],
    model: str,
    notes: list[str],
) -> dict[str, Any]:
    """Scoring and renormalization: as stated, else as the model type does, else a guess, which is named as such."""
    stated = {"scoring": scoring, "renormalize": renormalize}
    found = {
        name: default if stated[name] is None else stated[name]
        for name, default in zip(stated, known or guess, strict=True)
    }
    needed = ("scoring",) if scoring == "softmax_after_topk" else tuple(stated)
    guessed = () if known else tuple(name for name in needed if stated[name] is None)
    if guessed:
        assumed = " and ".join(f"{name}={found[name]!r}" for name in guessed)
        notes.append(
            f"Neither the configuration nor {model} decides how experts are weighted: {assumed} would be a guess. Give "
            f"{' and '.join(guessed)} yourself; without, routing_options() is refused."
        )
    return {**found, "guessed": guessed}


def _activation(config: Config, model_type: str | None) -> tuple[str, float | None, float | None]:
    limit = number(config, "swiglu_limit")
    if model_type == "gpt_oss":
        return "swiglu_oai", number(config, "swiglu_alpha") or 1.702, limit or 7.0
    name = word(config, "hidden_act", "hidden_activation") or "silu"
    name = _ACTIVATIONS.get(name, name)
    if not limit:
        return name, None, None
    if name == "silu" and model_type in _CLAMPED_BEFORE:
        return "silu_clamped", None, limit
    # Which of the clamped functions it is cannot be told: no name of this package, so that nothing is computed by mistake.
    return f"{name} with swiglu_limit", None, limit


def _gguf_options(config: Config, architecture: str) -> dict[str, Any]:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    notes: list[str] = []
    is_gpt_oss = architecture == "gpt-oss"
    gating = integer(config, key("expert_gating_func"))
    scoring = _GGUF_SCORINGS.get(gating, f"expert_gating_func {gating}") if gating else None
    renormalize = flag(config, key("expert_weights_norm"))
    if is_gpt_oss:
        scoring = "softmax_after_topk"
    else:
        notes.append("GGUF files do not name the activation; activation='silu' is assumed.")
    routing = _routing(
        scoring,
        renormalize,
        _GGUF_ROUTINGS.get(architecture),
        ("softmax", True),
        f"general.architecture={architecture!r}",
        notes,
    )
    scale = number(config, key("expert_weights_scale"))
    groups = integer(config, key("expert_group_count"))
    groups = groups if groups and groups > 1 else None
    return {
        "num_experts_per_tok": integer(config, key("expert_used_count"), least=1),
        "activation": "swiglu_oai" if is_gpt_oss else "silu",
        "activation_alpha": 1.702 if is_gpt_oss else None,
        "activation_limit": 7.0 if is_gpt_oss else None,
        **routing,
        "model_type": architecture,
        "apply_router_weight_on_input": architecture in _WEIGHT_ON_INPUT,
        "num_groups": groups,
        "topk_groups": integer(config, key("expert_group_used_count")) if groups else None,
        "group_score": None,
        "routed_scaling_factor": scale or 1.0,
        "notes": notes,
    }
