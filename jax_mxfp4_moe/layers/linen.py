"""The layer for Flax Linen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_mxfp4_moe.layers import common
from jax_mxfp4_moe.layers.common import Axes, Initializer, default_kernel_init
from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array
from jax_mxfp4_moe.quantize import Rounding, ScaleRule
from jax_mxfp4_moe.weights import MoeWeights, check_weights


class Mxfp4MoeLinen(nn.Module):
    """`Mxfp4Moe` for Flax Linen: the same fields, and the same arrays under the same names.

    Router and biases are in the collection "params", bytes in "quantized", the correction bias in "router_state". The latter two are
    not mutable in `apply`, and `jax.grad` with respect to `variables["params"]` is what trains. Weights that exist are put in with
    `variables_from_weights`; `Mxfp4Moe.to_linen` turns any layer into one of this kind.

    Fields of its own are `layout` and `shared_layout`, those of the weights it is given: "packed", or the tag of what `prepare` returned.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    use_shared_gate: bool = False
    use_bias: bool = False
    router_bias: bool = False
    use_correction_bias: bool = False
    use_activation_scale: bool = False
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int | None = None
    topk_groups: int | None = None
    group_score: str | None = None
    routed_scaling_factor: float = 1.0
    activation: str = "silu"
    activation_alpha: float | None = None
    activation_limit: float | None = None
    activation_quant: str | None = "auto"
    scale_rule: ScaleRule = "even"
    rounding: Rounding = "nearest_even"
    apply_router_weight_on_input: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = default_kernel_init
    kernel_axes: Sequence[str | None] | None = None
    mesh: jax.sharding.Mesh | None = None
    expert_axis: str | None = None
    tensor_axis: str | None = None
    token_axis: str | Sequence[str] | None = None
    dispatch: str | None = None
    implementation: str | Sequence[str] | None = None
    bridge: str | None = None
    layout: str = PACKED
    shared_layout: str = PACKED

    @nn.compact
    def __call__(self, x: jax.Array, *, token_mask: jax.Array | None = None) -> jax.Array:
        """Returns y [..., D] of x [..., D]; leading axes are tokens. Where `token_mask` [...] is False, y is 0, whatever x holds."""
        common.check_fields("Mxfp4MoeLinen", self, has_correction_bias=self.use_correction_bias)
        axes = common.logical_axes(self.kernel_axes)

        def dense(name: str, features: int, use_bias: bool) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=use_bias,
                dtype=jnp.float32,
                param_dtype=self.param_dtype,
                kernel_init=_annotated(self.kernel_init, axes.get(f"{name}_kernel")),
                bias_init=_annotated(nn.initializers.zeros, axes.get(f"{name}_bias")),
                precision=jax.lax.Precision.HIGHEST,
                name=name,
            )

        correction_bias = None
        if self.use_correction_bias:
            zeros = _annotated(lambda: jnp.zeros(self.num_experts, jnp.float32), axes.get("correction_bias"))
            correction_bias = self.variable("router_state", "correction_bias", zeros).value
        shared = self._shared_stack()
        return common.run(
            self,
            x,
            token_mask,
            router=dense("router", self.num_experts, self.router_bias),
            weights=_weights(self, self._stack()),
            correction_bias=correction_bias,
            shared_weights=None if shared is None else _Experts(shared, name="shared_experts")(),
            shared_gate=dense("shared_gate", 1, False) if self.use_shared_gate else None,
        )

    def _stack(self) -> _Stack:
        return _Stack(
            experts=self.num_experts + self.num_shared_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            use_bias=self.use_bias,
            use_activation_scale=self.use_activation_scale,
            activation_quant=None if self.activation_quant == "auto" else self.activation_quant,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            kernel_axes=common.hashable(self.kernel_axes),
            layout=self.layout,
            has_halves=self.tensor_axis is not None and self.layout == PACKED,
        )

    def _shared_stack(self) -> _Stack | None:
        if self.shared_intermediate_size is None:
            return None
        return self._stack()._replace(
            experts=1,
            intermediate_size=self.shared_intermediate_size,
            kernel_axes=common.shared_axes(self.kernel_axes),
            layout=self.shared_layout,
            has_halves=self.tensor_axis is not None and self.shared_layout == PACKED,
        )

    def variables_from_weights(
        self,
        weights: MoeWeights,
        router_kernel: Any,
        router_bias: Any = None,
        *,
        correction_bias: Any = None,
        shared_weights: MoeWeights | None = None,
        shared_gate_kernel: Any = None,
    ) -> dict[str, Any]:
        """Returns the variables of this layer around weights that exist: `layer.apply(variables, x)`.

        Args:
          weights: fused shared experts last.
          router_kernel: [D, num_experts], contraction first as in `nn.Dense`.
          router_bias: [num_experts] or None.
          correction_bias: [num_experts] or None, converted to float32.
          shared_weights: the separate shared expert, in the layout of `weights`, or None.
          shared_gate_kernel: [D, 1] or None.

        Raises:
          ValueError: a field of the layer says something else than the weights, so that it would compute something else.
        """
        where = "Mxfp4MoeLinen.variables_from_weights"
        check_weights(where, weights)
        if shared_weights is not None:
            common.check_shared_weights(where, weights, shared_weights)
        gate_shape = None if shared_gate_kernel is None else tuple(shared_gate_kernel.shape)
        facts = {
            "hidden_size": (self.hidden_size, weights.hidden_size),
            "intermediate_size": (self.intermediate_size, weights.intermediate_size),
            "num_experts + num_shared_experts": (self.num_experts + self.num_shared_experts, weights.num_experts),
            "shared_intermediate_size": (
                self.shared_intermediate_size,
                None if shared_weights is None else shared_weights.intermediate_size,
            ),
            "layout": (self.layout, weights.layout),
            "shared_layout": (self.shared_layout, PACKED if shared_weights is None else shared_weights.layout),
            "shape of router_kernel": ((self.hidden_size, self.num_experts), tuple(router_kernel.shape)),
            "router_bias": (self.router_bias, router_bias is not None),
            "use_correction_bias": (self.use_correction_bias, correction_bias is not None),
            "shape of shared_gate_kernel": ((self.hidden_size, 1) if self.use_shared_gate else None, gate_shape),
        }
        for of, part in (("", weights), (" of shared_experts", shared_weights)):
            if part is not None:
                facts |= {
                    f"use_bias{of}": (self.use_bias, part.gate_up_bias is not None),
                    f"use_bias (down){of}": (self.use_bias, part.down_bias is not None),
                    f"use_activation_scale{of}": (self.use_activation_scale, part.activation_scale is not None),
                }
        if self.activation_quant == "auto":  # the variables are bytes and cannot say
            facts["activation_quant"] = (None, weights.activation_quant)
        wrong = [f"{name}: {mine} here, {theirs} given" for name, (mine, theirs) in facts.items() if mine != theirs]
        if wrong:
            raise ValueError(
                f"{where}: {'; '.join(wrong)}; expected the fields of the layer to agree with the weights. Build the layer with their "
                "sizes, biases and activation_quant, or let Mxfp4Moe.from_weights(...).to_linen() build it."
            )
        axes = common.logical_axes(self.kernel_axes)
        variables = _boxed_weights(weights, self._stack())
        if shared_weights is not None:
            shared = _boxed_weights(shared_weights, self._shared_stack())
            for collection, arrays in shared.items():
                if arrays:
                    variables[collection]["shared_experts"] = arrays
        variables["params"]["router"] = _without_none(
            kernel=_boxed(router_kernel, axes.get("router_kernel")), bias=_boxed(router_bias, axes.get("router_bias"))
        )
        if shared_gate_kernel is not None:
            variables["params"]["shared_gate"] = {"kernel": _boxed(shared_gate_kernel, axes.get("shared_gate_kernel"))}
        if correction_bias is not None:
            correction_bias = jnp.asarray(correction_bias, jnp.float32)
            variables["router_state"] = {"correction_bias": _boxed(correction_bias, axes.get("correction_bias"))}
        return variables


class _Stack(NamedTuple):
    """What the arrays of one stack of experts depend on."""

    experts: int
    hidden_size: int
    intermediate_size: int
    use_bias: bool
    use_activation_scale: bool
    activation_quant: str | None
    param_dtype: Any
    kernel_init: Initializer
    kernel_axes: tuple[str | None, ...] | None
    layout: str
    has_halves: bool

    @property
    def axes(self) -> dict[str, Axes]:
        return common.logical_axes(self.kernel_axes, self.has_halves)


class _Experts(nn.Module):
    """The arrays of a separate shared expert, under a name of their own."""

    stack: _Stack

    @nn.compact
    def __call__(self) -> MoeWeights:
        return _weights(self, self.stack)


def _weights(module: nn.Module, stack: _Stack) -> MoeWeights:
    """The variables of `module` as weights, as `with_halves` has them; drawn at random while the module is initialized."""
    axes = stack.axes
    names = common.packed_names(stack.layout)
    hidden, intermediate = stack.hidden_size, stack.intermediate_size

    def mxfp4(name: str, contracted: int, rows: int) -> Mxfp4Array:
        made: list[Mxfp4Array] = []

        def once() -> Mxfp4Array:
            if stack.layout != PACKED:
                raise ValueError(
                    f"Mxfp4MoeLinen: init of a layer with layout={stack.layout!r}; expected layout 'packed', in which random weights are "
                    "made. Give it the variables that variables_from_weights(prepare(weights, implementation), ...) returns."
                )
            if not made:
                made.append(
                    common.random_experts(module.make_rng("params"), stack.experts, contracted, rows, stack.kernel_init)
                )
            return made[0]

        def variable(part: str) -> jax.Array:
            init = _annotated(
                lambda: common.with_halves(name, getattr(once(), part), stack.has_halves), axes.get(f"{name}_{part}")
            )
            return module.variable("quantized", names[f"{name}_{part}"], init).value

        return Mxfp4Array(variable("codes"), variable("scales"), length=contracted, layout=stack.layout)

    def bias(name: str, rows: int) -> jax.Array | None:
        if not stack.use_bias:
            return None
        halves = (2, rows // 2) if stack.has_halves and name == "gate_up_bias" else (rows,)
        return module.param(
            name, _annotated(nn.initializers.zeros, axes.get(name)), (stack.experts, *halves), stack.param_dtype
        )

    scale = None
    if stack.use_activation_scale:
        ones = _annotated(lambda: jnp.ones(2, jnp.float32), axes.get("activation_scale"))
        scale = module.variable("quantized", "activation_scale", ones).value
    return MoeWeights(
        mxfp4("gate_up", hidden, 2 * intermediate),
        mxfp4("down", intermediate, hidden),
        bias("gate_up_bias", 2 * intermediate),
        bias("down_bias", hidden),
        activation_quant=stack.activation_quant,
        activation_scale=scale,
    )


def _boxed_weights(weights: MoeWeights, stack: _Stack | None) -> dict[str, dict[str, Any]]:
    assert stack is not None

    def stored(name: str, array: Any) -> Any:
        return _boxed(common.with_halves(name, array, stack.has_halves), stack.axes.get(name))

    quantized = {
        kept_as: stored(name, getattr(getattr(weights, name.rsplit("_", 1)[0]), name.rsplit("_", 1)[1]))
        for name, kept_as in common.packed_names(weights.layout).items()
    }
    return {
        "params": _without_none(
            gate_up_bias=stored("gate_up_bias", weights.gate_up_bias), down_bias=stored("down_bias", weights.down_bias)
        ),
        "quantized": quantized | _without_none(activation_scale=stored("activation_scale", weights.activation_scale)),
    }


def _annotated(init: Callable[..., Any], axes: Axes | None) -> Callable[..., Any]:
    return init if axes is None else nn.with_logical_partitioning(init, axes)


def _boxed(value: Any, axes: Axes | None) -> Any:
    return None if value is None else _annotated(lambda: value, axes)()


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
