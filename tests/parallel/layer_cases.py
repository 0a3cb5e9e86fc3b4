"""Flax layers over 4 and 8 virtual CPU devices; `test_parallel.py` runs these in a process of their own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

from jax_mxfp4_moe.layers import Mxfp4Moe, common

assert len(jax.devices()) == 8, "run by test_parallel.py"

FIELDS = {
    "hidden_size": 64, "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "use_bias": True,
    "kernel_axes": ("exp", "mlp", "embed"),
}  # fmt: skip
OVER = {"expert_axis": "expert", "tensor_axis": "tensor", "token_axis": "token"}


def mesh_of(**axes):
    """The first devices in these axes; those of other layers' names divide nothing."""
    kinds, count = (AxisType.Auto,) * len(axes), int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:count])


def rules(mesh):
    """Experts and columns divided over those axes that the mesh has."""
    names = {"exp": "expert", "mlp": "tensor", "embed": None}
    return tuple((name, axis if axis in mesh.axis_names else None) for name, axis in names.items())


def fields_on(mesh, **fields):
    """The axes that the mesh has."""
    return {"mesh": mesh, **{name: axis for name, axis in OVER.items() if axis in mesh.axis_names}, **fields}


@functools.cache
def plain(**fields):
    """A layer on one device, with biases that are not zero."""
    layer = Mxfp4Moe(**FIELDS, **fields, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for part in (layer, layer.shared_experts):
        for name in ("gate_up_bias", "down_bias") if part is not None else ():
            bias = getattr(part, name)
            bias[...] = jnp.asarray(rng.normal(size=bias.shape), jnp.float32)
    return layer


def over(mesh, layer, **fields):
    """The same layer on a mesh, each array divided as its axes are named."""
    shared = layer.shared_experts
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules(mesh)):
        return Mxfp4Moe.from_weights(
            layer.weights, layer.router.kernel[...],
            num_experts_per_tok=2, shared_weights=None if shared is None else shared.weights,
            kernel_axes=FIELDS["kernel_axes"], **fields_on(mesh, **fields),
        )  # fmt: skip


def train(layer, x):
    """y, the gradients by name with all but the first axis joined, and the compiled program."""

    def loss(params, rest, x):
        y = nnx.merge(graph, params, rest)(x)
        return (y**2).mean(), y

    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True)).lower(params, rest, x).compile()
    (_, y), (of_layer, of_x) = compiled(params, rest, x)
    flat = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(of_layer)}
    return y, {name: a.reshape(a.shape[0], -1) for name, a in flat.items()} | {"x": np.asarray(of_x)}, compiled


@functools.cache
def case():
    """x, and what the layer on one device makes of it."""
    x = jax.random.normal(jax.random.key(1), (13, 64))
    return x, *train(plain(), x)[:2]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_three_axes_and_all_to_all_of_a_layer():
    """Output and gradients; arrays lie as the axes need them, so that no packed byte travels."""
    layer = over(mesh_of(token=2, expert=2, tensor=2), plain(), dispatch="all_to_all")
    for array, shape in ((layer.gate_up_codes, (4, 2, 64, 32)), (layer.down_codes, (4, 64, 32))):
        assert {shard.data.shape for shard in array[...].addressable_shards} == {shape}
    jax.tree.map(np.testing.assert_array_equal, layer.weights, plain().weights)
    x, y, expected = case()
    found_y, found, compiled = train(layer, x)
    moved = [line for line in compiled.as_text().splitlines() if re.search(r" (all|collective|reduce)-[a-z-]+\(", line)]
    assert moved
    assert not [line for line in moved if "u8[" in line]
    close(found_y, y)
    assert found.keys() == expected.keys()
    for name in found:
        close(found[name], expected[name])


def test_a_stack_of_layers_in_a_scan():
    """Made by `nnx.vmap`, in which zeros are no tracers. The axis of the layers has no name."""
    mesh, x = mesh_of(expert=2, tensor=2), case()[0]
    unnamed = {"transform_metadata": {nnx.PARTITION_NAME: None}}

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, **unnamed)
    def make(rngs):
        return Mxfp4Moe(**FIELDS, **fields_on(mesh), rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **unnamed)
    def forward(x, layer):
        return layer(x)

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules(mesh)):
        stack = make(nnx.Rngs(0))
        assert stack.weights.gate_up_bias.shape == (2, 8, 256)
        y = nnx.jit(forward)(x, stack)
    graph, state = nnx.split(stack)
    for i in range(2):
        one = nnx.merge(graph, jax.tree.map(lambda a, i=i: np.asarray(a[i]), state))
        weights = jax.tree.map(np.asarray, one.weights)
        x = Mxfp4Moe.from_weights(weights, np.asarray(one.router.kernel[...]), num_experts_per_tok=2)(x)
    close(y, x)


def test_two_axes_of_a_linen_layer_with_a_shared_expert():
    """On 4 devices. The shared expert has columns of its own, which the tensor axis divides too."""
    one = plain(shared_intermediate_size=64)
    module, variables = over(mesh_of(expert=2, tensor=2), one, dispatch="replicated").to_linen()
    assert (module.tensor_axis, module.dispatch) == ("tensor", "replicated")
    assert variables["quantized"]["shared_experts"]["gate_up_codes"].value.shape == (1, 2, 64, 32)
    x = case()[0]
    close(jax.jit(module.apply)(nn.unbox(variables), x), nnx.jit(lambda layer, x: layer(x))(one, x))
    made = jax.eval_shape(module.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, nn.unbox(made)) == jax.tree.map(jnp.shape, nn.unbox(variables))


def test_a_layer_s_dispatch_is_the_one_that_runs(monkeypatch):
    asked = []
    call = common.sharded_mxfp4_moe
    monkeypatch.setattr(
        common, "sharded_mxfp4_moe", lambda *a, **k: asked.append(k.get("dispatch", "not given")) or call(*a, **k)
    )
    mesh = mesh_of(expert=2, tensor=2)
    for dispatch in ("all_to_all", None):
        graph, state = nnx.split(over(mesh, plain(shared_intermediate_size=64), dispatch=dispatch))
        jax.eval_shape(lambda state, x, graph=graph: nnx.merge(graph, state)(x), state, case()[0])
    assert asked == ["all_to_all", "not given", None, "not given"]  # routed, shared


@pytest.fixture
def orbax():
    with ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer


def restore(orbax, path, mesh):
    """The layer on `mesh`, of which no device and no process ever holds all."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules(mesh)):
        graph, state = nnx.split(nnx.eval_shape(lambda: Mxfp4Moe(**FIELDS, **fields_on(mesh), rngs=nnx.Rngs(1))))
        shardings = nnx.get_named_sharding(state, mesh)
    target = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings)
    return nnx.merge(graph, orbax.restore(path, target))


def test_orbax_restores_a_layer_onto_a_larger_mesh(orbax, tmp_path):
    layer = over(mesh_of(expert=4), plain())
    assert len(layer.gate_up_codes[...].sharding.device_set) == 4
    orbax.save(tmp_path / "layer", nnx.state(layer))
    orbax.wait_until_finished()
    again = restore(orbax, tmp_path / "layer", mesh_of(expert=8))
    for name in ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales", "gate_up_bias", "down_bias"):
        array = getattr(again, name)[...]
        assert {shard.data.shape for shard in array.addressable_shards} == {(1, *array.shape[1:])}
        assert len(array.sharding.device_set) == 8
    x, y, _ = case()
    close(nnx.jit(lambda layer, x: layer(x))(again, x), y)


def test_orbax_restores_a_tensor_axis(orbax, tmp_path):
    """Onto more expert ranks; not into a layer without the axis, whose gate_up arrays have another shape."""
    orbax.save(tmp_path / "layer", nnx.state(over(mesh_of(expert=2, tensor=2), plain())))
    orbax.wait_until_finished()
    again = restore(orbax, tmp_path / "layer", mesh_of(expert=4, tensor=2))
    assert {shard.data.shape for shard in again.gate_up_codes[...].addressable_shards} == {(2, 2, 64, 32)}
    jax.tree.map(np.testing.assert_array_equal, again.weights, plain().weights)
    with pytest.raises(ValueError, match=r"\(8, 256.*not compatible with the stored shape: \(8, 2, 128"):
        restore(orbax, tmp_path / "layer", mesh_of(expert=8))
