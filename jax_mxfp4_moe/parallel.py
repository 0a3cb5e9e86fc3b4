"""One mixture-of-experts layer over the devices of a `jax.sharding.Mesh`.

`shard_weights` (or `load_sharded`, from a checkpoint) gives every device its experts and its rows; `sharded_mxfp4_moe` is
`mxfp4_moe` on them, under `jax.shard_map` and with JAX's own collectives. Three kinds of mesh axes, alone or together:

  expert axis   each rank holds an equal run of the routed experts, and a copy of the shared ones;
  tensor axis   each rank holds a part of every expert: columns of F, in whole blocks of 32;
  token axis    each rank has its own tokens, and the weights are copied.

Tokens reach their experts in one of two forms:

  "replicated"  every rank of the expert axis sees all tokens of its token rank, computes what its experts add, and one `psum`
                adds up. One collective: for decode.
  "all_to_all"  tokens are split over the expert axis too. Each goes to the ranks that hold one of its experts, once for each rank,
                and what they add comes back. `lax.ragged_all_to_all` moves only those rows where the platform has it (GPUs);
                elsewhere every rank gets every token, padded to the worst case, by `all_gather` and `psum_scatter`. For prefill.

No token is ever dropped: buffers have the size of the worst case, in which all tokens of the expert axis go to one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mxfp4_moe import checkpoint, implementations
from jax_mxfp4_moe.moe import as_array, local_ids, mxfp4_moe, prepare
from jax_mxfp4_moe.mxfp4 import BLOCK, PACKED, Mxfp4Array
from jax_mxfp4_moe.stage1 import varying_like
from jax_mxfp4_moe.weights import MoeWeights, check_weights

DISPATCHES = ("replicated", "all_to_all")


def all_to_all_from_tokens(expert_ranks: int) -> int:
    """Tokens of one token rank from which `dispatch=None` means "all_to_all".

    What benchmarks/scaling_model.py predicts for H200s of one node, up to 8 ranks; not measured. Two ranks exchange nearly as much as they
    would add up, and more ranks less and less.
    """
    return max(512, 2**15 // expert_ranks**2)


Axis = str | None
TokenAxes = str | tuple[str, ...] | None
Reader = Callable[[Sequence[int], int, int], MoeWeights]
"""`read(experts, start, stop)`: packed weights of those experts, columns start..stop-1 of F. Down bias whole."""


class Split(NamedTuple):
    """How a layer lies on a mesh; hashable.

    Attributes:
      mesh: the devices.
      expert_axis, tensor_axis: names of mesh axes, or None.
      num_experts, num_shared_experts: routed and shared experts of the whole layer; shared ids come behind the routed.
      hidden_size, intermediate_size: D and F of the whole layer.
    """

    mesh: Mesh
    expert_axis: Axis
    tensor_axis: Axis
    num_experts: int
    num_shared_experts: int
    hidden_size: int
    intermediate_size: int

    @property
    def expert_ranks(self) -> int:
        """Length of the expert axis, 1 without one."""
        return self.mesh.shape[self.expert_axis] if self.expert_axis else 1

    @property
    def tensor_ranks(self) -> int:
        """Length of the tensor axis, 1 without one."""
        return self.mesh.shape[self.tensor_axis] if self.tensor_axis else 1

    @property
    def experts_per_rank(self) -> int:
        """Routed experts that a rank of the expert axis holds."""
        return self.num_experts // self.expert_ranks

    @property
    def width(self) -> int:
        """Columns of F that a rank of the tensor axis has room for; the last ranks may own fewer, or none, and hold zeros."""
        return -(-(self.intermediate_size // BLOCK) // self.tensor_ranks) * BLOCK

    def experts_of(self, rank: int) -> list[int]:
        """Ids of the experts that an expert rank holds, in the order of its rows."""
        first = rank * self.experts_per_rank
        shared = range(self.num_experts, self.num_experts + self.num_shared_experts)
        return [*range(first, first + self.experts_per_rank), *shared]

    def columns_of(self, rank: int) -> tuple[int, int]:
        """Start and end of the columns of F that a tensor rank owns."""
        return tuple(min(r * self.width, self.intermediate_size) for r in (rank, rank + 1))  # type: ignore[return-value]

    @property
    def spec(self) -> PartitionSpec:
        """The partition of every leaf of the weights."""
        return PartitionSpec(self.tensor_axis, self.expert_axis)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes over which partial results are added up."""
        return tuple(axis for axis in (self.expert_axis, self.tensor_axis) if axis)


@jax.tree_util.register_pytree_with_keys_class
class ShardedMoeWeights:
    """The expert weights of one layer, spread over a mesh. Made by `shard_weights` and `load_sharded`.

    Invariant: every leaf of `parts` is [tensor ranks, expert ranks, ...] with the partition `split.spec`, and entry [t, x] is that
    leaf of the `MoeWeights` of rank (t, x): its experts, its columns of F padded with zeros to `split.width`, and the down bias on
    tensor rank 0 only (zeros elsewhere), so that a sum over ranks counts it once.
    In a gradient with respect to biases, each copy of a shared expert has the part of the tokens that its rank computed: add the
    copies up over the expert ranks before an update.

    Args:
      parts: MoeWeights whose leaves have the two leading axes.
      split: static.
    """

    parts: MoeWeights
    split: Split

    __slots__ = ("parts", "split")

    def __init__(self, parts: MoeWeights, split: Split) -> None:
        self.parts, self.split = parts, split

    @property
    def layout(self) -> str:
        """Layout of the parts: `"packed"`, or the tag of an implementation."""
        return self.parts.layout

    def __repr__(self) -> str:
        s = self.split
        return (
            f"ShardedMoeWeights(num_experts={s.num_experts}, num_shared_experts={s.num_shared_experts}, hidden_size={s.hidden_size}, "
            f"intermediate_size={s.intermediate_size}, expert_axis={s.expert_axis!r} ({s.expert_ranks}), "
            f"tensor_axis={s.tensor_axis!r} ({s.tensor_ranks}), layout={self.layout!r})"
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Split]:
        """Child parts; static split."""
        return ((jax.tree_util.GetAttrKey("parts"), self.parts),), self.split

    def tree_flatten(self) -> tuple[tuple[Any, ...], Split]:
        """The same without keys."""
        return (self.parts,), self.split

    @classmethod
    def tree_unflatten(cls, split: Split, children: tuple[Any, ...]) -> ShardedMoeWeights:
        """Rebuilds without any check."""
        sharded = object.__new__(cls)
        (sharded.parts,), sharded.split = children, split
        return sharded


def shard_weights(
    weights: MoeWeights,
    mesh: Mesh,
    *,
    expert_axis: Axis = None,
    tensor_axis: Axis = None,
    num_shared_experts: int = 0,
    implementation: str | None = None,
) -> ShardedMoeWeights:
    """Spreads a layer's weights over a mesh, outside jit. Every process passes the same whole weights and keeps its parts.

    Args:
      weights: the whole layer in the packed layout, shared experts last. NumPy leaves stay on the host.
      mesh: the devices. Its other axes hold copies.
      expert_axis: mesh axis that the routed experts are divided over, in equal runs.
      tensor_axis: mesh axis that F is divided over in whole blocks of 32: ceil(blocks / ranks) each, so that the last ranks can
        have fewer or none.
      num_shared_experts: how many of the last experts are shared: used by every token, and copied to every expert rank.
      implementation: also `prepare` each part for this implementation.

    Raises:
      ValueError: an axis that the mesh lacks or that is named twice, routed experts that the axis does not divide, fewer blocks of
        F than ranks, or weights that are not in the packed layout.
    """
    where = "shard_weights"
    check_weights(where, weights)
    if weights.layout != PACKED:
        raise ValueError(
            f"{where}: weights in layout {weights.layout!r} given; expected the packed layout, since a prepared one cannot be cut. "
            f"Pass the packed weights and implementation={weights.layout.split(':')[0]!r}."
        )
    split = _split(
        where, mesh, expert_axis, tensor_axis, weights.num_experts, num_shared_experts, weights.hidden_size, weights.intermediate_size
    )  # fmt: skip
    host = jax.tree.map(np.asarray, weights)
    return _assemble(split, functools.partial(_cut, host), implementation)


def load_sharded(
    path: Any,
    mesh: Mesh,
    *,
    layer: int,
    expert_axis: Axis = None,
    tensor_axis: Axis = None,
    implementation: str | None = None,
    **options: Any,
) -> ShardedMoeWeights:
    """Loads a layer of a checkpoint onto a mesh: each process reads only the bytes of the experts and rows of its own devices.

    Args:
      path: see `load`.
      mesh, expert_axis, tensor_axis, implementation: see `shard_weights`.
      layer: which one.
      **options: of `load`, such as include_shared.

    Raises:
      ValueError: as `load` and `shard_weights` do.
    """
    where = "load_sharded"
    source = checkpoint.open_checkpoint(path)
    facts = checkpoint.describe(source)
    shared = facts.num_shared_experts if options.get("include_shared") else 0
    split = _split(
        where, mesh, expert_axis, tensor_axis, facts.num_experts + shared, shared, facts.hidden_size, facts.intermediate_size
    )  # fmt: skip

    def read(experts: Sequence[int], start: int, stop: int) -> MoeWeights:
        part = checkpoint.load(source, layer=layer, experts=experts, intermediate=slice(start, stop), **options)
        return jax.tree.map(np.asarray, part)

    return _assemble(split, read, implementation)


def unshard_weights(sharded: ShardedMoeWeights) -> MoeWeights:
    """The inverse of `shard_weights`: the whole packed weights as NumPy arrays. All devices must belong to this process.

    With it a layer moves to another mesh: `shard_weights(unshard_weights(w), other_mesh, ...)`.
    """
    split, parts = sharded.split, jax.tree.map(np.asarray, sharded.parts)
    owner = None if sharded.layout == PACKED else implementations.get("unshard_weights", sharded.layout.split(":")[0])

    def part(t: int, x: int) -> MoeWeights:
        one = jax.tree.map(lambda leaf: leaf[t, x], parts)
        one = jax.tree.map(np.asarray, owner.unprepare(one)) if owner else one
        start, stop = split.columns_of(t)
        return _cut(one, range(split.experts_per_rank + (split.num_shared_experts if x == 0 else 0)), 0, stop - start)

    ranks = range(split.tensor_ranks), range(split.expert_ranks)
    whole = _join_columns([_join_experts([part(t, x) for x in ranks[1]]) for t in ranks[0]])
    # The part of expert rank 0 ends in the shared experts, which come last in the whole.
    first, shared = split.experts_per_rank, split.num_shared_experts
    order = [*range(first), *range(first + shared, whole.num_experts), *range(first, first + shared)]
    return _cut(whole, order, 0, split.intermediate_size)


def sharded_mxfp4_moe(
    x: Any,
    weights: ShardedMoeWeights,
    topk_weights: Any,
    topk_ids: Any,
    *,
    token_axis: TokenAxes = None,
    dispatch: str | None = None,
    token_mask: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """`mxfp4_moe` over the mesh that `weights` lie on, inside or outside of `jax.jit`.

    Args:
      x: [..., D]; leading axes are tokens. Any sharding; best the one it is needed in: tokens over `token_axis`, and over the expert
        axis as well for "all_to_all".
      weights: of `shard_weights` or `load_sharded`.
      topk_weights, topk_ids: [..., K]. Ids are global, those of shared experts behind the routed (`append_shared_experts`). Others
        are skipped.
      token_axis: mesh axis or axes over which the tokens are divided; no axis of the weights. Tokens that do not divide are padded.
      dispatch: "replicated" or "all_to_all"; see the head of this module. None: "all_to_all" with an expert axis of two or more
        ranks and at least `all_to_all_from_tokens(ranks)` tokens a token rank, else "replicated".
      token_mask: [...] bool or None.
      preferred_element_type: type of y; the type of x if None. Partial results travel and are added up in float32.
      **options: of `mxfp4_moe`. Without expert_map, which is made here.

    Returns:
      y [..., D], with its tokens over `token_axis` (and the expert axis for "all_to_all").

    Raises:
      TypeError, ValueError, NotImplementedError, ImportError: as for `mxfp4_moe`.
      ValueError: an axis that the mesh lacks or that the weights use, an unknown dispatch, "all_to_all" without an expert axis; weights
        of another mesh, arrays that are committed to other devices than the mesh's, another mesh in force, or a call inside `shard_map`.
      NotImplementedError: float8 activations with a scale for each row, on a tensor axis: a rank sees only a part of the row.
    """
    where = "sharded_mxfp4_moe"
    if not isinstance(weights, ShardedMoeWeights):
        raise TypeError(
            f"{where}: weights of type {type(weights).__name__} given; expected ShardedMoeWeights. Call shard_weights(weights, mesh, "
            "expert_axis=...) once, outside jit."
        )
    if options.pop("expert_map", None) is not None:
        raise ValueError(
            f"{where}: expert_map given; expected none: topk_ids are global, and each rank's map is made here."
        )
    split = weights.split
    token_axes = _token_axes(where, split, token_axis)
    x, topk_weights, topk_ids = as_array(x), as_array(topk_weights), as_array(topk_ids)
    lead = x.shape[:-1]
    if (
        x.ndim == 0
        or x.shape[-1] != split.hidden_size
        or topk_ids.ndim != x.ndim
        or topk_ids.shape[:-1] != lead
        or topk_weights.shape != topk_ids.shape
    ):
        raise ValueError(
            f"{where}: topk_weights of shape {topk_weights.shape} and topk_ids of shape {topk_ids.shape} given with x of shape {x.shape}; "
            f"expected x [..., {split.hidden_size}] and both [..., K] with the same leading axes."
        )
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(
            f"{where}: topk_ids of dtype {topk_ids.dtype} given; expected an integer type. topk_weights come before topk_ids."
        )
    others = {"token_mask": token_mask, "activation_scale": options.get("activation_scale")}
    _check_places(where, weights, {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids, **others})
    parts = _with_scale(where, weights, options)
    out_dtype = x.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    tokens, top_k = int(np.prod(lead, dtype=np.int64)), topk_ids.shape[-1]
    if tokens == 0:
        return jnp.zeros((*lead, split.hidden_size), out_dtype)
    dispatch = _dispatch(where, split, dispatch, tokens // _size(split.mesh, token_axes))

    ids, skipped = local_ids(where, topk_ids, split.num_experts + split.num_shared_experts, None)
    if token_mask is not None:
        token_mask = as_array(token_mask)
        if token_mask.shape != lead or token_mask.dtype != jnp.bool_:
            raise ValueError(
                f"{where}: token_mask {token_mask.dtype}{list(token_mask.shape)} given; expected bool{list(lead)}."
            )
        skipped = skipped | ~token_mask[..., None]
    ids = jnp.where(skipped, -1, ids)

    axes = (*token_axes, str(split.expert_axis)) if dispatch == "all_to_all" else token_axes
    padding = -tokens % _size(split.mesh, axes)
    spec = PartitionSpec(axes)

    def place(a: jax.Array, last: int, fill: Any) -> jax.Array:
        if padding or a.ndim > 2:
            a = _reshard(a, split.mesh, PartitionSpec())
        a = jnp.pad(a.reshape(tokens, last), ((0, padding), (0, 0)), constant_values=fill)
        return _reshard(a, split.mesh, spec)

    local = _all_to_all if dispatch == "all_to_all" else _replicated
    run = jax.shard_map(
        functools.partial(local, split, options),
        mesh=split.mesh,
        in_specs=(spec, spec, spec, split.spec),
        out_specs=spec,
    )
    parts = jax.tree.map(lambda leaf: _reshard(leaf, split.mesh, split.spec), parts)
    y = run(place(x, split.hidden_size, 0), place(topk_weights, top_k, 0), place(ids, top_k, -1), parts)
    if padding or len(lead) > 1:
        y = _reshard(y, split.mesh, PartitionSpec())
    return y[:tokens].astype(out_dtype).reshape(*lead, split.hidden_size)


# ---------------------------------------------------------------------------------------------------------------------
# What one device does
# ---------------------------------------------------------------------------------------------------------------------


def _replicated(
    split: Split,
    options: dict[str, Any],
    x: Any,
    topk_weights: Any,
    ids: Any,
    parts: MoeWeights,
) -> jax.Array:
    """y [tokens, D] float32 of the token rank's tokens, all of which this device sees."""
    ids = _local_ids(split, ids, share=True)
    y = _experts(split, options, x, topk_weights, ids, parts)
    return lax.psum(y, split.reduced) if split.reduced else y


def _all_to_all(
    split: Split,
    options: dict[str, Any],
    x: Any,
    topk_weights: Any,
    ids: Any,
    parts: MoeWeights,
) -> jax.Array:
    """y [tokens, D] float32 of this device's own tokens, which are different on each expert rank."""
    exchange = _ragged if _has_ragged_all_to_all(split.mesh) else _padded
    y = exchange(split, functools.partial(_experts, split, options, parts=parts), x, topk_weights, ids)
    return lax.psum(y, split.tensor_axis) if split.tensor_axis else y


def _padded(split: Split, experts: Callable[..., jax.Array], x: Any, topk_weights: Any, ids: Any) -> jax.Array:
    """Every rank gets every token of the expert axis and returns a sum for each."""
    axis = split.expert_axis
    x, topk_weights, ids = (lax.all_gather(a, axis, tiled=True) for a in (x, topk_weights, ids))
    y = experts(x, topk_weights, _local_ids(split, ids, share=True))
    return lax.psum_scatter(y, axis, tiled=True)


def _ragged(split: Split, experts: Callable[..., jax.Array], x: Any, topk_weights: Any, ids: Any) -> jax.Array:
    """A token goes once to each rank that holds one of its experts; both ways are ragged."""
    axis, ranks, rank = split.expert_axis, split.expert_ranks, _rank(split)
    tokens, top_k = ids.shape
    shared = ids >= split.num_experts
    owner = jnp.where(ids < 0, ranks, jnp.where(shared, rank, ids // split.experts_per_rank))
    needed = (owner[None] == jnp.arange(ranks)[:, None, None]).any(-1)
    # Rows to send, by rank and then by token. The fill value lies past the last one.
    rows = tokens * min(top_k, ranks)
    to, token = jnp.divmod(
        jnp.nonzero(needed.ravel(), size=rows, fill_value=ranks * tokens)[0].astype(jnp.int32), tokens
    )
    sent_ids = jnp.where(owner[token] == to[:, None], ids[token], -1)

    counts = lax.all_gather(needed.sum(-1, dtype=jnp.int32), axis)  # [from, to]
    starts = jnp.cumsum(counts, axis=1) - counts  # of the rows for `to` in the buffer of `from`
    arrivals = jnp.cumsum(counts, axis=0) - counts  # of the rows from `from` in the buffer of `to`

    def there(a: jax.Array, fill: Any) -> jax.Array:
        out = varying_like(jnp.full((ranks * tokens, a.shape[-1]), fill, a.dtype), a)
        return lax.ragged_all_to_all(
            a, out, starts[rank], counts[rank], arrivals[rank], counts[:, rank], axis_name=axis
        )

    received = there(x[token], 0), there(topk_weights[token], 0), there(sent_ids, -1)
    y = experts(received[0], received[1], _local_ids(split, received[2], share=False))
    back = varying_like(jnp.zeros((rows, y.shape[-1]), y.dtype), y)
    back = lax.ragged_all_to_all(
        y, back, arrivals[:, rank], counts[:, rank], starts[:, rank], counts[rank], axis_name=axis
    )  # fmt: skip
    # Added up rank by rank, so that the order is always the same.
    place = starts[rank][:, None] + jnp.cumsum(needed, axis=1) - 1
    total = varying_like(jnp.zeros((tokens, y.shape[-1]), y.dtype), back)
    for source in range(ranks):
        total = total + jnp.where(needed[source][:, None], back[place[source]], 0)
    return total


def _experts(
    split: Split,
    options: dict[str, Any],
    x: Any,
    topk_weights: Any,
    ids: Any,
    parts: MoeWeights,
) -> jax.Array:
    """What this device's experts and columns add to y, in float32; `ids` are rows of its weights."""
    weights = jax.tree.map(lambda leaf: leaf[0, 0], parts)
    if split.tensor_axis and weights.down_bias is not None:
        # Zeros already, except after a training step: their gradient is nothing then, and stays it.
        weights = weights.replace(down_bias=jnp.where(lax.axis_index(split.tensor_axis) == 0, weights.down_bias, 0))
    return mxfp4_moe(x, weights, topk_weights, ids, preferred_element_type=jnp.float32, **options)


def _local_ids(split: Split, ids: jax.Array, *, share: bool) -> jax.Array:
    """Rows of this rank's weights for global ids, and -1 for what another rank computes.

    Shared experts are on every rank; with `share`, the rank computes them for its own run of the tokens only.
    """
    rank, tokens = _rank(split), ids.shape[0]
    routed = ids - rank * split.experts_per_rank
    here = (routed >= 0) & (routed < split.experts_per_rank) & (ids < split.num_experts)
    is_shared = ids >= split.num_experts
    if share:
        is_shared &= (jnp.arange(tokens) // -(-tokens // split.expert_ranks) == rank)[:, None]
    return jnp.where(here, routed, jnp.where(is_shared, ids - split.num_experts + split.experts_per_rank, -1))


def _rank(split: Split) -> Any:
    return lax.axis_index(split.expert_axis) if split.expert_axis else 0


def _has_ragged_all_to_all(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")


def _reshard(a: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Explicit mesh axes are part of a type, and the caller says when to move data; with Auto axes `shard_map` does."""
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    return jax.reshard(a, NamedSharding(mesh, spec)) if explicit else a


# ---------------------------------------------------------------------------------------------------------------------
# Cutting weights up and putting them together
# ---------------------------------------------------------------------------------------------------------------------


def _assemble(split: Split, read: Reader, implementation: str | None) -> ShardedMoeWeights:
    """Reads the part of each rank that has a device in this process, once, and puts it there."""
    if implementation is not None and implementations.get("shard_weights", implementation).layouts == (PACKED,):
        implementation = None  # it reads parts as they are
    mesh, process = split.mesh, jax.process_index()
    names = list(mesh.axis_names)
    places: dict[tuple[int, int], list[jax.Device]] = {}
    for index, device in np.ndenumerate(mesh.devices):
        if device.process_index == process:
            t, x = (index[names.index(axis)] if axis else 0 for axis in (split.tensor_axis, split.expert_axis))
            places.setdefault((t, x), []).append(device)
    if not places:
        raise ValueError(
            f"shard_weights: a mesh of {mesh.devices.size} devices given, none of them of process {process}; expected devices of every "
            "process that calls this."
        )
    pieces = _place(split, read, implementation, places)
    # `prepare` leaves packed what its layout cannot hold. A layer has one layout, on the devices of all processes.
    if implementation is not None and not _everywhere(all(part.layout != PACKED for part in pieces.values())):
        pieces = _place(split, read, None, places)
    sharding = NamedSharding(mesh, split.spec)
    ranks = (split.tensor_ranks, split.expert_ranks)

    def join(*leaves: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays((*ranks, *leaves[0].shape[2:]), sharding, list(leaves))

    return ShardedMoeWeights(jax.tree.map(join, *pieces.values()), split)


def _place(
    split: Split, read: Reader, implementation: str | None, places: dict[tuple[int, int], list[jax.Device]]
) -> dict[jax.Device, MoeWeights]:
    """The part of each rank on each of its devices, prepared there, with the two leading axes."""
    pieces: dict[jax.Device, MoeWeights] = {}
    for (t, x), devices in sorted(places.items()):
        start, stop = split.columns_of(t)
        # A rank without columns holds zeros of the shape that the others have.
        part = (
            read(split.experts_of(x), start, stop) if stop > start else _zeros_like(read(split.experts_of(x), 0, BLOCK))
        )
        part = _pad(part, split.width, with_down_bias=t == 0)
        for device in devices:
            with jax.default_device(device):
                prepared = prepare(part, implementation) if implementation else part
                pieces[device] = jax.tree.map(lambda leaf: jax.device_put(leaf[None, None], device), prepared)  # noqa: B023
        del part
    return pieces


def _everywhere(fact: bool) -> bool:
    """Whether `fact` is true in every process; each of them asks."""
    if jax.process_count() == 1:
        return fact
    return bool(multihost_utils.process_allgather(np.array(fact)).all())


def _cut(weights: MoeWeights, experts: Sequence[int], start: int, stop: int) -> MoeWeights:
    """Those experts and columns start..stop-1 of F, which are multiples of 32; `weights` are NumPy arrays."""
    features, chosen = weights.intermediate_size, list(experts)
    rows = np.r_[start:stop, features + start : features + stop]

    def down(a: Any, per: int) -> np.ndarray:
        return a[chosen][..., start // per : stop // per]

    return _rebuild(
        weights,
        [a[chosen][:, rows] for a in (weights.gate_up.codes, weights.gate_up.scales)],
        [down(weights.down.codes, 2), down(weights.down.scales, BLOCK)],
        None if weights.gate_up_bias is None else weights.gate_up_bias[chosen][:, rows],
        None if weights.down_bias is None else weights.down_bias[chosen],
    )


def _pad(weights: MoeWeights, width: int, *, with_down_bias: bool) -> MoeWeights:
    """Zero columns up to `width`: their gate, up and down weights and biases are 0, so that they add exactly 0 to y."""
    features = weights.intermediate_size
    more = width - features
    if not more and (with_down_bias or weights.down_bias is None):
        return weights  # as it was read: a copy would double the memory that loading takes

    def halves(a: Any) -> np.ndarray:
        a = np.asarray(a).reshape(a.shape[0], 2, features, *a.shape[2:])
        a = np.pad(a, [(0, 0), (0, 0), (0, more), *[(0, 0)] * (a.ndim - 3)])
        return a.reshape(a.shape[0], 2 * width, *a.shape[3:])

    def down(a: Any, per: int) -> np.ndarray:
        return np.pad(np.asarray(a), [(0, 0), (0, 0), (0, more // per)])

    down_bias = None if weights.down_bias is None else np.asarray(weights.down_bias)
    return _rebuild(
        weights,
        [halves(weights.gate_up.codes), halves(weights.gate_up.scales)],
        [down(weights.down.codes, 2), down(weights.down.scales, BLOCK)],
        None if weights.gate_up_bias is None else halves(weights.gate_up_bias),
        down_bias if down_bias is None or with_down_bias else np.zeros_like(down_bias),
    )


def _join_experts(parts: Sequence[MoeWeights]) -> MoeWeights:
    """The experts of all parts, one part behind the other."""

    def join(*leaves: Any) -> np.ndarray:
        return np.concatenate(leaves)

    first = parts[0]
    return _rebuild(
        first,
        *(
            [join(*(getattr(p, name).codes for p in parts)), join(*(getattr(p, name).scales for p in parts))]
            for name in ("gate_up", "down")
        ),
        *(
            None if getattr(first, name) is None else join(*(getattr(p, name) for p in parts))
            for name in ("gate_up_bias", "down_bias")
        ),
    )


def _join_columns(parts: Sequence[MoeWeights]) -> MoeWeights:
    """The columns of all parts, one part behind the other; the down bias is that of the first."""
    first = parts[0]

    def halves(leaves: Sequence[Any]) -> np.ndarray:
        split = [np.asarray(a).reshape(a.shape[0], 2, a.shape[1] // 2, *a.shape[2:]) for a in leaves]
        joined = np.concatenate(split, axis=2)
        return joined.reshape(joined.shape[0], 2 * joined.shape[2], *joined.shape[3:])

    return _rebuild(
        first,
        [halves([p.gate_up.codes for p in parts]), halves([p.gate_up.scales for p in parts])],
        [
            np.concatenate([p.down.codes for p in parts], axis=-1),
            np.concatenate([p.down.scales for p in parts], axis=-1),
        ],
        None if first.gate_up_bias is None else halves([p.gate_up_bias for p in parts]),
        first.down_bias,
    )


def _rebuild(weights: MoeWeights, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any) -> MoeWeights:
    """`weights` with other experts or columns; `gate_up` and `down` are pairs of codes and scales."""
    return weights.replace(
        gate_up=Mxfp4Array(*gate_up), down=Mxfp4Array(*down), gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def _zeros_like(weights: MoeWeights) -> MoeWeights:
    return jax.tree.map(np.zeros_like, weights)


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))


def _split(
    where: str,
    mesh: Mesh,
    expert_axis: Axis,
    tensor_axis: Axis,
    num_experts: int,
    num_shared_experts: int,
    hidden: int,
    intermediate: int,
) -> Split:
    """`num_experts` counts the shared ones too."""
    for name, axis in (("expert_axis", expert_axis), ("tensor_axis", tensor_axis)):
        if axis is not None:
            _known_axis(where, mesh, name, axis)
    if expert_axis is not None and expert_axis == tensor_axis:
        raise ValueError(
            f"{where}: expert_axis and tensor_axis are both {expert_axis!r}; expected two axes of the mesh."
        )
    if not 0 <= num_shared_experts <= num_experts:
        raise ValueError(
            f"{where}: num_shared_experts={num_shared_experts} given with {num_experts} experts in all; expected 0 to {num_experts}."
        )
    split = Split(
        mesh, expert_axis, tensor_axis, num_experts - num_shared_experts, num_shared_experts, hidden, intermediate
    )
    if split.num_experts % split.expert_ranks:
        raise ValueError(
            f"{where}: {split.num_experts} routed experts given with {split.expert_ranks} ranks on the expert axis {expert_axis!r}; "
            "expected a multiple. Choose another mesh, or name the experts that every token uses with num_shared_experts."
        )
    blocks = intermediate // BLOCK
    if blocks < split.tensor_ranks:
        raise ValueError(
            f"{where}: F = {intermediate} given with {split.tensor_ranks} ranks on the tensor axis {tensor_axis!r}; expected at least one "
            f"block of {BLOCK} for each, {split.tensor_ranks * BLOCK} in all. Use a smaller tensor axis, and an expert axis."
        )
    return split


def _known_axis(where: str, mesh: Mesh, name: str, axis: str) -> None:
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{where}: {name}={axis!r} given with a mesh of axes {mesh.axis_names}; expected one of these, or None."
        )


def _token_axes(where: str, split: Split, token_axis: TokenAxes) -> tuple[str, ...]:
    axes = () if token_axis is None else (token_axis,) if isinstance(token_axis, str) else tuple(token_axis)
    for axis in axes:
        _known_axis(where, split.mesh, "token_axis", axis)
        if axis in split.reduced:
            raise ValueError(
                f"{where}: token_axis={token_axis!r} given, but {axis!r} divides the weights; expected another axis. With "
                "dispatch='all_to_all' tokens are divided over the expert axis anyway."
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"{where}: token_axis={token_axis!r} given; expected each axis once.")
    return axes


def _check_places(where: str, weights: ShardedMoeWeights, others: dict[str, Any]) -> None:
    """Raises ValueError for what lies elsewhere than the mesh of `weights`. Where a tracer will lie, JAX says when it compiles."""
    split = weights.split
    mesh, context = split.mesh, jax.sharding.get_abstract_mesh()
    if not context.empty and jax.sharding.AxisType.Manual in context.axis_types:
        raise ValueError(
            f"{where}: called inside of jax.shard_map over {context}; expected a call outside, since it makes its own over the mesh of "
            "the weights. Inside, call mxfp4_moe on the weights of the device."
        )
    if not context.empty and _axes(context) != _axes(mesh):
        raise ValueError(
            f"{where}: weights on {mesh} given while {context} is in force; expected one mesh. Use jax.set_mesh(weights.split.mesh), or "
            "move the weights: shard_weights(unshard_weights(weights), mesh, ...)."
        )
    ranks = (split.tensor_ranks, split.expert_ranks)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights.parts):
        name = f"weights.parts{jax.tree_util.keystr(path)}"
        if jnp.shape(leaf)[:2] != ranks:
            raise ValueError(
                f"{where}: {name} of shape {jnp.shape(leaf)} given with a split over {ranks} (tensor, expert) ranks; expected these two "
                "axes first: parts that were made for another mesh do not fit. Call shard_weights or load_sharded for this mesh."
            )
        _check_devices(where, name, leaf, mesh, "shard_weights(unshard_weights(weights), mesh, ...)")
    for name, given in others.items():
        for array in jax.tree.leaves(given):
            _check_devices(where, name, array, mesh, f"jax.device_put({name}, NamedSharding(mesh, PartitionSpec()))")


def _axes(mesh: Any) -> tuple[Any, ...]:
    """What `jax.shard_map` compares of a mesh with the one in force: the order of its axes and their types too."""
    return mesh.axis_names, tuple(mesh.shape.values()), mesh.axis_types


def _check_devices(where: str, name: str, array: Any, mesh: Mesh, remedy: str) -> None:
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array) or not array.committed:
        return
    found, devices = array.sharding.device_set, set(mesh.devices.flat)
    if found != devices:
        raise ValueError(
            f"{where}: {name} on {_devices(found)} given; expected all devices of the mesh that the weights were made for, {mesh} on "
            f"{_devices(devices)}. Move it with {remedy}."
        )


def _devices(devices: set[jax.Device]) -> str:
    ids = sorted(device.id for device in devices)
    platform = next(iter(devices)).platform
    return f"{platform} {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"


def _dispatch(where: str, split: Split, dispatch: str | None, tokens: int) -> str:
    if dispatch is None:
        ranks = split.expert_ranks
        return "all_to_all" if ranks > 1 and tokens >= all_to_all_from_tokens(ranks) else "replicated"
    if dispatch not in DISPATCHES:
        raise ValueError(
            f"{where}: dispatch={dispatch!r} given; expected one of {', '.join(DISPATCHES)}, or None to choose by the number of tokens."
        )
    if dispatch == "all_to_all" and split.expert_axis is None:
        raise ValueError(
            f"{where}: dispatch='all_to_all' given with weights that no expert axis divides; expected 'replicated' or None, or weights of "
            "shard_weights(..., expert_axis=...)."
        )
    return dispatch


def _with_scale(where: str, weights: ShardedMoeWeights, options: dict[str, Any]) -> MoeWeights:
    """The parts, with the static scales of the call if it gives any; takes them out of `options`."""
    parts, split = weights.parts, weights.split
    quant = options.get("activation_quant", "auto")
    quant = parts.activation_quant if quant == "auto" else quant
    scale = options.pop("activation_scale", None) if quant == "fp8" else None
    if scale is not None:
        if not hasattr(scale, "__len__") or np.ndim(scale) == 0 or len(scale) != 2:
            raise ValueError(
                f"{where}: activation_scale={scale!r} given; expected a pair, of x and of h, or an array [2]."
            )
        scale = jnp.stack([jnp.asarray(s, jnp.float32) for s in scale])
        parts = parts.replace(
            activation_scale=jnp.broadcast_to(scale, (split.tensor_ranks, split.expert_ranks, *scale.shape))
        )
    if quant == "fp8" and parts.activation_scale is None and split.tensor_ranks > 1:
        raise NotImplementedError(
            f"{where}: activation_quant='fp8' with one scale a row was asked for on the tensor axis {split.tensor_axis!r}, where a rank "
            "sees only its part of each row of h; expected static scales. Pass activation_scale, or use an expert axis alone."
        )
    return parts
