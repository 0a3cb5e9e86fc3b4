"""The OCP MXFP4 format: its constants, its array type, pack, unpack and dequantize.

Format (OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3): elements are E2M1 (one sign, two exponent and
one mantissa bit), and every 32 consecutive elements share one E8M0 scale, a bare biased exponent. An element's value is
`E2M1(code) * 2 ** (scale - 127)`; scale 255 is NaN. Blocks run along the last axis, which is the contraction axis of
the products this package computes. Two codes share a byte, the even element in the low nibble, as in every safetensors
MXFP4 checkpoint.

Everything is carried in uint8 arrays: a typed float4 array occupies a byte an element on the host, does not cross DLPack,
and yields meaningless cotangents under `jax.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 32
"""Elements that share one scale."""

SCALE_BIAS = 127
"""A scale byte b means 2 ** (b - SCALE_BIAS)."""

SCALE_NAN = 255
"""The one scale byte that is not a number; a block that carries it decodes to NaN."""

E2M1_MAX = 6.0
"""Largest magnitude of an element."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each of the sixteen codes."""

PACKED = "packed"
"""The canonical layout: `codes[..., i]` holds elements 2i and 2i + 1, rows in their logical order."""

_FLOAT4 = np.dtype(jnp.float4_e2m1fn)
_E8M0 = np.dtype(jnp.float8_e8m0fnu)


@jax.tree_util.register_pytree_with_keys_class
class Mxfp4Array:
    """An array of MXFP4 values: packed codes and block scales.

    Invariants of the `packed` layout, checked when it is built:
      codes.shape[:-1] == scales.shape[:-1];  codes.shape[-1] * 2 == length;  scales.shape[-1] * 32 == length.
    Leading axes are read from `codes`, so that arrays of equal length can be stacked, scanned over and vmapped.
    Another `layout` is what an implementation's `prepare` made for its kernels; only that implementation can read it.

    Args:
      codes: [..., length // 2] uint8 (int8 bytes are reinterpreted), or [..., length] float4_e2m1fn, which is packed.
      scales: [..., length // 32] uint8 or float8_e8m0fnu.
      length: logical size of the last axis; read from `codes` when it is left out.
      layout: `"packed"`, or the tag of an implementation's layout, whose shapes are not checked here.

    Raises:
      TypeError: codes or scales are of another dtype.
      ValueError: the shapes break an invariant.
    """

    codes: jax.Array
    scales: jax.Array
    length: int
    layout: str

    __slots__ = ("codes", "layout", "length", "scales")

    def __init__(self, codes: Any, scales: Any, *, length: int | None = None, layout: str = PACKED) -> None:
        self.codes = _codes_as_bytes(codes)
        self.scales = _scales_as_bytes(scales)
        self.length = 2 * self.codes.shape[-1] if length is None else int(length)
        self.layout = layout
        if layout == PACKED:
            check_packed_shapes("Mxfp4Array", self.codes.shape, self.scales.shape, self.length)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: one entry an element, not a byte."""
        return (*self.codes.shape[:-1], self.length)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return int(np.prod(self.codes.shape)) + int(np.prod(self.scales.shape))

    def __len__(self) -> int:
        """Size of the first axis."""
        return self.shape[0]

    def __iter__(self) -> Iterator[Mxfp4Array]:
        """The entries along the first axis; without this, Python would index past its end, which JAX clamps."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Mxfp4Array:
        """Selects along leading axes; the last axis, along which blocks run, cannot be cut this way."""
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(np.asarray(part) if isinstance(part, list) else part for part in parts)
        # A boolean array takes as many axes as it has; None and the ellipsis take none; anything else takes one.
        consumed = sum(
            part.ndim if getattr(part, "dtype", None) == np.bool_ else 1
            for part in parts
            if part is not None and part is not Ellipsis
        )
        trailing_ellipsis = all(part is not Ellipsis for part in parts[:-1])
        if self.layout != PACKED or consumed >= self.ndim or not trailing_ellipsis:
            raise ValueError(
                f"Mxfp4Array: index {index!r} given for logical shape {self.shape} in layout {self.layout!r}; expected an index "
                "of leading axes in layout 'packed'. To cut the last axis, cut codes by 16 and scales by 1 for each block of 32."
            )
        return _unchecked(self.codes[parts], self.scales[parts], self.length, self.layout)

    def __repr__(self) -> str:
        return f"Mxfp4Array(shape={self.shape if hasattr(self.codes, 'shape') else self.codes}, layout={self.layout!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[int, str]]:
        """Children codes and scales; static length and layout."""
        key = jax.tree_util.GetAttrKey
        return ((key("codes"), self.codes), (key("scales"), self.scales)), (self.length, self.layout)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, str]]:
        """The same without keys."""
        return (self.codes, self.scales), (self.length, self.layout)

    @classmethod
    def tree_unflatten(cls, static: tuple[int, str], children: tuple[Any, Any]) -> Mxfp4Array:
        """Rebuilds without any check, since transformations put placeholders where the arrays were."""
        return _unchecked(*children, *static)


def _unchecked(codes: Any, scales: Any, length: int, layout: str) -> Mxfp4Array:
    array = object.__new__(Mxfp4Array)
    array.codes, array.scales, array.length, array.layout = codes, scales, length, layout
    return array


def check_packed_shapes(where: str, codes: tuple[int, ...], scales: tuple[int, ...], length: int) -> None:
    """Raises ValueError unless the shapes obey the invariants of `Mxfp4Array` in the packed layout."""
    if (
        not codes
        or length % BLOCK
        or codes[-1] * 2 != length
        or not scales
        or codes[:-1] != scales[:-1]
        or scales[-1] * BLOCK != length
    ):
        rows = ", ".join(map(str, codes[:-1]))
        raise ValueError(
            f"{where}: codes of shape {codes} and scales of shape {scales} given for length {length}; expected codes "
            f"[{rows}{', ' if rows else ''}length / 2] and scales [{rows}{', ' if rows else ''}length / 32] with length a multiple of "
            f"{BLOCK}. Pad the last axis with zeros to a multiple of {BLOCK} before quantizing."
        )


def _codes_as_bytes(codes: Any) -> Any:
    codes = codes if hasattr(codes, "dtype") else np.asarray(codes)
    dtype = np.dtype(codes.dtype)
    if dtype == np.uint8:
        return codes
    if dtype == np.int8:
        return codes.view(np.uint8) if isinstance(codes, np.ndarray) else lax.bitcast_convert_type(codes, jnp.uint8)
    if dtype == _FLOAT4:
        if codes.shape[-1] % 2:
            raise ValueError(
                f"Mxfp4Array: float4 codes of shape {codes.shape} given; expected an even last axis, since two codes share a byte. "
                f"Pad it to a multiple of {BLOCK}."
            )
        pairs = jnp.asarray(codes).reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
        return lax.bitcast_convert_type(pairs, jnp.uint8)
    raise TypeError(
        f"Mxfp4Array: codes of dtype {dtype} given; expected uint8 or int8 (two codes a byte) or float4_e2m1fn. "
        "To make codes from floats, call quantize(x)."
    )


def _scales_as_bytes(scales: Any) -> Any:
    scales = scales if hasattr(scales, "dtype") else np.asarray(scales)
    dtype = np.dtype(scales.dtype)
    if dtype == np.uint8:
        return scales
    if dtype in (_E8M0, np.dtype(np.int8)):
        return scales.view(np.uint8) if isinstance(scales, np.ndarray) else lax.bitcast_convert_type(scales, jnp.uint8)
    raise TypeError(
        f"Mxfp4Array: scales of dtype {dtype} given; expected uint8 bytes (exponent + 127) or float8_e8m0fnu. "
        "To make scales from floats, call quantize(x)."
    )


def pack(codes: jax.Array) -> jax.Array:
    """Packs codes two a byte, the even element in the low nibble; the inverse of `unpack`.

    Args:
      codes: [..., n] uint8, each in 0..15 (higher bits are dropped), n even.

    Returns:
      [..., n // 2] uint8.
    """
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] & 0xF) | (pairs[..., 1] << 4)


def unpack(codes: jax.Array) -> jax.Array:
    """Takes packed bytes [..., n // 2] apart into codes [..., n], each in 0..15; the inverse of `pack`."""
    return jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def dequantize(array: Mxfp4Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns the values of `array` in a floating-point type, exactly wherever the type can hold them.

    Exponents are combined as integers and the result is assembled bit by bit, because a decoded scale that is multiplied
    afterwards is flushed to zero on platforms that treat subnormal numbers as zero (XLA on CPU among them).

    Args:
      array: any leading axes, layout `packed`.
      dtype: float32, bfloat16 or float16.

    Returns:
      [..., length] of `dtype`. Values too large for it become infinities of the right sign; values too small for it are
      rounded to nearest even, subnormals included. Scale byte 255 gives NaN whatever the code.

    Raises:
      ValueError: the array is in the layout of some implementation.
      TypeError: another dtype.
    """
    if not isinstance(array, Mxfp4Array):
        raise TypeError(
            f"dequantize: a {type(array).__name__} given; expected an Mxfp4Array: Mxfp4Array(codes, scales)."
        )
    if array.layout != PACKED:
        raise ValueError(
            f"dequantize: an array in layout {array.layout!r} given; expected layout 'packed'. "
            "Keep the packed weights: prepare() returns new ones."
        )
    dtype = float_dtype("dequantize: dtype", dtype)
    return _assemble(
        unpack(array.codes), jnp.repeat(array.scales, BLOCK, axis=-1, total_repeat_length=array.length), dtype
    )


def float_dtype(what: str, dtype: Any) -> np.dtype:
    """Returns `dtype` as a NumPy dtype, or raises a TypeError that begins with `what` unless it is one of the three float types."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in _FLOAT_FORMATS:
        raise TypeError(
            f"{what} {repr(dtype) if found is None else found} given; expected float32, bfloat16 or float16. Cast it."
        )
    return found


# Mantissa bits and exponent bias of the types that dequantize can return, and the integer type of the same width.
_FLOAT_FORMATS: dict[Any, tuple[int, int, Any]] = {
    np.dtype(np.float32): (23, 127, jnp.uint32),
    np.dtype(jnp.bfloat16): (7, 127, jnp.uint16),
    np.dtype(np.float16): (10, 15, jnp.uint16),
}


def _assemble(codes: jax.Array, scales: jax.Array, dtype: np.dtype) -> jax.Array:
    """Builds `E2M1(code) * 2 ** (scale - 127)` of equal-shaped codes and scale bytes as bits of `dtype`."""
    mantissa_bits, bias, uint = _FLOAT_FORMATS[dtype]
    width = 8 * dtype.itemsize
    magnitude = (codes & 7).astype(jnp.int32)
    # Codes 2 to 7 are normal, (1 + m / 2) * 2 ** (e - 1); code 1 is 0.5, which is normal in every wider type.
    half = jnp.where(magnitude > 1, magnitude & 1, 0)
    exponent = jnp.where(magnitude > 1, magnitude >> 1, 0) - 1
    field = exponent + scales.astype(jnp.int32) + (bias - SCALE_BIAS)
    significand = (2 + half) << (mantissa_bits - 1)
    normal = (field << mantissa_bits) | (half << (mantissa_bits - 1))
    # Below the smallest normal number: shift the significand right, rounding half to even.
    shift = jnp.clip(1 - field, 1, mantissa_bits + 2)
    kept = significand >> shift
    rest, tie = significand - (kept << shift), 1 << (shift - 1)
    subnormal = kept + ((rest > tie) | ((rest == tie) & (kept & 1 == 1))).astype(jnp.int32)
    top = (1 << (width - 1 - mantissa_bits)) - 1
    bits = jnp.where(field >= top, top << mantissa_bits, jnp.where(field > 0, normal, subnormal))
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(scales == SCALE_NAN, (top << mantissa_bits) | (1 << (mantissa_bits - 1)), bits).astype(uint)
    sign = (codes >> 3).astype(uint) << (width - 1)
    return lax.bitcast_convert_type(bits | sign, dtype)


def dequantize_halves(codes: jax.Array, scales: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The values of the even and of the odd elements, each [..., n // 2], for products that sum over the last axis.

    A product may take its terms in any order, and leaving the two nibbles of a byte apart avoids an interleaving that costs
    as much as the decoding. Unlike `dequantize`, values
    below 2 ** -126 become zero, as they would inside a product on platforms that flush subnormals.

    Args:
      codes: [..., n // 2] uint8. scales: [..., n // 32] uint8.
      dtype: float32 or bfloat16; both hold every MXFP4 value of normal magnitude.
    """
    per_block = (*scales.shape, BLOCK // 2)
    exponent_of_scale = scales.astype(jnp.int32)[..., None]
    nan = jnp.where(scales == SCALE_NAN, 0x7FC00000, 0).astype(jnp.int32)[..., None]

    def half(nibbles: jax.Array) -> jax.Array:
        code = nibbles.astype(jnp.int32).reshape(per_block)
        magnitude = code & 7
        field = jnp.where(magnitude > 1, magnitude >> 1, 0) - 1 + exponent_of_scale
        bits = (field << 23) | (jnp.where(magnitude > 1, magnitude & 1, 0) << 22)
        bits = jnp.where(field >= 255, 0x7F800000, bits)
        bits = jnp.where((magnitude == 0) | (field <= 0), 0, bits)
        bits = bits | ((code >> 3) << 31) | nan
        return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype).reshape(codes.shape)

    return half(codes & 0xF), half(codes >> 4)
