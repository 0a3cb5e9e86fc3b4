"""MoeWeights: the two expert stacks of a mixture-of-experts layer, in MXFP4."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array, check_packed_shapes
from jax_mxfp4_moe.problem import ACTIVATION_QUANTS
from jax_mxfp4_moe.quantize import Rounding, ScaleRule, quantize


@jax.tree_util.register_pytree_with_keys_class
class MoeWeights:
    """The expert weights of one layer.

    Invariants, with E experts, hidden size D and intermediate size F:
      gate_up.shape == (E, 2 * F, D): rows 0..F-1 are the gate, rows F..2F-1 the up projection;
      down.shape == (E, D, F);  gate_up_bias.shape == (E, 2 * F);  down_bias.shape == (E, D).
    The contraction axis is last in both, because MXFP4 blocks run along it. A stack of layers has one more leading axis
    in every leaf, and `lax.scan` over it yields one layer's weights at a time.

    Args:
      gate_up, down: Mxfp4Array, both in one layout.
      gate_up_bias, down_bias: float arrays or None. The down bias is multiplied by the router weight.
      activation_quant: static: how the checkpoint was made to be run: None (weights only), "mxfp4" or "fp8" (activations quantized
        before each stage); `mxfp4_moe(activation_quant="auto")` follows it.
      activation_scale: [2] float32 or None: the static scales of "fp8" activations, of x and of h, where a checkpoint has them
        (`input_scale`); without them each row gets its own. Not used with other activations.
    """

    gate_up: Mxfp4Array
    down: Mxfp4Array
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None
    activation_quant: str | None
    activation_scale: jax.Array | None

    _CHILDREN = ("gate_up", "down", "gate_up_bias", "down_bias", "activation_scale")
    __slots__ = ("activation_quant", "activation_scale", "down", "down_bias", "gate_up", "gate_up_bias")

    def __init__(
        self,
        gate_up: Mxfp4Array,
        down: Mxfp4Array,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        *,
        activation_quant: str | None = None,
        activation_scale: Any = None,
    ) -> None:
        if activation_quant not in ACTIVATION_QUANTS:
            raise ValueError(
                f"MoeWeights: activation_quant={activation_quant!r} given; expected one of {ACTIVATION_QUANTS}. "
                "Leave it out for weights whose activations stay in bfloat16."
            )
        self.gate_up, self.down = gate_up, down
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.activation_quant = activation_quant
        self.activation_scale = activation_scale

    @property
    def num_experts(self) -> int:
        """E, the length of the experts axis."""
        return self.gate_up.codes.shape[-3]

    @property
    def hidden_size(self) -> int:
        """D, the width of x and y."""
        return self.gate_up.length

    @property
    def intermediate_size(self) -> int:
        """F, the width between the two stages."""
        return self.down.length

    @property
    def layout(self) -> str:
        """`"packed"`, or the tag of the implementation that `prepare` was called for."""
        return self.gate_up.layout

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        floats = [a for a in (self.gate_up_bias, self.down_bias, self.activation_scale) if a is not None]
        return self.gate_up.nbytes + self.down.nbytes + sum(a.size * a.dtype.itemsize for a in floats)

    def replace(self, **changes: Any) -> MoeWeights:
        """A copy with some of its parts exchanged, unchecked."""
        new = self.tree_unflatten(*reversed(self.tree_flatten()))
        for name, part in changes.items():
            setattr(new, name, part)
        return new

    def __repr__(self) -> str:
        bias = "" if self.gate_up_bias is None and self.down_bias is None else ", with biases"
        scale = "" if self.activation_scale is None else ", with activation_scale"
        quant = self.activation_quant
        return f"MoeWeights(gate_up={self.gate_up!r}, down={self.down!r}{bias}{scale}, activation_quant={quant!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], str | None]:
        """Children gate_up, down, the two biases and activation_scale; static activation_quant."""
        key = jax.tree_util.GetAttrKey
        return tuple((key(name), getattr(self, name)) for name in self._CHILDREN), self.activation_quant

    def tree_flatten(self) -> tuple[tuple[Any, ...], str | None]:
        """The same without keys."""
        return tuple(getattr(self, name) for name in self._CHILDREN), self.activation_quant

    @classmethod
    def tree_unflatten(cls, activation_quant: str | None, children: tuple[Any, ...]) -> MoeWeights:
        """Rebuilds without any check."""
        weights = object.__new__(cls)
        for name, child in zip(cls._CHILDREN, children, strict=True):
            setattr(weights, name, child)
        weights.activation_quant = activation_quant
        return weights


_quantize = jax.jit(quantize, static_argnames=("scale_rule", "rounding"))


def quantize_weights(
    gate_up: Any,
    down: Any,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    *,
    scale_rule: ScaleRule = "even",
    rounding: Rounding = "nearest_even",
    activation_quant: str | None = None,
) -> MoeWeights:
    """Quantizes float expert weights to MXFP4, one expert at a time so that the peak of extra memory is one expert.

    Args:
      gate_up: [E, 2F, D] float32, bfloat16 or float16, gate rows first, contraction axis last.
      down: [E, D, F], likewise.
      gate_up_bias, down_bias: [E, 2F], [E, D] or None; kept as they are.
      scale_rule, rounding: see `quantize`.
      activation_quant: recorded in the result; see `MoeWeights`.

    Raises:
      ValueError: the shapes do not belong together, or D or F is not a multiple of 32.
      TypeError: the weights are not floating point.
    """
    gate_up, down = (w if hasattr(w, "shape") else np.asarray(w) for w in (gate_up, down))
    if (
        len(gate_up.shape) != 3
        or len(down.shape) != 3
        or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1])
    ):
        raise ValueError(
            f"quantize_weights: gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} given; expected [E, 2F, D] and "
            "[E, D, F], contraction axis last. Weights stored input-major need jnp.swapaxes(w, 1, 2) first."
        )
    rules = {"scale_rule": scale_rule, "rounding": rounding}

    def stack(w: Any) -> Mxfp4Array:
        if isinstance(w, jax.core.Tracer) or len(w) == 0:
            return _quantize(jnp.asarray(w), **rules)
        return jax.tree.map(lambda *experts: jnp.stack(experts), *[_quantize(jnp.asarray(e), **rules) for e in w])

    return MoeWeights(stack(gate_up), stack(down), gate_up_bias, down_bias, activation_quant=activation_quant)


def check_weights(where: str, weights: MoeWeights) -> None:
    """Raises ValueError or TypeError unless `weights` obeys the invariants of `MoeWeights` for one layer."""
    if not isinstance(weights, MoeWeights):
        raise TypeError(
            f"{where}: weights of type {type(weights).__name__} given; expected MoeWeights. "
            "Build them with quantize_weights(gate_up, down) or MoeWeights(gate_up, down)."
        )
    up, down = weights.gate_up, weights.down
    for name, part in (("gate_up", up), ("down", down)):
        if not isinstance(part, Mxfp4Array):
            raise TypeError(
                f"{where}: weights.{name} of type {type(part).__name__} given; expected an Mxfp4Array. Build the weights with "
                "quantize_weights(gate_up, down), or from bytes with Mxfp4Array(codes, scales)."
            )
        if part.codes.dtype != np.uint8 or part.scales.dtype != np.uint8:
            raise TypeError(
                f"{where}: weights.{name} with codes {part.codes.dtype} and scales {part.scales.dtype} given; expected uint8. Packed bytes "
                "must not be cast: leave them out of a tree.map over parameters."
            )
    if up.layout != down.layout:
        raise ValueError(
            f"{where}: weights.gate_up in layout {up.layout!r} and weights.down in layout {down.layout!r} given; expected "
            "one layout. Call prepare(weights, implementation) on the whole MoeWeights."
        )
    check_activation_scale(f"{where}: weights.activation_scale", weights.activation_scale)
    if up.layout != PACKED:
        return
    for name, array in (("gate_up", up), ("down", down)):
        check_packed_shapes(f"{where}: weights.{name}", array.codes.shape, array.scales.shape, array.length)
    if up.ndim != 3 or down.ndim != 3 or up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        raise ValueError(
            f"{where}: weights.gate_up {up.shape} and weights.down {down.shape} given; expected [E, 2F, D] and [E, D, F] with the "
            "same E, F and D. Index a stack of layers first, or lax.scan over it."
        )
    experts, rows, hidden = up.shape
    for name, bias, shape in (
        ("gate_up_bias", weights.gate_up_bias, (experts, rows)),
        ("down_bias", weights.down_bias, (experts, hidden)),
    ):
        if bias is None:
            continue
        if not hasattr(bias, "dtype") or np.dtype(bias.dtype) not in (np.float32, np.float16, jnp.bfloat16):
            raise TypeError(
                f"{where}: weights.{name} of type {getattr(bias, 'dtype', type(bias).__name__)} given; expected an array of float32, "
                "bfloat16 or float16. Cast it."
            )
        if tuple(bias.shape) != shape:
            raise ValueError(
                f"{where}: weights.{name} of shape {tuple(bias.shape)} given; expected {shape}, one row an expert."
            )


def check_activation_scale(what: str, scale: Any) -> None:
    """Raises a ValueError or TypeError that begins with `what` unless `scale` is None or a float32 array [2]."""
    if scale is None:
        return
    if not hasattr(scale, "dtype") or scale.dtype != np.float32:
        raise TypeError(
            f"{what} of type {getattr(scale, 'dtype', type(scale).__name__)} given; expected an array of float32: the scales of x and "
            "of h. Cast it."
        )
    if tuple(scale.shape) != (2,):
        raise ValueError(
            f"{what} of shape {tuple(scale.shape)} given; expected (2,), the scales of x and of h. Of one scale an expert take the largest."
        )
