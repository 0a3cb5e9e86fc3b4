"""How one checked call goes through JAX's transformations: `jax.grad`, `jax.vmap`, and lowering for several platforms.

Of the two rules, `jax.custom_vjp` stands outside and `jax.custom_batching.custom_vmap` inside: JAX composes them in that order
only. Forward and backward pass are each a function of weights and of arrays with one row a token; under `jax.vmap` with shared
weights a batch of such arrays is nothing but more tokens, for either of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from jax_mxfp4_moe import implementations
from jax_mxfp4_moe.gradient import Cotangents, backward
from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.base import Config, Operands, Pipeline
from jax_mxfp4_moe.implementations.xla import XlaSteps
from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array
from jax_mxfp4_moe.partition import over_devices
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.stage1 import varying_like
from jax_mxfp4_moe.tuning import table
from jax_mxfp4_moe.weights import MoeWeights


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call, resolved.

    Attributes:
      problem: shapes, types and options.
      choices: (platform, implementation name, config) for each platform that the call may be lowered for.
      own_config: whether the configs are the caller's, and not to be replaced when `jax.vmap` makes the problem larger.
      bridge: the bridge asked for.
      pipeline: joins the steps.
      groups: how many calls `jax.vmap` has put into this one, behind each other along the tokens.
    """

    problem: MoeProblem
    choices: tuple[tuple[str, str, Config], ...]
    own_config: bool
    bridge: str | None
    pipeline: Pipeline
    groups: int = 1

    def times(self, size: int) -> Call:
        """The call on `size` times as many tokens, `size` calls behind each other, by the same implementations."""
        return dataclasses.replace(self.with_tokens(size * self.problem.tokens), groups=size * self.groups)

    def with_tokens(self, tokens: int) -> Call:
        """The call on more or fewer tokens, by the same implementations."""
        problem = dataclasses.replace(self.problem, tokens=tokens)
        choices = self.choices
        if not self.own_config:
            choices = tuple(
                (platform, name, table.lookup(implementations.IMPLEMENTATIONS[name], problem, platform, None))
                for platform, name, _ in choices
            )
        return dataclasses.replace(self, problem=problem, choices=choices)

    def goes_through_host(self) -> bool:
        """Whether a forward pass may call back to Python by `jax.pure_callback`."""
        if all(name == "xla" for _, name, _ in self.choices):
            return False
        return self.bridge == "callback" or torch_call.why_not("eager") is not None

    def fits(self, size: int) -> bool:
        """Whether these implementations can run the call on `size` times as many tokens."""
        problem = dataclasses.replace(self.problem, tokens=size * self.problem.tokens)
        return problem.rows < 2**31 and all(
            implementations.IMPLEMENTATIONS[name].why_not(problem, platform) is None
            for platform, name, _ in self.choices
        )


@functools.partial(jax.jit, static_argnames="call")
def run(operands: Operands, call: Call) -> jax.Array:
    """Returns y [tokens, D] of `call.problem.out_dtype`."""
    # Alike inside of jax.shard_map: what differs between devices then makes the sums over devices that a derivative needs.
    return _layer(call, jax.tree.map(lambda a: varying_like(a, operands), operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(call: Call, operands: Operands) -> jax.Array:
    x, weights, *routing = operands
    return _over_batches(_forward, call, weights, (x, *routing))


def _keep_operands(call: Call, operands: Operands) -> tuple[jax.Array, Operands]:
    return _layer(call, operands), operands


def _cotangents(call: Call, operands: Operands, dy: jax.Array) -> tuple[Operands]:
    x, weights, *routing = operands
    found = _first_derivative(call, weights, (x, *routing, dy))
    # None: bytes and ids have no derivative, and static scales of activations count as constants.
    biases = {
        name: None if (sums := getattr(found, name)) is None else sums[0].astype(getattr(weights, name).dtype)
        for name in ("gate_up_bias", "down_bias")
    }
    frozen = weights.replace(gate_up=None, down=None, activation_scale=None, **biases)
    return (Operands(found.x, frozen, found.topk_weights, None),)  # type: ignore[arg-type]


_layer.defvjp(_keep_operands, _cotangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _first_derivative(call: Call, weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> Cotangents:
    return _over_batches(_backward, call, weights, by_token)


def _keep_nothing(call: Call, weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> tuple[Cotangents, None]:
    return _first_derivative(call, weights, by_token), None


def _no_second_derivative(*_: Any) -> Any:
    # Here and not on the way forward, where jax.lax.stop_gradient around the gradient could not prevent it.
    raise NotImplementedError(
        "mxfp4_moe: the derivative of its gradient was asked for; expected first derivatives only. Put jax.lax.stop_gradient around the "
        "gradient where it is meant to count as a constant."
    )


_first_derivative.defvjp(_keep_nothing, _no_second_derivative)


def _over_batches(
    function: Callable[..., Any], call: Call, weights: MoeWeights, by_token: tuple[jax.Array, ...]
) -> Any:
    """`function(call, weights, by_token)`, with what `jax.vmap` makes of it: more tokens if weights are shared, else a loop."""

    @jax.custom_batching.custom_vmap
    def mapped(weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> Any:
        if function is _forward and call.goes_through_host():
            # XLA loses the host's half of a callback inside of what it divides.
            return function(call, weights, by_token)
        return over_devices(function, call, weights, by_token)

    @mapped.def_vmap
    def rule(size: int, batched: Any, weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        if size == 0:
            results = jax.eval_shape(functools.partial(function, call), *_without_batch((weights, by_token), batched))
            y = jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), results)
        elif any(jax.tree.leaves(batched[0])) or not call.fits(size):
            leaves, structure = jax.tree.flatten((weights, by_token))
            one_by_one = jax.custom_batching.sequential_vmap(
                lambda *leaves: mapped(*jax.tree.unflatten(structure, leaves))
            )
            y = jax.vmap(one_by_one, [0 if b else None for b in jax.tree.leaves(batched)])(*leaves)
        else:
            joined = tuple(_join(a, b, size) for a, b in zip(by_token, batched[1], strict=True))
            y = _over_batches(function, call.times(size), weights, joined)
            y = jax.tree.map(lambda a: a.reshape(size, a.shape[0] // size, *a.shape[1:]), y)
        return y, jax.tree.map(lambda _: True, y)

    return mapped(weights, by_token)


def _without_batch(arrays: Any, batched: Any) -> Any:
    """Shapes and types of one entry of a batch."""
    leaves, structure = jax.tree.flatten(arrays)
    shapes = [
        jax.ShapeDtypeStruct(a.shape[1:] if b else a.shape, a.dtype)
        for a, b in zip(leaves, jax.tree.leaves(batched), strict=True)
    ]
    return jax.tree.unflatten(structure, shapes)


def _join(a: jax.Array, is_batched: bool, size: int) -> jax.Array:
    """[size * n, ...] of [size, n, ...], or of [n, ...] that is the same for all."""
    a = a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
    return a.reshape(size * a.shape[1], *a.shape[2:])


def _forward(call: Call, weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> jax.Array:
    x, topk_weights, topk_ids = by_token

    def on(platform: str, name: str, config: Config) -> Callable[[Operands], jax.Array]:
        chosen = implementations.IMPLEMENTATIONS[name]
        return lambda operands: chosen.run(
            operands, call.problem, config, platform=platform, pipeline=call.pipeline, bridge=call.bridge
        )

    operands = Operands(x, weights, topk_weights, topk_ids)
    # A custom call does not say by itself what it varies over.
    return varying_like(_by_platform(call, on, operands), operands)


def _backward(call: Call, weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> Cotangents:
    """In plain JAX, whatever the forward pass ran on."""
    problem = call.problem

    def on(platform: str, name: str, config: Config) -> Callable[..., Cotangents]:
        if name != "xla":
            config = table.lookup(implementations.IMPLEMENTATIONS["xla"], problem, platform, None)
        # As wide as x: what comes back from bfloat16 results is bfloat16 too. XLA's CPU products are fastest in float32.
        narrow = platform != "cpu" and problem.dtype == "bfloat16" and problem.activation_quant != "fp8"
        steps = XlaSteps(problem, int(config["tile_rows"]), jnp.bfloat16 if narrow else jnp.float32)

        def branch(weights: MoeWeights, by_token: tuple[jax.Array, ...]) -> Cotangents:
            if weights.layout != PACKED:
                weights = implementations.IMPLEMENTATIONS[weights.layout.split(":")[0]].unprepare(weights)
            x, topk_weights, topk_ids, dy = by_token
            return backward(
                x, weights, topk_weights, topk_ids, dy, problem, steps.quantize,
                groups=call.groups, tile_rows=steps.tile_rows, dtype=steps.dtype,
            )  # fmt: skip

        return branch

    return _by_platform(call, on, weights, by_token)


def _by_platform(call: Call, on: Callable[..., Callable[..., Any]], *operands: Any) -> Any:
    """Applies `on(*choice)` of the choice for the platform that the program is lowered for."""
    if len(call.choices) == 1:
        return on(*call.choices[0])(*operands)
    return lax.platform_dependent(*operands, **{choice[0]: on(*choice) for choice in call.choices})


# So that an exported function that takes weights can be written to a file: their static parts, as text.
for _node in (Mxfp4Array, MoeWeights):
    export.register_pytree_node_serialization(
        _node,
        serialized_name=f"jax_mxfp4_moe.{_node.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda text: _as_tuple(json.loads(text)),
    )


def _as_tuple(static: Any) -> Any:
    return tuple(static) if isinstance(static, list) else static
