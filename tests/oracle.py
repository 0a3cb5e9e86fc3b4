"""A second opinion on MXFP4 and on the MoE layer: slow, float64, written from the definitions.

Imports nothing of the package and nothing of JAX or torch, and avoids the bit tricks that the package uses: a scale
comes from comparisons of exact numbers, an element from its place among the midpoints, the layer from loops over
tokens and slots. float64 holds every number met here exactly: a value of 24 bits times a power of two between 2^-149
and 2^128, a code (2 bits) times a scale (a power of two).
"""

from __future__ import annotations

import math

import numpy as np

BLOCK = 32
# The eight magnitudes of E2M1 in the order of their codes; codes 8..15 are the same numbers negated (8 is -0).
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CODE_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
SCALE_VALUES = np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])
SCALE_RULES = ("floor", "even", "rceil", "ceil", "half_up")
ROUNDINGS = ("nearest_even", "half_away")

# Bits of the significand (the hidden one included), exponent of the smallest subnormal, largest finite number.
_FLOATS = {
    "float16": (11, -24, 65504.0),
    "bfloat16": (8, -133, float.fromhex("0x1.fep127")),
    "float32": (24, -149, float.fromhex("0x1.fffffep127")),
}


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds float64 to the nearest value of a narrower type (ties to even, overflow to infinity), as float64."""
    x = np.asarray(x, np.float64)
    if dtype == "float64":
        return x
    bits, smallest, largest = _FLOATS[dtype]
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - bits, smallest))
    with np.errstate(invalid="ignore"):
        rounded = np.where(np.isfinite(x), np.rint(x / step) * step, x)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)


# --- bytes -----------------------------------------------------------------------------------------------------------


def pack(codes: np.ndarray) -> np.ndarray:
    """[..., n] codes 0..15 -> [..., n // 2] bytes, the even element in the low nibble."""
    codes = np.asarray(codes, np.uint8)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def unpack(packed: np.ndarray) -> np.ndarray:
    """[..., n // 2] bytes -> [..., n] codes 0..15."""
    packed = np.asarray(packed, np.uint8)
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The exact value of every element as float64; NaN in a block whose scale byte is 255."""
    values = CODE_VALUES[unpack(packed)]
    return values * np.repeat(SCALE_VALUES[np.asarray(scales)], BLOCK, axis=-1)


# --- quantize --------------------------------------------------------------------------------------------------------


def scale_byte(amax: float, rule: str) -> int:
    """The scale byte of a block by its largest magnitude: finite, positive, exact."""
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent with mantissa in [1/2, 1)
    mantissa, exponent = 2 * mantissa, exponent - 1
    if rule == "floor":  # OCP: the largest power of two in amax over the largest power of two in E2M1, 4
        power = exponent - 2
    elif rule == "even":  # amax rounded to one mantissa bit, halves up: 1.75 and more become 2
        power = exponent - 2 + (mantissa >= 1.75)
    elif rule == "half_up":
        power = exponent - 2 + (mantissa >= 1.5)
    elif rule == "rceil":  # the smallest scale with which amax does not saturate
        power = next(n for n in range(exponent - 4, exponent + 1) if amax <= math.ldexp(6.0, n))
    elif rule == "ceil":  # the smallest power of two that is no less than amax, over 4
        power = next(n for n in range(exponent - 4, exponent + 1) if amax <= math.ldexp(4.0, n))
    else:
        raise ValueError(rule)
    return min(max(power + 127, 0), 254)


def element_codes(ratios: np.ndarray, rounding: str) -> np.ndarray:
    """Codes of x / scale: nearest magnitude, beyond 6 saturates, the sign of zero kept."""
    ratios = np.asarray(ratios, np.float64)
    lower = np.searchsorted(MIDPOINTS, np.abs(ratios), side="left")  # midpoints below; at a tie the smaller code
    tie = np.isin(np.abs(ratios), MIDPOINTS)
    up = lower % 2 == 1 if rounding == "nearest_even" else np.ones_like(tie)
    return (lower + (tie & up) + 8 * np.signbit(ratios)).astype(np.uint8)


def quantize(x: np.ndarray, scale_rule: str = "even", rounding: str = "nearest_even") -> tuple[np.ndarray, np.ndarray]:
    """[..., n] -> packed bytes [..., n // 2], scale bytes [..., n // 32]; a block with a NaN or inf is byte 255, codes 0."""
    with np.errstate(invalid="ignore"):  # NaN
        x = np.asarray(x).astype(np.float64)
    blocks = x.reshape(-1, BLOCK)
    codes = np.zeros(blocks.shape, np.uint8)
    scales = np.zeros(len(blocks), np.uint8)
    for i, block in enumerate(blocks):
        if not np.isfinite(block).all():
            scales[i] = 255
            continue
        scales[i] = scale_byte(float(np.abs(block).max()), scale_rule)
        codes[i] = element_codes(block / SCALE_VALUES[scales[i]], rounding)
    return pack(codes.reshape(x.shape)), scales.reshape(*x.shape[:-1], x.shape[-1] // BLOCK)


def quantize_dequantize(x: np.ndarray, scale_rule: str, rounding: str) -> np.ndarray:
    return dequantize(*quantize(x, scale_rule, rounding))


def is_far_from_ties(x: np.ndarray, scale_rule: str, rounding: str, margin: float) -> bool:
    """Whether x, moved either way by `margin` times the largest magnitude of its block, quantizes to the same bytes."""
    x = np.asarray(x, np.float64)
    blocks = x.reshape(-1, BLOCK)
    step = margin * np.abs(blocks).max(axis=-1, keepdims=True)
    here = quantize(blocks, scale_rule, rounding)
    for moved in (blocks + step, blocks - step):
        codes, scales = quantize(moved, scale_rule, rounding)
        # An element may change sign, which changes a code only from +0 to -0.
        if not np.array_equal(scales, here[1]) or not np.array_equal(dequantize(codes, scales), dequantize(*here)):
            return False
    return True


# --- float8 ----------------------------------------------------------------------------------------------------------

# The magnitudes of E4M3 in the order of their codes: three mantissa bits, the exponent of code 8 is -6; 127 would be NaN.
E4M3_MAGNITUDES = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(8, 127)]
)
E4M3_VALUES = np.concatenate([E4M3_MAGNITUDES, [math.nan], -E4M3_MAGNITUDES, [math.nan]])


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """The nearest code, a tie to the even one, beyond 448 saturated, NaN and infinity 0x7F."""
    x = np.asarray(x, np.float64)
    midpoints = (E4M3_MAGNITUDES[1:] + E4M3_MAGNITUDES[:-1]) / 2
    code = np.searchsorted(midpoints, np.abs(x), side="left")
    code = code + (np.isin(np.abs(x), midpoints) & (code % 2 == 1))
    return np.where(np.isfinite(x), code + 128 * np.signbit(x), 127).astype(np.uint8)


def quantize_fp8(x: np.ndarray, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """[..., n] -> codes [..., n] uint8, scales [...] float32: the scale of a row, or one for all, and float32 where it says so."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.asarray(x).astype(np.float32)
        if scale is None:
            scales = np.maximum(np.abs(x).max(axis=-1) * np.float32(1 / 448), np.float32(2.0**-100))
            scales = np.where(np.isfinite(x).all(axis=-1), scales, np.float32(np.nan))
        else:
            good = 2.0**-100 <= np.float32(scale) <= 2.0**100
            scales = np.full(x.shape[:-1], scale if good else np.nan, np.float32)
        quotients = x * (np.float32(1) / scales)[..., None]
        quotients = np.where(np.isfinite(x), np.clip(quotients, -1e30, 1e30), np.nan)
    codes = np.where(np.isnan(scales)[..., None], 0, e4m3_codes(quotients)).astype(np.uint8)
    return codes, scales


def dequantize_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return E4M3_VALUES[codes] * np.asarray(scales, np.float64)[..., None]


# --- the layer -------------------------------------------------------------------------------------------------------


def silu(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """With the exponential of a number that is not positive, which neither overflows nor loses digits."""
    x = np.asarray(x, np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1 + small)


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution function of x."""
    x = np.asarray(x, np.float64)
    return x / 2 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """(1 + tanh z) / 2 is sigmoid(2z)."""
    x = np.asarray(x, np.float64)
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def activate(gate: np.ndarray, up: np.ndarray, activation: str, alpha=None, limit=None) -> np.ndarray:
    """The gated activations of docs/numerics.md. The two parameters' defaults are those of swiglu_oai."""
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    if activation == "silu":
        return silu(gate) * up
    if activation == "gelu":
        return gelu(gate) * up
    if activation == "gelu_tanh":
        return gelu_tanh(gate) * up
    if activation == "swiglu_oai":
        alpha, limit = 1.702 if alpha is None else alpha, 7.0 if limit is None else limit
        gate = np.where(gate > limit, limit, gate)
        return silu(alpha * gate) / alpha * (np.clip(up, -limit, limit) + 1)
    up = np.where(up > limit, limit, np.where(up < -limit, -limit, up))
    if activation == "silu_clamped":
        return silu(np.where(gate > limit, limit, gate)) * up
    if activation == "silu_post_clamped":
        gated = silu(gate)
        return np.where(gated > limit, limit, gated) * up
    raise ValueError(activation)


def moe(
    x,
    gate_up,
    down,
    topk_weights,
    topk_ids,
    *,
    gate_up_bias=None,
    down_bias=None,
    x_dtype="float32",
    activation="silu",
    activation_alpha=None,
    activation_limit=None,
    activation_quant=None,
    activation_scale=None,
    scale_rule="even",
    rounding="nearest_even",
    expert_map=None,
    token_mask=None,
    apply_router_weight_on_input=False,
    out_dtype="float64",
    intermediates=None,
):
    """The MoE layer, one token and one slot at a time.

    Args:
      x: [..., D], values of `x_dtype`.
      gate_up: [E, 2F, D], the exact weights (see `dequantize`), gate rows first.
      down: [E, D, F].
      topk_weights: [..., K].
      topk_ids: [..., K]; after `expert_map` a slot counts only if its id is in 0..E-1.
      activation, activation_alpha, activation_limit: see `activate`.
      activation_scale: for "fp8" the scales of x and of h, or None for one a row.
      expert_map: [E_global] local expert of a global id, -1 elsewhere; ids outside the map are skipped.
      token_mask: [...] bool; the row of a False token is never read and gives 0.
      apply_router_weight_on_input: the router weight multiplies the stage 1 product (before its bias), not the result.
      out_dtype: the sum over slots is rounded to this once; float64 leaves it exact.
      intermediates: a list that receives every row that is rounded to MXFP4 between the stages.

    Returns:
      [..., D] float64.
    """
    experts, two_f, hidden = gate_up.shape
    intermediate = two_f // 2
    x = np.asarray(x).astype(np.float64)
    rows = x.reshape(-1, hidden)
    ids = np.asarray(topk_ids).reshape(len(rows), -1) if len(rows) else np.zeros((0, 1), int)
    weights = np.asarray(topk_weights).astype(np.float64).reshape(ids.shape) if len(rows) else np.zeros((0, 1))
    weights = round_to(weights, "float32")
    x_scale, h_scale = (None, None) if activation_scale is None else activation_scale
    mask = np.ones(len(rows), bool) if token_mask is None else np.asarray(token_mask).reshape(-1)
    y = np.zeros((len(rows), hidden))
    for token in range(len(rows)):
        if not mask[token]:
            continue
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert_map is not None:
                expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
            if expert < 0 or expert >= experts:
                continue
            a = rows[token]
            weight = weights[token, slot]
            if activation_quant == "mxfp4":
                a = quantize_dequantize(a, scale_rule, rounding)
            elif activation_quant == "fp8":
                a = dequantize_fp8(*quantize_fp8(a, x_scale))
            gate_up_row = gate_up[expert] @ a
            if apply_router_weight_on_input:  # on the product, in full precision: x itself is not rounded once more
                gate_up_row = gate_up_row * weight
            if gate_up_bias is not None:
                gate_up_row = gate_up_row + np.asarray(gate_up_bias)[expert].astype(np.float64)
            gate, up = gate_up_row[:intermediate], gate_up_row[intermediate:]
            h = round_to(activate(gate, up, activation, activation_alpha, activation_limit), x_dtype)
            if activation_quant == "mxfp4":
                if intermediates is not None:
                    intermediates.append(h)
                h = quantize_dequantize(h, scale_rule, rounding)
            elif activation_quant == "fp8":
                h = dequantize_fp8(*quantize_fp8(h, h_scale))
            out = down[expert] @ h
            if down_bias is not None:
                out = out + np.asarray(down_bias)[expert].astype(np.float64)
            y[token] += out if apply_router_weight_on_input else out * weight
    return round_to(y, out_dtype).reshape(x.shape)


def topk_routing(
    logits,
    top_k,
    *,
    scoring="softmax",
    renormalize=True,
    correction_bias=None,
    num_groups=None,
    topk_groups=None,
    group_score=None,
    routed_scaling_factor=1.0,
):
    """Router weights and ids, one token at a time, by sorting lists; finite logits. The first among equals is the lower id."""
    logits = np.asarray(logits, np.float64)
    rows = logits.reshape(-1, logits.shape[-1])
    weights, ids = np.zeros((len(rows), top_k)), np.zeros((len(rows), top_k), int)
    bias = np.zeros(rows.shape[-1]) if correction_bias is None else np.asarray(correction_bias, np.float64)
    for t, row in enumerate(rows):
        exps = [math.exp(v - row.max()) for v in row]
        score = {
            "softmax": lambda: [e / sum(exps) for e in exps],  # noqa: B023
            "softmax_after_topk": lambda: list(row),  # noqa: B023
            "sigmoid": lambda: [float(sigmoid(v)) for v in row],  # noqa: B023
            "sqrtsoftplus": lambda: [math.sqrt(max(v, 0) + math.log1p(math.exp(-abs(v)))) for v in row],  # noqa: B023
        }[scoring]()
        biased = [s + b for s, b in zip(score, bias, strict=True)]
        allowed = list(range(len(row)))
        if num_groups is not None:
            size = len(row) // num_groups
            groups = [list(range(g * size, g * size + size)) for g in range(num_groups)]
            top2 = group_score == "top2_sum" or (group_score is None and correction_bias is not None)
            best = [sum(sorted((biased[e] for e in group), reverse=True)[: 2 if top2 else 1]) for group in groups]
            order = sorted(range(num_groups), key=lambda g: (-best[g], g))
            allowed = [e for g in order[:topk_groups] for e in groups[g]]
        ids[t] = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
        chosen = np.array([score[e] for e in ids[t]])
        if scoring == "softmax_after_topk":
            chosen = np.exp(chosen - chosen.max())
            chosen = chosen / chosen.sum()
        elif renormalize:
            chosen = chosen / chosen.sum()
        weights[t] = chosen * routed_scaling_factor
    shape = (*logits.shape[:-1], top_k)
    return weights.reshape(shape), ids.reshape(shape)
