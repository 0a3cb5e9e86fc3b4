"""Layers over meshes of 4 and 8 virtual CPU devices; `test_parallel.py` runs these in a process of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_case
from checkpoint import synthetic
from jax import lax
from jax._src.lax.parallel import ragged_all_to_all_p
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mxfp4_moe import Mxfp4Array, append_shared_experts, checkpoint, implementations, mxfp4_moe, parallel
from jax_mxfp4_moe.parallel import load_sharded, shard_weights, sharded_mxfp4_moe, unshard_weights
from jax_mxfp4_moe.testing import TOLERANCES, relative_error

assert len(jax.devices()) == 8, "run by test_parallel.py"


def mesh_of(kind=AxisType.Auto, **axes):
    kinds, count = (kind,) * len(axes), int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:count])


MESHES = {
    "expert8": ({"expert": 8}, {"expert_axis": "expert"}, None),
    "tensor8": ({"tensor": 8}, {"tensor_axis": "tensor"}, None),
    "token2xexpert4": ({"token": 2, "expert": 4}, {"expert_axis": "expert"}, "token"),
    "expert2xtensor4": ({"expert": 2, "tensor": 4}, {"expert_axis": "expert", "tensor_axis": "tensor"}, None),
    "token2xexpert2xtensor2": (
        {"token": 2, "expert": 2, "tensor": 2},
        {"expert_axis": "expert", "tensor_axis": "tensor"},
        "token",
    ),
    "token8": ({"token": 8}, {}, "token"),
    "expert4": ({"expert": 4}, {"expert_axis": "expert"}, None),
    "tensor4": ({"tensor": 4}, {"tensor_axis": "tensor"}, None),
    "expert2xtensor2": ({"expert": 2, "tensor": 2}, {"expert_axis": "expert", "tensor_axis": "tensor"}, None),
    "token2xexpert2": ({"token": 2, "expert": 2}, {"expert_axis": "expert"}, "token"),
}
EXPERTS, SHARED = 8, 1


def layer(seed=0, *, tokens=21, biases=True, **options):
    """8 routed experts and 1 shared; 288 columns are 9 blocks, which 2, 4 and 8 ranks do not divide. Global ids, some of them skipped."""
    case = random_case(
        seed=seed, tokens=tokens, experts=EXPERTS + SHARED, top_k=2, intermediate=288, biases=biases, **options
    )
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(int(np.prod(tokens)))]).astype(np.int32)
    ids = ids.reshape(case.topk_ids.shape)
    ids.reshape(-1)[::7] = -1
    weights, ids = append_shared_experts(jnp.asarray(case.topk_weights), jnp.asarray(ids), EXPERTS, SHARED)
    return case.replace(topk_weights=np.asarray(weights), topk_ids=np.asarray(ids))


def emulated_ragged_all_to_all(a, out, starts, sizes, out_starts, out_sizes, *, axis_name):
    """What the operation is documented to do, by gathering everything: a CPU lacks it."""
    everything = [lax.all_gather(b, axis_name) for b in (a, starts, sizes, out_starts)]
    rank, at = lax.axis_index(axis_name), jnp.arange(out.shape[0])
    for source in range(len(everything[0])):
        rows, start, size, to = everything[0][source], *(b[source, rank] for b in everything[1:])
        out = jnp.where(
            ((at >= to) & (at < to + size))[:, None], rows[jnp.clip(at - to + start, 0, len(rows) - 1)], out
        )
    return out


def lowered_for_cpu(*operands, axis_name, axis_index_groups):
    assert axis_index_groups is None
    return emulated_ragged_all_to_all(*operands, axis_name=axis_name)


# The operation itself, with JAX's own derivative of it.
mlir.register_lowering(
    ragged_all_to_all_p, mlir.lower_fun(lowered_for_cpu, multiple_results=False), platform="cpu"
)  # fmt: skip


@pytest.fixture
def ragged(monkeypatch):
    monkeypatch.setattr(parallel, "_has_ragged_all_to_all", lambda mesh: True)


def check(case, axes, split, token_axis, *, implementation="torch", **options):
    """Relative error against the oracle, and the recipe. A program with `torch` in it compiles in a fraction of the time of `xla`'s."""
    mesh = mesh_of(**axes)
    weights = shard_weights(case.weights, mesh, num_shared_experts=SHARED, **split)
    operands = jax.tree.map(jnp.asarray, (case.x, case.topk_weights, case.topk_ids))

    def call(weights, x, topk_weights, topk_ids):
        return sharded_mxfp4_moe(
            x, weights, topk_weights, topk_ids, token_axis=token_axis, implementation=implementation, **options
        )

    y = jax.jit(call)(weights, *operands)
    mxfp4 = {name: value for name, value in options.items() if name != "dispatch"}
    assert y.shape == case.x.shape
    recipe = (options.get("activation_quant"), str(case.x.dtype))
    return relative_error(np.asarray(y, np.float64), case.expected(**mxfp4)), recipe


@pytest.mark.parametrize("dispatch", ["replicated", "all_to_all"])
@pytest.mark.parametrize(
    "name", [name for name in MESHES if name not in ("token2xexpert2", "token2xexpert4", "expert2xtensor4")]
)
def test_every_mesh_equals_one_device(name, dispatch):
    """Those left out are in the tests below."""
    axes, split, token_axis = MESHES[name]
    if dispatch == "all_to_all" and "expert_axis" not in split:
        pytest.skip("all_to_all needs an expert axis")
    error, _ = check(layer(), axes, split, token_axis, dispatch=dispatch)
    assert error < 1e-5


@pytest.mark.parametrize("name", ["expert4", "token2xexpert2xtensor2"])
def test_ragged_exchange(ragged, name):
    axes, split, token_axis = MESHES[name]
    error, _ = check(layer(1), axes, split, token_axis, dispatch="all_to_all")
    assert error < 1e-5


def test_ragged_exchange_of_the_worst_case(ragged):
    """Every token goes to the same rank, whose buffer must hold them all."""
    case = layer(2)
    ids = np.stack([np.full(21, 6), np.full(21, -1), np.full(21, EXPERTS)], axis=1)
    assert check(case.replace(topk_ids=ids), *MESHES["expert8"], dispatch="all_to_all")[0] < 1e-5


@pytest.mark.parametrize("dispatch", ["replicated", "all_to_all"])
@pytest.mark.parametrize(
    ("tokens", "name"), [(1, "token2xexpert4"), (3, "token2xexpert2"), ((2, 3, 4), "token2xexpert2")]
)
def test_few_tokens_and_leading_axes(tokens, name, dispatch):
    assert check(layer(3, tokens=tokens), *MESHES[name], dispatch=dispatch)[0] < 1e-5


def test_no_tokens():
    case = layer(3, tokens=4)
    empty = case.replace(**{name: getattr(case, name)[:0] for name in ("x", "topk_weights", "topk_ids")})
    mesh = mesh_of(expert=8)
    weights = shard_weights(case.weights, mesh, expert_axis="expert", num_shared_experts=SHARED)
    y = sharded_mxfp4_moe(empty.x, weights, empty.topk_weights, empty.topk_ids)
    assert y.shape == empty.x.shape
    assert y.dtype == empty.x.dtype


@pytest.mark.parametrize("implementation", ["xla", "torch"])
@pytest.mark.parametrize("quant", [None, "mxfp4"])
def test_implementations_in_bfloat16(implementation, quant):
    case = layer(4, dtype="bfloat16")
    error, recipe = check(
        case, *MESHES["expert2xtensor4"], implementation=implementation, activation_quant=quant
    )  # fmt: skip
    assert error < TOLERANCES[recipe[1], recipe[0]]


def test_other_activations_and_weights_on_the_input():
    """A padded column has gate = up = 0, which every activation turns into 0."""
    for options in (
        {"activation": "swiglu_oai", "activation_alpha": 1.702, "activation_limit": 7.0},
        {"activation": "silu_post_clamped", "activation_limit": 1.0, "apply_router_weight_on_input": True},
    ):
        assert check(layer(5), *MESHES["tensor4"], **options)[0] < 1e-5


def test_token_mask():
    case = layer(6)
    mask = np.arange(21) % 3 > 0
    case.x[~mask] = np.nan
    error, _ = check(case, *MESHES["token2xexpert4"], token_mask=mask)
    assert error < 1e-5


def test_narrow_ids():
    """256 experts and ids that cannot hold this number, or a skip."""
    case = random_case(seed=14, tokens=16, experts=256, top_k=2, hidden=32, intermediate=32)
    ids = (case.topk_ids % 255).astype(np.uint8)
    mesh = mesh_of(expert=4)
    weights = shard_weights(case.weights, mesh, expert_axis="expert")
    y = jax.jit(functools.partial(sharded_mxfp4_moe, implementation="torch"))(case.x, weights, case.topk_weights, ids)
    assert relative_error(np.asarray(y), case.replace(topk_ids=ids.astype(np.int32)).expected()) < 1e-5


def test_one_layout_on_all_devices(monkeypatch):
    """One rank's part does not fit a layout, as a row of scales too far apart: all stay packed."""
    triton = implementations.IMPLEMENTATIONS["triton"]

    def prepare(weights):
        fits = np.asarray(weights.gate_up.codes)[0, 0, 0] != marked
        layout = "triton:e4m3" if fits else "packed"
        return weights.replace(
            **{
                name: Mxfp4Array(stack.codes, stack.scales, length=stack.length, layout=layout)
                for name, stack in (("gate_up", weights.gate_up), ("down", weights.down))
            }
        )

    monkeypatch.setattr(triton, "prepare", prepare)
    case = layer()
    first = np.asarray(case.weights.gate_up.codes)[:EXPERTS, 0, 0]
    mesh = mesh_of(expert=8)
    split = {"expert_axis": "expert", "num_shared_experts": SHARED, "implementation": "triton"}
    marked = first[3]
    assert list(first).count(marked) < 8
    assert shard_weights(case.weights, mesh, **split).layout == "packed"
    marked = -1
    assert shard_weights(case.weights, mesh, **split).layout == "triton:e4m3"


@pytest.mark.parametrize(
    ("tokens", "dispatch"), [(16, "replicated"), (16, "all_to_all"), (21, "all_to_all"), ((4, 4), "replicated")]
)
def test_explicit_axes_and_sharded_input(tokens, dispatch):
    """On a mesh whose axes are Explicit, shardings are part of types; input may come in any."""
    case = layer(7, tokens=tokens)
    mesh = mesh_of(AxisType.Explicit, token=2, expert=4)
    weights = shard_weights(case.weights, mesh, expert_axis="expert", num_shared_experts=SHARED)
    spec = PartitionSpec(("token", "expert") if tokens == 16 else None)
    operands = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (case.x, case.topk_weights, case.topk_ids)]
    with jax.set_mesh(mesh):
        y = jax.jit(
            lambda w, *a: sharded_mxfp4_moe(
                a[0],
                w,
                *a[1:],
                token_axis="token",
                dispatch=dispatch,
                implementation="xla" if tokens == 16 else "torch",
            )
        )(weights, *operands)
    assert relative_error(np.asarray(y), case.expected()) < 1e-5


@pytest.mark.parametrize("name", MESHES)
def test_unshard_is_the_inverse(name):
    axes, split, _ = MESHES[name]
    weights = layer(8).weights
    there_and_back = unshard_weights(shard_weights(weights, mesh_of(**axes), num_shared_experts=SHARED, **split))
    jax.tree.map(np.testing.assert_array_equal, there_and_back, weights)
    assert jax.tree.structure(there_and_back) == jax.tree.structure(weights)


def test_case_15_uneven_and_empty_ranks():
    """9 blocks on 4 ranks are 96, 96, 96 and 0 columns; every rank has arrays of the same shape. "tensor4" above computes with these."""
    sharded = shard_weights(layer().weights, mesh_of(tensor=4), tensor_axis="tensor", num_shared_experts=SHARED)
    assert [sharded.split.columns_of(rank) for rank in range(4)] == [(0, 96), (96, 192), (192, 288), (288, 288)]
    codes = sharded.parts.down.codes
    assert codes.shape == (4, 1, EXPERTS + SHARED, 64, 48)
    assert {shard.data.shape for shard in codes.addressable_shards} == {(1, 1, EXPERTS + SHARED, 64, 48)}
    assert not np.asarray(codes[3]).any()
    down_bias = np.asarray(sharded.parts.down_bias)
    assert down_bias[0].any()
    assert not down_bias[1:].any()


def test_case_28_no_weight_is_gathered():
    """In the compiled program no collective carries packed bytes."""
    case = layer()
    for dispatch in parallel.DISPATCHES:
        mesh = mesh_of(token=2, expert=4)
        weights = shard_weights(case.weights, mesh, expert_axis="expert", num_shared_experts=SHARED)
        text = (
            jax.jit(lambda *a, d=dispatch: sharded_mxfp4_moe(*a, token_axis="token", dispatch=d, implementation="xla"))
            .lower(case.x, weights, case.topk_weights, case.topk_ids)
            .compile()
            .as_text()
        )
        moved = [line for line in text.splitlines() if "all-gather(" in line or "all-reduce(" in line]
        assert moved
        assert not [line for line in moved if "u8[" in line]


def test_layers_in_a_scan():
    case = layer(9)
    mesh = mesh_of(token=2, expert=4)
    weights = shard_weights(case.weights, mesh, expert_axis="expert", num_shared_experts=SHARED)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weights)

    @jax.jit
    def run(stack, x, topk_weights, topk_ids):
        def one(x, weights):
            return sharded_mxfp4_moe(x, weights, topk_weights, topk_ids, token_axis="token"), None

        return lax.scan(one, x, stack)[0]

    y = run(stack, case.x, case.topk_weights, case.topk_ids)
    first = case.expected().astype(np.float32)
    assert relative_error(np.asarray(y), case.replace(x=first).expected()) < 1e-4


def with_biases(weights, gate_up_bias, down_bias):
    return weights.replace(gate_up_bias=gate_up_bias, down_bias=down_bias)


@functools.cache
def gradients_on_one_device():
    """A case, a cotangent, and the gradients with respect to x, router weights and biases."""
    case = layer(10)
    cotangent = np.random.default_rng(0).normal(size=case.x.shape).astype(np.float32)

    def loss(x, topk_weights, *biases):
        return (mxfp4_moe(x, with_biases(case.weights, *biases), topk_weights, case.topk_ids) * cotangent).sum()

    operands = case.x, case.topk_weights, case.weights.gate_up_bias, case.weights.down_bias
    return case, cotangent, jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*operands)


@pytest.mark.parametrize(
    ("exchange", "name"),
    [("replicated", "tensor4"), ("padded", "token2xexpert2xtensor2"), ("ragged", "expert4")],
)
def test_gradients_equal_one_device(exchange, name, request):
    """On tensor4 the last rank has no column of F."""
    if exchange == "ragged":
        request.getfixturevalue("ragged")
    case, cotangent, want = gradients_on_one_device()
    axes, split, token_axis = MESHES[name]
    sharded = shard_weights(case.weights, mesh_of(**axes), num_shared_experts=SHARED, **split)
    dispatch = "replicated" if exchange == "replicated" else "all_to_all"

    def over_mesh(x, topk_weights, gate_up_bias, down_bias):
        weights = parallel.ShardedMoeWeights(with_biases(sharded.parts, gate_up_bias, down_bias), sharded.split)
        y = sharded_mxfp4_moe(x, weights, topk_weights, case.topk_ids, token_axis=token_axis, dispatch=dispatch)
        return (y * cotangent).sum()

    biases = sharded.parts.gate_up_bias, sharded.parts.down_bias
    got = jax.jit(jax.grad(over_mesh, (0, 1, 2, 3)))(case.x, case.topk_weights, *biases)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert relative_error(np.asarray(mine), np.asarray(theirs)) < 1e-5
    # The gradient of a part lies where the part does; those of the copies of a shared expert add up.
    own = sharded.split.experts_per_rank
    parts = [np.asarray(g).reshape(*g.shape[:3], -1, g.shape[-1] // n) for g, n in zip(got[2:], (2, 1), strict=True)]
    for part, theirs, halves in zip(parts, want[2:], (2, 1), strict=True):
        routed = part[:, :, :own].reshape(part.shape[0], EXPERTS, *part.shape[3:])
        every = np.concatenate([routed, part[:, :, own:].sum(1)], axis=1)
        if halves == 2:  # [tensor, expert, half, column]
            mine = (
                every.transpose(1, 2, 0, 3).reshape(EXPERTS + SHARED, 2, -1)[:, :, :288].reshape(EXPERTS + SHARED, -1)
            )
        else:
            assert not every[1:].any()
            mine = every[0, :, 0]
        assert relative_error(mine, np.asarray(theirs)) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Arrays and weights of other devices than the mesh's
# ---------------------------------------------------------------------------------------------------------------------


def test_case_wrong_device_is_refused_before_anything_runs():
    case = random_case(tokens=8, experts=8)
    here, there = mesh_of(expert=4), jax.make_mesh((4,), ("expert",), devices=jax.devices()[4:])
    weights = shard_weights(case.weights, here, expert_axis="expert")
    moved = jax.tree.map(lambda a: jax.device_put(np.asarray(a), NamedSharding(there, weights.split.spec)), weights)
    four = "all devices of the mesh that the weights were made for, Mesh('expert': 4, axis_types=(Auto,)) on cpu 0, 1, 2, 3"

    def on(place):
        return jax.device_put(case.x, place)

    for x, w, given, remedy in (
        (on(jax.devices()[5]), weights, "x on cpu 5", "jax.device_put(x, NamedSharding(mesh, PartitionSpec()))"),
        (on(jax.devices()[0]), weights, "x on cpu 0", "jax.device_put(x, NamedSharding(mesh, PartitionSpec()))"),
        (
            case.x,
            moved,
            "weights.parts.gate_up.codes on cpu 4, 5, 6, 7",
            "shard_weights(unshard_weights(weights), mesh, ...)",
        ),
    ):
        with pytest.raises(ValueError, match="sharded_mxfp4_moe: ") as error:
            sharded_mxfp4_moe(x, w, case.topk_weights, case.topk_ids)
        assert f"{given} given; expected {four}. Move it with {remedy}" in str(error.value)
        # Under jit JAX says it, when it compiles.
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(sharded_mxfp4_moe)(x, w, case.topk_weights, case.topk_ids)


@pytest.mark.parametrize("name", ["topk_weights", "topk_ids", "token_mask", "activation_scale"])
def test_case_wrong_device_of_other_arrays(name):
    case = random_case(tokens=8, experts=8)
    weights = shard_weights(case.weights, mesh_of(expert=4), expert_axis="expert")
    given = {
        "topk_weights": case.topk_weights, "topk_ids": case.topk_ids, "token_mask": np.ones(8, bool),
        "activation_scale": np.ones(2, np.float32), "activation_quant": "fp8",
    }  # fmt: skip
    given[name] = jax.device_put(given[name], jax.devices()[5])
    with pytest.raises(
        ValueError, match=rf"^sharded_mxfp4_moe: {name} on cpu 5 given; .*Move it with jax\.device_put\({name}, "
    ):
        sharded_mxfp4_moe(case.x, weights, **given)


def test_case_weights_of_another_mesh():
    case = random_case(tokens=8, experts=8)
    four, eight = mesh_of(expert=4), mesh_of(expert=8)
    weights = shard_weights(case.weights, four, expert_axis="expert")
    operands = case.topk_weights, case.topk_ids
    parts = shard_weights(case.weights, eight, expert_axis="expert").parts
    with pytest.raises(
        ValueError, match=r"of shape \(1, 8, 1, 192, 32\) given with a split over \(1, 4\) .* made for another mesh"
    ):
        jax.jit(sharded_mxfp4_moe).trace(case.x, parallel.ShardedMoeWeights(parts, weights.split), *operands)
    with jax.set_mesh(eight), pytest.raises(ValueError, match=r"'expert': 4, .* is in force; expected one mesh"):
        sharded_mxfp4_moe(case.x, weights, *operands)
    two = shard_weights(case.weights, mesh_of(expert=4, other=2), expert_axis="expert")
    for mesh in (mesh_of(other=2, expert=4), mesh_of(AxisType.Explicit, expert=4, other=2)):  # in order, and in type
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"is in force; expected one mesh\. Use jax\.set_mesh"):
            sharded_mxfp4_moe(case.x, two, *operands)
    inside = jax.shard_map(
        lambda x: sharded_mxfp4_moe(x, weights, *operands), mesh=four, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"called inside of jax.shard_map over .* Inside, call mxfp4_moe"):
        inside(case.x)


# ---------------------------------------------------------------------------------------------------------------------
# Plain jax.jit on arrays that have a sharding
# ---------------------------------------------------------------------------------------------------------------------


def squares(forward, x, topk_weights, biases, topk_ids, weights):
    """The sum of the squares of y, and y."""
    y = forward(x, weights.replace(gate_up_bias=biases[0], down_bias=biases[1]), topk_weights, topk_ids)
    return (y**2).sum(), y


@functools.cache
def squares_on_one_device():
    """A case of 16 tokens, and what `jax.grad` makes of `squares`: ((x, topk_weights, biases), y)."""
    case = layer(11, tokens=16)
    biases = case.weights.gate_up_bias, case.weights.down_bias
    gradient = jax.jit(jax.grad(functools.partial(squares, mxfp4_moe), (0, 1, 2), has_aux=True))
    return case, gradient(case.x, case.topk_weights, biases, case.topk_ids, case.weights)


@pytest.mark.parametrize("implementation", ["xla", "torch"])
def test_plain_jit_divides_tokens(implementation):
    """Each device does its own tokens, in both passes; no activation and no weight is gathered."""
    case, (want, _) = squares_on_one_device()
    mesh = mesh_of(data=4, other=2)
    by_token = NamedSharding(mesh, PartitionSpec("data"))
    weights = jax.device_put(case.weights, NamedSharding(mesh, PartitionSpec()))
    x, topk_weights, topk_ids = jax.device_put((case.x, case.topk_weights, case.topk_ids), by_token)
    operands = x, topk_weights, (weights.gate_up_bias, weights.down_bias), topk_ids, weights

    forward = functools.partial(mxfp4_moe, implementation=implementation)
    gradient = jax.jit(jax.grad(functools.partial(squares, forward), (0, 1, 2), has_aux=True))
    compiled = gradient.lower(*operands).compile()
    got, y = compiled(*operands)
    assert relative_error(np.asarray(y), case.expected()) < 1e-5
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(np.asarray(mine), np.asarray(theirs)) < 1e-5
    assert y.sharding.is_equivalent_to(by_token, 2)
    assert got[0].sharding.is_equivalent_to(by_token, 2)
    assert "all-gather(" not in compiled.as_text()


def test_plain_jit_with_tokens_that_do_not_divide():
    case = layer(12, tokens=18)
    mesh = mesh_of(data=4, other=2)

    @jax.jit
    def run(x, weights, topk_weights, topk_ids):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
        return mxfp4_moe(x, weights, topk_weights, topk_ids)

    y = run(case.x, case.weights, case.topk_weights, case.topk_ids)
    assert relative_error(np.asarray(y), case.expected()) < 1e-5


@pytest.mark.parametrize("spec", [PartitionSpec("expert"), PartitionSpec(None, "expert")])
def test_plain_jit_refuses_weights_that_are_divided(spec):
    """XLA would gather all experts in every call. Inside jit it is seen when XLA divides the program, outside at once."""
    case = random_case(seed=13, experts=8, intermediate=256)
    weights = jax.device_put(case.weights, NamedSharding(mesh_of(expert=8), spec))
    operands = case.x, case.topk_weights, case.topk_ids
    for call in (mxfp4_moe, jax.jit(mxfp4_moe)):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="divided over devices") as error:
            call(operands[0], weights, *operands[1:])
        assert "shard_weights(weights, mesh, expert_axis=...)" in str(error.value)


def test_plain_jit_on_explicit_axes_refuses_divided_tokens():
    case = random_case(seed=13, tokens=16)
    mesh = mesh_of(AxisType.Explicit, data=8)
    x = jax.device_put(case.x, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"divided over Explicit axes(.|\n)*AxisType\.Auto"):
        jax.jit(mxfp4_moe).trace(x, case.weights, case.topk_weights, case.topk_ids)


def test_inside_of_a_shard_map_over_some_of_the_axes():
    """One axis is Manual, the other stays Auto: forward and gradient."""
    case, ((dx, _, _), y) = squares_on_one_device()
    by_token, copies = PartitionSpec("a"), PartitionSpec()

    def local(x, weights, topk_weights, topk_ids):
        return mxfp4_moe(x, weights, topk_weights, topk_ids, implementation="xla")

    over = jax.shard_map(
        local,
        mesh=mesh_of(a=2, b=2),
        in_specs=(by_token, copies, by_token, by_token),
        out_specs=by_token,
        axis_names={"a"},
    )
    biases = case.weights.gate_up_bias, case.weights.down_bias
    gradient = jax.jit(jax.grad(functools.partial(squares, over), has_aux=True))
    for mine, theirs in zip(
        gradient(case.x, case.topk_weights, biases, case.topk_ids, case.weights), (dx, y), strict=True
    ):
        assert relative_error(np.asarray(mine), np.asarray(theirs)) < 1e-5


def test_plain_jit_through_the_host_stays_right():
    """XLA would lose a callback inside of what it divides, so such a call is not divided."""
    case = layer(15, tokens=16)
    mesh = mesh_of(data=8)
    x = jax.device_put(case.x, NamedSharding(mesh, PartitionSpec("data")))
    for activation in ("gelu", "silu"):
        y = jax.jit(
            lambda *a, activation=activation: mxfp4_moe(
                *a, activation=activation, implementation="torch", bridge="callback"
            )
        )(x, case.weights, case.topk_weights, case.topk_ids)
        assert relative_error(np.asarray(y), case.expected(activation=activation)) < 1e-5


def test_plain_jit_on_explicit_axes_refuses_at_trace_time():
    case = random_case(seed=13, experts=8)
    mesh = mesh_of(AxisType.Explicit, expert=8)
    weights = jax.device_put(case.weights, NamedSharding(mesh, PartitionSpec("expert")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="divided over devices"):
        jax.jit(mxfp4_moe).trace(case.x, weights, case.topk_weights, case.topk_ids)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [{"expert_axis": "expert", "tensor_axis": "tensor"}, {"tensor_axis": "tensor"}])
def test_sharded_loading_equals_sharding(tmp_path, split):
    synthetic.quark(tmp_path, experts=8)
    mesh = mesh_of(expert=4, tensor=2)
    whole = checkpoint.load(tmp_path, layer=1, include_shared=True)
    shared = checkpoint.describe(tmp_path).num_shared_experts
    assert shared
    loaded = load_sharded(tmp_path, mesh, layer=1, include_shared=True, **split)
    sharded = shard_weights(whole, mesh, num_shared_experts=shared, **split)
    assert loaded.split == sharded.split
    jax.tree.map(np.testing.assert_array_equal, loaded, sharded)


def test_sharded_loading_reads_each_part_once(tmp_path, monkeypatch):
    """As every process does for its own devices, in a run with one process for each."""
    synthetic.quark(tmp_path, experts=8)
    asked = []
    load = checkpoint.load
    monkeypatch.setattr(
        checkpoint, "load", lambda *a, **k: asked.append((k["experts"], k["intermediate"])) or load(*a, **k)
    )
    load_sharded(tmp_path, mesh_of(data=2, expert=4), layer=1, expert_axis="expert")
    features = checkpoint.describe(tmp_path).intermediate_size
    assert asked == [([2 * rank, 2 * rank + 1], slice(0, features)) for rank in range(4)]
