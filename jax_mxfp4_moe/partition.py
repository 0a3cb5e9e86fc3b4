"""How one call is divided over devices when nobody says so: plain `jax.jit` on arrays that have a sharding.

Rows of x are independent, so that a call whose tokens lie on several devices is done by each on its own tokens, with weights that
are the same everywhere. Weights that are themselves divided would have to be gathered first, all of them, in every call; that is
refused, and `parallel.sharded_mxfp4_moe` is the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REMEDY = (
    "each device would gather all of them in every call. Use jax_mxfp4_moe.parallel: shard_weights(weights, mesh, expert_axis=...) once, "
    "and sharded_mxfp4_moe in place of mxfp4_moe. For a copy on every device: jax.device_put(weights, NamedSharding(mesh, P()))."
)


def check_not_divided(where: str, weights: Any) -> None:
    """Raises ValueError for weights that are known to be divided over devices. Under jit on Auto axes `over_devices` sees it later."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        sharding = _explicit_sharding(leaf) if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if sharding is not None and not sharding.is_fully_replicated:
            raise _divided(where, path, leaf, sharding)


def check_not_explicit(where: str, x: jax.Array) -> None:
    """Raises ValueError for tokens that lie on Explicit mesh axes: their division is part of types, and not XLA's to choose."""
    sharding = _explicit_sharding(x)
    if sharding is not None and any(axes is not None for axes in sharding.spec):
        raise ValueError(
            f"{where}: x of type {jax.typeof(x)} given, divided over Explicit axes of {sharding.mesh}; expected Auto axes, over which "
            "plain jit divides tokens. Make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * n, not the default of jax.make_mesh, "
            "or use jax_mxfp4_moe.parallel.sharded_mxfp4_moe."
        )


def _explicit_sharding(a: Any) -> Any:
    """The sharding in the type of `a`: of its Explicit mesh axes."""
    return getattr(jax.typeof(a), "sharding", None)


def _divided(where: str, path: Any, leaf: Any, sharding: Any) -> ValueError:
    return ValueError(
        f"{where}: weights{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} divided over devices ({sharding}) given; expected "
        f"weights that every device holds whole, since {REMEDY}"
    )


def over_devices(function: Callable[..., Any], call: Any, weights: Any, by_token: tuple[jax.Array, ...]) -> Any:
    """`function(call, weights, by_token)`, which XLA may divide along the tokens.

    Args:
      function: returns a pytree of arrays; those with `call.problem.tokens` rows have a row a token, others are sums over tokens.
      call: static; `call.with_tokens(n)` is the call on n of the tokens.
      weights: any pytree of arrays.
      by_token: arrays of one row a token.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context.are_all_axes_manual:  # inside of jax.shard_map: divided already
        return function(call, weights, by_token)
    return _partitioned(function, call, len(jax.tree.leaves(weights)), weights, by_token)


def _function(
    function: Callable[..., Any], call: Any, whole: int, weights: Any, by_token: tuple[jax.Array, ...]
) -> Any:
    return function(call, weights, by_token)


_partitioned = custom_partitioning(_function, static_argnums=(0, 1, 2))


def _shardings(call: Any, mesh: Mesh, arguments: Any, results: Any) -> tuple[Any, Any, Any]:
    """Mesh axes of the tokens, and the shardings of arguments and of results."""
    weights, by_token = arguments
    tokens, x = call.problem.tokens, by_token[0]
    axes = x.sharding.spec[0] if isinstance(x.sharding, NamedSharding) and len(x.sharding.spec) else None
    ranks = 1
    for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
        ranks *= mesh.shape[axis]
    # Groups are runs of tokens, which a division could cut.
    if tokens % ranks or call.groups > 1:
        axes = None

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(axes) if leaf.ndim and leaf.shape[0] == tokens else PartitionSpec())

    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), weights)
    return axes, (whole, jax.tree.map(sharding, by_token)), jax.tree.map(sharding, results)


def _partition(
    function: Callable[..., Any], call: Any, whole: int, mesh: Mesh, arguments: Any, results: Any
) -> tuple[Any, ...]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments[0]):
        if leaf.sharding is not None and not leaf.sharding.is_fully_replicated:
            raise _divided("mxfp4_moe", path, leaf, leaf.sharding)
    axes, argument_shardings, result_shardings = _shardings(call, mesh, arguments, results)
    local = call
    if axes is not None:
        local = call.with_tokens(argument_shardings[1][0].shard_shape(arguments[1][0].shape)[0])

    def on_one_device(weights: Any, by_token: tuple[jax.Array, ...]) -> Any:
        found = function(local, weights, by_token)
        if axes is None:
            return found
        # What has no row a token is a sum over tokens, of which each device has a part.
        return jax.tree.map(lambda a, s: a if s.spec[:1] == (axes,) else lax.psum(a, axes), found, result_shardings)

    return mesh, on_one_device, result_shardings, argument_shardings


def _infer(function: Callable[..., Any], call: Any, whole: int, mesh: Mesh, arguments: Any, results: Any) -> Any:
    return _shardings(call, mesh, arguments, results)[2]


def _rule(function: Callable[..., Any], call: Any, whole: int, mesh: Mesh, arguments: Any, results: Any) -> str:
    """One factor for the tokens of all arrays, and one of its own for every other axis: nothing else is divided alike."""
    names = (f"a{i}" for i in itertools.count())

    def factors(values: Any) -> str:
        """`t a0, t a1` for two arrays with a row a token."""
        return ", ".join(
            " ".join(["t" if has_tokens else next(names), *itertools.islice(names, len(shape) - 1)])
            for shape, has_tokens in values
        )

    tokens = None if call.groups > 1 else call.problem.tokens
    given = [(list(a.shape), i >= whole) for i, a in enumerate(arguments)]
    found = [(list(a.shape), a.shape[0] == tokens) for a in results]
    return f"{factors(given)} -> {factors(found)}"


_partitioned.def_partition(
    partition=_partition, infer_sharding_from_operands=_infer, sharding_rule=_rule, decode_shardings=True
)
