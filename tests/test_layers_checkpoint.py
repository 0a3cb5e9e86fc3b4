"""Layers from the checkpoints of models, and to and from Orbax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import orbax.checkpoint as ocp
import pytest
from checkpoint import synthetic
from flax import nnx

from jax_mxfp4_moe.checkpoint import open_checkpoint
from jax_mxfp4_moe.implementations.triton.layout import shuffle
from jax_mxfp4_moe.layers import Mxfp4Moe, Mxfp4MoeLinen
from jax_mxfp4_moe.layers import nnx as nnx_layer

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# So few blocks that the writers draw scales near 2 ** -5; with more they use all 256 bytes, NaN among them.
SMALL = {"hidden": 32, "intermediate": 32, "experts": 3}
SWIGLU = {"activation": "swiglu_oai", "activation_alpha": 1.702, "activation_limit": 7.0}
SIGMOID = {"scoring": "sigmoid", "routed_scaling_factor": 2.5}
MODELS = {
    "gpt_oss": (synthetic.gpt_oss, {"scoring": "softmax_after_topk"}, SWIGLU),
    "quark_gpt_oss": (
        synthetic.quark_gpt_oss,
        {"scoring": "softmax_after_topk"},
        {**SWIGLU, "activation_quant": "fp8"},
    ),
    "deepseek": (
        functools.partial(synthetic.quark, style="deepseek", scale_rule="ceil"),
        SIGMOID,
        {"activation_quant": "mxfp4", "scale_rule": "ceil"},
    ),
    "kimi": (functools.partial(synthetic.compressed_tensors, style="kimi_multimodal"), SIGMOID, {}),
    "qwen3": (
        functools.partial(synthetic.quark, style="qwen3"),
        {"scoring": "softmax"},
        {"activation_quant": "mxfp4"},
    ),
    "mixtral": (functools.partial(synthetic.bfloat16, style="mixtral"), {"scoring": "softmax"}, {}),
    "deepseek_v4": (
        synthetic.deepseek_v4,
        {"scoring": "sqrtsoftplus", "routed_scaling_factor": 1.5},
        {"activation": "silu_clamped", "activation_limit": 10.0},
    ),
}
"""Writer, routing and activation of each model; the last two are what its code does, and not read from its config.json."""


def values(stack):
    """Floats are quantized when they are loaded."""
    return stack.values if stack.codes is not None else oracle.quantize_dequantize(stack.values, "even", "nearest_even")


def expected(x, truth, routing, options, *, shared):
    """y by the oracle, from what was written into the files."""
    logits = x.astype(np.float64) @ truth.router.T + (0 if truth.router_bias is None else truth.router_bias)
    weights, ids = oracle.topk_routing(logits, 2, correction_bias=truth.correction_bias, **routing)
    gate_up, down = values(truth.gate_up), values(truth.down)
    if shared:
        ids = np.concatenate([ids, np.full((len(x), 1), len(gate_up))], axis=1)
        weights = np.concatenate([weights, np.ones((len(x), 1))], axis=1)
        gate_up = np.concatenate([gate_up, values(truth.shared_gate_up)])
        down = np.concatenate([down, values(truth.shared_down)])
    scale = None
    if truth.input_scales:
        scale = [truth.input_scales[name].max() for name in ("gate_up_proj", "down_proj")]
    biases = {"gate_up_bias": truth.gate_up_bias, "down_bias": truth.down_bias}
    return oracle.moe(x, gate_up, down, weights, ids, activation_scale=scale, **biases, **options)


@pytest.mark.filterwarnings("ignore:Mxfp4Moe.from_checkpoint")
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_of_a_model_is_the_model_s_layer(tmp_path, model):
    write, routing, options = MODELS[model]
    written = write(tmp_path, layers=1, **SMALL)
    (number, truth), *_ = written.layers.items()
    x = np.random.default_rng(3).normal(size=(5, 32)).astype(np.float32)
    shared = truth.shared_gate_up is not None and model != "deepseek_v4"  # whose shared experts are in fp8
    layer = Mxfp4Moe.from_checkpoint(tmp_path, layer=number, include_shared=shared)
    assert layer.num_shared_experts == int(shared)
    wanted = routing | {"activation_quant": None, "scale_rule": "even"} | options
    assert {name: getattr(layer, name) for name in wanted} == wanted
    y = expected(x, truth, routing, options, shared=shared)
    np.testing.assert_allclose(layer(x), y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
    # What the layer does at random is something else, so that the comparison can fail.
    other = oracle.moe(x, values(truth.gate_up), values(truth.down), np.full((5, 2), 0.5), np.tile([0, 1], (5, 1)))
    assert np.abs(other - y).max() > 0.1 * np.abs(y).max()


def test_overrides_and_an_open_checkpoint(tmp_path):
    written = synthetic.quark(tmp_path, style="deepseek", layers=2, **SMALL)
    checkpoint = open_checkpoint(tmp_path)
    layer = Mxfp4Moe.from_checkpoint(
        checkpoint,
        layer=2,
        implementation="xla",
        include_shared=False,
        activation_quant=None,
        num_experts_per_tok=1,
        renormalize=False,
        dtype=jnp.bfloat16,
        kernel_axes=("exp", "mlp", "embed"),
    )
    assert (layer.num_experts_per_tok, layer.renormalize, layer.scoring) == (1, False, "sigmoid")
    assert (layer.implementation, layer.activation_quant, layer.num_shared_experts) == ("xla", None, 0)
    assert layer.gate_up_codes.get_metadata("out_sharding") == ("exp", "mlp", "embed")
    np.testing.assert_array_equal(layer.gate_up_codes[...], written.layers[2].gate_up.packed)
    assert layer.dtype == jnp.bfloat16


def test_what_a_checkpoint_does_not_say(tmp_path):
    written = synthetic.quark(tmp_path, style="qwen3", layers=1, **SMALL)
    config = {
        k: v for k, v in written.config.items() if k not in ("num_experts_per_tok", "model_type", "norm_topk_prob")
    }
    synthetic.write_model(tmp_path, written.tensors, config)
    guess = "scoring='softmax' and renormalize=True would be a guess"
    given = {"scoring": "sigmoid", "renormalize": False}
    with (
        pytest.warns(UserWarning, match=guess),
        pytest.raises(ValueError, match=r"routing of model_type=None.*renormalize"),
    ):
        Mxfp4Moe.from_checkpoint(tmp_path, layer=0, num_experts_per_tok=2)
    with (
        pytest.warns(UserWarning, match=guess),
        pytest.raises(ValueError, match=r"no num_experts_per_tok in the configuration of .*Give num_experts_per_tok="),
    ):
        Mxfp4Moe.from_checkpoint(tmp_path, layer=0, **given)
    with pytest.warns(UserWarning, match=guess):
        layer = Mxfp4Moe.from_checkpoint(tmp_path, layer=0, num_experts_per_tok=2, **given)
    assert (layer.num_experts_per_tok, layer.scoring, layer.renormalize) == (2, "sigmoid", False)


@pytest.mark.filterwarnings("ignore:Mxfp4Moe.from_checkpoint")
def test_llama4_weighs_the_input_of_its_expert(tmp_path):
    written = synthetic.quark(tmp_path, style="qwen3", layers=1, inputs=None, **SMALL)
    config = {k: v for k, v in written.config.items() if k != "norm_topk_prob"}
    synthetic.write_model(tmp_path, written.tensors, {**config, "model_type": "llama4_text", "num_experts_per_tok": 1})
    layer = Mxfp4Moe.from_checkpoint(tmp_path, layer=0)
    truth = written.layers[0]
    x = np.random.default_rng(3).normal(size=(5, 32)).astype(np.float32)
    logits = x.astype(np.float64) @ truth.router.T
    ids = logits.argmax(axis=-1)[:, None]
    weighted = x / (1 + np.exp(-logits.max(axis=-1, keepdims=True)))
    y = oracle.moe(weighted, values(truth.gate_up), values(truth.down), np.ones((5, 1)), ids, x_dtype="float32")
    np.testing.assert_allclose(layer(x), y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


@pytest.mark.filterwarnings("ignore:Mxfp4Moe.from_checkpoint")
def test_shared_experts_that_cannot_be_loaded_are_not_dropped(tmp_path):
    synthetic.quark(tmp_path, style="kimi", layers=1, shared_packed=False, **SMALL)
    with pytest.raises(ValueError, match="quantize=True"):
        Mxfp4Moe.from_checkpoint(tmp_path, layer=1)
    assert Mxfp4Moe.from_checkpoint(tmp_path, layer=1, quantize=True).num_shared_experts == 1


# --- Orbax -----------------------------------------------------------------------------------------------------------

FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "use_bias": True,
    "router_bias": True,
    "shared_intermediate_size": 96,
    "use_shared_gate": True,
    "use_correction_bias": True,
    "use_activation_scale": True,
    "activation_quant": "fp8",
    "scoring": "sigmoid",
}


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


@pytest.fixture
def orbax():
    with ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer


def save(orbax, path, tree):
    orbax.save(path, tree)
    orbax.wait_until_finished()


def assert_same_arrays(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_orbax_keeps_every_array_of_an_nnx_layer(orbax, tmp_path):
    layer = Mxfp4Moe(**FIELDS, rngs=nnx.Rngs(0))
    layer.correction_bias[...] = jnp.array([1.0, 2.0, 3.0])
    save(orbax, tmp_path / "layer", nnx.state(layer))
    other = nnx.eval_shape(lambda: Mxfp4Moe(**FIELDS, rngs=nnx.Rngs(1)))
    graph, state = nnx.split(other)
    again = nnx.merge(graph, orbax.restore(tmp_path / "layer", state))
    assert again.layout == "packed"
    assert_same_arrays(nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(layer)))
    assert {str(a.dtype) for a in jax.tree.leaves(nnx.state(again))} == {"uint8", "float32"}


def test_orbax_keeps_every_array_of_a_linen_layer(orbax, tmp_path):
    """With partitioning boxes, which are saved as what they hold."""
    fields = {**FIELDS, "kernel_axes": ("exp", "mlp", "embed")}
    _, variables = Mxfp4Moe(**fields, rngs=nnx.Rngs(0)).to_linen()
    save(orbax, tmp_path / "layer", variables)
    target = jax.eval_shape(Mxfp4MoeLinen(**fields).init, jax.random.key(1), jnp.zeros((1, 64)))
    again = orbax.restore(tmp_path / "layer", target)
    assert_same_arrays(again, variables)


def test_orbax_tells_layouts_apart(orbax, tmp_path, monkeypatch):
    """Shapes would not: gate_up has the same in both layouts here."""
    monkeypatch.setattr(
        nnx_layer, "prepare", lambda w, name: w.replace(gate_up=shuffle(w.gate_up), down=shuffle(w.down))
    )
    fields = {**FIELDS, "hidden_size": 128, "intermediate_size": 128, "shared_intermediate_size": 128}
    packed, ready = (Mxfp4Moe(**fields, rngs=nnx.Rngs(0)) for _ in range(2))
    ready.prepare("triton")
    assert packed.weights.gate_up.codes.shape == ready.weights.gate_up.codes.shape
    layers = {"packed": packed, "ready": ready}
    trees = {"packed": packed.to_linen()[1], "ready": ready.to_linen()[1]}
    for name, layer in layers.items():
        save(orbax, tmp_path / name, nnx.state(layer))
        save(orbax, tmp_path / f"linen_{name}", trees[name])
    for name, other in (("packed", "ready"), ("ready", "packed")):
        graph, state = nnx.split(layers[name])
        again = nnx.merge(graph, orbax.restore(tmp_path / name, abstract(state)))
        assert again.layout == layers[name].layout
        assert_same_arrays(nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(state))
        assert_same_arrays(orbax.restore(tmp_path / f"linen_{name}", abstract(trees[name])), trees[name])
        for path, target in ((other, nnx.state(layers[name])), (f"linen_{other}", trees[name])):
            with pytest.raises(ValueError, match="_codes_triton_e4m3"):
                orbax.restore(tmp_path / path, abstract(target))
    # Packed, restored, prepared: the way from one machine to another.
    graph, state = nnx.split(packed)
    again = nnx.merge(graph, orbax.restore(tmp_path / "packed", abstract(state)))
    again.prepare("triton")
    assert_same_arrays(again.weights, ready.weights)
