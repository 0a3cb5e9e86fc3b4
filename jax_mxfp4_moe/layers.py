"""Flax modules that own a router and MXFP4 experts and call `mxfp4_moe`: `Mxfp4Moe` (NNX) and `Mxfp4MoeLinen`.

Both hold the same arrays under the same names, D being the hidden size, F the intermediate size and E the routed and shared experts
together:

  router/kernel [D, num_experts], router/bias [num_experts]   float
  gate_up_codes [E, 2F, D / 2], gate_up_scales [E, 2F, D / 32]   uint8
  down_codes [E, D, F / 2], down_scales [E, D, F / 32]   uint8
  gate_up_bias [E, 2F], down_bias [E, D]   float

Floats are ordinary parameters: of a quantized layer, router and biases are what can still be trained. The bytes are not, and stand
apart, so that gradients and optimizers do not see them. They are plain uint8 arrays, which every checkpoint library can save.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mxfp4_moe.moe import mxfp4_moe
from jax_mxfp4_moe.mxfp4 import BLOCK, PACKED, Mxfp4Array
from jax_mxfp4_moe.quantize import quantize
from jax_mxfp4_moe.route import append_shared_experts, topk_routing
from jax_mxfp4_moe.weights import MoeWeights, check_weights

if importlib.util.find_spec("flax") is None:
    raise ImportError("jax_mxfp4_moe.layers needs flax, which is not installed: pip install 'jax_mxfp4_moe[flax]'")

from flax import linen as nn
from flax import nnx

Initializer = Callable[..., jax.Array]
default_kernel_init: Initializer = nnx.initializers.lecun_normal()


class Quantized(nnx.Variable):
    """Bytes of an MXFP4 array. Not an `nnx.Param`: `nnx.grad`, `nnx.Optimizer` and `nnx.state(layer, nnx.Param)` leave it out."""


class Mxfp4Moe(nnx.Module):
    """A mixture-of-experts layer in MXFP4: chooses experts for each token and adds up what they answer.

    Shared experts, which every token uses with weight 1, stand behind the routed ones in the same arrays, and one call computes all.

    Args:
      hidden_size, intermediate_size: D and F, multiples of 32. A shared expert has the same F; one of n times F is n shared experts.
      num_experts, num_experts_per_tok: routed experts, and how many of them a token uses.
      num_shared_experts: shared experts.
      use_bias, router_bias: whether experts and router have biases.
      activation, activation_alpha, activation_limit, activation_quant: see `mxfp4_moe`. "auto" is what the weights were made for, and
        None for weights made here.
      scoring, renormalize: see `topk_routing`. The router computes in float32 whatever `dtype` is.
      dtype: type that x is converted to, and of the result; the type of x if None.
      param_dtype: type of router and biases.
      kernel_init: called as Flax does, with (key, [in, out], dtype), for the router and once for every expert's two matrices.
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
        use_bias: bool = False,
        router_bias: bool = False,
        activation: str = "silu",
        activation_alpha: float | None = None,
        activation_limit: float | None = None,
        activation_quant: str | None = "auto",
        scoring: str = "softmax",
        renormalize: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        implementation: str | Sequence[str] | None = None,
        bridge: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        _check_sizes("Mxfp4Moe", hidden_size, intermediate_size, num_experts, num_experts_per_tok, num_shared_experts)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.num_shared_experts = num_shared_experts
        self.activation = activation
        self.activation_alpha = activation_alpha
        self.activation_limit = activation_limit
        self.activation_quant = None if activation_quant == "auto" else activation_quant
        self.scoring = scoring
        self.renormalize = renormalize
        self.dtype = dtype
        self.implementation = _hashable(implementation)
        self.bridge = bridge
        self.layout = PACKED

        experts = num_experts + num_shared_experts
        self.router = nnx.Linear(
            hidden_size,
            num_experts,
            use_bias=router_bias,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            precision=jax.lax.Precision.HIGHEST,
            rngs=rngs,
        )
        gate_up = _random_experts(rngs.params(), experts, hidden_size, 2 * intermediate_size, kernel_init)
        down = _random_experts(rngs.params(), experts, intermediate_size, hidden_size, kernel_init)
        gate_up_bias = jnp.zeros((experts, 2 * intermediate_size), param_dtype) if use_bias else None
        down_bias = jnp.zeros((experts, hidden_size), param_dtype) if use_bias else None
        self._set_weights(MoeWeights(gate_up, down, gate_up_bias, down_bias, activation_quant=self.activation_quant))

    @classmethod
    def from_weights(
        cls,
        weights: MoeWeights,
        router_kernel: Any,
        router_bias: Any = None,
        *,
        num_experts_per_tok: int,
        num_shared_experts: int = 0,
        activation_quant: str | None = "auto",
        **options: Any,
    ) -> Mxfp4Moe:
        """Makes a layer around weights that exist, without drawing random ones.

        Args:
          weights: packed, or prepared for `implementation`; shared experts last. The arrays are not copied.
          router_kernel: [D, num_experts], contraction first as in `nnx.Linear`; `router.weight` of torch checkpoints is its transpose.
          router_bias: [num_experts] or None.
          num_experts_per_tok, num_shared_experts, activation_quant: as in the constructor.
          **options: of the constructor: activation, scoring, dtype, implementation, ...

        Raises:
          ValueError: weights and router do not belong together.
        """
        where = f"{cls.__name__}.from_weights"
        check_weights(where, weights)
        num_experts = weights.num_experts - num_shared_experts
        router_kernel = jnp.asarray(router_kernel)
        router_bias = None if router_bias is None else jnp.asarray(router_bias)
        if router_kernel.shape != (weights.hidden_size, num_experts) or (
            router_bias is not None and router_bias.shape != (num_experts,)
        ):
            bias = "" if router_bias is None else f" and router_bias {router_bias.shape}"
            raise ValueError(
                f"{where}: router_kernel {router_kernel.shape}{bias} given with weights of {weights.num_experts} experts, "
                f"num_shared_experts={num_shared_experts} and hidden size {weights.hidden_size}; expected router_kernel "
                f"{(weights.hidden_size, num_experts)} and router_bias {(num_experts,)} or None: the router does not choose "
                "shared experts. A [num_experts, hidden] router weight of a torch checkpoint has to be transposed."
            )
        # Abstract: nothing is drawn or allocated before the given arrays take the place of the random ones.
        layer = nnx.eval_shape(
            lambda: cls(
                weights.hidden_size,
                weights.intermediate_size,
                num_experts,
                num_experts_per_tok,
                num_shared_experts=num_shared_experts,
                use_bias=weights.gate_up_bias is not None or weights.down_bias is not None,
                router_bias=router_bias is not None,
                activation_quant=weights.activation_quant if activation_quant == "auto" else activation_quant,
                rngs=nnx.Rngs(0),
                **options,
            )
        )
        layer.router.kernel = nnx.Param(router_kernel)
        layer.router.bias = None if router_bias is None else nnx.Param(router_bias)
        layer._set_weights(weights)
        return layer

    def _set_weights(self, weights: MoeWeights) -> None:
        self.layout = weights.layout
        self.gate_up_codes = Quantized(weights.gate_up.codes)
        self.gate_up_scales = Quantized(weights.gate_up.scales)
        self.down_codes = Quantized(weights.down.codes)
        self.down_scales = Quantized(weights.down.scales)
        self.gate_up_bias = None if weights.gate_up_bias is None else nnx.Param(weights.gate_up_bias)
        self.down_bias = None if weights.down_bias is None else nnx.Param(weights.down_bias)

    @property
    def weights(self) -> MoeWeights:
        """The experts as `mxfp4_moe` takes them, shared ones last."""
        return MoeWeights(
            Mxfp4Array(self.gate_up_codes[...], self.gate_up_scales[...], length=self.hidden_size, layout=self.layout),
            Mxfp4Array(self.down_codes[...], self.down_scales[...], length=self.intermediate_size, layout=self.layout),
            None if self.gate_up_bias is None else self.gate_up_bias[...],
            None if self.down_bias is None else self.down_bias[...],
            activation_quant=self.activation_quant,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns y [..., D] of x [..., D]; leading axes are tokens."""
        return _run(self, x, self.router, self.weights)


class Mxfp4MoeLinen(nn.Module):
    """`Mxfp4Moe` for Flax Linen: the same fields, and the same arrays under the same names.

    Router and biases are in the collection "params", codes and scales in "quantized". The latter is not mutable in `apply`, and
    `jax.grad` with respect to `variables["params"]` is what trains. Weights that exist are put in with `variables_from_weights`.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int = 0
    use_bias: bool = False
    router_bias: bool = False
    activation: str = "silu"
    activation_alpha: float | None = None
    activation_limit: float | None = None
    activation_quant: str | None = "auto"
    scoring: str = "softmax"
    renormalize: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = default_kernel_init
    implementation: str | Sequence[str] | None = None
    bridge: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns y [..., D] of x [..., D]; leading axes are tokens."""
        hidden, intermediate = self.hidden_size, self.intermediate_size
        _check_sizes(
            "Mxfp4MoeLinen", hidden, intermediate, self.num_experts, self.num_experts_per_tok, self.num_shared_experts
        )
        experts = self.num_experts + self.num_shared_experts
        router = nn.Dense(
            self.num_experts,
            use_bias=self.router_bias,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            precision=jax.lax.Precision.HIGHEST,
            name="router",
        )
        weights = MoeWeights(
            self._experts("gate_up", experts, hidden, 2 * intermediate),
            self._experts("down", experts, intermediate, hidden),
            self._bias("gate_up_bias", experts, 2 * intermediate),
            self._bias("down_bias", experts, hidden),
        )
        return _run(self, x, router, weights)

    def _experts(self, name: str, experts: int, contracted: int, rows: int) -> Mxfp4Array:
        made: list[Mxfp4Array] = []

        def once() -> Mxfp4Array:
            if not made:
                made.append(_random_experts(self.make_rng("params"), experts, contracted, rows, self.kernel_init))
            return made[0]

        codes = self.variable("quantized", f"{name}_codes", lambda: once().codes).value
        scales = self.variable("quantized", f"{name}_scales", lambda: once().scales).value
        return Mxfp4Array(codes, scales)

    def _bias(self, name: str, experts: int, rows: int) -> jax.Array | None:
        if not self.use_bias:
            return None
        return self.param(name, nn.initializers.zeros, (experts, rows), self.param_dtype)

    def variables_from_weights(
        self, weights: MoeWeights, router_kernel: Any, router_bias: Any = None
    ) -> dict[str, Any]:
        """Returns the variables of this layer around packed weights that exist: `layer.apply(variables, x)`.

        Args:
          weights: shared experts last.
          router_kernel: [D, num_experts], contraction first as in `nn.Dense`.
          router_bias: [num_experts] or None.

        Raises:
          ValueError: a field of the layer says something else than the weights, so that it would compute something else.
        """
        where = "Mxfp4MoeLinen.variables_from_weights"
        check_weights(where, weights)
        facts = {
            "hidden_size": (self.hidden_size, weights.hidden_size),
            "intermediate_size": (self.intermediate_size, weights.intermediate_size),
            "num_experts + num_shared_experts": (self.num_experts + self.num_shared_experts, weights.num_experts),
            "use_bias": (self.use_bias, weights.gate_up_bias is not None),
            "use_bias (down)": (self.use_bias, weights.down_bias is not None),
            "router_bias": (self.router_bias, router_bias is not None),
            "shape of router_kernel": ((self.hidden_size, self.num_experts), tuple(router_kernel.shape)),
        }
        if self.activation_quant == "auto":  # the variables are bytes and cannot say
            facts["activation_quant"] = (None, weights.activation_quant)
        wrong = [f"{name}: {mine} here, {theirs} given" for name, (mine, theirs) in facts.items() if mine != theirs]
        if wrong:
            raise ValueError(
                f"{where}: {'; '.join(wrong)}; expected the fields of the layer to agree with the weights. Build the layer with their "
                "sizes, biases and activation_quant."
            )
        router = {"kernel": router_kernel, "bias": router_bias}
        biases = {"gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}
        params = {"router": _without_none(router), **_without_none(biases)}
        quantized = {
            "gate_up_codes": weights.gate_up.codes,
            "gate_up_scales": weights.gate_up.scales,
            "down_codes": weights.down.codes,
            "down_scales": weights.down.scales,
        }
        return {"params": params, "quantized": quantized}


def _run(layer: Mxfp4Moe | Mxfp4MoeLinen, x: jax.Array, router: Callable[..., Any], weights: MoeWeights) -> jax.Array:
    """What both modules do, from the fields that they have in common."""
    if layer.dtype is not None:
        x = x.astype(layer.dtype)
    topk_weights, topk_ids = topk_routing(
        router(x), layer.num_experts_per_tok, scoring=layer.scoring, renormalize=layer.renormalize
    )
    return mxfp4_moe(
        x,
        weights,
        *append_shared_experts(topk_weights, topk_ids, layer.num_experts, layer.num_shared_experts),
        activation=layer.activation,
        activation_alpha=layer.activation_alpha,
        activation_limit=layer.activation_limit,
        activation_quant=layer.activation_quant,
        implementation=layer.implementation,
        bridge=layer.bridge,
    )


@functools.partial(jax.jit, static_argnames=("experts", "contracted", "rows", "kernel_init"))
def _random_experts(key: jax.Array, experts: int, contracted: int, rows: int, kernel_init: Initializer) -> Mxfp4Array:
    """[experts, rows, contracted], each drawn in float32 as a Flax kernel [contracted, rows] and quantized before the next."""

    def one(key: jax.Array) -> Mxfp4Array:
        return quantize(kernel_init(key, (contracted, rows), jnp.float32).T)

    return jax.lax.map(one, jax.random.split(key, experts))


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _hashable(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    if implementation is None or isinstance(implementation, str):
        return implementation
    return tuple(implementation)


def _check_sizes(
    where: str,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    num_experts_per_tok: int,
    num_shared_experts: int,
) -> None:
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size <= 0 or size % BLOCK:
            raise ValueError(
                f"{where}: {name}={size} given; expected a positive multiple of {BLOCK}, the length of an MXFP4 block. "
                "Pad the model's weights with zeros to the next multiple."
            )
    if not 1 <= num_experts_per_tok <= num_experts or num_shared_experts < 0:
        raise ValueError(
            f"{where}: num_experts={num_experts}, num_experts_per_tok={num_experts_per_tok} and num_shared_experts={num_shared_experts} "
            "given; expected 1 <= num_experts_per_tok <= num_experts and num_shared_experts >= 0. Shared experts are not among num_experts."
        )
