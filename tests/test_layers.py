import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_mxfp4_moe import MoeWeights, append_shared_experts, dequantize, mxfp4_moe, quantize, topk_routing
from jax_mxfp4_moe.layers import Mxfp4Moe, Mxfp4MoeLinen, Quantized

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
    routing = topk_routing(logits, layer.num_experts_per_tok, scoring=layer.scoring, renormalize=layer.renormalize)
    routing = append_shared_experts(*routing, layer.num_experts, layer.num_shared_experts)
    return mxfp4_moe(x, layer.weights, *routing, **options)


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


def test_options_reach_the_functions(x):
    layer = Mxfp4Moe(
        **SIZES,
        activation="swiglu_oai",
        activation_alpha=1.3,
        activation_limit=2.0,
        scoring="sigmoid",
        renormalize=False,
        implementation=["xla"],
        rngs=nnx.Rngs(0),
    )
    options = {"activation": "swiglu_oai", "activation_alpha": 1.3, "activation_limit": 2.0}
    np.testing.assert_allclose(layer(x), expected(layer, x, **options), rtol=1e-5, atol=1e-6)
    assert not np.allclose(layer(x), expected(layer, x))


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


def test_without_flax():
    code = "import sys; sys.modules['flax'] = None; import jax_mxfp4_moe; import jax_mxfp4_moe.layers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert run.stderr.strip().endswith(
        "ImportError: jax_mxfp4_moe.layers needs flax, which is not installed: pip install 'jax_mxfp4_moe[flax]'"
    )
