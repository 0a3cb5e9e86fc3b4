import inspect
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeVariableNotFoundError
from jax.sharding import PartitionSpec

from jax_mxfp4_moe import (
    MoeWeights,
    Mxfp4Array,
    append_shared_experts,
    dequantize,
    mxfp4_moe,
    quantize,
    quantize_weights,
    topk_routing,
)
from jax_mxfp4_moe.implementations.triton.layout import shuffle, unshuffle
from jax_mxfp4_moe.layers import Mxfp4Moe, Mxfp4MoeLinen, Quantized, RouterState, common
from jax_mxfp4_moe.layers import nnx as nnx_layer

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2}
FULL = {**SIZES, "num_shared_experts": 2, "use_bias": True, "router_bias": True}


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(7), (2, 5, 64))


def with_random_biases(layer):
    keys = jax.random.split(jax.random.key(3), 3)
    for key, bias in zip(keys, (layer.router.bias, layer.gate_up_bias, layer.down_bias), strict=True):
        bias[...] = jax.random.normal(key, bias[...].shape)
    return layer


@pytest.fixture(scope="module")
def layer():
    return with_random_biases(Mxfp4Moe(**FULL, rngs=nnx.Rngs(0)))


def expected(layer, x, **options):
    """The layer written out in calls of the functions that it stands for."""
    logits = jnp.dot(x, layer.router.kernel[...], precision="highest")
    logits = logits if layer.router.bias is None else logits + layer.router.bias[...]
    bias = None if layer.correction_bias is None else layer.correction_bias[...]
    names = ("scoring", "renormalize", "num_groups", "topk_groups", "group_score", "routed_scaling_factor")
    fields = {name: getattr(layer, name) for name in names}
    routing = topk_routing(logits, layer.num_experts_per_tok, correction_bias=bias, **fields)
    routing = append_shared_experts(*routing, layer.num_experts, layer.num_shared_experts)
    return mxfp4_moe(x, layer.weights, *routing, **options)


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def slices(weights, *experts):
    """Some of the experts."""
    experts = np.array(experts)
    biases = (b if b is None else b[experts] for b in (weights.gate_up_bias, weights.down_bias))
    return MoeWeights(weights.gate_up[experts], weights.down[experts], *biases)


def prepared(weights):
    """The weights in the layout that `prepare` makes on a GPU."""
    return weights.replace(gate_up=shuffle(weights.gate_up), down=shuffle(weights.down))


def variables_of(layer, linen):
    bias = None if layer.router.bias is None else layer.router.bias[...]
    return linen.variables_from_weights(layer.weights, layer.router.kernel[...], bias)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [(SIZES, {}), (FULL, {"activation_quant": "mxfp4"}), (FULL, {"implementation": "torch"})],
    ids=["plain", "full_quantized", "full_torch"],
)
def test_both_modules_are_the_functions_they_stand_for(x, sizes, options):
    layer = Mxfp4Moe(**sizes, **options, rngs=nnx.Rngs(0))
    if sizes is FULL:
        with_random_biases(layer)
    y = layer(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y, expected(layer, x, **options), rtol=1e-5, atol=1e-6)
    linen = Mxfp4MoeLinen(**sizes, **options)
    np.testing.assert_allclose(jax.jit(linen.apply)(variables_of(layer, linen), x), y, rtol=1e-5, atol=1e-6)


def test_options_reach_the_functions(x, monkeypatch):
    """Every option under its own name, and to the separate shared expert too."""
    options = {
        "activation": "swiglu_oai",
        "activation_alpha": 1.3,
        "activation_limit": 2.0,
        "activation_quant": "mxfp4",
        "scale_rule": "rceil",
        "rounding": "half_away",
        "apply_router_weight_on_input": True,
        "implementation": ("torch", "xla"),
        "bridge": "callback",
    }
    routing = {
        "scoring": "sigmoid",
        "renormalize": False,
        "num_groups": 3,
        "topk_groups": 2,
        "group_score": "max",
        "routed_scaling_factor": 1.5,
    }
    asked = []

    def record(function):
        def recorded(*args, **kwargs):
            asked.append({name: value for name, value in kwargs.items() if name in options | routing})
            return function(*args, **kwargs)

        return recorded

    fields = {**SIZES, **options, **routing, "implementation": ["torch", "xla"], "shared_intermediate_size": 32}
    layer = Mxfp4Moe(**fields, rngs=nnx.Rngs(0))
    module, variables = layer.to_linen()
    monkeypatch.setattr(common, "topk_routing", record(topk_routing))
    monkeypatch.setattr(common, "mxfp4_moe", record(lambda x, *_, **__: x))
    layer(x)
    assert asked == [routing, options, options]
    module.apply(variables, x)
    assert asked[3:] == [routing, routing, options, options]  # the first routing is the check of the fields


def test_both_modules_have_the_same_fields():
    parameters = inspect.signature(Mxfp4Moe.__init__).parameters
    nnx_fields = {name: p.default for name, p in parameters.items() if name not in ("self", "rngs")}
    linen_fields = {name: p.default for name, p in inspect.signature(Mxfp4MoeLinen).parameters.items()}
    assert linen_fields.keys() - nnx_fields.keys() == {"layout", "shared_layout", "parent", "name"}
    assert nnx_fields == {name: linen_fields[name] for name in nnx_fields}


# --- the router ------------------------------------------------------------------------------------------------------

DEEPSEEK = {
    "scoring": "sigmoid",
    "num_groups": 3,
    "topk_groups": 1,
    "routed_scaling_factor": 2.5,
}


def test_routing_options(layer, x):
    bias = jnp.array([0.0, 0.0, 3.0, 3.0, 0.0, 0.0])  # the group of experts 2 and 3 wins whatever the logits are
    routed = Mxfp4Moe.from_weights(
        layer.weights,
        layer.router.kernel[...],
        num_experts_per_tok=2,
        num_shared_experts=2,
        correction_bias=bias,
        **DEEPSEEK,
    )
    y = routed(x)
    same(y, expected(routed, x))
    # By hand: the weights are sigmoids that add up to 2.5; the two shared experts count once each.
    scores = jax.nn.sigmoid(jnp.dot(x, layer.router.kernel[...], precision="highest"))[..., 2:4]
    topk_weights = jnp.concatenate([2.5 * scores / scores.sum(-1, keepdims=True), jnp.ones((2, 5, 2))], axis=-1)
    topk_ids = jnp.broadcast_to(jnp.array([2, 3, 6, 7]), (2, 5, 4))
    same(y, mxfp4_moe(x, layer.weights, topk_weights, topk_ids))
    module, variables = routed.to_linen()
    assert set(variables["router_state"]) == {"correction_bias"}
    same(module.apply(variables, x), y)


def test_the_correction_bias_is_no_parameter(layer, x):
    weights, kernel = slices(layer.weights, 0, 1, 2, 3, 4, 5), layer.router.kernel[...]
    bias = jnp.zeros(6, jnp.bfloat16)
    layer = Mxfp4Moe.from_weights(weights, kernel, num_experts_per_tok=2, correction_bias=bias, scoring="sigmoid")
    assert layer.correction_bias[...].dtype == jnp.float32
    y = layer(x)
    layer.correction_bias[...] += jnp.array([9.0, 9.0, 0, 0, 0, 0])
    assert not np.allclose(layer(x), y)
    assert {path for path, _ in nnx.to_flat_state(nnx.state(layer, RouterState))} == {("correction_bias",)}
    assert not issubclass(RouterState, nnx.Param)
    made = Mxfp4MoeLinen(**SIZES, use_correction_bias=True, scoring="sigmoid").init(jax.random.key(0), x)
    assert made["router_state"]["correction_bias"].shape == (6,)
    assert set(made["params"]) == {"router"}


# --- shared experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gated", "dtype"), [(False, jnp.bfloat16), (True, jnp.float32)], ids=["plain_bfloat16", "gated_float32"]
)
def test_fused_and_separate_shared_experts_agree(layer, x, gated, dtype):
    weights, kernel = layer.weights, layer.router.kernel[...]
    options = {
        "num_experts_per_tok": 2,
        "shared_gate_kernel": jax.random.normal(jax.random.key(5), (64, 1)) if gated else None,
        "routed_scaling_factor": 2.5,
        "dtype": dtype,
    }
    fused = Mxfp4Moe.from_weights(slices(weights, *range(7)), kernel, num_shared_experts=1, **options)
    separate = Mxfp4Moe.from_weights(slices(weights, *range(6)), kernel, shared_weights=slices(weights, 6), **options)
    assert separate.shared_intermediate_size == 96
    y = fused(x)
    assert y.dtype == dtype
    # Both add in float32 and round once.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-5}
    y = y.astype(jnp.float32)
    np.testing.assert_allclose(separate(x).astype(jnp.float32), y, **tolerance)
    module, variables = separate.to_linen()
    np.testing.assert_allclose(module.apply(variables, x).astype(jnp.float32), y, **tolerance)


def test_a_shared_gate_weights_the_shared_expert(layer, x):
    weights, gate_kernel = layer.weights, jax.random.normal(jax.random.key(5), (64, 1))
    gated = Mxfp4Moe.from_weights(
        slices(weights, *range(7)),
        layer.router.kernel[...],
        num_experts_per_tok=2,
        num_shared_experts=1,
        routed_scaling_factor=2.5,
        shared_gate_kernel=gate_kernel,
    )
    gate = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(gate_kernel, np.float64)))
    topk_weights, topk_ids = topk_routing(gated.router(x), 2)
    topk_weights = jnp.concatenate([2.5 * topk_weights, jnp.asarray(gate, jnp.float32)], axis=-1)
    topk_ids = jnp.concatenate([topk_ids, jnp.full((2, 5, 1), 6)], axis=-1)
    same(gated(x), mxfp4_moe(x, weights, topk_weights, topk_ids))


def test_a_separate_shared_expert_of_twice_the_width_is_two_fused_ones(layer, x):
    weights = layer.weights.replace(gate_up_bias=None)
    two, f = weights.gate_up[6:], 96

    def wide(codes, per_byte):  # gate rows of both experts, then up rows of both; columns of both
        rows = jnp.concatenate([codes[0, :f], codes[1, :f], codes[0, f:], codes[1, f:]])
        return rows[None]

    gate_up = Mxfp4Array(wide(two.codes, 2), wide(two.scales, 32))
    down = Mxfp4Array(
        *(jnp.concatenate([a[6], a[7]], axis=-1)[None] for a in (weights.down.codes, weights.down.scales))
    )
    down_bias = (weights.down_bias[6] + weights.down_bias[7])[None]
    routed = slices(weights, *range(6))
    kernel = layer.router.kernel[...]
    separate = Mxfp4Moe.from_weights(
        routed, kernel, num_experts_per_tok=2, shared_weights=MoeWeights(gate_up, down, None, down_bias)
    )
    assert separate.shared_intermediate_size == 192
    fused = Mxfp4Moe.from_weights(weights, kernel, num_experts_per_tok=2, num_shared_experts=2)
    same(separate(x), fused(x))


def test_arrays_of_a_separate_shared_expert(x):
    options = {"shared_intermediate_size": 32, "use_shared_gate": True, "use_bias": True, "use_correction_bias": True}
    layer = Mxfp4Moe(**SIZES, **options, use_activation_scale=True, activation_quant="fp8", rngs=nnx.Rngs(0))
    made = Mxfp4MoeLinen(**SIZES, **options, use_activation_scale=True, activation_quant="fp8").init(
        jax.random.key(0), x
    )
    module, given = layer.to_linen()
    assert jax.tree.structure(made) == jax.tree.structure(given)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, given)
    assert {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(layer))} == {
        "/".join(key.key for key in path)
        for collection in made.values()
        for path, _ in jax.tree_util.tree_leaves_with_path(collection)
    }
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(layer)))
    assert shapes["shared_experts"]["gate_up_codes"] == (1, 64, 32)
    assert shapes["shared_experts"]["down_scales"] == (1, 64, 1)
    assert shapes["shared_gate"] == {"kernel": (64, 1)}
    assert shapes["activation_scale"] == (2,)
    same(module.apply(given, x), layer(x))
    layer.activation_scale[...] = jnp.array([1e-3, 1.0])  # x is clipped at 448e-3
    same(layer(x), expected_separate(layer, x))
    assert not np.allclose(layer(x), module.apply(given, x), atol=1e-2)


def expected_separate(layer, x):
    shared = layer.shared_experts.weights
    gate = jax.nn.sigmoid(layer.shared_gate(x))
    alone = mxfp4_moe(x, shared, gate, jnp.zeros((2, 5, 1), int))
    return expected(layer, x) + alone


def test_token_mask(layer, x):
    options = {"num_experts_per_tok": 2, "shared_gate_kernel": jnp.ones((64, 1))}
    parts = {"num_shared_experts": 2}, {"shared_weights": slices(layer.weights, 6)}
    mask = jnp.arange(10).reshape(2, 5) % 3 > 0
    for weights, shared in zip((layer.weights, slices(layer.weights, *range(6))), parts, strict=True):
        masked = Mxfp4Moe.from_weights(weights, layer.router.kernel[...], **options, **shared)
        y = masked(jnp.where(mask[..., None], x, jnp.nan), token_mask=mask)
        same(y, jnp.where(mask[..., None], masked(x), 0))
        module, variables = masked.to_linen()
        np.testing.assert_array_equal(module.apply(variables, x, token_mask=mask)[~mask], 0)


def test_what_a_masked_token_holds_reaches_no_gradient(layer, x):
    """The router reads every row, also one of NaN."""
    mask = jnp.arange(10).reshape(2, 5) % 3 > 0
    masked = Mxfp4Moe.from_weights(
        slices(layer.weights, *range(6)),
        layer.router.kernel[...],
        num_experts_per_tok=2,
        shared_gate_kernel=jnp.ones((64, 1)),
        shared_weights=slices(layer.weights, 6),
    )
    module, variables = masked.to_linen()

    def gradients(x):
        def loss(params):
            return (module.apply({**variables, "params": params}, x, token_mask=mask) ** 2).sum()

        return nnx.grad(lambda m: (m(x, token_mask=mask) ** 2).sum())(masked), jax.grad(loss)(variables["params"])

    got, want = gradients(jnp.where(mask[..., None], x, jnp.nan)), gradients(x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# --- everything else -------------------------------------------------------------------------------------------------


def test_leading_axes_are_tokens(layer, x):
    flat = layer(x.reshape(-1, 64))
    np.testing.assert_allclose(layer(x).reshape(-1, 64), flat, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer(x[0, 0]), flat[0], rtol=1e-4, atol=1e-5)  # one token may use another tile size
    assert layer(x[:0]).shape == (0, 5, 64)


def test_under_jit(layer, x):
    y = layer(x)
    graph, state = nnx.split(layer)
    assert hash(graph) == hash(nnx.split(layer)[0])
    for again in (
        nnx.jit(lambda layer, x: layer(x))(layer, x),
        jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x),
        nnx.merge(graph, state)(x),
    ):
        np.testing.assert_allclose(again, y, rtol=1e-5, atol=1e-6)


def test_parameters_are_the_floats(layer):
    _, parameters, quantized = nnx.split(layer, nnx.Param, Quantized)
    assert {path for path, _ in nnx.to_flat_state(parameters)} == {
        ("router", "kernel"),
        ("router", "bias"),
        ("gate_up_bias",),
        ("down_bias",),
    }
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(parameters))
    assert len(jax.tree.leaves(quantized)) == 4
    assert all(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(quantized))
    assert not issubclass(Quantized, nnx.Param)
    # nnx.grad differentiates nnx.Param only, and so meets no uint8 leaf.
    gradients = nnx.grad(lambda layer: jnp.sum(layer.router.kernel[...] ** 2))(layer)
    assert jax.tree.structure(gradients) == jax.tree.structure(parameters)


def test_linen_variables_are_the_nnx_arrays(layer, x):
    made = Mxfp4MoeLinen(**FULL).init(jax.random.key(0), x)
    given = variables_of(layer, Mxfp4MoeLinen(**FULL))
    assert jax.tree.structure(made) == jax.tree.structure(given)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, given)
    assert {leaf.dtype for leaf in jax.tree.leaves(made["quantized"])} == {np.dtype("uint8")}
    assert {leaf.dtype for leaf in jax.tree.leaves(made["params"])} == {np.dtype("float32")}
    paths = {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(layer))}
    assert paths == {
        "/".join(key.key for key in path)
        for collection in made.values()
        for path, _ in jax.tree_util.tree_leaves_with_path(collection)
    }


def test_linen_draws_codes_and_scales_of_one_array(x):
    variables = Mxfp4MoeLinen(**SIZES).init(jax.random.key(0), x)["quantized"]
    # In every block of an array that was quantized, the largest code is at least 4 under the "even" rule (a value of 2).
    codes = np.asarray(variables["gate_up_codes"])
    largest = np.maximum(codes & 7, codes >> 4 & 7).reshape(*codes.shape[:-1], -1, 16).max(axis=-1)
    assert largest.min() >= 4
    assert not (codes[0] == codes[1]).all()


def test_random_experts_are_drawn_as_flax_draws_kernels():
    asked = []

    def kernel_init(key, shape, dtype):
        asked.append(shape)
        return nnx.initializers.lecun_normal()(key, shape, dtype)

    layer = Mxfp4Moe(512, 32, 3, 1, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    assert set(asked) == {(512, 3), (512, 64), (32, 512)}  # never a stack of experts
    assert np.std(dequantize(layer.weights.gate_up, jnp.float32)) == pytest.approx(512**-0.5, rel=0.05)
    assert np.std(dequantize(layer.weights.down, jnp.float32)) == pytest.approx(32**-0.5, rel=0.05)


def test_a_shared_expert_counts_once_with_weight_1(x):
    layer = Mxfp4Moe(**SIZES, num_shared_experts=1, rngs=nnx.Rngs(0))
    weights = layer.weights
    assert weights.num_experts == 7
    ones, shared = jnp.ones((2, 5, 1)), jnp.full((2, 5, 1), 6)
    alone = mxfp4_moe(x, weights, ones, shared)
    routed = mxfp4_moe(x, weights, *topk_routing(layer.router(x), 2))
    np.testing.assert_allclose(layer(x), routed + alone, rtol=1e-4, atol=1e-5)


def test_from_weights_takes_the_arrays_as_they_are(layer, x):
    again = Mxfp4Moe.from_weights(
        layer.weights, layer.router.kernel[...], layer.router.bias[...], num_experts_per_tok=2, num_shared_experts=2
    )
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(layer))
    assert again.gate_up_codes[...] is layer.gate_up_codes[...]
    np.testing.assert_array_equal(again(x), layer(x))
    # Only one of the two biases.
    weights = layer.weights
    weights.gate_up_bias = None
    again = Mxfp4Moe.from_weights(weights, layer.router.kernel[...], num_experts_per_tok=2, num_shared_experts=2)
    assert again.gate_up_bias is None
    np.testing.assert_allclose(again(x), expected(again, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("given", "quant"), [("auto", "mxfp4"), (None, None), ("mxfp4", "mxfp4")])
def test_from_weights_follows_what_weights_were_made_for(x, given, quant):
    layer = Mxfp4Moe(**SIZES, activation_quant="mxfp4", rngs=nnx.Rngs(0))
    assert layer.weights.activation_quant == "mxfp4"
    again = Mxfp4Moe.from_weights(
        layer.weights, layer.router.kernel[...], num_experts_per_tok=2, activation_quant=given
    )
    assert again.activation_quant == quant
    np.testing.assert_array_equal(again(x), expected(again, x, activation_quant=quant))


def test_from_weights_draws_nothing(layer):
    def kernel_init(key, shape, dtype):
        assert isinstance(key, jax.core.Tracer)
        return jnp.zeros(shape, dtype)

    Mxfp4Moe.from_weights(
        layer.weights, layer.router.kernel[...], num_experts_per_tok=2, num_shared_experts=2, kernel_init=kernel_init
    )


def test_state_goes_through_plain_bytes(layer, x):
    flat = {"/".join(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(layer))}
    flat = pickle.loads(pickle.dumps(flat))
    assert {str(array.dtype) for array in flat.values()} == {"uint8", "float32"}
    other = Mxfp4Moe(**FULL, rngs=nnx.Rngs(1))
    assert not np.allclose(other(x), layer(x))
    state = nnx.state(other)
    for path, leaf in nnx.to_flat_state(state):
        leaf[...] = jnp.asarray(flat["/".join(path)])
    nnx.update(other, state)
    np.testing.assert_array_equal(other(x), layer(x))


def test_dtype(layer, x):
    narrow = Mxfp4Moe(**SIZES, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, router_bias=True, rngs=nnx.Rngs(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(narrow, nnx.Param))} == {jnp.dtype(jnp.bfloat16)}
    assert narrow(x).dtype == jnp.bfloat16
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert narrow.router(x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_a_layer_can_be_made_abstractly():
    layer = nnx.eval_shape(lambda: Mxfp4Moe(7168, 2048, 256, 8, num_shared_experts=1, rngs=nnx.Rngs(0)))
    assert layer.gate_up_codes.get_value().shape == (257, 4096, 3584)
    assert layer.down_scales.get_value().shape == (257, 7168, 64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 100}, "hidden_size=100 given; expected a positive multiple of 32"),
        ({"intermediate_size": 0}, "intermediate_size=0 given; expected a positive multiple of 32"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7"),
        ({"num_shared_experts": -1}, "num_shared_experts=-1"),
        ({"activation_quant": "int4"}, "activation_quant='int4' given"),
    ],
    ids=str,
)
def test_bad_sizes_and_options(change, text):
    with pytest.raises(ValueError, match=text):
        Mxfp4Moe(**{**SIZES, **change}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=text):
        Mxfp4MoeLinen(**{**SIZES, **change}).init(jax.random.key(0), jnp.zeros((1, 64)))


@pytest.mark.parametrize(
    ("kernel", "bias", "shared"),
    [((8, 64), None, 0), ((64, 8), None, 1), ((64, 8), (7,), 0), ((64,), None, 0)],
    ids=str,
)
def test_router_of_another_shape(layer, kernel, bias, shared):
    bias = None if bias is None else jnp.zeros(bias)
    with pytest.raises(ValueError, match=r"from_weights: router_kernel \(.*expected router_kernel \(64, .*transposed"):
        Mxfp4Moe.from_weights(layer.weights, jnp.zeros(kernel), bias, num_experts_per_tok=2, num_shared_experts=shared)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_bias": False}, "use_bias: False here, True given"),
        ({"num_shared_experts": 1}, "num_experts + num_shared_experts: 7 here, 8 given"),
        ({"hidden_size": 32}, "hidden_size: 32 here, 64 given"),
        ({"router_bias": False}, "router_bias: False here, True given"),
    ],
)
def test_a_linen_layer_that_says_something_else_than_its_weights(layer, change, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        variables_of(layer, Mxfp4MoeLinen(**{**FULL, **change}))


def test_a_linen_layer_cannot_read_activation_quant_off_the_bytes(layer):
    weights = layer.weights
    weights = MoeWeights(
        weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, activation_quant="mxfp4"
    )
    with pytest.raises(ValueError, match="activation_quant: None here, mxfp4 given"):
        Mxfp4MoeLinen(**FULL).variables_from_weights(weights, layer.router.kernel[...], layer.router.bias[...])
    Mxfp4MoeLinen(**FULL, activation_quant="mxfp4").variables_from_weights(
        weights, layer.router.kernel[...], layer.router.bias[...]
    )


def test_weights_of_another_type(layer):
    with pytest.raises(TypeError, match="expected MoeWeights"):
        Mxfp4Moe.from_weights(quantize(jnp.zeros((2, 64))), layer.router.kernel[...], num_experts_per_tok=2)
    with pytest.raises(TypeError, match="expected MoeWeights"):
        Mxfp4MoeLinen(**FULL).variables_from_weights(None, layer.router.kernel[...])


# --- dense layers ----------------------------------------------------------------------------------------------------


def dense_kernels(experts=6, hidden=64, intermediate=96):
    """wi_0, wi_1, wo and their biases, as MaxText and most Flax layers hold them."""
    keys = iter(jax.random.split(jax.random.key(2), 6))
    shapes = {"wi_0": (hidden, intermediate), "wi_1": (hidden, intermediate), "wo": (intermediate, hidden)}
    kernels = {
        name: jax.random.normal(next(keys), (experts, *shape), jnp.bfloat16) / 8 for name, shape in shapes.items()
    }
    biases = {f"{name}_bias": jax.random.normal(next(keys), (experts, shape[1])) for name, shape in shapes.items()}
    return kernels, biases


def test_from_dense(layer, x):
    kernels, biases = dense_kernels()
    kernel = jax.random.normal(jax.random.key(1), (64, 5))
    options = {"num_experts_per_tok": 2, "num_shared_experts": 1, "scale_rule": "ceil"}
    made = Mxfp4Moe.from_dense(kernel, **kernels, **biases, **options)
    gate_up = jnp.concatenate([kernels["wi_0"], kernels["wi_1"]], axis=2).swapaxes(1, 2)
    bias = jnp.concatenate([biases["wi_0_bias"], biases["wi_1_bias"]], axis=1)
    wanted = quantize_weights(gate_up, kernels["wo"].swapaxes(1, 2), bias, biases["wo_bias"], scale_rule="ceil")
    for a, b in zip(jax.tree.leaves(made.weights), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (made.num_experts, made.num_shared_experts, made.scale_rule) == (5, 1, "ceil")
    assert made.weights.activation_quant is None
    # Against the dense layer itself: what MXFP4 costs, and not a mixed-up axis.
    topk_weights, topk_ids = append_shared_experts(*topk_routing(made.router(x), 2), 5, 1)
    h = [jnp.einsum("bsd,edf->bsef", x, kernels[w]) + biases[f"{w}_bias"] for w in ("wi_0", "wi_1")]
    each = jnp.einsum("bsef,efd->bsed", jax.nn.silu(h[0]) * h[1], kernels["wo"]) + biases["wo_bias"]
    y = jnp.einsum("bsk,bskd->bsd", topk_weights, jnp.take_along_axis(each, topk_ids[..., None], axis=2))
    assert jnp.linalg.norm(made(x) - y) < 0.25 * jnp.linalg.norm(y)


def test_from_dense_holds_one_expert_in_float():
    """What is quantized at a time is one expert, so a stack that is a file in memory is never read whole."""
    seen = []

    class Stack(np.ndarray):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    kernels = {name: np.asarray(kernel, np.float32).view(Stack) for name, kernel in dense_kernels(3, 32, 32)[0].items()}
    Mxfp4Moe.from_dense(jnp.zeros((32, 3)), **kernels, num_experts_per_tok=1)
    assert seen == [0, 0, 1, 1, 2, 2, 0, 1, 2]


@pytest.mark.parametrize("transposed", ["wi_0", "wi_1", "wo", "router_kernel", "wi_1_bias", "wo_bias"])
def test_transposed_kernels(transposed):
    kernels, biases = dense_kernels()
    given = {"router_kernel": jnp.zeros((64, 6)), **kernels, **biases}
    given[transposed] = jnp.swapaxes(given[transposed], -1, -2)
    shape = re.escape(f"{transposed} {given[transposed].shape}")
    with pytest.raises(
        ValueError, match=rf"from_dense: .*{shape}.*expected router_kernel \[D, num_experts\].*Transpose a"
    ):
        Mxfp4Moe.from_dense(**given, num_experts_per_tok=2)


def test_half_of_the_biases_and_integers():
    kernels, biases = dense_kernels()
    with pytest.raises(ValueError, match="one of wi_0_bias and wi_1_bias given; expected both or neither"):
        Mxfp4Moe.from_dense(jnp.zeros((64, 6)), **kernels, wi_0_bias=biases["wi_0_bias"], num_experts_per_tok=2)
    kernels["wo"] = kernels["wo"].astype(jnp.int32)
    with pytest.raises(TypeError, match="int32"):
        Mxfp4Moe.from_dense(jnp.zeros((64, 6)), **kernels, num_experts_per_tok=2)


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_prepare_puts_the_layout_into_names(layer, monkeypatch):
    weights = slices(layer.weights, *range(6))
    made = Mxfp4Moe.from_weights(
        weights, layer.router.kernel[...], num_experts_per_tok=2, shared_weights=slices(layer.weights, 6)
    )
    monkeypatch.setattr(nnx_layer, "prepare", lambda w, name: prepared(w))
    made.prepare("triton")
    assert (made.layout, made.shared_experts.layout, made.implementation) == ("triton:e4m3",) * 2 + ("triton",)
    names = {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(made, Quantized))}
    parts = [f"{a}_{b}_triton_e4m3" for a in ("gate_up", "down") for b in ("codes", "scales")]
    assert names == {*parts, *(f"shared_experts/{part}" for part in parts)}
    np.testing.assert_array_equal(made.weights.gate_up.codes, shuffle(weights.gate_up).codes)
    np.testing.assert_array_equal(unshuffle(made.weights.down).codes, weights.down.codes)
    np.testing.assert_array_equal(made.gate_up_bias[...], weights.gate_up_bias)
    module, variables = made.to_linen()
    assert module.layout == module.shared_layout == "triton:e4m3"
    assert set(parts) < set(variables["quantized"])
    with pytest.raises(ValueError, match=r"'triton' \(layout 'triton:e4m3'\), but implementation='xla' was asked for"):
        module.clone(implementation="xla").apply(variables, jnp.zeros((1, 64)))
    with pytest.raises(ValueError, match="init of a layer with layout='triton:e4m3'; expected layout 'packed'"):
        module.init(jax.random.key(0), jnp.zeros((1, 64)))
    with pytest.raises(ValueError, match="layout: packed here, triton:e4m3 given"):
        module.clone(layout="packed").variables_from_weights(made.weights, made.router.kernel[...])
    with pytest.raises(ScopeVariableNotFoundError, match="gate_up_codes"):
        module.clone(layout="packed").apply(variables, jnp.zeros((1, 64)))


def test_state_of_another_layout_is_refused(layer):
    kernel, options = layer.router.kernel[...], {"num_experts_per_tok": 2, "num_shared_experts": 2}
    packed = Mxfp4Moe.from_weights(layer.weights, kernel, **options)
    ready = Mxfp4Moe.from_weights(prepared(layer.weights), kernel, **options)
    for one, other in ((packed, ready), (ready, packed)):
        broken = nnx.clone(one)
        nnx.update(broken, nnx.state(other))  # Flax adds what it does not know, and leaves the old arrays
        with pytest.raises(ValueError, match=rf"found in a layer of layout '{one.layout}'; expected .* alone"):
            broken(jnp.zeros((1, 64)))


# --- partitioning ----------------------------------------------------------------------------------------------------

AXES = {"kernel_axes": ("exp", "mlp", "embed"), "shared_intermediate_size": 32, "use_correction_bias": True}
AXES |= {"use_shared_gate": True, "use_bias": True, "router_bias": True, **SIZES}
SPECS = {
    "router/kernel": ("embed", None),
    "router/bias": (None,),
    "correction_bias": (None,),
    "gate_up_codes": ("exp", "mlp", "embed"),
    "gate_up_scales": ("exp", "mlp", "embed"),
    "down_codes": ("exp", "embed", "mlp"),
    "down_scales": ("exp", "embed", "mlp"),
    "gate_up_bias": ("exp", "mlp"),
    "down_bias": ("exp", "embed"),
    "shared_experts/gate_up_codes": (None, "mlp", "embed"),
    "shared_experts/gate_up_scales": (None, "mlp", "embed"),
    "shared_experts/down_codes": (None, "embed", "mlp"),
    "shared_experts/down_scales": (None, "embed", "mlp"),
    "shared_experts/gate_up_bias": (None, "mlp"),
    "shared_experts/down_bias": (None, "embed"),
    "shared_gate/kernel": ("embed", None),
}


def by_path(tree):
    """Leaves by their names joined with slashes, whatever collection they are in."""
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(tree))}
    return {path: leaf.get_value() for path, leaf in flat.items()}


def linen_by_path(variables):
    leaves = jax.tree_util.tree_leaves_with_path(variables, is_leaf=lambda a: isinstance(a, PartitionSpec))
    return {"/".join(key.key for key in path[1:]): leaf for path, leaf in leaves}


def test_partitioning_metadata_needs_no_mesh(x):
    layer = Mxfp4Moe(**AXES, rngs=nnx.Rngs(0))
    made = jax.eval_shape(Mxfp4MoeLinen(**AXES).init, jax.random.key(0), x)
    module, given = layer.to_linen()
    again = Mxfp4Moe.from_weights(
        layer.weights,
        layer.router.kernel[...],
        layer.router.bias[...],
        num_experts_per_tok=2,
        correction_bias=layer.correction_bias[...],
        shared_weights=layer.shared_experts.weights,
        shared_gate_kernel=layer.shared_gate.kernel[...],
        kernel_axes=["exp", "mlp", "embed"],
    )
    specs = {path: PartitionSpec(*axes) for path, axes in SPECS.items()}
    for each in (layer, again):
        found = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(each)))
        assert {"/".join(path): leaf.get_value() for path, leaf in found} == specs
    for variables in (made, given):
        assert linen_by_path(nn.get_partition_spec(variables)) == specs
        assert isinstance(variables["quantized"]["gate_up_codes"], nn.LogicallyPartitioned)
    assert jax.eval_shape(module.apply, given, x).shape == jax.eval_shape(layer, x).shape == x.shape
    assert all(len(axes) == by_path(layer)[path].ndim for path, axes in SPECS.items())
    # Without kernel_axes there are neither names nor boxes.
    plain = Mxfp4Moe(**SIZES, rngs=nnx.Rngs(0))
    assert set(jax.tree.leaves(nnx.get_partition_spec(nnx.state(plain)))) == {PartitionSpec()}
    assert nn.unbox(plain.to_linen()[1]) == plain.to_linen()[1]


def test_stacked_layers(x):
    """Layers made by vmap and run by scan, in both Flaxes: the new axis gets its name, and each layer its own weights."""
    fields = {**SIZES, "kernel_axes": ("exp", "mlp", "embed"), "use_correction_bias": True}
    metadata = {nnx.PARTITION_NAME: "layers"}

    @nnx.vmap(transform_metadata=metadata)
    def make(key):
        return Mxfp4Moe(**fields, rngs=nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 2)
    stack = make(keys)
    assert stack.gate_up_codes[...].shape == (2, 6, 192, 32)
    assert nnx.get_partition_spec(nnx.state(stack))["down_scales"].get_value() == PartitionSpec(
        "layers", "exp", "embed", "mlp"
    )
    y = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=metadata)(
        x, stack
    )
    graph, state = nnx.split(stack)
    one, two = (nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state)) for i in range(2))
    call = nnx.jit(lambda layer, x: layer(x))
    same(y, call(two, call(one, x)))

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "quantized": 0, "router_state": 0}
            body = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes=axes,
                split_rngs={"params": True},
                length=2,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return body(Mxfp4MoeLinen(**fields, name="moe"), x, None)[0]

    shapes = jax.eval_shape(Stack().init, jax.random.key(0), x)
    assert jax.tree.structure(shapes["quantized"]["moe"]["gate_up_codes"]).num_leaves == 1
    assert nn.get_partition_spec(shapes)["quantized"]["moe"]["gate_up_codes"] == PartitionSpec(
        "layers", "exp", "mlp", "embed"
    )


MESH = """
import jax, jax.numpy as jnp, numpy as np
from flax import linen as nn, nnx
from jax.sharding import AxisType
from jax_mxfp4_moe.layers import Mxfp4Moe, Mxfp4MoeLinen

fields = dict(hidden_size=64, intermediate_size=64, num_experts=4, num_experts_per_tok=2, use_bias=True, shared_intermediate_size=96)
fields |= dict(kernel_axes=("exp", "mlp", "embed"), router_bias=True)
mesh = jax.make_mesh((2, 2), ("experts", "columns"), axis_types=(AxisType.Auto,) * 2)
over = dict(mesh=mesh, expert_axis="experts", token_axis="columns")
x = jax.random.normal(jax.random.key(1), (6, 64))
plain = Mxfp4Moe(**fields, rngs=nnx.Rngs(0))
y = plain(x)
module, variables = plain.to_linen()
unboxed = nn.unbox(variables)
rules = (("exp", "experts"), ("mlp", None), ("embed", "columns"))


def check(name, array, shape):
    shapes = {shard.data.shape for shard in array.addressable_shards}
    assert shapes == {shape}, (name, shapes, shape)


with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    layer = nnx.jit(lambda: Mxfp4Moe(**fields, **over, rngs=nnx.Rngs(0)))()
    given = Mxfp4Moe.from_weights(
        plain.weights, plain.router.kernel[...], num_experts_per_tok=2, kernel_axes=fields["kernel_axes"]
    )
    for each in (layer, given):
        check("gate_up_codes", each.gate_up_codes[...], (2, 128, 16))
        check("gate_up_scales", each.gate_up_scales[...], (2, 128, 1))
        check("down_codes", each.down_codes[...], (2, 32, 32))
        check("router", each.router.kernel[...], (32, 4))
    check("shared", layer.shared_experts.gate_up_codes[...], (1, 192, 16))
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, x), y, rtol=1e-4, atol=1e-5)
    placed = jax.device_put(unboxed, nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh))
    check("linen", placed["quantized"]["down_codes"], (2, 32, 32))

    for size in ("hidden_size", "intermediate_size", "shared_intermediate_size"):
        with nn.logical_axis_rules((("exp", None), ("mlp", "columns"), ("embed", "columns" if size == "hidden_size" else None))):
            bad = {**fields, "intermediate_size": 128, "shared_intermediate_size": 128, size: 160}
            for make in (lambda: Mxfp4Moe(**bad, rngs=nnx.Rngs(0)),
                         lambda: Mxfp4MoeLinen(**bad).init(jax.random.key(0), jnp.zeros((1, bad["hidden_size"])))):
                try:
                    make()
                except ValueError as error:
                    print("REFUSED", error)

# Outside of a mesh the layer cannot know; then JAX refuses, since scales have one entry a block.
small = Mxfp4Moe(**{**fields, "hidden_size": 96}, rngs=nnx.Rngs(0))
with nn.logical_axis_rules(rules):
    shardings = nnx.get_named_sharding(nnx.state(small), mesh)
    try:
        jax.device_put(nnx.state(small), shardings)
    except ValueError as error:
        print("JAX", error)

with jax.set_mesh(jax.make_mesh((4,), ("exp",), axis_types=(AxisType.Explicit,))):
    try:
        Mxfp4Moe(**fields, rngs=nnx.Rngs(0))
    except ValueError as error:
        print("EXPLICIT", error)
"""


def test_on_a_mesh():
    environment = {
        **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
    }  # fmt: skip
    run = subprocess.run([sys.executable, "-c", MESH], capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    refused = [line for line in lines if line.startswith("REFUSED")]
    names = ("hidden_size", "intermediate_size", "shared_intermediate_size")
    assert [line.split("=")[0] for line in refused] == [
        f"REFUSED {layer}: {name}" for name in names for layer in ("Mxfp4Moe", "Mxfp4MoeLinen")
    ]
    assert (
        "=160 over 2 devices (axis 'embed' of kernel_axes on 'columns') given; expected whole blocks of 32: 5 blocks"
        in refused[0]
    )
    assert "multiple of 64" in refused[0]
    assert any(re.match("JAX .*evenly divide|JAX .*divisible", line) for line in lines), run.stdout
    assert any(line.startswith("EXPLICIT Mxfp4Moe: kernel_axes=") and "expected Auto alone" in line for line in lines)


# --- training --------------------------------------------------------------------------------------------------------


def test_an_optimizer_leaves_bytes_and_the_correction_bias(x):
    """Linen: everything in "params" has a gradient. NNX: weight decay changes whatever an optimizer sees, and that is the same."""
    options = {"use_bias": True, "use_correction_bias": True, "use_shared_gate": True, "scoring": "sigmoid"}
    layer = Mxfp4Moe(**SIZES, shared_intermediate_size=32, **options, rngs=nnx.Rngs(0))
    module, variables = layer.to_linen()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))

    def loss(params, rest):
        return (module.apply({"params": params, **rest}, x) ** 2).mean()

    params = variables.pop("params")
    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params, variables))
    gradients = {"/".join(key.key for key in path): leaf for path, leaf in leaves}
    assert all(jnp.abs(leaf).max() > 0 for leaf in gradients.values())
    assert set(gradients) == {
        "router/kernel",
        "shared_gate/kernel",
        "gate_up_bias",
        "down_bias",
        "shared_experts/gate_up_bias",
        "shared_experts/down_bias",
    }
    optimizer = nnx.Optimizer(layer, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)
    optimizer.update(layer, jax.tree.map(jnp.ones_like, nnx.state(layer, nnx.Param)))
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    unchanged = jax.tree.map(np.array_equal, before, after)
    assert {
        "/".join(key.key for key in path) for path, kept in jax.tree_util.tree_leaves_with_path(unchanged) if not kept
    } == set(gradients)


ONE = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"num_shared_experts": 1, "shared_intermediate_size": 32},
            "num_shared_experts=1 and shared_intermediate_size=32 given",
        ),
        ({"shared_intermediate_size": 100}, "shared_intermediate_size=100 given; expected a positive multiple of 32"),
        ({"use_shared_gate": True}, "use_shared_gate=True given without shared experts"),
        (
            {"kernel_axes": "exp"},
            "kernel_axes='exp' given; expected the names of the axes experts, intermediate and hidden",
        ),
        ({"kernel_axes": ("exp", "embed")}, "kernel_axes=('exp', 'embed') given"),
        ({"scoring": "softmin"}, "scoring='softmin' given"),
        ({"num_groups": 4, "topk_groups": 2}, "num_groups=4 and topk_groups=2 given with 6 experts"),
        (
            {"scoring": "softmax_after_topk", "use_correction_bias": True},
            "correction_bias given with scoring='softmax_after_topk'",
        ),
        ({"activation": "relu"}, "activation='relu' given"),
        ({"expert_axis": "x"}, "expert_axis='x' and token_axis=None given without a mesh"),
        ({"expert_axis": "y", "mesh": ONE}, "expert_axis='y' given with a mesh of axes ('x',)"),
        (
            {"expert_axis": "x", "mesh": ONE, "num_shared_experts": 1},
            "num_experts=6 and num_shared_experts=1 given with 1 devices",
        ),
    ],
    ids=str,
)
def test_fields_that_no_layer_can_have(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Mxfp4Moe(**{**SIZES, **change}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape(text)):
        Mxfp4MoeLinen(**{**SIZES, **change}).init(jax.random.key(0), jnp.zeros((1, 64)))


def test_weights_that_do_not_belong_together(layer):
    weights, kernel = slices(layer.weights, *range(6)), layer.router.kernel[...]
    for options, text in (
        ({"correction_bias": jnp.zeros(8)}, "correction_bias (8,) given with weights of 6 experts"),
        ({"shared_gate_kernel": jnp.zeros((1, 64))}, "shared_gate_kernel (1, 64) given; expected (64, 1)"),
        (
            {"shared_weights": weights},
            "(experts, hidden size, activation_quant) (6, 64, None) given; expected (1, 64, None)",
        ),
        (
            {"shared_weights": slices(weights, 0).replace(activation_quant="mxfp4")},
            "(1, 64, 'mxfp4') given; expected (1, 64, None)",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            Mxfp4Moe.from_weights(weights, kernel, num_experts_per_tok=2, **options)
    with pytest.raises(
        ValueError, match=re.escape("kernel_axes=('a', 'b', 'c') and weights in layout 'triton:e4m3' given")
    ):
        Mxfp4Moe.from_weights(prepared(weights), kernel, num_experts_per_tok=2, kernel_axes=("a", "b", "c"))
    linen = Mxfp4MoeLinen(**SIZES, use_bias=True)
    for options, text in (
        ({"correction_bias": jnp.zeros(6)}, "use_correction_bias: False here, True given"),
        ({"shared_weights": slices(weights, 0)}, "shared_intermediate_size: None here, 96 given"),
        ({"shared_gate_kernel": jnp.zeros((64, 1))}, "shape of shared_gate_kernel: None here, (64, 1) given"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            linen.variables_from_weights(weights, kernel, **options)


def test_without_flax():
    code = "import sys; sys.modules['flax'] = None; import jax_mxfp4_moe; import jax_mxfp4_moe.layers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert run.stderr.strip().endswith(
        "ImportError: jax_mxfp4_moe.layers needs flax, which is not installed: pip install 'jax_mxfp4_moe[flax]'"
    )
