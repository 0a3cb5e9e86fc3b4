"""The layer under JAX's transformations: vmap in every form, and together with grad; scan, remat, shard_map, export, donation."""

import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import compiled_fast, random_case
from jax import export

from jax_mxfp4_moe import MoeWeights, mxfp4_moe
from jax_mxfp4_moe.testing import relative_error

BATCH = 3
SMALL = {"tokens": 4, "top_k": 2, "hidden": 32, "intermediate": 32, "biases": True}
LAYERS = [random_case(seed=seed, **SMALL) for seed in range(BATCH)]
CASE = LAYERS[0]
DY = np.random.default_rng(7).normal(size=(BATCH, *CASE.x.shape)).astype(np.float32)
TOLERANCE = 2e-6


def stacked(of):
    """One of each layer's x, weights, topk_weights or topk_ids, stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(getattr(case, of) for case in LAYERS))


NAMES = ("x", "weights", "topk_weights", "topk_ids")
STACKED = [stacked(name) for name in NAMES]
FIRST = [jax.tree.map(lambda a: a[0], a) for a in STACKED]


# What is asked here is one layer above the implementations; torch's call is the one that compiles fastest.
IMPLEMENTATION = "torch" if CASE.why_not("torch") is None else "xla"


def layer(x, weights, topk_weights, topk_ids, *, implementation=IMPLEMENTATION, **options):
    return mxfp4_moe(x, weights, topk_weights, topk_ids, implementation=implementation, **options)


def value_and_gradients(x, weights, topk_weights, topk_ids, dy):
    """y and the gradients of x, biases and router weights."""

    def loss(x, biases, topk_weights):
        y = layer(x, MoeWeights(weights.gate_up, weights.down, *biases), topk_weights, topk_ids)
        return (y * dy).sum(), y

    (_, y), found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
        x, (weights.gate_up_bias, weights.down_bias), topk_weights
    )
    return y, found


one = compiled_fast(value_and_gradients)  # once for all tests; a loop over it is what a batch is compared with


def agree(found, expected, tolerance=TOLERANCE):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) <= tolerance


def in_a_loop(function, axes, arguments):
    slices = [
        [a if axis is None else jax.tree.map(lambda a: a[i], a) for a, axis in zip(arguments, axes, strict=True)]  # noqa: B023
        for i in range(BATCH)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(function(*part) for part in slices))


def is_folded(function, *arguments):
    """Whether the program works on all tokens of the batch together."""
    return f"f32[{BATCH * 4},32]" in str(jax.make_jaxpr(function)(*arguments))


# --- vmap ------------------------------------------------------------------------------------------------------------

IN_AXES = [axes for axes in itertools.product((0, None), repeat=4) if any(axis == 0 for axis in axes)]


@pytest.mark.parametrize(
    ("axes", "implementation"),
    [*((axes, "torch") for axes in IN_AXES), ((0, None, 0, 0), "xla"), ((0, 0, None, 0), "xla")],
    ids=str,
)
def test_in_axes(axes, implementation):
    """Every combination of what is mapped and what is shared: what a loop gives, as more tokens where weights are shared."""
    if CASE.why_not(implementation) is not None:
        pytest.skip(f"{implementation} {CASE.why_not(implementation)}")
    arguments = [a if axis == 0 else b for axis, a, b in zip(axes, STACKED, FIRST, strict=True)]
    mapped = jax.vmap(lambda *arguments: layer(*arguments, implementation=implementation), axes)
    agree(mapped(*arguments), in_a_loop(lambda *a: one(*a, DY[0])[0], axes, arguments))
    assert is_folded(mapped, *arguments) is (axes[1] is None)


@pytest.mark.parametrize("axes", [(0, None, 0, 0), (0, None, None, None), (None, 0, None, None)], ids=str)
def test_vmap_of_grad_and_grad_of_vmap(axes):
    """One gradient for each of a batch, and the gradient of a batch, in which what is shared gets the sum."""
    arguments = [a if axis == 0 else b for axis, a, b in zip(axes, STACKED, FIRST, strict=True)]
    y, each = in_a_loop(one, (*axes, 0), (*arguments, DY))
    agree(compiled_fast(jax.vmap(value_and_gradients, (*axes, 0)))(*arguments, DY), (y, each))

    def loss(x, biases, topk_weights):
        weights = MoeWeights(arguments[1].gate_up, arguments[1].down, *biases)
        return (jax.vmap(layer, axes)(x, weights, topk_weights, arguments[3]) * DY).sum()

    biases = (arguments[1].gate_up_bias, arguments[1].down_bias)
    total = compiled_fast(jax.grad(loss, (0, 1, 2)))(arguments[0], biases, arguments[2])
    summed = tuple(
        part if axis == 0 else jax.tree.map(lambda a: a.sum(axis=0), part)
        for axis, part in zip(axes[:3], each, strict=True)
    )
    agree(total, summed)


def test_axes_that_are_not_the_first():
    x, topk_weights, topk_ids = (jnp.moveaxis(STACKED[i], 0, 1) for i in (0, 2, 3))
    y = jax.vmap(lambda *a: layer(a[0], FIRST[1], *a[1:]), in_axes=1, out_axes=2)(x, topk_weights, topk_ids)
    expected = in_a_loop(lambda *a: one(*a, DY[0])[0], (0, None, 0, 0), (STACKED[0], FIRST[1], *STACKED[2:]))
    agree(jnp.moveaxis(y, 2, 0), expected)


def test_nested():
    """Batches of batches of gradients: shared weights inside, then a loop over weights outside."""
    x = jnp.stack([STACKED[0], STACKED[0][::-1]])
    over_x = jax.vmap(jax.vmap(value_and_gradients, (0, None, 0, 0, 0)), (0, None, None, None, None))
    y, found = compiled_fast(over_x)(x, FIRST[1], *STACKED[2:], DY)
    for i in range(2):
        expected = in_a_loop(one, (0, None, 0, 0, 0), (x[i], FIRST[1], *STACKED[2:], DY))
        agree((y[i], jax.tree.map(lambda a: a[i], found)), expected)  # noqa: B023
    over_weights = jax.vmap(jax.vmap(layer, (0, None, 0, 0)), (None, 0, None, None))
    y = compiled_fast(over_weights)(STACKED[0], STACKED[1], *STACKED[2:])
    for i, weights in enumerate(case.weights for case in LAYERS):
        expected = in_a_loop(lambda *a: one(*a, DY[0])[0], (0, None, 0, 0), (STACKED[0], weights, *STACKED[2:]))
        agree(y[i], expected)


def test_expert_maps_and_masks():
    """A batch over expert_map alone, as for each device of a mesh, and over token_mask alone."""
    maps = np.full((BATCH, 5), -1, np.int32)
    maps[0, :2], maps[1, 2:4], maps[2, 4:] = [0, 1], [2, 3], [4]
    parts = jax.vmap(lambda m: layer(*FIRST, expert_map=m))(jnp.asarray(maps))
    agree(parts.sum(axis=0), one(*FIRST, DY[0])[0])
    masks = np.arange(4) < np.array([[1], [3], [4]])
    y = jax.vmap(lambda mask: layer(*FIRST, token_mask=mask))(jnp.asarray(masks))
    agree(y, np.where(masks[..., None], one(*FIRST, DY[0])[0], 0))


def test_a_batch_is_one_custom_call():
    """Forward, and none on the way back; so is a batch of different weights, but inside of a loop."""
    if CASE.why_not("torch") is not None:
        pytest.skip(f"torch {CASE.why_not('torch')}")

    def calls(function, *arguments):
        return len(re.findall(r"target_name=jax_mxfp4_moe|pure_callback\[", str(jax.make_jaxpr(function)(*arguments))))

    def through_torch(*arguments):
        return layer(*arguments, implementation="torch")

    over_x, over_weights = jax.vmap(through_torch, (0, None, 0, 0)), jax.vmap(through_torch, (None, 0, None, None))
    assert calls(over_x, STACKED[0], FIRST[1], *STACKED[2:]) == 1
    assert calls(over_weights, FIRST[0], STACKED[1], *FIRST[2:]) == 1
    assert calls(jax.grad(lambda x: over_x(x, FIRST[1], *STACKED[2:]).sum()), STACKED[0]) == 1


def test_configs_under_vmap():
    """The folded problem gets a config of its own, and a config of the caller's stays."""
    x, ids = jnp.tile(CASE.x, (64, 1, 1)), jnp.tile(CASE.topk_ids, (64, 1, 1))

    def rows_of_products(**options):
        def over_batch(x, ids):
            return layer(x, FIRST[1], FIRST[2], ids, implementation="xla", **options)

        program = str(jax.make_jaxpr(jax.vmap(over_batch))(x, ids))
        return {int(rows) for rows in re.findall(r"f32\[(\d+),64\] = dot_general", program)}

    assert rows_of_products() == {64}  # 512 rows of 5 experts
    assert rows_of_products(config={"tile_rows": 8}) == {8}


def test_more_rows_than_fit_go_one_by_one(monkeypatch):
    """As do problems that the implementation refuses when they are larger."""
    from jax_mxfp4_moe.implementations import IMPLEMENTATIONS

    xla = IMPLEMENTATIONS["xla"]
    monkeypatch.setattr(xla, "why_not", lambda problem, platform: "is small" if problem.tokens > 4 else None)
    program = jax.vmap(lambda x: layer(x, *FIRST[1:], implementation="xla", config={"tile_rows": 1}))
    assert not is_folded(program, STACKED[0])
    assert is_folded(jax.vmap(lambda x: layer(x, *FIRST[1:], implementation="torch")), STACKED[0])
    shape = jax.eval_shape(
        jax.vmap(lambda x: layer(x, *FIRST[1:])), jax.ShapeDtypeStruct((2**29, *CASE.x.shape), jnp.float32)
    )
    assert shape.shape == (2**29, *CASE.x.shape)


def test_jacobian_by_rows():
    """jax.jacrev maps the backward pass alone over cotangents."""
    found = compiled_fast(jax.jacrev(lambda w: layer(*FIRST[:2], w, FIRST[3])))(FIRST[2])
    expected = in_a_loop(lambda *a: one(*a)[1][2], (None,) * 4 + (0,), (*FIRST, DY))
    agree(jnp.einsum("btd,tdsk->bsk", DY, found), expected)


# --- scan, remat, jit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_through_a_stack_of_layers(remat):
    """Stacked weights, scanned over; with jax.checkpoint around a layer the same numbers."""

    def block(x, parts):
        weights, topk_weights = parts
        return x + jnp.tanh(layer(x, weights, topk_weights, FIRST[3])), None

    body = jax.checkpoint(block) if remat else block

    def scanned(x, biases, topk_weights):
        weights = MoeWeights(STACKED[1].gate_up, STACKED[1].down, *biases)
        return (jax.lax.scan(body, x, (weights, topk_weights))[0] * DY[0]).sum()

    trained = (FIRST[0], (STACKED[1].gate_up_bias, STACKED[1].down_bias), STACKED[2])
    found = compiled_fast(jax.grad(scanned, (0, 1, 2)))(*trained)

    # The chain rule by hand, from the gradients of one layer.
    inputs = [FIRST[0]]
    parts = [(case.weights, case.topk_weights) for case in LAYERS]
    for weights, topk_weights in parts:
        y = one(inputs[-1], weights, topk_weights, FIRST[3], DY[0])[0]
        inputs.append(inputs[-1] + jnp.tanh(y))
    back, by_layer = DY[0], []
    for x, (weights, topk_weights) in zip(inputs[-2::-1], parts[::-1], strict=True):
        y = one(x, weights, topk_weights, FIRST[3], DY[0])[0]
        dx, biases, dw = one(x, weights, topk_weights, FIRST[3], back * (1 - jnp.tanh(y) ** 2))[1]
        back = back + dx
        by_layer.insert(0, (biases, dw))
    biases, dw = jax.tree.map(lambda *leaves: np.stack(leaves), *by_layer)
    agree(found, (back, biases, dw), 1e-5)


def test_donation_and_nested_jit():
    """A donated x may be written over by its own gradient; a jit in a jit changes nothing."""
    expected = one(*FIRST, DY[0])[1][0]
    donating = compiled_fast(lambda x: jax.jit(value_and_gradients)(x, *FIRST[1:], DY[0])[1][0], donate_argnums=0)
    x = FIRST[0] + 0
    agree(donating(x), expected)
    assert x.is_deleted()


def test_static_options():
    """Options may be static arguments of the caller's jit; each gives a program of its own."""
    call = jax.jit(layer, static_argnames=("activation", "activation_limit", "implementation"))
    plain, clamped = (
        call(*FIRST, implementation=IMPLEMENTATION, **options)
        for options in ({"activation": "silu"}, {"activation": "silu_clamped", "activation_limit": 0.5})
    )
    agree(plain, one(*FIRST, DY[0])[0])
    assert relative_error(clamped, plain) > 0.01


def test_shapes_without_running():
    y, (dx, biases, dw) = jax.eval_shape(value_and_gradients, *FIRST, DY[0])
    assert (y.shape, dx.shape, dw.shape) == (CASE.x.shape, CASE.x.shape, CASE.topk_weights.shape)
    assert [bias.shape for bias in biases] == [CASE.gate_up_bias.shape, CASE.down_bias.shape]
    mapped = jax.eval_shape(jax.vmap(value_and_gradients, (0, None, 0, 0, 0)), STACKED[0], FIRST[1], *STACKED[2:], DY)
    assert [a.shape[0] for a in jax.tree.leaves(mapped)] == [BATCH] * 5


# --- ahead of time ---------------------------------------------------------------------------------------------------


def test_compiled_ahead_of_time():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (*FIRST, DY[0]))
    program = compiled_fast(lambda *arguments: value_and_gradients(*arguments)).lower(*shapes).compile()
    agree(program(*FIRST, DY[0]), one(*FIRST, DY[0]))


def test_export():
    """The xla implementation is plain JAX, and an exported program runs on any platform; its derivative goes along."""
    exported = export.export(jax.jit(layer, static_argnames="implementation"), platforms=["cpu", "cuda", "rocm"])(
        *FIRST, implementation="xla"
    )
    assert exported.platforms == ("cpu", "cuda", "rocm")
    loaded = compiled_fast(jax.value_and_grad(lambda x: (exported.call(x, *FIRST[1:]) * DY[0]).sum()))
    y, found = one(*FIRST, DY[0])
    agree(loaded(FIRST[0]), ((y * DY[0]).sum(), found[0]))


def test_export_to_bytes_and_back():
    """Weights are arguments of the program; their static parts are written as text."""
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export writes with, is not installed")
    exported = export.export(jax.jit(lambda *a: layer(*a, implementation="xla")))(*FIRST)
    again = export.deserialize(exported.serialize(vjp_order=1))
    loaded = compiled_fast(jax.value_and_grad(lambda x: (again.call(x, *FIRST[1:]) * DY[0]).sum()))
    y, found = one(*FIRST, DY[0])
    agree(loaded(FIRST[0]), ((y * DY[0]).sum(), found[0]))


def test_export_of_a_custom_call():
    """JAX writes a program with custom calls only if told that their names will keep their meaning."""
    from jax_mxfp4_moe.implementations import torch_call

    for reason in (CASE.why_not("torch"), torch_call.why_not("eager")):
        if reason is not None:
            pytest.skip(f"torch {reason}")
    function = jax.jit(lambda *a: layer(*a, implementation="torch", bridge="eager"))
    with pytest.raises(ValueError, match=r"custom calls whose targets have no compatibility guarantees"):
        export.export(function)(*FIRST)
    allowed = [export.DisabledSafetyCheck.custom_call("jax_mxfp4_moe_eager")]
    exported = export.export(function, disabled_checks=allowed)(*FIRST)
    agree(exported.call(*FIRST), one(*FIRST, DY[0])[0])


def test_a_symbolic_number_of_tokens_is_refused():
    (tokens,) = export.symbolic_shape("tokens")
    shapes = [jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype) for a in (FIRST[0], *FIRST[2:])]
    with pytest.raises(Exception, match=r"'tokens'.*constant"):
        export.export(jax.jit(lambda x, w, i: layer(x, FIRST[1], w, i)))(*shapes)


# --- several devices -------------------------------------------------------------------------------------------------

ON_TWO_DEVICES = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from test_transforms import CASE, DY, FIRST, MoeWeights, agree, layer

mesh = Mesh(np.array(jax.devices()), ("d",))
assert mesh.size == 2

def found(function):
    def loss(x, biases, topk_weights):
        weights = MoeWeights(FIRST[1].gate_up, FIRST[1].down, *biases)
        return (function(x, weights, topk_weights, FIRST[3]) * DY[0]).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(FIRST[0], (FIRST[1].gate_up_bias, FIRST[1].down_bias), FIRST[2])

expected = found(layer)
for name in sys.argv[2:]:
    def local(*arguments):
        return layer(*arguments, implementation=name)

    # Tokens over devices: what the devices share, the biases, gets the sum over devices.
    by_token = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P(), P("d"), P("d")), out_specs=P("d"))
    agree(found(by_token), expected, 1e-5)

    # A batch over devices, whose name vmap is told.
    xs = jax.device_put(np.stack([FIRST[0], 2 * FIRST[0]]), NamedSharding(mesh, P("d")))
    ys = jax.jit(jax.vmap(lambda x: local(x, *FIRST[1:]), spmd_axis_name="d"))(xs)
    agree(ys[0], layer(*FIRST), 1e-5)
    print("AGREE", name)
"""


def test_gradients_inside_shard_map():
    """On two virtual devices, with JAX's check of what varies over the mesh."""
    names = [name for name in ("xla", "torch") if CASE.why_not(name) is None]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_TWO_DEVICES), str(Path(__file__).parent), *names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"},
    )
    assert done.stdout.split() == [word for name in names for word in ("AGREE", name)], done.stderr


def test_a_batch_of_none():
    case = random_case(tokens=3)
    x = jnp.zeros((0, *case.x.shape), case.x.dtype)
    call = jax.vmap(lambda x: mxfp4_moe(x, case.weights, case.topk_weights, case.topk_ids))
    assert call(x).shape == x.shape
    assert jax.vmap(jax.grad(lambda x: call(x[None]).sum()))(x).shape == x.shape
