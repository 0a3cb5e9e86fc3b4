"""Start here: `mxfp4_moe` checks its input, chooses an implementation, configures it and runs the five steps (through `transform`,
which says what `jax.grad` and `jax.vmap` make of a call).

`pipeline` below is how x becomes y, for every implementation; what differs is whose steps it is given: JAX operations
(`implementations/xla.py`) or torch operations on XLA's buffers, behind the bridge (`implementations/torch.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe import device, implementations
from jax_mxfp4_moe.implementations.base import Config, Operands, Steps
from jax_mxfp4_moe.implementations.torch_call import BRIDGES, ENVIRONMENT_VARIABLE
from jax_mxfp4_moe.mxfp4 import PACKED, float_dtype
from jax_mxfp4_moe.partition import check_not_divided, check_not_explicit
from jax_mxfp4_moe.problem import ACTIVATION_QUANTS, MoeProblem, resolve_activation
from jax_mxfp4_moe.quantize import FP8_LARGEST_STATIC_SCALE, FP8_LEAST_SCALE, Rounding, ScaleRule, check_rules
from jax_mxfp4_moe.transform import Call, run
from jax_mxfp4_moe.tuning import table
from jax_mxfp4_moe.weights import MoeWeights, check_activation_scale, check_weights


def pipeline(steps: Steps, operands: Operands) -> Any:
    """The five steps of a mixture-of-experts layer."""
    x, weights, topk_weights, topk_ids = operands
    x_scale, h_scale = (None, None) if weights.activation_scale is None else weights.activation_scale
    routing = steps.route(topk_ids)
    x = steps.quantize(x, x_scale)
    h = steps.stage1(x, weights.gate_up, weights.gate_up_bias, topk_weights, routing)
    h = steps.quantize(h, h_scale)
    return steps.stage2(h, weights.down, weights.down_bias, topk_weights, routing)


def mxfp4_moe(
    x: Any,
    weights: MoeWeights,
    topk_weights: Any,
    topk_ids: Any,
    *,
    activation: str = "silu",
    activation_alpha: float | None = None,
    activation_limit: float | None = None,
    activation_quant: str | None = "auto",
    activation_scale: Any = None,
    scale_rule: ScaleRule = "even",
    rounding: Rounding = "nearest_even",
    expert_map: Any = None,
    token_mask: Any = None,
    apply_router_weight_on_input: bool = False,
    deterministic: bool = False,
    preferred_element_type: Any = None,
    config: Mapping[str, Any] | str | None = None,
    implementation: str | Sequence[str] | None = None,
    bridge: str | None = None,
) -> jax.Array:
    """Runs tokens through their experts, whose weights are in MXFP4, inside or outside of `jax.jit`.

    For each token t: `y[t] = sum_k topk_weights[t, k] * (h @ down[e].T + down_bias[e])` with `e = topk_ids[t, k]` and
    `h = activation(x[t] @ gate[e].T + bias, x[t] @ up[e].T + bias)`. Sums are in float32; h is rounded to the type of x,
    and y once at the end. What an implementation rounds beyond that is in `docs/numerics.md`.

    Differentiable once, in reverse mode, with respect to x, topk_weights and the biases, on every implementation; the MXFP4 weights are
    frozen. Under `jax.vmap` a batch that shares the weights becomes more tokens of one call. See `docs/gradients.md`.

    Args:
      x: [..., D] float32, bfloat16 or float16; leading axes are tokens.
      weights: gate_up [E, 2F, D] and down [E, D, F], packed or prepared for an implementation.
      topk_weights: [..., K] floating point, converted to float32.
      topk_ids: [..., K] integer. A slot whose id is negative, or E or more, is skipped: it adds exactly 0.
      activation: one of the gated activations listed in `stage1.activate`.
      activation_alpha, activation_limit: parameters of those that take them.
      activation_quant: "auto" (what `weights` say they were made for), None (weights only), or "mxfp4" or "fp8" (x is rounded to MXFP4 or
        to float8 E4M3 before stage 1, and h before stage 2).
      activation_scale: the static scales of "fp8" activations, of x and of h: a pair of scalars or an array [2]. If None, those of
        `weights`, or else one for each row, from its largest magnitude; see `quantize_fp8`.
      scale_rule, rounding: how activations are rounded; see `quantize`.
      expert_map: [experts_global] integer or None: the row of `weights` that holds each global id, -1 for elsewhere.
      token_mask: [...] bool or None: False rows give exactly 0, whatever x holds there.
      apply_router_weight_on_input: the router weight multiplies the stage 1 product (before its bias) and not the result;
        biases are then not weighted. K is 1 in models that use it.
      deterministic: the same inputs must give the same bits on the same machine. An implementation that cannot promise it
        refuses.
      preferred_element_type: type of y; the type of x if None.
      config: tuning parameters of the implementation, by name, instead of those from its table.
      implementation: "xla", "torch", a sequence of names to try in order, or None to choose.
      bridge: how torch is reached: None (choose), "eager", "graph" or "callback"; see `bridge/README.md`.

    Returns:
      y [..., D].

    Raises:
      TypeError, ValueError: input that the caller can mend; nothing has run.
      NotImplementedError: no implementation, or not the one asked for, can do this; the text gives each one's reason.
      ImportError: the implementation asked for needs an extra that is not installed.
    """
    problem, operands, shape = _check(
        x, weights, topk_weights, topk_ids, activation, activation_alpha, activation_limit, activation_quant,
        activation_scale, scale_rule, rounding, expert_map, token_mask, apply_router_weight_on_input, deterministic,
        preferred_element_type,
    )  # fmt: skip
    bridge = _bridge(bridge)
    if problem.tokens == 0 or problem.experts == 0:
        return jnp.zeros(shape, problem.out_dtype)
    choices = _choose_and_configure(problem, operands, implementation, config)
    return run(operands, Call(problem, choices, config is not None, bridge, pipeline)).reshape(shape)


def _choose_and_configure(
    problem: MoeProblem, operands: Operands, implementation: str | Sequence[str] | None, config: Any
) -> tuple[tuple[str, str, Config], ...]:
    """(platform, implementation name, config) for each platform that the call may be lowered for."""
    choices, refusals = [], []
    for platform in device.platforms(operands.x):
        try:
            chosen = implementations.choose(problem, platform, implementation, operands.weights.layout)
        except (NotImplementedError, ImportError) as refusal:
            refusals.append(refusal)
            continue
        choices.append((platform, chosen.name, table.lookup(chosen, problem, platform, config)))
    if not choices:
        raise refusals[0]
    return tuple(choices)


def _bridge(bridge: str | None) -> str | None:
    """The argument or, without one, the environment variable, which is thus read at every call and not only at the first."""
    source = "bridge"
    if bridge is None:
        bridge, source = os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE
    if bridge is not None and bridge not in BRIDGES:
        raise ValueError(
            f"mxfp4_moe: {source}={bridge!r} given; expected one of {', '.join(BRIDGES)}, or None to choose."
        )
    return bridge


def prepare(weights: MoeWeights, implementation: str) -> MoeWeights:
    """Brings packed weights to the layout of an implementation, once, outside jit.

    Args:
      weights: in the packed layout, or already in that of `implementation`, in which case they are returned as they are.
      implementation: whose layout; "xla" and "torch" read the packed one itself.

    Raises:
      ValueError: an unknown implementation, or weights in the layout of another one.
    """
    check_weights("prepare", weights)
    chosen = implementations.get("prepare", implementation)
    if weights.layout in chosen.layouts and weights.layout != PACKED:
        return weights
    if weights.layout != PACKED:
        raise ValueError(implementations.wrong_layout("prepare", weights.layout, implementation))
    return chosen.prepare(weights)


def _check(
    x: Any,
    weights: MoeWeights,
    topk_weights: Any,
    topk_ids: Any,
    activation: str,
    activation_alpha: float | None,
    activation_limit: float | None,
    activation_quant: str | None,
    activation_scale: Any,
    scale_rule: str,
    rounding: str,
    expert_map: Any,
    token_mask: Any,
    apply_router_weight_on_input: bool,
    deterministic: bool,
    preferred_element_type: Any,
) -> tuple[MoeProblem, Operands, tuple[int, ...]]:
    """Checks shapes, types and names; returns the problem, the operands in one form, and the shape of y."""
    where = "mxfp4_moe"
    check_weights(where, weights)
    check_not_divided(where, weights)
    x, topk_weights, topk_ids = as_array(x), as_array(topk_weights), as_array(topk_ids)
    check_not_explicit(where, x)
    lead = _check_arrays(where, x, weights, topk_weights, topk_ids)
    if activation_quant == "auto":
        activation_quant = weights.activation_quant
    if activation_quant not in ACTIVATION_QUANTS:
        raise ValueError(
            f"{where}: activation_quant={activation_quant!r} given; expected 'auto', None, 'mxfp4' or 'fp8'."
        )
    if activation_scale is not None and activation_quant != "fp8":
        raise ValueError(
            f"{where}: activation_scale given with activation_quant={activation_quant!r}; expected None, since only 'fp8' has "
            "static scales. Leave it out."
        )
    activation_scale = _activation_scale(where, weights, activation_quant, activation_scale)
    check_rules(where, scale_rule, rounding)
    alpha, limit = resolve_activation(where, activation, activation_alpha, activation_limit)
    out_dtype = float_dtype(
        f"{where}: preferred_element_type", x.dtype if preferred_element_type is None else preferred_element_type
    )

    tokens, top_k = int(np.prod(lead, dtype=np.int64)), topk_ids.shape[-1]
    problem = MoeProblem(
        tokens=tokens,
        top_k=top_k,
        experts=weights.num_experts,
        hidden=weights.hidden_size,
        intermediate=weights.intermediate_size,
        dtype=str(x.dtype),
        out_dtype=str(out_dtype),
        activation=activation,
        activation_alpha=alpha,
        activation_limit=limit,
        activation_quant=activation_quant,
        scale_rule=scale_rule,
        rounding=rounding,
        has_gate_up_bias=weights.gate_up_bias is not None,
        has_down_bias=weights.down_bias is not None,
        apply_router_weight_on_input=bool(apply_router_weight_on_input),
        deterministic=bool(deterministic),
        has_activation_scale=activation_scale is not None,
    )
    if problem.rows >= 2**31:
        raise ValueError(
            f"{where}: {tokens} tokens with {top_k} experts each given; expected fewer than 2**31 rows in all. Call it on parts of x."
        )
    ids, skipped = local_ids(where, topk_ids.reshape(tokens, top_k), weights.num_experts, expert_map)
    if token_mask is not None:
        token_mask = as_array(token_mask)
        if token_mask.shape != lead or token_mask.dtype != jnp.bool_:
            wrong = ValueError if token_mask.dtype == jnp.bool_ else TypeError
            raise wrong(
                f"{where}: token_mask {token_mask.dtype}{list(token_mask.shape)} given; expected bool{list(lead)}, one entry a token."
            )
        skipped = skipped | ~token_mask.reshape(tokens, 1)
    operands = Operands(
        x.reshape(tokens, problem.hidden),
        weights.replace(activation_scale=activation_scale),
        jnp.where(skipped, 0, topk_weights.reshape(tokens, top_k).astype(jnp.float32)),
        jnp.where(skipped, -1, ids),
    )
    return problem, operands, (*lead, problem.hidden)


def as_array(a: Any) -> jax.Array:
    """Any array as a JAX array; integers that are too wide for one become -1."""
    if isinstance(a, jax.Array):
        return a
    a = np.asarray(a)
    if a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        # Without x64, JAX keeps the low 32 bits of a wide integer, which would turn an id that is far off into a valid one.
        a = np.where((a < 0) | (a > 2**31 - 1), -1, a).astype(np.int32)
    return jnp.asarray(a)


def _activation_scale(
    where: str, weights: MoeWeights, activation_quant: str | None, activation_scale: Any
) -> jax.Array | None:
    """The static scales of this call, [2] float32, or None."""
    if activation_quant != "fp8":
        return None
    if activation_scale is None:
        return weights.activation_scale
    if isinstance(activation_scale, (tuple, list)) and len(activation_scale) == 2:
        activation_scale = jnp.stack([jnp.asarray(s, jnp.float32) for s in activation_scale])
    activation_scale = as_array(activation_scale)
    if jnp.issubdtype(activation_scale.dtype, jnp.floating):
        activation_scale = activation_scale.astype(jnp.float32)
    check_activation_scale(f"{where}: activation_scale", activation_scale)
    return activation_scale


def _check_arrays(
    where: str, x: jax.Array, weights: MoeWeights, topk_weights: jax.Array, topk_ids: jax.Array
) -> tuple[int, ...]:
    """Returns the leading axes, which x, topk_weights and topk_ids share."""
    float_dtype(f"{where}: x of dtype", x.dtype)
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(
            f"{where}: topk_ids of dtype {topk_ids.dtype} given; expected an integer type. topk_weights come before topk_ids; both are "
            "what topk_routing(logits, num_experts_per_tok) returns."
        )
    if not jnp.issubdtype(topk_weights.dtype, jnp.floating):
        raise TypeError(
            f"{where}: topk_weights of dtype {topk_weights.dtype} given; expected a floating-point type. "
            "topk_weights come before topk_ids."
        )
    if x.ndim == 0 or x.shape[-1] != weights.hidden_size:
        raise ValueError(
            f"{where}: x of shape {x.shape} given with weights.gate_up of shape {weights.gate_up.shape}; expected x [..., "
            f"{weights.hidden_size}]. Pass the weights of this layer, with the contraction axis last."
        )
    lead = x.shape[:-1]
    if (
        topk_ids.ndim != x.ndim
        or topk_ids.shape[:-1] != lead
        or topk_ids.shape[-1] == 0
        or topk_weights.shape != topk_ids.shape
    ):
        raise ValueError(
            f"{where}: topk_weights of shape {topk_weights.shape} and topk_ids of shape {topk_ids.shape} given with x of shape {x.shape}; "
            f"expected both [{', '.join(map(str, lead))}{', ' if lead else ''}K], the leading axes of x and K experts each."
        )
    return lead


def local_ids(where: str, ids: jax.Array, experts: int, expert_map: Any) -> tuple[jax.Array, jax.Array]:
    """Ids as int32 rows of the weights, and which slots are skipped."""
    count = experts
    if expert_map is not None:
        expert_map = as_array(expert_map)
        if expert_map.ndim != 1 or not jnp.issubdtype(expert_map.dtype, jnp.integer):
            wrong = ValueError if jnp.issubdtype(expert_map.dtype, jnp.integer) else TypeError
            raise wrong(
                f"{where}: expert_map {expert_map.dtype}{list(expert_map.shape)} given; expected a 1-D integer array: for each global id "
                "the row of weights that holds it, or -1."
            )
        if not isinstance(expert_map, jax.core.Tracer):
            _check_not_a_mask(where, np.asarray(expert_map))
        count = expert_map.shape[0]
    # Compared in the type they came in, so that nothing wraps.
    skipped = (ids < 0) | (ids >= count) if jnp.iinfo(ids.dtype).max >= count else ids < 0
    ids = jnp.where(skipped, 0, ids).astype(jnp.int32)
    if expert_map is not None and count:
        local = expert_map[ids]
        skipped = skipped | (local < 0)
        if jnp.iinfo(local.dtype).max >= experts:
            skipped = skipped | (local >= experts)
        ids = jnp.where(skipped, 0, local).astype(jnp.int32)
    return ids, skipped


def _check_not_a_mask(where: str, expert_map: np.ndarray) -> None:
    """Raises ValueError for what other libraries call expert_mask: read as rows of the weights, it gives wrong numbers."""
    if np.isin(expert_map, (0, 1)).all() and len(np.unique(expert_map)) < expert_map.size:
        raise ValueError(
            f"{where}: expert_map of {expert_map.size} entries given, all of them 0 or 1; expected for each global id the row of weights "
            "that holds it, or -1. From a mask of the experts that are here: jnp.where(mask, jnp.cumsum(mask) - 1, -1)."
        )


def validate(weights: MoeWeights, topk_weights: Any, topk_ids: Any, *, expert_map: Any = None, x: Any = None) -> None:
    """Checks values, which a jitted call cannot: call it outside jit, on real data, when answers look wrong.

    Args:
      weights, topk_weights, topk_ids, expert_map, x: as for `mxfp4_moe`; x is optional.

    Raises:
      ValueError: an id that is at least E (an id below 0 is a skip on purpose), a router weight or an x that is not finite,
        an `expert_map` that points outside of the weights, a scale byte 255 (NaN) or an `activation_scale` that is no scale in the weights.
    """
    check_weights("validate", weights)
    ids, routed = np.asarray(topk_ids), np.asarray(topk_weights, np.float32)
    if ids.shape != routed.shape or ids.dtype.kind not in "iu":
        raise ValueError(
            f"validate: topk_weights of shape {routed.shape} and topk_ids {ids.dtype}{list(ids.shape)} given; expected equal shapes and an "
            "integer type, as topk_routing returns them."
        )
    mapping = None if expert_map is None else np.asarray(expert_map)
    if mapping is not None:
        _check_not_a_mask("validate", mapping)
    count = weights.num_experts if mapping is None else mapping.shape[0]
    if (ids >= count).any():
        raise ValueError(
            f"validate: topk_ids up to {ids.max()} given with {count} experts; expected ids below {count}. Ids over all devices need "
            "expert_map, which says which row of the weights holds each."
        )
    if mapping is not None and (mapping >= weights.num_experts).any():
        raise ValueError(
            f"validate: expert_map entries up to {mapping.max()} given with weights of {weights.num_experts} experts; expected rows of "
            "the weights, or -1 for an expert that is elsewhere."
        )
    for name, values in (("topk_weights", routed[ids >= 0]), ("x", None if x is None else np.asarray(x, np.float32))):
        if values is not None and not np.isfinite(values).all():
            raise ValueError(
                f"validate: {name} with {np.count_nonzero(~np.isfinite(values))} values that are not finite given; expected finite ones. "
                "Mask padding rows with token_mask."
            )
    if weights.activation_scale is not None:
        given = np.asarray(weights.activation_scale)
        if not ((given >= FP8_LEAST_SCALE) & (given <= FP8_LARGEST_STATIC_SCALE)).all():
            raise ValueError(
                f"validate: weights.activation_scale {given.tolist()} given; expected numbers from 2**-100 to 2**100, with others every "
                "result is NaN. Set it to None for scales that are found at every call."
            )
    if weights.layout == PACKED:
        for name, array in (("gate_up", weights.gate_up), ("down", weights.down)):
            bad = np.argwhere(np.asarray(array.scales) == 255)
            if bad.size:
                raise ValueError(
                    f"validate: weights.{name} has {len(bad)} scale bytes of 255 (NaN), the first at {bad[0].tolist()}; expected 0 to 254. "
                    "The weights were quantized from values that are not finite, or the file is damaged."
                )
