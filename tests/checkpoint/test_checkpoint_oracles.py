"""Second opinions on the formats from packages by other authors. Each is optional: a test skips where its package is missing."""

import json
import os
import sys

import ml_dtypes
import numpy as np
import oracle
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import synthetic
from test_checkpoint_write import same, small, weights_of

from jax_mxfp4_moe import checkpoint
from jax_mxfp4_moe.checkpoint import write
from jax_mxfp4_moe.checkpoint.files import open_checkpoint


def floats(array):
    """Values of loaded codes and scales in float32; what is beyond its range becomes infinite."""
    with np.errstate(over="ignore"):
        return oracle.dequantize(np.asarray(array.codes), np.asarray(array.scales)).astype(np.float32)


def every_pair(lowest=0):
    """Every scale byte that is a number, with all sixteen codes in its block."""
    scales = np.arange(lowest, 255, dtype=np.uint8)[:, None]
    packed = oracle.pack(np.tile(np.arange(16, dtype=np.uint8), (len(scales), 2)))
    with np.errstate(over="ignore"):
        return packed, scales, oracle.dequantize(packed, scales).astype(np.float32)


# --- gguf ------------------------------------------------------------------------------------------------------------


def test_gguf_reads_the_synthetic_file_as_we_do(tmp_path):
    gguf = pytest.importorskip("gguf")
    truth = synthetic.gguf(tmp_path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(truth.path).tensors}
    ours = open_checkpoint(truth.path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == tuple(int(n) for n in theirs[name].shape[::-1])
        assert tensor.bytes.tobytes() == theirs[name].data.tobytes()
    for number in truth.layers:
        loaded = checkpoint.load(ours, layer=number)
        with np.errstate(over="ignore"):
            gate, up, down = (
                gguf.dequantize(theirs[f"blk.{number}.ffn_{part}_exps.weight"].data, gguf.GGMLQuantizationType.MXFP4)
                for part in ("gate", "up", "down")
            )
        np.testing.assert_array_equal(floats(loaded.gate_up), np.concatenate([gate, up], axis=1))
        np.testing.assert_array_equal(floats(loaded.down), down)


def test_what_gguf_quantizes_is_read_to_the_same_values(tmp_path):
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.MXFP4
    weights = {part: rng.normal(size=(3, *shape)).astype(np.float32) for part, shape in
               (("gate", (96, 160)), ("up", (96, 160)), ("down", (160, 96)))}  # fmt: skip
    weights["gate"][0, 0, :32] = 0
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    for part, values in weights.items():
        writer.add_tensor(f"blk.7.ffn_{part}_exps.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = checkpoint.load(tmp_path / "model.gguf", layer=7)
    gate, up, down = (gguf.dequantize(gguf.quantize(values, kind), kind) for values in weights.values())
    np.testing.assert_array_equal(floats(loaded.gate_up), np.concatenate([gate, up], axis=1))
    np.testing.assert_array_equal(floats(loaded.down), down)


# --- safetensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", write.FORMATS)
def test_safetensors_reads_what_is_written(format, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    weights = small(3, biases=True)
    router = checkpoint.Router(np.ones((3, 32), ml_dtypes.bfloat16), None, None)
    family = {"family": "gpt_oss"} if format == "gpt_oss" else {}
    checkpoint.save(tmp_path / "new", {0: weights}, routers={0: router}, format=format, **family, max_shard_bytes=9_000)
    ours = open_checkpoint(tmp_path / "new")
    theirs = {}
    for file in ours.files:
        theirs.update(numpy.load_file(file))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.read().dtype
        np.testing.assert_array_equal(theirs[name].view(np.uint8), tensor.read().view(np.uint8))


def test_safetensors_knows_the_types_of_the_synthetic_files(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    truth = synthetic.deepseek_v4(tmp_path, shards=1)
    theirs = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in theirs.items()} == {
        name: (t.dtype, t.shape, t.data) for name, t in truth.tensors.items()
    }


def test_what_safetensors_writes_is_read(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    truth = synthetic.gpt_oss(tmp_path / "truth", layers=1)
    (tmp_path / "new").mkdir()
    numpy.save_file({name: t.array() for name, t in truth.tensors.items()}, tmp_path / "new" / "model.safetensors")
    (tmp_path / "new" / "config.json").write_text(json.dumps(truth.config))
    same(checkpoint.load(tmp_path / "new", layer=0), checkpoint.load(truth.path, layer=0))


# --- compressed-tensors ----------------------------------------------------------------------------------------------


@pytest.fixture
def mxfp4_scheme():
    """Their compressor of one module's tensors, and its scheme as our configuration states it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stated = write.quantization_config(
        "compressed_tensors", activation_quant="mxfp4", kept=["lm_head", "model.layers.*.mlp.gate"]
    )
    config = QuantizationConfig.model_validate(stated)
    assert config.format == "mxfp4-pack-quantized"
    return MXFP4PackedCompressor, config.config_groups["group_0"]


def test_compressed_tensors_decodes_every_pair(mxfp4_scheme):
    import torch

    compressor, scheme = mxfp4_scheme
    packed, scales, values = every_pair()
    module = {"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scales)}
    decoded = compressor.decompress(module, scheme)["weight"].float().numpy()
    # Theirs is bfloat16, which holds all of these numbers exactly unless they are subnormal.
    normal = (np.abs(values) >= 2.0**-126) | (values == 0)
    np.testing.assert_array_equal(decoded[normal], values[normal])


def test_what_compressed_tensors_packs_is_read(mxfp4_scheme, tmp_path):
    import torch

    compressor, scheme = mxfp4_scheme
    truth = synthetic.bfloat16(tmp_path / "floats", style="qwen3", layers=1)
    tensors = {}
    for name, tensor in truth.tensors.items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        weight = tensor.array().astype(np.float32)
        _, scales = oracle.quantize(weight.astype(np.float64), "even")
        module = {
            "weight": torch.from_numpy(weight).to(torch.bfloat16),
            "weight_scale": torch.from_numpy(oracle.SCALE_VALUES[scales].astype(np.float32)),
        }
        for leaf, array in compressor.compress(module, scheme).items():
            tensors[name.replace("weight", leaf)] = synthetic.Tensor.of("U8", array.numpy())
    config = synthetic.with_quantization(truth.config, synthetic.compressed_tensors_config())
    synthetic.write_model(tmp_path / "packed", tensors, config)
    same(checkpoint.load(tmp_path / "packed", layer=0), checkpoint.load(truth.path, layer=0, scale_rule="even"))


# --- torchao ---------------------------------------------------------------------------------------------------------


def test_torchao_decodes_every_pair():
    pytest.importorskip("torchao")
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    packed, scales, values = every_pair()
    scales = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
    decoded = to_dtype(torch.from_numpy(packed), scales, torch.float4_e2m1fn_x2, 32, torch.float32).numpy()
    np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
def test_torchao_quantizes_to_the_bytes_that_are_written(rule, tmp_path):
    """Its scale rules have the same names; a checkpoint quantized with each holds its bytes."""
    pytest.importorskip("torchao")
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    truth = synthetic.bfloat16(tmp_path, style="qwen3", layers=1)
    loaded = checkpoint.load(tmp_path, layer=0, scale_rule=rule)
    for values, ours in ((truth.layers[0].gate_up.values, loaded.gate_up), (truth.layers[0].down.values, loaded.down)):
        rows = torch.from_numpy(values.reshape(-1, values.shape[-1]).astype(np.float32))
        scales, codes = to_mx(rows, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode(rule))
        zeros = ~values.reshape(*ours.scales.shape, 32).any(-1)  # whose scale means nothing
        theirs = scales.view(torch.uint8).numpy().reshape(ours.scales.shape)
        np.testing.assert_array_equal(np.asarray(ours.scales)[~zeros], theirs[~zeros])
        np.testing.assert_array_equal(ours.codes, codes.numpy().reshape(ours.codes.shape))


# --- AMD Quark -------------------------------------------------------------------------------------------------------


def test_quark_packs_as_its_checkpoints_are_read(tmp_path):
    pack = pytest.importorskip("quark.torch.utils.pack", exc_type=ImportError)
    import torch

    method = pack.create_pack_method("per_group", "fp4")
    truth = synthetic.quark(tmp_path, style="qwen3", layers=1)
    weights = weights_of(truth.layers[0])
    values = oracle.CODE_VALUES[truth.layers[0].gate_up.codes].astype(np.float32)
    for reorder in (True, False):
        packed = method.pack(torch.from_numpy(values), reorder).numpy()
        np.testing.assert_array_equal(packed, np.asarray(weights.gate_up.codes))
        np.testing.assert_array_equal(method.unpack(torch.from_numpy(packed), reorder).numpy(), values)


def test_quark_states_its_configuration_as_ours(tmp_path):
    config = pytest.importorskip("quark.torch.quantization.config.config", exc_type=ImportError)
    weight = config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec().to_dict()
    ours = write.quantization_config("quark", activation_quant="mxfp4")["global_quant_config"]
    assert {key: weight[key] for key in ours["weight"]} == ours["weight"]
    inputs = config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec().to_dict()
    assert {key: inputs[key] for key in ours["input_tensors"]} == ours["input_tensors"]
    truth = synthetic.quark(tmp_path / "truth", style="qwen3", layers=1)
    stated = {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}}
    synthetic.write_model(tmp_path / "new", truth.tensors, {**truth.config, "quantization_config": stated})
    assert checkpoint.load(tmp_path / "new", layer=0).activation_quant == "mxfp4"
    assert checkpoint.describe(tmp_path / "new").scale_rule == "even"
