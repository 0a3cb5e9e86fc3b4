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

_RENORMALIZE = {
    "deepseek_v2": False, "deepseek_v3": True, "deepseek_v4": True, "gpt_oss": True, "kimi_k2": True, "mixtral": True, "qwen2_moe": False,
    "qwen3_moe": False,
}  # fmt: skip
"""What a model type does where its configuration has no `norm_topk_prob`."""

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
    if model_type == "gpt_oss":
        scoring = "softmax_after_topk"
    renormalize = flag(config, "norm_topk_prob", "moe_renormalize")
    if renormalize is None:
        renormalize = _RENORMALIZE.get(model_type or "", True)
        if model_type not in _RENORMALIZE:
            notes.append(
                "The configuration does not say whether the weights of a token are made to sum to 1; renormalize=True is assumed."
            )
    groups, topk_groups = integer(config, "n_group", "num_expert_group"), integer(config, "topk_group")
    method = word(config, "topk_method")
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
        "scoring": scoring or ("sigmoid" if has_correction_bias else "softmax"),
        "renormalize": renormalize,
        "num_groups": groups,
        "topk_groups": topk_groups,
        "group_score": "max" if groups and method == "group_limited_greedy" else None,
        "routed_scaling_factor": 1.0 if scaling is None else scaling,
        "notes": notes,
    }


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

    notes = []
    is_gpt_oss = architecture == "gpt-oss"
    gating = integer(config, key("expert_gating_func"))
    scoring = "softmax_after_topk" if is_gpt_oss else _GGUF_SCORINGS.get(gating or 1, f"expert_gating_func {gating}")
    renormalize = flag(config, key("expert_weights_norm"))
    if not is_gpt_oss:
        notes.append("GGUF files do not name the activation; activation='silu' is assumed.")
        if renormalize is None:
            notes.append(
                "The file does not say whether the weights of a token are made to sum to 1; renormalize=True is assumed."
            )
    scale = number(config, key("expert_weights_scale"))
    groups = integer(config, key("expert_group_count"))
    groups = groups if groups and groups > 1 else None
    return {
        "num_experts_per_tok": integer(config, key("expert_used_count"), least=1),
        "activation": "swiglu_oai" if is_gpt_oss else "silu",
        "activation_alpha": 1.702 if is_gpt_oss else None,
        "activation_limit": 7.0 if is_gpt_oss else None,
        "scoring": scoring,
        "renormalize": True if renormalize is None else renormalize,
        "num_groups": groups,
        "topk_groups": integer(config, key("expert_group_used_count")) if groups else None,
        "group_score": None,
        "routed_scaling_factor": scale or 1.0,
        "notes": notes,
    }
