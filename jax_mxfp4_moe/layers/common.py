"""What the NNX and the Linen layer have in common: the forward pass, names of arrays, logical axes, checks of sizes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from jax_mxfp4_moe.moe import mxfp4_moe
from jax_mxfp4_moe.mxfp4 import BLOCK, PACKED, Mxfp4Array
from jax_mxfp4_moe.parallel import DISPATCHES, ShardedMoeWeights, Split, sharded_mxfp4_moe
from jax_mxfp4_moe.problem import resolve_activation
from jax_mxfp4_moe.quantize import Rounding, ScaleRule, quantize
from jax_mxfp4_moe.route import append_shared_experts, topk_routing
from jax_mxfp4_moe.weights import MoeWeights, check_weights, quantize_weights

Initializer = Callable[..., jax.Array]
default_kernel_init: Initializer = nn.initializers.lecun_normal()

Axes = tuple[str | None, ...]


def run(
    layer: Any,
    x: jax.Array,
    token_mask: jax.Array | None,
    *,
    router: Callable[..., Any],
    weights: MoeWeights,
    correction_bias: jax.Array | None,
    shared_weights: MoeWeights | None,
    shared_gate: Callable[..., Any] | None,
) -> jax.Array:
    """What both modules do, from the fields that they have in common; weights as `with_halves` has them."""
    if layer.dtype is not None:
        x = x.astype(layer.dtype)
    if token_mask is not None and jnp.shape(token_mask) == x.shape[:-1]:
        # The router reads every row, and what a masked one holds must not reach the router's gradient.
        x = jnp.where(token_mask[..., None], x, 0)
    options: dict[str, Any] = {
        "activation": layer.activation,
        "activation_alpha": layer.activation_alpha,
        "activation_limit": layer.activation_limit,
        "activation_quant": layer.activation_quant,
        "scale_rule": layer.scale_rule,
        "rounding": layer.rounding,
        "token_mask": token_mask,
        "apply_router_weight_on_input": layer.apply_router_weight_on_input,
        "implementation": layer.implementation,
        "bridge": layer.bridge,
    }

    def call(weights: MoeWeights, expert_axis: str | None, topk_weights: Any, topk_ids: Any, dtype: Any) -> jax.Array:
        if layer.mesh is None:
            return mxfp4_moe(x, weights, topk_weights, topk_ids, preferred_element_type=dtype, **options)
        sharded = _divided(layer.mesh, expert_axis, layer.tensor_axis, weights)
        over = {"token_axis": layer.token_axis, "preferred_element_type": dtype}
        if expert_axis is not None:  # a separate shared expert is on all ranks of the axis
            over["dispatch"] = layer.dispatch
        return sharded_mxfp4_moe(x, sharded, topk_weights, topk_ids, **over, **options)

    topk_weights, topk_ids = _choose(layer, router(x), correction_bias)
    # The weight of the shared expert. It is not among those that routed_scaling_factor multiplies.
    gate = jnp.ones((*x.shape[:-1], 1), jnp.float32) if shared_gate is None else jax.nn.sigmoid(shared_gate(x))
    if shared_weights is None:
        top_k = layer.num_experts_per_tok
        topk_weights, topk_ids = append_shared_experts(
            topk_weights, topk_ids, layer.num_experts, layer.num_shared_experts
        )
        topk_weights = jnp.concatenate([topk_weights[..., :top_k], topk_weights[..., top_k:] * gate], axis=-1)
        return call(weights, layer.expert_axis, topk_weights, topk_ids, x.dtype)
    # Added in float32 and rounded once, as within one call.
    routed = call(weights, layer.expert_axis, topk_weights, topk_ids, jnp.float32)
    ids = jnp.zeros(gate.shape, jnp.int32)
    return (routed + call(shared_weights, None, gate, ids, jnp.float32)).astype(x.dtype)


def _divided(mesh: Mesh, expert_axis: str | None, tensor_axis: str | None, weights: MoeWeights) -> ShardedMoeWeights:
    """The weights as `sharded_mxfp4_moe` takes them: each rank has an equal run of the experts, and of the columns of F.

    Arrays that are divided alike already stay where they are, and are not copied.
    """
    if weights.layout != PACKED:
        raise ValueError(
            f"Mxfp4Moe: mesh={mesh} and weights in layout {weights.layout!r} given; expected layout 'packed', since a prepared one cannot "
            "be cut. Give packed weights, or call parallel.shard_weights(..., implementation=...) and parallel.sharded_mxfp4_moe."
        )
    experts = weights.down.codes.shape[0]
    split = Split(mesh, expert_axis, tensor_axis, experts, 0, weights.hidden_size, weights.intermediate_size)
    ranks = (split.tensor_ranks, split.expert_ranks)

    def by_rank(leaf: jax.Array) -> jax.Array:
        """[1, expert ranks, E / expert ranks, ...]."""
        return leaf.reshape(1, ranks[1], -1, *leaf.shape[1:])

    def by_column(leaf: jax.Array, axis: int) -> jax.Array:
        """[tensor ranks, expert ranks, E / expert ranks, ...] of an array whose `axis` runs along F."""
        columns = leaf.shape[axis]
        leaf = leaf.reshape(ranks[1], -1, *leaf.shape[1:axis], ranks[0], columns // ranks[0], *leaf.shape[axis + 1 :])
        return jnp.moveaxis(leaf, axis + 1, 0)

    scale = weights.activation_scale
    parts = weights.replace(activation_scale=None)
    if tensor_axis is None:
        parts = jax.tree.map(by_rank, parts)
    else:
        gate_up = jax.tree.map(lambda leaf: by_column(leaf, 2), (parts.gate_up, parts.gate_up_bias))
        gate_up = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:3], -1, *leaf.shape[5:]), gate_up)
        # `sharded_mxfp4_moe` takes the down bias of tensor rank 0.
        down_bias = None if parts.down_bias is None else by_rank(parts.down_bias)
        parts = parts.replace(
            gate_up=gate_up[0],
            gate_up_bias=gate_up[1],
            down=Mxfp4Array(
                by_column(parts.down.codes, 2), by_column(parts.down.scales, 2), length=split.width, layout=PACKED
            ),
            down_bias=None if down_bias is None else jnp.broadcast_to(down_bias, (*ranks, *down_bias.shape[2:])),
        )
    if scale is not None:
        parts = parts.replace(activation_scale=jnp.broadcast_to(scale, (*ranks, *scale.shape)))
    return ShardedMoeWeights(parts, split)


def with_halves(name: str, array: Any, has_halves: bool) -> Any:
    """Array `name` as a layer stores it: with a tensor axis, gate and up have an axis of their own.

    [E, 2F, ...] is then [E, 2, F, ...], which a mesh can divide along F without parting a gate column from its up column.
    """
    if array is None or not has_halves or not name.startswith("gate_up"):
        return array
    return array.reshape(array.shape[0], 2, array.shape[1] // 2, *array.shape[2:])


def without_halves(name: str, array: Any, has_halves: bool) -> Any:
    """The inverse of `with_halves`, for stacks of layers too."""
    if array is None or not has_halves or not name.startswith("gate_up"):
        return array
    lead = array.ndim - (2 if name.endswith("bias") else 3)
    return array.reshape(*array.shape[:lead], -1, *array.shape[lead + 2 :])


def _choose(layer: Any, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    return topk_routing(
        logits,
        layer.num_experts_per_tok,
        scoring=layer.scoring,
        renormalize=layer.renormalize,
        correction_bias=correction_bias,
        num_groups=layer.num_groups,
        topk_groups=layer.topk_groups,
        group_score=layer.group_score,
        routed_scaling_factor=layer.routed_scaling_factor,
    )


def packed_names(layout: str) -> dict[str, str]:
    """The names of the four arrays of bytes, which carry the tag of a layout other than "packed".

    A checkpoint of one layout then does not fit a layer of another: the name is missing, whatever library restores it. Shapes could not
    tell: the bytes of two layouts may have the same.
    """
    tag = "" if layout == PACKED else "_" + re.sub(r"\W", "_", layout)
    return {name: name + tag for name in ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")}


def logical_axes(kernel_axes: Sequence[str | None] | None, has_halves: bool = False) -> dict[str, Axes]:
    """Names of the axes of every array, by the array's name; empty without `kernel_axes`.

    Codes and scales of an array share them: the last axis of both is the contraction axis, 2 and 32 elements an entry.
    For `has_halves` see `with_halves`.
    """
    if kernel_axes is None:
        return {}
    experts, intermediate, hidden = kernel_axes
    halves: Axes = (None,) if has_halves else ()
    stacks = {"gate_up": (experts, *halves, intermediate, hidden), "down": (experts, hidden, intermediate)}
    return {
        **{f"{name}_{part}": axes for name, axes in stacks.items() for part in ("codes", "scales")},
        **{f"{name}_bias": axes[:-1] for name, axes in stacks.items()},
        "activation_scale": (None,),
        # Logits are needed whole to choose from, so the router is not cut along experts.
        "router_kernel": (hidden, None),
        "router_bias": (None,),
        "correction_bias": (None,),
        "shared_gate_kernel": (hidden, None),
    }


def shared_axes(kernel_axes: Sequence[str | None] | None) -> tuple[str | None, ...] | None:
    """The `kernel_axes` of a separate shared expert: there is one, which cannot be cut along experts."""
    return None if kernel_axes is None else (None, *kernel_axes[1:])


@functools.partial(jax.jit, static_argnames=("experts", "contracted", "rows", "kernel_init"))
def random_experts(key: jax.Array, experts: int, contracted: int, rows: int, kernel_init: Initializer) -> Mxfp4Array:
    """[experts, rows, contracted], each drawn in float32 as a Flax kernel [contracted, rows] and quantized before the next."""

    def one(key: jax.Array) -> Mxfp4Array:
        return quantize(kernel_init(key, (contracted, rows), jnp.float32).T)

    return jax.lax.map(one, jax.random.split(key, experts))


class _Transposed:
    """A stack [E, rows, contracted] made one expert at a time of kernels [E, contracted, rows], joined along rows."""

    def __init__(self, *kernels: Any) -> None:
        self.kernels = kernels
        experts, contracted, _ = kernels[0].shape
        self.shape = (experts, sum(kernel.shape[2] for kernel in kernels), contracted)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        for expert in range(len(self)):
            yield jnp.concatenate([jnp.asarray(kernel[expert]).T for kernel in self.kernels])


def quantize_kernels(
    where: str,
    router_kernel: Any,
    wi_0: Any,
    wi_1: Any,
    wo: Any,
    wi_0_bias: Any,
    wi_1_bias: Any,
    wo_bias: Any,
    *,
    num_shared_experts: int,
    scale_rule: ScaleRule,
    rounding: Rounding,
    activation_quant: str | None,
) -> MoeWeights:
    """Quantizes kernels as Flax layers hold them, contraction axis first; see `Mxfp4Moe.from_dense`."""
    given = {
        "router_kernel": router_kernel,
        "wi_0": wi_0,
        "wi_1": wi_1,
        "wo": wo,
        "wi_0_bias": wi_0_bias,
        "wi_1_bias": wi_1_bias,
        "wo_bias": wo_bias,
    }
    shapes = {name: tuple(jnp.shape(array)) for name, array in given.items() if array is not None}
    # E, D and F are read where a transposed array does not show; every other shape follows.
    hidden, routed = shapes["router_kernel"] if len(shapes["router_kernel"]) == 2 else (-1, -1)
    experts, intermediate = routed + num_shared_experts, shapes["wi_0"][-1] if shapes["wi_0"] else -1
    expected = {
        "router_kernel": (hidden, routed),
        "wi_0": (experts, hidden, intermediate),
        "wi_1": (experts, hidden, intermediate),
        "wo": (experts, intermediate, hidden),
        "wi_0_bias": (experts, intermediate),
        "wi_1_bias": (experts, intermediate),
        "wo_bias": (experts, hidden),
    }
    if any(shape != expected[name] for name, shape in shapes.items()):
        raise ValueError(
            f"{where}: {', '.join(f'{name} {shape}' for name, shape in shapes.items())} given with num_shared_experts="
            f"{num_shared_experts}; expected router_kernel [D, num_experts], wi_0 and wi_1 [E, D, F], wo [E, F, D] and biases [E, F], "
            "[E, F], [E, D], contraction axis first, shared experts last. Transpose a torch router weight [num_experts, D]; for stacks "
            "with the contraction axis last, call from_weights(quantize_weights(gate_up, down), router_kernel)."
        )
    if (wi_0_bias is None) != (wi_1_bias is None):
        raise ValueError(
            f"{where}: one of wi_0_bias and wi_1_bias given; expected both or neither. Pass zeros for the other."
        )
    return quantize_weights(
        _Transposed(wi_0, wi_1),
        _Transposed(wo),
        None if wi_0_bias is None else jnp.concatenate([jnp.asarray(wi_0_bias), jnp.asarray(wi_1_bias)], axis=-1),
        None if wo_bias is None else jnp.asarray(wo_bias),
        scale_rule=scale_rule,
        rounding=rounding,
        activation_quant=activation_quant,
    )


def check_shared_weights(where: str, weights: MoeWeights, shared: MoeWeights) -> None:
    """Raises ValueError unless `shared` is one expert that can stand beside `weights`."""
    check_weights(f"{where}: shared_weights", shared)
    given, expected = (
        (shared.num_experts, shared.hidden_size, shared.activation_quant),
        (1, weights.hidden_size, weights.activation_quant),
    )
    if given != expected:
        raise ValueError(
            f"{where}: shared_weights of (experts, hidden size, activation_quant) {given} given; expected {expected}. Shared experts of "
            "the width of the routed ones stand behind them in `weights`; n of another width are one of n times the width."
        )


def hashable(names: Any) -> Any:
    """A sequence of names as a tuple; a string or None as it is."""
    return names if names is None or isinstance(names, str) else tuple(names)


def check_fields(where: str, layer: Any, *, has_correction_bias: bool) -> None:
    """Raises ValueError for sizes, options and axes that no layer can have, before weights are drawn or looked at."""
    sizes = {"hidden_size": layer.hidden_size, "intermediate_size": layer.intermediate_size}
    if layer.shared_intermediate_size is not None:
        sizes["shared_intermediate_size"] = layer.shared_intermediate_size
    for name, size in sizes.items():
        if size <= 0 or size % BLOCK:
            raise ValueError(
                f"{where}: {name}={size} given; expected a positive multiple of {BLOCK}, the length of an MXFP4 block. "
                "Pad the model's weights with zeros to the next multiple."
            )
    if not 1 <= layer.num_experts_per_tok <= layer.num_experts or layer.num_shared_experts < 0:
        raise ValueError(
            f"{where}: num_experts={layer.num_experts}, num_experts_per_tok={layer.num_experts_per_tok} and num_shared_experts="
            f"{layer.num_shared_experts} given; expected 1 <= num_experts_per_tok <= num_experts and num_shared_experts >= 0. Shared "
            "experts are not among num_experts."
        )
    if layer.num_shared_experts and layer.shared_intermediate_size is not None:
        raise ValueError(
            f"{where}: num_shared_experts={layer.num_shared_experts} and shared_intermediate_size={layer.shared_intermediate_size} given; "
            "expected one of them: shared experts are fused with the routed ones, or one separate expert of its own width. For n separate "
            "ones of width F give shared_intermediate_size=n * F alone."
        )
    if layer.use_shared_gate and not layer.num_shared_experts and layer.shared_intermediate_size is None:
        raise ValueError(
            f"{where}: use_shared_gate=True given without shared experts; expected num_shared_experts or shared_intermediate_size. Give "
            "one of them, or leave use_shared_gate out."
        )
    resolve_activation(where, layer.activation, layer.activation_alpha, layer.activation_limit)
    jax.eval_shape(
        lambda: _choose(
            layer, jnp.zeros(layer.num_experts), jnp.zeros(layer.num_experts) if has_correction_bias else None
        )
    )
    axes = layer.kernel_axes
    if axes is not None and (
        isinstance(axes, str) or len(axes) != 3 or not all(a is None or isinstance(a, str) for a in axes)
    ):
        raise ValueError(
            f"{where}: kernel_axes={axes!r} given; expected the names of the axes experts, intermediate and hidden, each a string or None, "
            'such as ("exp", "mlp", "embed"), or None for no partitioning metadata.'
        )
    _check_blocks(where, axes, sizes)
    _check_mesh(where, layer, sizes)


def _check_mesh(where: str, layer: Any, sizes: dict[str, int]) -> None:
    """Raises ValueError for axes that the experts or their columns cannot be divided over, and for an unknown dispatch."""
    mesh, axis, tensor_axis = layer.mesh, layer.expert_axis, layer.tensor_axis
    if mesh is None and (axis is not None or layer.token_axis is not None):
        raise ValueError(
            f"{where}: expert_axis={axis!r} and token_axis={layer.token_axis!r} given without a mesh; expected mesh=... beside them."
        )
    if mesh is None and tensor_axis is not None:
        raise ValueError(f"{where}: tensor_axis={tensor_axis!r} given without a mesh; expected mesh=... beside it.")
    if layer.dispatch is not None and (layer.dispatch not in DISPATCHES or axis is None):
        raise ValueError(
            f"{where}: dispatch={layer.dispatch!r} and expert_axis={axis!r} given; expected one of {', '.join(DISPATCHES)} and an "
            "expert_axis, or None to choose by the number of tokens."
        )
    for name, given in (("expert_axis", axis), ("tensor_axis", tensor_axis)):
        if given is not None and given not in mesh.axis_names:
            raise ValueError(
                f"{where}: {name}={given!r} given with a mesh of axes {mesh.axis_names}; expected one of these."
            )
    if tensor_axis is not None:
        if tensor_axis == axis:
            raise ValueError(f"{where}: expert_axis and tensor_axis are both {axis!r}; expected two axes of the mesh.")
        ranks = mesh.shape[tensor_axis]
        for name, size in sizes.items():
            if name != "hidden_size" and size // BLOCK % ranks:
                raise ValueError(
                    f"{where}: {name}={size} given with {ranks} devices on tensor_axis={tensor_axis!r}; expected equally many blocks of "
                    f"{BLOCK} on each. Pad the weights with zeros to a multiple of {BLOCK * ranks}, or use parallel.shard_weights, which "
                    "divides any number of blocks."
                )
    if axis is None:
        return
    if layer.num_experts % mesh.shape[axis] or layer.num_shared_experts:
        raise ValueError(
            f"{where}: num_experts={layer.num_experts} and num_shared_experts={layer.num_shared_experts} given with {mesh.shape[axis]} "
            f"devices on expert_axis={axis!r}; expected equally many routed experts on each, and no fused shared ones. Give "
            "shared_intermediate_size for a separate shared expert, which every device has."
        )


def _check_blocks(where: str, kernel_axes: Sequence[str | None] | None, sizes: dict[str, int]) -> None:
    """Raises ValueError if the mesh and rules in force would cut inside a block of 32."""
    mesh = jax.sharding.get_abstract_mesh()
    if kernel_axes is None or mesh.empty:
        return
    if not mesh.are_all_axes_auto:
        raise ValueError(
            f"{where}: kernel_axes={kernel_axes} given on a mesh with axis types {mesh.axis_types}; expected Auto alone. Make it with "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    rules = dict(nn.get_logical_axis_rules())
    for name, size in sizes.items():
        axis = kernel_axes[2 if name == "hidden_size" else 1]
        target = rules.get(axis, axis)
        shards = math.prod(mesh.shape.get(on, 1) for on in (target if isinstance(target, tuple) else (target,)))
        if size // BLOCK % shards:
            raise ValueError(
                f"{where}: {name}={size} over {shards} devices (axis {axis!r} of kernel_axes on {target!r}) given; expected whole blocks "
                f"of {BLOCK}: {size // BLOCK} blocks do not divide by {shards}. Map another axis, or pad the weights with zeros to a "
                f"multiple of {BLOCK * shards}."
            )
