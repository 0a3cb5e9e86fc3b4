"""Steps 2 and 4: bf16 or f32 -> MXFP4, with named rules for the scale and for the elements; or -> float8 rows, for activations only.

Scale rules give the scale byte of a block from its largest magnitude `amax = m * 2 ** e`, 1 <= m < 2:

| rule      | scale exponent                         | used by                                                         |
|-----------|----------------------------------------|-----------------------------------------------------------------|
| `floor`   | e - 2                                  | OCP specification 1.0 section 6.3, microxcaling, gguf           |
| `even`    | e - 2, one more when m >= 1.75         | AMD Quark (`scale_calculation_mode: even`), compressed-tensors  |
| `rceil`   | smallest with amax / scale <= 6        | NVIDIA's round-up rule, DeepSeek-V4, aiter from v0.1.16         |
| `ceil`    | e - 2, one more when m > 1             | smallest with amax / scale <= 4                                 |
| `half_up` | e - 2, one more when m >= 1.5          | aiter's weight quantizer before v0.1.16                         |

Element rules: `nearest_even` (ties to the even code: ml_dtypes, XLA, gfx950 hardware conversion) and `half_away` (ties away
from zero: aiter's fused Triton kernel). The default, `even` with `nearest_even`, is what AMD's Quark MXFP4 checkpoints
state in their configuration.

One answer each, the same in every implementation:
  a block of zeros: scale byte 0, codes 0 (8 for -0);
  NaN or an infinity anywhere in a block: scale byte 255, codes 0, so that the whole block decodes to NaN and is never lost;
  subnormal inputs: exact, nothing is flushed; scale bytes are clamped to 0..254;
  elements beyond 6 times the scale: +-6;  negative values that round to zero: code 8 (-0).

The rules of float8 are in `quantize_fp8`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mxfp4_moe.mxfp4 import BLOCK, SCALE_NAN, Mxfp4Array, pack

ScaleRule = Literal["floor", "even", "rceil", "ceil", "half_up"]
Rounding = Literal["nearest_even", "half_away"]

SCALE_RULES: tuple[str, ...] = ("floor", "even", "rceil", "ceil", "half_up")
ROUNDINGS: tuple[str, ...] = ("nearest_even", "half_away")

# What each rule adds to the bits of a float32 before its exponent field is read: enough to carry into the exponent
# exactly when the rule rounds up.
SCALE_RULE_CARRY: dict[str, int] = {
    "floor": 0,
    "even": 0x200000,  # m >= 1.75
    "rceil": 0x3FFFFF,  # m > 1.5
    "ceil": 0x7FFFFF,  # m > 1
    "half_up": 0x400000,  # m >= 1.5
}

# float32 bits of the midpoints between neighbouring E2M1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. A midpoint goes up when it
# is reached; nearest_even lets a midpoint below an even code go up and one below an odd code stay, hence the extra bit.
_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32).view(np.int32)
ROUND_UP_FROM: dict[str, tuple[int, ...]] = {
    "nearest_even": tuple(int(bits) + (i % 2 == 0) for i, bits in enumerate(_MIDPOINTS)),
    "half_away": tuple(int(bits) for bits in _MIDPOINTS),
}


def check_rules(where: str, scale_rule: str, rounding: str) -> None:
    """Raises ValueError for an unknown rule."""
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"{where}: scale_rule={scale_rule!r} given; expected one of {', '.join(SCALE_RULES)}.")
    if rounding not in ROUNDINGS:
        raise ValueError(f"{where}: rounding={rounding!r} given; expected one of {', '.join(ROUNDINGS)}.")


def quantize(x: Any, *, scale_rule: ScaleRule = "even", rounding: Rounding = "nearest_even") -> Mxfp4Array:
    """Returns x in MXFP4: each run of 32 values along the last axis gets one scale.

    The same function serves weights, ahead of time, and activations, before each of the two products.

    Args:
      x: [..., n] float32, bfloat16 or float16; 32 divides n.
      scale_rule: makes the scale from the largest magnitude of a block; see the table at the head of this module.
      rounding: where a value between two elements goes; see there too. Two implementations give the same bytes only if both
        rules are the same.

    Returns:
      An Mxfp4Array of logical shape [..., n]: codes [..., n // 2], scales [..., n // 32], both uint8.

    Raises:
      ValueError: 32 does not divide n, or a rule is unknown.
      TypeError: x is of another type.
    """
    check_rules("quantize", scale_rule, rounding)
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"quantize: x of shape {x.shape} given; expected a last axis that is a multiple of {BLOCK}. Pad it with zeros."
        )
    bits = lax.bitcast_convert_type(_to_float32(x), jnp.int32)
    magnitude = (bits & 0x7FFFFFFF).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = magnitude.max(axis=-1)
    scales = jnp.clip(((amax + SCALE_RULE_CARRY[scale_rule]) >> 23) - 2, 0, SCALE_NAN - 1)
    scales = jnp.where(amax >= 0x7F800000, SCALE_NAN, scales)

    scaled = _divide_by_scale(magnitude, scales[..., None])
    codes = sum((scaled >= threshold).astype(jnp.uint8) for threshold in ROUND_UP_FROM[rounding])
    sign = (bits < 0).reshape(magnitude.shape).astype(jnp.uint8) << 3
    codes = jnp.where(scales[..., None] == SCALE_NAN, 0, codes | sign).astype(jnp.uint8)
    return Mxfp4Array(pack(codes.reshape(x.shape)), scales.astype(jnp.uint8))


def _to_float32(x: jax.Array) -> jax.Array:
    """Widens without flushing subnormal inputs."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16, jnp.float32)
    if x.dtype == jnp.float16:
        return _half_to_float32(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"quantize: x of dtype {x.dtype} given; expected float32, bfloat16 or float16. Cast it first.")
    return x


def _half_to_float32(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    sign, exponent, mantissa = (bits & 0x8000) << 16, (bits >> 10) & 0x1F, bits & 0x3FF
    # A float16 subnormal is mantissa * 2 ** -24, a normal float32; the product is exact.
    subnormal = lax.bitcast_convert_type(mantissa.astype(jnp.float32) * np.float32(2.0**-24), jnp.int32)
    normal = ((exponent + 112) << 23) | (mantissa << 13)
    special = 0x7F800000 | (mantissa << 13)
    magnitude = jnp.where(exponent == 0, subnormal, jnp.where(exponent == 31, special, normal))
    return lax.bitcast_convert_type(sign | magnitude, jnp.float32)


def _divide_by_scale(magnitude: jax.Array, scales: jax.Array) -> jax.Array:
    """Bits of |x| / 2 ** (scale - 127), for the bits of |x|; a quotient below 2 ** -126 may come out as any tiny number."""
    field, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    quotient = ((jnp.maximum(field - scales + 127, 0)) << 23) | mantissa
    # A subnormal x is mantissa * 2 ** -149; the quotient matters only for the lowest scales, where it is a normal number.
    power = lax.bitcast_convert_type((127 - 22 - jnp.minimum(scales, 64)) << 23, jnp.float32)
    tiny = lax.bitcast_convert_type(mantissa.astype(jnp.float32) * power, jnp.int32)
    return jnp.where(field == 0, tiny, quotient)


FP8_MAX = 448.0
"""Largest E4M3 value."""
FP8_NAN = 0x7F
"""The code of NaN."""
FP8_LEAST_SCALE, FP8_LARGEST_STATIC_SCALE = 2.0**-100, 2.0**100


class Fp8Array(NamedTuple):
    """Rows of E4M3 values (float8_e4m3fn), each row with its own factor: an element's value is `E4M3(code) * scale`.

    Attributes:
      codes: [..., n] uint8, the bits of the E4M3 values.
      scales: [...] float32, one a row; NaN makes its row NaN.
    """

    codes: jax.Array
    scales: jax.Array


def quantize_fp8(x: Any, scale: Any = None) -> Fp8Array:
    """Returns x in E4M3, for the activations of `activation_quant="fp8"`.

    The code is `x * (1 / scale)`, both rounded to float32, then rounded to E4M3, to nearest and ties to even; what is beyond the largest
    value becomes +-448. One answer each, the same in every implementation:
      a row of zeros: scale 2 ** -100, codes 0 (0x80 for -0);
      no scale is below 2 ** -100; values below 2 ** -126, which some platforms take for zero, thus always round to zero;
      NaN or an infinity: without `scale`, NaN for its whole row (scale NaN, codes 0); with it, NaN for the element (code 0x7F).

    Args:
      x: [..., n] float32, bfloat16 or float16.
      scale: the static scale of all rows, a float32 scalar; outside of 2 ** -100 .. 2 ** 100 (zero, negative, NaN) every row becomes NaN.
        None gives each row its own: its largest magnitude times the float32 number nearest to 1 / 448.
    """
    bits = lax.bitcast_convert_type(_to_float32(jnp.asarray(x)), jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    if scale is None:
        amax = magnitude.max(axis=-1)
        scales = jnp.maximum(lax.bitcast_convert_type(amax, jnp.float32) * np.float32(1 / FP8_MAX), FP8_LEAST_SCALE)
        is_good = amax < 0x7F800000
    else:
        scales = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), magnitude.shape[:-1])
        is_good = (scales >= FP8_LEAST_SCALE) & (scales <= FP8_LARGEST_STATIC_SCALE)
    # Not a division: XLA makes this product of one, and torch does not.
    quotient = lax.bitcast_convert_type(magnitude, jnp.float32) * (1 / scales)[..., None]
    codes = _e4m3_code(jnp.minimum(quotient, FP8_MAX)) | (bits < 0) << 7
    codes = jnp.where(magnitude >= 0x7F800000, FP8_NAN, codes)
    codes = jnp.where(is_good[..., None], codes, 0).astype(jnp.uint8)
    return Fp8Array(codes, jnp.where(is_good, scales, jnp.nan))


def _e4m3_code(x: jax.Array) -> jax.Array:
    """The code of 0 <= x <= 448. By bits, since a conversion to float8 and back is one that a compiler may leave out."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Round the mantissa from 23 bits to 3, a tie to even, and the bias of the exponent from 127 to 7.
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    subnormal = lax.round(x * 2.0**9, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    return jnp.where(x < 2.0**-6, subnormal, normal)


def dequantize_fp8(a: Fp8Array) -> jax.Array:
    """The values of `a`, [..., n] float32."""
    return lax.bitcast_convert_type(a.codes, jnp.float8_e4m3fn).astype(jnp.float32) * a.scales[..., None]
