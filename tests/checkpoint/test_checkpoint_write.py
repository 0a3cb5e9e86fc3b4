"""Written checkpoints: byte by byte those of the synthetic files, whole or not there at all, and loaded again as they were."""

import json
import os
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import synthetic

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, checkpoint
from jax_mxfp4_moe.checkpoint import write
from jax_mxfp4_moe.checkpoint.files import open_checkpoint

# What a writer is asked for to give back the experts and routers of a synthetic checkpoint.
TARGETS = {
    "gpt_oss": {"format": "gpt_oss"},
    "quark_deepseek": {"format": "quark"},
    "quark_qwen3": {"format": "quark"},
    "quark_kimi_multimodal": {"format": "quark", "root": "language_model.model."},
    "quark_gpt_oss_weights_only": {"format": "quark", "family": "gpt_oss"},
    "compressed_tensors": {"format": "compressed_tensors"},
    "compressed_tensors_kimi": {"format": "compressed_tensors", "root": "language_model.model."},
}
FOREIGN = (
    "embed_tokens",
    "norm",
    "lm_head",
    "self_attn",
    "layers.0.mlp.gate_proj",
    "layers.0.mlp.up_proj",
    "layers.0.mlp.down_proj",
)


def weights_of(layer, shared=False, activation_quant=None):
    """MoeWeights from the truth, without any reader."""
    gate_up, down = (layer.shared_gate_up, layer.shared_down) if shared else (layer.gate_up, layer.down)
    biases = [
        None if bias is None or shared else jnp.asarray(bias, jnp.bfloat16)
        for bias in (layer.gate_up_bias, layer.down_bias)
    ]
    return MoeWeights(
        *(Mxfp4Array(jnp.asarray(stack.packed), jnp.asarray(stack.scales)) for stack in (gate_up, down)),
        *biases,
        activation_quant=activation_quant,
    )


def activation_quant_of(truth):
    quantization = truth.config["quantization_config"]
    if quantization["quant_method"] == "quark":
        return "mxfp4" if quantization["global_quant_config"]["input_tensors"] else None
    if quantization["quant_method"] == "compressed-tensors":
        return "mxfp4" if quantization["config_groups"]["group_0"]["input_activations"] else None
    return None


def router_of(layer):
    return checkpoint.Router(
        jnp.asarray(layer.router, jnp.bfloat16),
        None if layer.router_bias is None else jnp.asarray(layer.router_bias, jnp.bfloat16),
        None if layer.correction_bias is None else np.asarray(layer.correction_bias, np.float32),
    )


def save(path, truth, **options):
    quant = activation_quant_of(truth)
    layers = {n: weights_of(layer, activation_quant=quant) for n, layer in truth.layers.items()}
    shared = {n: weights_of(x, True, quant) for n, x in truth.layers.items() if x.shared_gate_up is not None}
    routers = {number: router_of(layer) for number, layer in truth.layers.items()}
    write.save(path, layers, shared=shared, routers=routers, config=truth.config, **options)
    return layers


def same(a, b):
    """Equal structure (layout, activation_quant and which biases included), dtypes and bytes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("shard_bytes", [1, 20_000, write.MAX_SHARD_BYTES], ids=["a_file_each", "small", "large"])
@pytest.mark.parametrize("name", TARGETS)
def test_tensors_are_those_of_the_synthetic_file(name, shard_bytes, tmp_path):
    truth = synthetic.FORMATS[name](tmp_path / "truth")
    save(tmp_path / "written", truth, max_shard_bytes=shard_bytes, **TARGETS[name])
    written = open_checkpoint(tmp_path / "written")
    expected = {n: t for n, t in truth.tensors.items() if not any(part in n for part in FOREIGN)}
    assert written.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        found = written[tensor_name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), tensor_name
        assert found.bytes.tobytes() == tensor.data, tensor_name
        assert found.offset % found.read().dtype.itemsize == 0, "torch refuses tensors that are not aligned"
    if shard_bytes == 1:
        assert len(written.files) == len(expected)
    else:
        alone = max(len(tensor.data) for tensor in expected.values())  # a tensor is never divided
        assert all(os.path.getsize(file) < max(shard_bytes, alone) + 5_000 for file in written.files)


@pytest.mark.parametrize("name", TARGETS)
def test_load_gives_back_what_was_saved(name, tmp_path):
    truth = synthetic.FORMATS[name](tmp_path / "truth")
    layers = save(tmp_path / "written", truth, max_shard_bytes=20_000, **TARGETS[name])
    for number, weights in layers.items():
        same(checkpoint.load(tmp_path / "written", layer=number), weights)


def small(experts=2, hidden=32, intermediate=64, biases=False, **options):
    rng = np.random.default_rng(0)

    def stack(rows, length):
        return Mxfp4Array(
            rng.integers(0, 256, (experts, rows, length // 2), dtype=np.uint8),
            rng.integers(100, 140, (experts, rows, length // 32)).astype(np.uint8),
        )

    bias = [rng.normal(size=(experts, n)).astype(np.float32) if biases else None for n in (2 * intermediate, hidden)]
    return MoeWeights(stack(2 * intermediate, hidden), stack(hidden, intermediate), *bias, **options)


@pytest.mark.parametrize(
    ("format", "family"), [(format, family) for format, families in write.FORMATS.items() for family in families]
)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_every_format_and_family_loads_without_a_model_configuration(format, family, biases, tmp_path):
    weights = small(biases=biases, activation_quant=None if format == "gpt_oss" else "mxfp4")
    write.save(tmp_path / "new", {3: weights}, format=format, family=family)
    same(checkpoint.load(tmp_path / "new", layer=3), weights)


def test_expert_0_alone_differs_from_zero(tmp_path):
    weights = jax.tree.map(
        lambda leaf: leaf * (np.arange(len(leaf)) == 0).astype(leaf.dtype).reshape(-1, 1, 1), small(12)
    )
    write.save(tmp_path / "new", {0: weights}, format="quark", max_shard_bytes=3_000)
    loaded = checkpoint.load(tmp_path / "new", layer=0)
    same(loaded, weights)
    assert np.asarray(loaded.gate_up.codes)[0].any()
    assert not np.asarray(loaded.gate_up.codes)[1:].any()


def test_configuration_says_how_the_weights_are_to_be_run(tmp_path):
    config = {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "old"}}
    write.save(
        tmp_path / "quark", {0: small(activation_quant="mxfp4")}, format="quark", config=config, scale_rule="floor"
    )
    written = json.loads((tmp_path / "quark" / "config.json").read_text())
    assert written["model_type"] == "qwen3_moe"
    quantization = written["quantization_config"]
    assert quantization["quant_method"] == "quark"
    assert quantization["global_quant_config"]["weight"]["scale_calculation_mode"] == "floor"
    assert quantization["global_quant_config"]["input_tensors"]["is_dynamic"] is True
    assert config["quantization_config"] == {"quant_method": "old"}, "the caller's own is left alone"
    write.save(tmp_path / "ct", {0: small()}, format="compressed_tensors")
    group = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] is None
    assert group["format"] == "mxfp4-pack-quantized"


def test_modules_kept():
    quantized = ["model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight_scale"]
    kept = [
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.9.mlp.experts.0.up_proj.weight",
    ]
    patterns = write.modules_kept([*kept, "model.layers.0.mlp.gate.bias"], quantized)
    # Layer 9 predicts further tokens and has experts in bfloat16: a star there would catch the packed ones.
    assert patterns == ["lm_head", "model.layers.*.mlp.gate", "model.layers.9.mlp.experts.0.up_proj"]
    ignore = write.quantization_config("compressed_tensors", kept=patterns)["ignore"]
    assert ignore == ["lm_head", r"re:model\.layers\..*\.mlp\.gate$", "model.layers.9.mlp.experts.0.up_proj"]


def prepared(weights):
    return MoeWeights(
        *(Mxfp4Array(a.codes, a.scales, length=a.length, layout="triton") for a in (weights.gate_up, weights.down))
    )


@pytest.mark.parametrize(
    ("told", "error", "options"),
    [
        ("format 'onnx' given; expected one of gpt_oss, quark, compressed_tensors", ValueError, {"format": "onnx"}),
        ("family 'mixtral' given; expected one of gpt_oss", ValueError, {"format": "gpt_oss", "family": "mixtral"}),
        ("layers of type MoeWeights given; expected weights by layer number", TypeError, {"layers": small()}),
        ("layers of type dict given", TypeError, {"layers": {}}),
        ("layer 0: weights of type int given; expected MoeWeights", TypeError, {"layers": {0: 1}}),
        ("layout 'triton' given; expected layout 'packed'", ValueError, {"layers": {0: prepared(small())}}),
        ("weights without experts", ValueError, {"layers": {0: small(0)}}),
        ("shared experts given; expected none in format 'gpt_oss'", ValueError, {"format": "gpt_oss", "shared": {0: small(1)}}),
        ("2 shared experts given; expected them as one expert", ValueError, {"shared": {0: small(2)}}),
        ("of layers [5] given; expected layers among [0]", ValueError, {"shared": {5: small(1)}}),
        ("activation_quant='mxfp4' given; expected None in format 'gpt_oss'", ValueError,
         {"format": "gpt_oss", "family": "gpt_oss", "layers": {0: small(activation_quant="mxfp4")}}),
        ("activation_quant='fp8' given; expected None or 'mxfp4'", ValueError, {"layers": {0: small(activation_quant="fp8")}}),
        ("['None', 'mxfp4'] given; expected one for all", ValueError, {"layers": {0: small(), 1: small(activation_quant="mxfp4")}}),
        ("no model_type given with format 'gpt_oss'; expected one", ValueError, {"format": "gpt_oss"}),
        ("no model_type given with format 'gpt_oss'", ValueError, {"format": "gpt_oss", "config": {"hidden_act": "silu"}}),
        ("scale_rule='ceil' given, with activation_quant='mxfp4'; expected 'even'", ValueError,
         {"format": "compressed_tensors", "scale_rule": "ceil", "layers": {0: small(activation_quant="mxfp4")}}),
        ("scale_rule='rceil' given; expected one of even, floor, ceil", ValueError, {"scale_rule": "rceil"}),
        ("a router with correction_bias given; expected none", ValueError,
         {"family": "gpt_oss", "routers": {0: checkpoint.Router(np.zeros((2, 32)), None, np.zeros(2))}}),
        ("of dtype complex128 given", TypeError, {"routers": {0: checkpoint.Router(np.zeros(2, complex), None, None)}}),
        ("max_shard_bytes=0 given", ValueError, {"max_shard_bytes": 0}),
        ("layers numbered [-1] given; expected integers from 0 on", ValueError, {"layers": {-1: small()}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_written_is_refused(told, error, options, tmp_path):
    with pytest.raises(error) as caught:
        write.save(tmp_path / "new", **{"layers": {0: small()}, "format": "quark", **options})
    assert told in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_replaced_unasked(tmp_path):
    (tmp_path / "old").mkdir()
    write.save(tmp_path / "old", {0: small()}, format="quark")  # an empty one is a new place
    before = checkpoint.load(tmp_path / "old", layer=0)
    with pytest.raises(FileExistsError, match="is not an empty folder; expected a new place"):
        write.save(tmp_path / "old", {0: small(3)}, format="quark")
    same(checkpoint.load(tmp_path / "old", layer=0), before)
    write.save(tmp_path / "old", {0: small(3, biases=True)}, format="gpt_oss", family="gpt_oss", overwrite=True)
    assert checkpoint.load(tmp_path / "old", layer=0).num_experts == 3
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_overwrite_deletes_only_checkpoints(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("thesis", "file"):
        with pytest.raises(FileExistsError, match="is not a checkpoint, and would be deleted"):
            write.save(tmp_path / name, {0: small()}, format="quark", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_nothing_half_written(overwrite, tmp_path, monkeypatch):
    path = tmp_path / "new"
    if overwrite:
        write.save(path, {0: small()}, format="quark")
    synced = []

    def full(descriptor):
        synced.append(descriptor)
        assert overwrite or not path.exists(), "under its name before it was whole"
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write.save(path, {0: small(5)}, format="quark", max_shard_bytes=5_000, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == (["new"] if overwrite else [])
    if overwrite:
        assert checkpoint.load(path, layer=0).num_experts == 2


def test_a_checkpoint_appears_in_one_step(tmp_path, monkeypatch):
    path, renamed, rename = tmp_path / "new", [], os.rename

    def watched(old, new):
        assert not path.exists()
        assert set(checkpoint.describe(old).layers) == {0}, "not whole yet"
        renamed.append(new)
        rename(old, new)

    monkeypatch.setattr(os, "rename", watched)
    write.save(path, {0: small(5)}, format="quark", max_shard_bytes=5_000)
    assert renamed == [path]


def test_a_source_of_the_wrong_size_is_not_written(tmp_path):
    short = write.TensorSource("a", "U8", (4,), lambda: [np.zeros(3, np.uint8)])
    with pytest.raises(RuntimeError, match="tensor 'a' gave 3 bytes; 4 were announced"):
        write.write_tensors(tmp_path, [[short]])


def test_a_name_is_written_once(tmp_path):
    one = write.array_source("a", np.zeros(3))
    with pytest.raises(ValueError, match="tensor 'a' is given twice"):
        write.write_tensors(tmp_path, [[one], [one]])
    assert list(tmp_path.iterdir()) == []


def test_empty_tensors_and_groups(tmp_path):
    empty = [write.array_source("a", np.zeros((0, 3), np.float32)), write.array_source("b", np.zeros(3, np.int8))]
    with write.new_folder(tmp_path / "new") as draft:
        write.write_tensors(draft, [[], empty, []], max_shard_bytes=1)
    written = open_checkpoint(tmp_path / "new")
    assert {name: (t.dtype, t.shape) for name, t in written.items()} == {"a": ("F32", (0, 3)), "b": ("I8", (3,))}


@pytest.mark.parametrize("format", write.FORMATS)
def test_memory_is_that_of_one_expert(format, tmp_path):
    weights = small(48, 256, 256)
    one = weights.gate_up.nbytes // 48
    tracemalloc.start()
    try:
        write.save(tmp_path / "new", {0: weights}, format=format, family=next(iter(write.FORMATS[format])))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Beside the expert being interleaved: headers and names, a few hundred bytes a tensor, and the file's buffer.
    names = 6 * (1 if format == "gpt_oss" else 48) * 3_000 + 200_000
    assert peak < 2 * one + names < weights.nbytes / 3
