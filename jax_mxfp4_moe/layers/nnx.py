"""The layer for Flax NNX."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_mxfp4_moe.checkpoint import Checkpoint, describe, load, load_router, open_checkpoint
from jax_mxfp4_moe.checkpoint.load import ROUTING_OPTIONS, has_shared
from jax_mxfp4_moe.layers import common
from jax_mxfp4_moe.layers.common import Axes, Initializer, default_kernel_init
from jax_mxfp4_moe.layers.linen import Mxfp4MoeLinen
from jax_mxfp4_moe.moe import prepare
from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array
from jax_mxfp4_moe.quantize import Rounding, ScaleRule
from jax_mxfp4_moe.weights import MoeWeights, check_weights


class Quantized(nnx.Variable):
    """A part of quantized weights. Not an `nnx.Param`: `nnx.grad`, `nnx.Optimizer` and `nnx.state(layer, nnx.Param)` leave it out."""


class RouterState(nnx.Variable):
    """What a router holds beside its parameters, and no gradient changes: the correction bias that balances load."""


class Mxfp4Experts(nnx.Module):
    """The arrays of one `MoeWeights` as variables: the base of `Mxfp4Moe`, and its separate shared expert.

    With `has_halves` gate and up have an axis of their own, as `common.with_halves` says.
    """

    def __init__(
        self, weights: MoeWeights, kernel_axes: Sequence[str | None] | None = None, has_halves: bool = False
    ) -> None:
        self.kernel_axes = common.hashable(kernel_axes)
        self.has_halves = has_halves
        self._set_weights(weights)

    def _set_weights(self, weights: MoeWeights) -> None:
        has_halves = self.has_halves and weights.layout == PACKED
        axes = common.logical_axes(self.kernel_axes, has_halves)
        if axes and weights.layout != PACKED:
            raise ValueError(
                f"{type(self).__name__}: kernel_axes={self.kernel_axes} and weights in layout {weights.layout!r} given; expected layout "
                "'packed', the axes of which have names. Leave kernel_axes out."
            )
        for name in vars(self).keys() & set(common.packed_names(getattr(self, "layout", PACKED)).values()):
            delattr(self, name)
        self.hidden_size, self.intermediate_size = weights.hidden_size, weights.intermediate_size
        self.activation_quant, self.layout = weights.activation_quant, weights.layout
        for name, stored in common.packed_names(weights.layout).items():
            stack, part = name.rsplit("_", 1)
            array = common.with_halves(name, getattr(getattr(weights, stack), part), has_halves)
            _assign(self, stored, _variable(Quantized, array, axes.get(name)))
        for name, kind in (("gate_up_bias", nnx.Param), ("down_bias", nnx.Param), ("activation_scale", Quantized)):
            array = common.with_halves(name, getattr(weights, name), has_halves)
            _assign(self, name, _variable(kind, array, axes.get(name)))

    @property
    def weights(self) -> MoeWeights:
        """The experts as `mxfp4_moe` takes them, fused shared ones last."""
        stored, has_halves = self._stored(), self.has_halves and self.layout == PACKED
        gate_up = jax.tree.map(lambda a: common.without_halves("gate_up", a, has_halves), stored.gate_up)
        return stored.replace(
            gate_up=gate_up, gate_up_bias=common.without_halves("gate_up_bias", stored.gate_up_bias, has_halves)
        )

    def _stored(self) -> MoeWeights:
        """The same with the arrays' own shapes."""
        names = common.packed_names(self.layout)
        others = [n for n in vars(self) if n.startswith(tuple(common.packed_names(PACKED))) and n not in names.values()]
        if others:
            raise ValueError(
                f"{type(self).__name__}: arrays {', '.join(others)} found in a layer of layout {self.layout!r}; expected "
                f"{', '.join(names.values())} alone. The state of a layer in another layout was put in: make the layer of weights in that "
                "layout, or restore into a packed layer and call layer.prepare(implementation)."
            )

        def stack(name: str, length: int) -> Mxfp4Array:
            codes, scales = (getattr(self, names[f"{name}_{part}"])[...] for part in ("codes", "scales"))
            return Mxfp4Array(codes, scales, length=length, layout=self.layout)

        return MoeWeights(
            stack("gate_up", self.hidden_size),
            stack("down", self.intermediate_size),
            _value(self.gate_up_bias),
            _value(self.down_bias),
            activation_quant=self.activation_quant,
            activation_scale=_value(self.activation_scale),
        )


class Mxfp4Moe(Mxfp4Experts):
    """A mixture-of-experts layer in MXFP4: chooses experts for each token and adds up what they answer.

    Shared experts, which every token uses with weight 1, are fused or separate. Fused ones have the width of the routed experts and stand
    behind them in the same arrays, and one call computes all. A separate one has a width of its own and is a second call.

    Args:
      hidden_size, intermediate_size: D and F, multiples of 32.
      num_experts, num_experts_per_tok: routed experts, and how many of them a token uses.
      num_shared_experts: fused shared experts.
      shared_intermediate_size: width of a separate shared expert, a multiple of 32, instead of `num_shared_experts`.
      use_shared_gate: the shared experts' weight is the sigmoid of a learned product with x instead of 1.
      use_bias, router_bias: whether experts and router have biases.
      use_correction_bias: whether the router has a correction bias, `e_score_correction_bias` of DeepSeek-V3. It changes which experts are
        chosen and not their weights. No gradient reaches it: add to `layer.correction_bias` to balance load.
      use_activation_scale: whether "fp8" activations have static scales; see `MoeWeights`.
      scoring, renormalize, num_groups, topk_groups, group_score, routed_scaling_factor: see `topk_routing`. The router computes in float32
        whatever `dtype` is. Shared experts are not scaled by `routed_scaling_factor`.
      activation, activation_alpha, activation_limit, activation_quant, scale_rule, rounding, apply_router_weight_on_input: see `mxfp4_moe`.
        activation_quant "auto" is what the weights were made for, and None for weights made here.
      dtype: type that x is converted to, and of the result; the type of x if None.
      param_dtype: type of router and biases.
      kernel_init: called as Flax does, with (key, [in, out], dtype), for the router and once for every expert's two matrices.
      kernel_axes: names of the axes experts, intermediate and hidden for partitioning, such as ("exp", "mlp", "embed"), or None for no
        metadata. Without a mesh it is metadata only; with one, Flax places arrays as they are made.
      mesh, expert_axis, tensor_axis, token_axis: run the layer over devices, by `parallel.sharded_mxfp4_moe`: experts divided over one axis
        of the mesh, columns of F in whole blocks of 32 over another, tokens over a third. What else of the weights is divided, each call
        gathers. Without a mesh weights must not be divided. With a tensor axis gate_up arrays are [E, 2, F, ...] instead of [E, 2F, ...].
      dispatch: how tokens reach the experts of an expert axis, see `parallel.sharded_mxfp4_moe`. None: by their number.
      implementation, bridge: see `mxfp4_moe`.
      rngs: the stream "params" is used. One expert at a time exists in float, so a layer that is too large in float can be made.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        num_shared_experts: int = 0,
        shared_intermediate_size: int | None = None,
        use_shared_gate: bool = False,
        use_bias: bool = False,
        router_bias: bool = False,
        use_correction_bias: bool = False,
        use_activation_scale: bool = False,
        scoring: str = "softmax",
        renormalize: bool = True,
        num_groups: int | None = None,
        topk_groups: int | None = None,
        group_score: str | None = None,
        routed_scaling_factor: float = 1.0,
        activation: str = "silu",
        activation_alpha: float | None = None,
        activation_limit: float | None = None,
        activation_quant: str | None = "auto",
        scale_rule: ScaleRule = "even",
        rounding: Rounding = "nearest_even",
        apply_router_weight_on_input: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        kernel_axes: Sequence[str | None] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        expert_axis: str | None = None,
        tensor_axis: str | None = None,
        token_axis: str | Sequence[str] | None = None,
        dispatch: str | None = None,
        implementation: str | Sequence[str] | None = None,
        bridge: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.num_shared_experts = num_shared_experts
        self.shared_intermediate_size = shared_intermediate_size
        self.use_shared_gate = use_shared_gate
        self.scoring = scoring
        self.renormalize = renormalize
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_score = group_score
        self.routed_scaling_factor = routed_scaling_factor
        self.activation = activation
        self.activation_alpha = activation_alpha
        self.activation_limit = activation_limit
        self.activation_quant = None if activation_quant == "auto" else activation_quant
        self.scale_rule = scale_rule
        self.rounding = rounding
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.dtype = dtype
        self.kernel_axes = common.hashable(kernel_axes)
        self.mesh = mesh
        self.expert_axis = expert_axis
        self.tensor_axis = tensor_axis
        self.has_halves = tensor_axis is not None
        self.dispatch = dispatch
        self.token_axis = common.hashable(token_axis)
        self.implementation = common.hashable(implementation)
        self.bridge = bridge
        common.check_fields("Mxfp4Moe", self, has_correction_bias=use_correction_bias)

        def linear(name: str, features: int, use_bias: bool) -> nnx.Linear:
            return nnx.Linear(
                hidden_size,
                features,
                use_bias=use_bias,
                dtype=jnp.float32,
                param_dtype=param_dtype,
                kernel_init=_annotated(kernel_init, axes.get(f"{name}_kernel")),
                bias_init=_annotated(nnx.initializers.zeros, axes.get(f"{name}_bias")),
                precision=jax.lax.Precision.HIGHEST,
                rngs=rngs,
            )

        def experts(count: int, intermediate: int) -> MoeWeights:
            return MoeWeights(
                common.random_experts(rngs.params(), count, hidden_size, 2 * intermediate, kernel_init),
                common.random_experts(rngs.params(), count, intermediate, hidden_size, kernel_init),
                jnp.zeros((count, 2 * intermediate), param_dtype) if use_bias else None,
                jnp.zeros((count, hidden_size), param_dtype) if use_bias else None,
                activation_quant=self.activation_quant,
                activation_scale=jnp.ones(2, jnp.float32) if use_activation_scale else None,
            )

        axes = common.logical_axes(self.kernel_axes)
        self.router = linear("router", num_experts, router_bias)
        correction_bias = jnp.zeros(num_experts, jnp.float32) if use_correction_bias else None
        self.correction_bias = _variable(RouterState, correction_bias, axes.get("correction_bias"))
        self._set_weights(experts(num_experts + num_shared_experts, intermediate_size))
        self.shared_experts = (
            None
            if shared_intermediate_size is None
            else Mxfp4Experts(
                experts(1, shared_intermediate_size), common.shared_axes(self.kernel_axes), self.has_halves
            )
        )
        self.shared_gate = linear("shared_gate", 1, False) if use_shared_gate else None

    @classmethod
    def from_weights(
        cls,
        weights: MoeWeights,
        router_kernel: Any,
        router_bias: Any = None,
        *,
        num_experts_per_tok: int,
        num_shared_experts: int = 0,
        correction_bias: Any = None,
        shared_weights: MoeWeights | None = None,
        shared_gate_kernel: Any = None,
        activation_quant: str | None = "auto",
        **options: Any,
    ) -> Mxfp4Moe:
        """Makes a layer around weights that exist, without drawing random ones.

        Args:
          weights: packed, or prepared for `implementation`; fused shared experts last. The arrays are not copied.
          router_kernel: [D, num_experts], contraction first as in `nnx.Linear`; `router.weight` of torch checkpoints is its transpose.
          router_bias: [num_experts] or None.
          correction_bias: [num_experts] or None, converted to float32.
          shared_weights: the separate shared expert, in the layout of `weights`, or None.
          shared_gate_kernel: [D, 1] or None.
          num_experts_per_tok, num_shared_experts, activation_quant: as in the constructor.
          **options: of the constructor: activation, scoring, dtype, implementation, ...

        Raises:
          ValueError: weights and router do not belong together.
        """
        where = f"{cls.__name__}.from_weights"
        check_weights(where, weights)
        num_experts = weights.num_experts - num_shared_experts
        router_kernel, router_bias, correction_bias, shared_gate_kernel = (
            None if array is None else jnp.asarray(array)
            for array in (router_kernel, router_bias, correction_bias, shared_gate_kernel)
        )
        if router_kernel.shape != (weights.hidden_size, num_experts) or any(
            bias is not None and bias.shape != (num_experts,) for bias in (router_bias, correction_bias)
        ):
            biases = "".join(
                f" and {name} {bias.shape}"
                for name, bias in (("router_bias", router_bias), ("correction_bias", correction_bias))
                if bias is not None
            )
            raise ValueError(
                f"{where}: router_kernel {router_kernel.shape}{biases} given with weights of {weights.num_experts} experts, "
                f"num_shared_experts={num_shared_experts} and hidden size {weights.hidden_size}; expected router_kernel "
                f"{(weights.hidden_size, num_experts)} and router_bias and correction_bias {(num_experts,)} or None: the router does not "
                "choose shared experts. A [num_experts, hidden] router weight of a torch checkpoint has to be transposed."
            )
        if shared_gate_kernel is not None and shared_gate_kernel.shape != (weights.hidden_size, 1):
            raise ValueError(
                f"{where}: shared_gate_kernel {shared_gate_kernel.shape} given; expected {(weights.hidden_size, 1)}. A [1, hidden] "
                "weight of a torch checkpoint has to be transposed."
            )
        if shared_weights is not None:
            common.check_shared_weights(where, weights, shared_weights)
        # Abstract: nothing is drawn or allocated before the given arrays take the place of the random ones.
        layer = nnx.eval_shape(
            lambda: cls(
                weights.hidden_size,
                weights.intermediate_size,
                num_experts,
                num_experts_per_tok,
                num_shared_experts=num_shared_experts,
                shared_intermediate_size=None if shared_weights is None else shared_weights.intermediate_size,
                use_shared_gate=shared_gate_kernel is not None,
                use_bias=weights.gate_up_bias is not None or weights.down_bias is not None,
                router_bias=router_bias is not None,
                use_correction_bias=correction_bias is not None,
                activation_quant=weights.activation_quant if activation_quant == "auto" else activation_quant,
                rngs=nnx.Rngs(0),
                **options,
            )
        )
        axes = common.logical_axes(layer.kernel_axes)
        correction_bias = None if correction_bias is None else correction_bias.astype(jnp.float32)
        _assign(layer.router, "kernel", _variable(nnx.Param, router_kernel, axes.get("router_kernel")))
        _assign(layer.router, "bias", _variable(nnx.Param, router_bias, axes.get("router_bias")))
        _assign(layer, "correction_bias", _variable(RouterState, correction_bias, axes.get("correction_bias")))
        for part, given in ((layer, weights), (layer.shared_experts, shared_weights)):
            if given is not None:
                part._set_weights(given.replace(activation_quant=layer.activation_quant))
        if shared_gate_kernel is not None:
            gate = _variable(nnx.Param, shared_gate_kernel, axes.get("shared_gate_kernel"))
            _assign(layer.shared_gate, "kernel", gate)
        return layer

    @classmethod
    def from_dense(
        cls,
        router_kernel: Any,
        router_bias: Any = None,
        *,
        wi_0: Any,
        wi_1: Any,
        wo: Any,
        wi_0_bias: Any = None,
        wi_1_bias: Any = None,
        wo_bias: Any = None,
        num_experts_per_tok: int,
        num_shared_experts: int = 0,
        activation_quant: str | None = None,
        scale_rule: ScaleRule = "even",
        rounding: Rounding = "nearest_even",
        **options: Any,
    ) -> Mxfp4Moe:
        """Quantizes a trained layer in float32 or bfloat16, one expert at a time.

        Kernels are as Flax layers hold them, contraction axis first. For stacks with the contraction axis last call
        `from_weights(quantize_weights(gate_up, down), router_kernel, ...)`.

        Args:
          router_kernel, router_bias: [D, num_experts], [num_experts] or None; kept as they are.
          wi_0, wi_1, wo: gate [E, D, F], up [E, D, F] and down [E, F, D]; fused shared experts last.
          wi_0_bias, wi_1_bias, wo_bias: [E, F], [E, F], [E, D], or None; kept as they are.
          scale_rule, rounding: of the weights here, and of activations later.
          num_experts_per_tok, num_shared_experts, activation_quant, **options: as in `from_weights`.

        Raises:
          ValueError: shapes that do not belong together; those of transposed kernels among them, unless D equals F.
          TypeError: kernels that are not floating point.
        """
        weights = common.quantize_kernels(
            f"{cls.__name__}.from_dense",
            router_kernel,
            wi_0,
            wi_1,
            wo,
            wi_0_bias,
            wi_1_bias,
            wo_bias,
            num_shared_experts=num_shared_experts,
            scale_rule=scale_rule,
            rounding=rounding,
            activation_quant=activation_quant,
        )
        return cls.from_weights(
            weights,
            router_kernel,
            router_bias,
            num_experts_per_tok=num_experts_per_tok,
            num_shared_experts=num_shared_experts,
            scale_rule=scale_rule,
            rounding=rounding,
            **options,
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str] | Checkpoint,
        *,
        layer: int,
        implementation: str | None = None,
        include_shared: bool = True,
        quantize: bool | None = None,
        activation_quant: str | None = "auto",
        scale_rule: ScaleRule | None = None,
        rounding: Rounding = "nearest_even",
        **overrides: Any,
    ) -> Mxfp4Moe:
        """Loads router and experts of one layer, with the options that the checkpoint's configuration states.

        Args:
          path: a folder, a .safetensors or .gguf file, or an open checkpoint; see `checkpoint.load`.
          layer: the number in the tensor names.
          implementation: the one that runs the layer, for which the weights are prepared; None keeps them packed and leaves the choice.
          include_shared: False leaves the shared experts out, where the model runs them by other means.
          quantize, activation_quant, rounding: see `checkpoint.load`.
          scale_rule: of experts in floats and of activations; None is the rule that the configuration states, or else "even".
          **overrides: options of the constructor, instead of what the configuration says or beside it: num_experts_per_tok, renormalize,
            dtype, kernel_axes, ...

        Raises:
          FileNotFoundError, ValueError: as for `checkpoint.load` and `checkpoint.load_router`; also if the configuration does not say how
            many experts a token uses, or how they are weighted in a model type that is not known, and the overrides do not say it either.

        Warns:
          UserWarning: each of `checkpoint.describe(path).notes`: what had to be assumed.
        """
        where = f"{cls.__name__}.from_checkpoint"
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        facts = describe(checkpoint)
        for note in facts.notes:
            warnings.warn(f"{where}: {note}", stacklevel=2)
        options = {
            **facts.activation_options(),
            **facts.routing_options(**{name: overrides[name] for name in ROUTING_OPTIONS if name in overrides}),
            "num_experts_per_tok": facts.num_experts_per_tok,
        }
        options |= overrides
        if options["num_experts_per_tok"] is None:
            raise ValueError(
                f"{where}: no num_experts_per_tok in the configuration of {checkpoint.path}; expected how many experts a token uses. Give "
                "num_experts_per_tok=..."
            )
        router = load_router(checkpoint, layer=layer)
        weights = load(
            checkpoint,
            layer=layer,
            implementation=implementation,
            include_shared=include_shared and has_shared(checkpoint, layer),
            quantize=quantize,
            scale_rule=scale_rule,
            rounding=rounding,
            activation_quant=activation_quant,
        )
        if scale_rule is not None:
            options["scale_rule"] = scale_rule
        return cls.from_weights(
            weights,
            router.weight.T,
            router.bias,
            correction_bias=router.correction_bias,
            num_shared_experts=weights.num_experts - router.weight.shape[0],
            rounding=rounding,
            implementation=implementation,
            **options,
        )

    def prepare(self, implementation: str) -> None:
        """Brings the experts to the layout of an implementation, in place and outside jit, and makes it the layer's own.

        Raises:
          ValueError: an unknown implementation, weights in the layout of another one, or `kernel_axes`, which name packed axes.
        """
        parts = [part for part in (self, self.shared_experts) if part is not None]
        # All before any, so that a refusal leaves the layer whole.
        ready = [prepare(part.weights, implementation) for part in parts]
        for part, weights in zip(parts, ready, strict=True):
            part._set_weights(weights)
        self.implementation = implementation

    def to_linen(self) -> tuple[Mxfp4MoeLinen, dict[str, Any]]:
        """Returns the same layer for Linen, and its variables; the arrays are not copied."""
        kernel = self.router.kernel[...]
        weights = self.weights
        module = Mxfp4MoeLinen(
            **{name: getattr(self, name) for name in Mxfp4MoeLinen.__dataclass_fields__ if name in vars(self)},
            use_bias=weights.gate_up_bias is not None,
            router_bias=self.router.bias is not None,
            use_correction_bias=self.correction_bias is not None,
            use_activation_scale=weights.activation_scale is not None,
            param_dtype=kernel.dtype,
            shared_layout=PACKED if self.shared_experts is None else self.shared_experts.layout,
        )
        variables = module.variables_from_weights(
            weights,
            kernel,
            _value(self.router.bias),
            correction_bias=_value(self.correction_bias),
            shared_weights=None if self.shared_experts is None else self.shared_experts.weights,
            shared_gate_kernel=None if self.shared_gate is None else self.shared_gate.kernel[...],
        )
        return module, variables

    def __call__(self, x: jax.Array, *, token_mask: jax.Array | None = None) -> jax.Array:
        """Returns y [..., D] of x [..., D]; leading axes are tokens. Where `token_mask` [...] is False, y is 0, whatever x holds."""
        return common.run(
            self,
            x,
            token_mask,
            router=self.router,
            weights=self._stored(),
            correction_bias=_value(self.correction_bias),
            shared_weights=None if self.shared_experts is None else self.shared_experts._stored(),
            shared_gate=self.shared_gate,
        )


def _assign(node: nnx.Module, name: str, value: Any) -> None:
    """Sets an attribute anew: NNX lets none that was None become a variable."""
    if hasattr(node, name):
        delattr(node, name)
    setattr(node, name, value)


def _value(variable: nnx.Variable | None) -> jax.Array | None:
    return None if variable is None else variable[...]


def _annotated(init: Initializer, axes: Axes | None) -> Initializer:
    """`init` with the names of axes as metadata, which without a mesh stays metadata: Flax would ask for one."""
    if axes is None:
        return init
    eager = {} if _has_mesh() else {"eager_sharding": False}
    return nnx.with_partitioning(init, axes, **eager)


def _variable(kind: type[nnx.Variable], value: Any, axes: Axes | None) -> nnx.Variable | None:
    if value is None:
        return None
    if axes is not None and _has_mesh() and not isinstance(value, jax.core.Tracer):
        # Flax places only arrays that were made under the mesh.
        named = kind(nnx.with_partitioning(lambda: value, axes, eager_sharding=False)())
        (spec,) = jax.tree.leaves(nnx.get_partition_spec(named))
        value = jax.device_put(value, spec)  # on the mesh in force, whose devices no trace may ask for
    return kind(_annotated(lambda: value, axes)())


def _has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty
