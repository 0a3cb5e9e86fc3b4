"""Converted checkpoints: the same experts by `load`, everything else byte by byte, a configuration that says so; and the command."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import oracle
import synthetic
from test_checkpoint_write import same

from jax_mxfp4_moe import checkpoint
from jax_mxfp4_moe.checkpoint import convert as module
from jax_mxfp4_moe.checkpoint import dense
from jax_mxfp4_moe.checkpoint.convert import convert
from jax_mxfp4_moe.checkpoint.files import open_checkpoint

# Formats of which a whole model can be converted, and to what.
WHOLE = {
    "gpt_oss": ("gpt_oss", "quark", "compressed_tensors"),
    "gpt_oss_dequantized": ("gpt_oss", "quark"),
    "quark_deepseek": ("quark", "compressed_tensors"),
    "quark_kimi": ("compressed_tensors",),
    "quark_kimi_multimodal": ("quark", "compressed_tensors"),
    "quark_gpt_oss_weights_only": ("gpt_oss", "quark"),
    "compressed_tensors": ("quark", "compressed_tensors"),
    "compressed_tensors_kimi": ("quark",),
    "mixtral": ("quark", "compressed_tensors"),
    "qwen3": ("quark",),
    "deepseek": ("compressed_tensors",),
}
PAIRS = [(name, to) for name, targets in WHOLE.items() for to in targets]
IN_FLOATS = ("gpt_oss_dequantized", "mixtral", "qwen3", "deepseek")
FILES = {"tokenizer.json": b'{"a": 1}', "LICENSE": b"free\n", "merges.txt": b""}


def experts_of(path, layer):
    options = checkpoint.describe(path)
    shared = options.num_shared_experts and not any("shared experts are in floats" in note for note in options.notes)
    return checkpoint.load(path, layer=layer, include_shared=bool(shared))


@pytest.mark.parametrize(("name", "to"), PAIRS)
def test_a_whole_model(name, to, tmp_path):
    truth = synthetic.FORMATS[name](tmp_path / "source")
    for file, content in FILES.items():
        (truth.path / file).write_bytes(content)
    (truth.path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    done = convert(truth.path, tmp_path / "new", to=to, max_shard_bytes=50_000)
    assert done.layers == tuple(truth.layers)
    assert done.quantized == (name in IN_FLOATS)
    old, new = open_checkpoint(truth.path), open_checkpoint(tmp_path / "new")
    before, after = checkpoint.describe(old), checkpoint.describe(new)
    assert after.format == to
    fields = (
        *(
            "num_experts",
            "hidden_size",
            "intermediate_size",
            "num_experts_per_tok",
            "activation_quant",
            "scale_rule",
            "use_bias",
        ),
        *(
            "router_bias",
            "correction_bias",
            "scoring",
            "renormalize",
            "activation",
            "activation_limit",
            "routed_scaling_factor",
        ),
    )
    assert {f: getattr(before, f) for f in fields} == {f: getattr(after, f) for f in fields}
    for number in truth.layers:
        if name == "deepseek":  # its shared experts stay in floats
            same(checkpoint.load(new, layer=number), checkpoint.load(old, layer=number))
        else:
            same(experts_of(new, number), experts_of(old, number))
        same(checkpoint.load_router(new, layer=number), checkpoint.load_router(old, layer=number))
    copied = [n for n, t in truth.tensors.items() if n in new and (new[n].dtype, new[n].shape) == (t.dtype, t.shape)]
    assert done.copied <= len(copied)
    for tensor in copied:
        assert new[tensor].bytes.tobytes() == truth.tensors[tensor].data, tensor
    experts = [
        n
        for n in truth.tensors
        if ".experts." in n or (".shared_experts." in n and name not in (*IN_FLOATS, "quark_kimi"))
    ]
    assert set(truth.tensors) - set(copied) <= set(experts), "left out or changed, and not of an expert"
    assert sum(tensor.nbytes for tensor in new.values()) == done.nbytes
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names >= FILES.keys()
    assert "pytorch_model.bin" not in names
    assert all((tmp_path / "new" / file).read_bytes() == content for file, content in FILES.items())


SAME = {
    "gpt_oss": "gpt_oss",
    "quark_deepseek": "quark",
    "quark_kimi": "quark",
    "quark_kimi_multimodal": "quark",
    "quark_gpt_oss_weights_only": "quark",
    "compressed_tensors": "compressed_tensors",
    "compressed_tensors_kimi": "compressed_tensors",
}


@pytest.mark.parametrize(("name", "to"), SAME.items(), ids=SAME)
def test_reading_and_writing_one_format_changes_no_tensor(name, to, tmp_path):
    truth = synthetic.FORMATS[name](tmp_path / "source")
    convert(truth.path, tmp_path / "new", to=to)
    new = open_checkpoint(tmp_path / "new")
    assert {n: (t.dtype, t.shape, t.bytes.tobytes()) for n, t in new.items()} == {
        n: (t.dtype, t.shape, t.data) for n, t in truth.tensors.items()
    }


@pytest.mark.parametrize(("back", "there"), [("gpt_oss", "quark"), ("gpt_oss", "compressed_tensors")])
def test_there_and_back(back, there, tmp_path):
    truth = synthetic.FORMATS[back](tmp_path / "a")
    convert(truth.path, tmp_path / "b", to=there)
    convert(tmp_path / "b", tmp_path / "c", to=back)
    assert {n: t.bytes.tobytes() for n, t in open_checkpoint(tmp_path / "c").items()} == {
        n: t.data for n, t in truth.tensors.items()
    }


@pytest.mark.parametrize("name", ["gpt_oss_original", "deepseek_v4", "gguf", "quark_deepseek", "mixtral"])
def test_some_layers_of_a_model(name, tmp_path):
    truth = synthetic.FORMATS[name](tmp_path / "source")
    number = max(truth.layers)
    done = convert(truth.path, tmp_path / "new", to="quark", layers=[number])
    assert done.layers == (number,)
    new = open_checkpoint(tmp_path / "new")
    assert all(f"layers.{number}." in tensor for tensor in new)
    same(checkpoint.load(new, layer=number), checkpoint.load(truth.path, layer=number))
    same(checkpoint.load_router(new, layer=number), checkpoint.load_router(truth.path, layer=number))
    assert bool(done.notes) == (name == "deepseek_v4"), "its shared experts are float8"
    assert checkpoint.describe(new).activation == checkpoint.describe(truth.path).activation


ROUTING = ("model_type", "layers", "notes", "scale_rule", "guessed")


@pytest.mark.parametrize("to", ["quark", "compressed_tensors"])
@pytest.mark.parametrize("architecture", ["gpt-oss", "deepseek2", "llama4", "qwen2moe", "mystery"])
def test_what_a_gguf_file_says_of_routing_is_kept(architecture, to, tmp_path):
    metadata = {
        "expert_group_count": 3,
        "expert_group_used_count": 2,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
    }
    truth = synthetic.gguf(
        tmp_path / "source", architecture=architecture, metadata=metadata if architecture == "deepseek2" else {}
    )
    done = convert(truth.path, tmp_path / "new", to=to, layers=[0])
    before, after = (dataclasses.asdict(checkpoint.describe(path)) for path in (truth.path, tmp_path / "new"))
    assert done.notes == before["notes"]
    assert before["guessed"] == after["guessed"] == (("scoring", "renormalize") if architecture == "mystery" else ())
    assert {k: v for k, v in before.items() if k not in ROUTING} == {k: v for k, v in after.items() if k not in ROUTING}
    if architecture == "deepseek2":
        assert (after["routed_scaling_factor"], after["num_groups"], after["topk_groups"]) == (2.5, 3, 2)
        assert (after["scoring"], after["renormalize"]) == ("sigmoid", False)


def test_the_scale_rule_is_used_and_recorded(tmp_path):
    truth = synthetic.FORMATS["qwen3"](tmp_path / "source")
    convert(truth.path, tmp_path / "new", to="quark", scale_rule="ceil")
    loaded = checkpoint.load(tmp_path / "new", layer=0)
    _, scales = oracle.quantize(truth.layers[0].gate_up.values, "ceil")
    np.testing.assert_array_equal(loaded.gate_up.scales, scales)
    assert checkpoint.describe(tmp_path / "new").scale_rule == "ceil"


def test_layers_in_floats_of_a_quantized_model_are_copied_and_named(tmp_path):
    truth = synthetic.quark(tmp_path / "source", mtp=True)
    done = convert(truth.path, tmp_path / "new", to="compressed_tensors")
    assert done.layers == (1, 2)
    assert done.notes == (
        "Layers 3 are in floats in a checkpoint that is quantized otherwise: their experts were copied.",
    )
    new = open_checkpoint(tmp_path / "new")
    assert new["model.layers.3.mlp.experts.0.gate_proj.weight"].dtype == "BF16"
    ignored = new.config["quantization_config"]["ignore"]
    assert "model.layers.3.mlp.experts.0.gate_proj" in ignored
    assert r"re:model\.layers\..*\.mlp\.gate$" in ignored
    with pytest.raises(ValueError, match="no experts in MXFP4 among the chosen layers"):
        convert(truth.path, tmp_path / "more", to="quark", layers=[3])


def test_weights_only_drops_what_the_source_says_of_activations(tmp_path):
    truth = synthetic.quark_gpt_oss(tmp_path / "source", inputs="fp8")
    with pytest.raises(
        ValueError, match=r"activation_quant='fp8' given; expected None .* or convert with weights_only"
    ):
        convert(truth.path, tmp_path / "new", to="gpt_oss")
    convert(truth.path, tmp_path / "new", to="gpt_oss", weights_only=True)
    loaded, original = (checkpoint.load(tmp_path / n, layer=0) for n in ("new", "source"))
    assert original.activation_quant == "fp8"
    same(loaded, original.replace(activation_quant=None, activation_scale=None))
    assert not [n for n in open_checkpoint(tmp_path / "new") if "input_scale" in n]


def with_more(name, tensor):
    """A Quark model with one more tensor, in a shard of its own."""

    def make(folder):
        truth = synthetic.quark(folder, style="qwen3")
        (folder / "more.safetensors").write_bytes(synthetic.safetensors_bytes({name: tensor}))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][name] = "more.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return truth

    return make


quantized_attention = with_more("model.layers.0.self_attn.o_proj.weight", synthetic.Tensor.of("U8", np.zeros((4, 16))))
odd_expert = with_more("model.layers.0.mlp.experts.0.gate_proj.zero_point", synthetic.Tensor.of("F32", np.zeros(3)))
qwen3 = synthetic.FORMATS["quark_qwen3"]
gpt_oss_for_mxfp4 = functools.partial(synthetic.quark_gpt_oss, inputs="mxfp4")

# The source, options of convert, and what the error says. Destinations are relative to the folder that holds the source.
REFUSED = {
    "shared_experts": (
        synthetic.quark,
        {"to": "gpt_oss", "weights_only": True},
        "shared experts given; expected none in format 'gpt_oss'",
    ),
    "activations": (gpt_oss_for_mxfp4, {"to": "gpt_oss"}, "activation_quant='mxfp4' given; expected None"),
    "activation_of_another_model": (
        qwen3,
        {"to": "gpt_oss", "weights_only": True},
        "activation='silu' and scoring='softmax'; expected 'swiglu_oai' and 'softmax_after_topk' in format 'gpt_oss'",
    ),
    "activation_of_another_gguf": (
        functools.partial(synthetic.gguf, architecture="qwen3moe"),
        {"to": "gpt_oss", "layers": [0]},
        "activation='silu' and scoring='softmax'; expected 'swiglu_oai'",
    ),
    "rule_of_activations": (
        functools.partial(synthetic.quark, style="qwen3", scale_rule="ceil"),
        {"to": "compressed_tensors"},
        "scale_rule='ceil' given, with activation_quant='mxfp4'; expected 'even' in format 'compressed_tensors'",
    ),
    "rule_without_use": (
        synthetic.gpt_oss,
        {"scale_rule": "even"},
        "in MXFP4 already; expected it only where they are in floats",
    ),
    "rule_without_word": (
        synthetic.bfloat16,
        {"scale_rule": "rceil"},
        "scale_rule='rceil' given; expected one of even, floor, ceil",
    ),
    "unknown_rule": (synthetic.bfloat16, {"scale_rule": "up"}, "convert: scale_rule='up' given; expected one of floor"),
    "unknown_format": (
        synthetic.gpt_oss,
        {"to": "gguf"},
        "convert: format 'gguf' given; expected one of gpt_oss, quark",
    ),
    "unknown_layer": (synthetic.gpt_oss, {"layers": [0, 7]}, "layers [7] given; expected some of 0, 1"),
    "no_layer": (synthetic.gpt_oss, {"layers": []}, "layers [] given; expected some of 0, 1"),
    "whole_gguf": (synthetic.gguf, {}, "tensor 'token_embd.weight' F32 [3, 160]"),
    "whole_original": (synthetic.gpt_oss_original, {}, "has names of its own; expected a Hugging Face model"),
    "float8_beside": (synthetic.deepseek_v4, {}, "describes nothing else. Convert some of its layers (--layers)"),
    "attention_quantized": (quantized_attention, {}, "tensor 'model.layers.0.self_attn.o_proj.weight' U8 [4, 16]"),
    "unknown_part_of_an_expert": (odd_expert, {}, "gate_proj.zero_point' F32 [3] in"),
    "onto_itself": (
        synthetic.gpt_oss,
        {"destination": "source", "overwrite": True},
        "which holds the source; expected another",
    ),
    "onto_a_parent": (
        synthetic.gpt_oss,
        {"destination": ".", "overwrite": True},
        "which holds the source; expected another",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, options, told = REFUSED[case]
    truth = make(tmp_path / "source")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the text is tested below
        convert(truth.path, **{"destination": "new", "to": "quark", **options})
    assert told in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_experts_in_floats_are_quantized_once(tmp_path, monkeypatch):
    truth = synthetic.gpt_oss_dequantized(tmp_path / "source")
    seen = []
    quantize_rows = dense.quantize_rows
    monkeypatch.setattr(
        dense, "quantize_rows", lambda weight, **rules: seen.append(1) or quantize_rows(weight, **rules)
    )
    for to in ("gpt_oss", "quark", "compressed_tensors"):
        seen.clear()
        convert(truth.path, tmp_path / to, to=to)
        assert len(seen) == len(truth.layers) * 3 * synthetic.EXPERTS


@pytest.mark.parametrize("to", ["gpt_oss", "quark"])
@pytest.mark.parametrize("make", [synthetic.gpt_oss, synthetic.gpt_oss_dequantized], ids=["packed", "floats"])
def test_memory_is_that_of_one_expert(make, to, tmp_path):
    """Or, of experts in floats that become one stacked tensor, that of the tensor; never more with more layers."""
    truth = make(tmp_path / "source", layers=8, experts=4, hidden=256, intermediate=512)
    one = 2 * 512 * 256 * 17 // 32
    total = one * 4 * 8 * 3 // 2
    checkpoint.load(truth.path, layer=0)  # compiles
    tracemalloc.start()
    try:
        convert(truth.path, tmp_path / "new", to=to)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    quantizing = 0 if make is synthetic.gpt_oss else 1_000_000 + 4 * 512 * 256 + 4 * one * (to == "gpt_oss")
    assert peak < 4 * one + quantizing + 700_000 < total * 0.6


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def invoke():
    typer_testing = pytest.importorskip("typer.testing")
    from jax_mxfp4_moe.cli import app

    def call(*arguments):
        return typer_testing.CliRunner().invoke(app, ["convert", *map(str, arguments)], env={"COLUMNS": "400"})

    return call


def test_command(invoke, tmp_path):
    synthetic.gpt_oss(tmp_path / "source")
    done = invoke(
        tmp_path / "source", tmp_path / "new", "--to", "quark", "--layers", "0-1", "--max-shard-bytes", 20_000
    )
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'new'}: 0.000 GB; experts of 2 layers rewritten, 4 tensors copied" in done.output
    same(checkpoint.load(tmp_path / "new", layer=1), checkpoint.load(tmp_path / "source", layer=1))
    again = invoke(tmp_path / "source", tmp_path / "new", "--to", "quark")
    assert again.exit_code == 1
    assert "is not an empty folder; expected a new place. Give another path, or overwrite=True" in again.output
    done = invoke(tmp_path / "source", tmp_path / "new", "--to", "gpt_oss", "--overwrite")
    assert done.exit_code == 0, done.output
    assert checkpoint.describe(tmp_path / "new").format == "gpt_oss"


def test_command_passes_its_options_on(invoke, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(module, "run", lambda *paths, **options: seen.update(options, paths=paths) or 1)
    done = invoke("a", "b", "--to", "quark", "--layers", "1, 3-5", "--scale-rule", "floor", "--weights-only")
    assert done.exit_code == 1
    assert [str(path) for path in seen.pop("paths")] == ["a", "b"]
    assert seen == {
        "to": "quark", "layers": [1, 3, 4, 5], "scale_rule": "floor", "weights_only": True, "overwrite": False,
        "max_shard_bytes": 5_000_000_000,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("missing", "new", "--to", "quark"), 1, "missing given, which does not exist"),
        (("broken", "new", "--to", "quark"), 1, "model.safetensors: 3 bytes found"),
        (("broken", "new"), 2, "--to"),
        (
            ("broken", "new", "--to", "onnx"),
            2,
            "format 'onnx' given; expected one of gpt_oss, quark, compressed_tensors",
        ),
        (("broken", "new", "--to", "quark", "--scale-rule", "up"), 2, "scale rule 'up' given; expected one of floor"),
        (
            ("broken", "new", "--to", "quark", "--layers", "1-"),
            2,
            "'1-' given; expected layer numbers and ranges such as 0,3-5",
        ),
        (("broken", "new", "--to", "quark", "--layers", "0-99999999999"), 2, "expected layer numbers"),
        (("broken", "new", "--to", "quark", "--max-shard-bytes", "0"), 2, "--max-shard-bytes"),
    ],
)
def test_status_and_message_of_what_fails(invoke, arguments, status, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"abc")
    done = invoke(*arguments)
    assert done.exit_code == status, done.output
    assert told in " ".join(done.output.split())
    assert not (tmp_path / "new").exists()


def test_converting_needs_no_safetensors_and_no_torch(tmp_path):
    synthetic.deepseek_v4(tmp_path / "source")
    code = (
        "import sys; from jax_mxfp4_moe.checkpoint.convert import run; import pathlib; "
        f"status = run(pathlib.Path({str(tmp_path / 'source')!r}), pathlib.Path({str(tmp_path / 'new')!r}), to='quark', layers=[0]); "
        "bad = {'torch', 'safetensors', 'gguf', 'flax'} & set(sys.modules); sys.exit(status or bool(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "experts of 1 layers rewritten" in done.stdout
    assert jax.tree.leaves(checkpoint.load(tmp_path / "new", layer=0))


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run(tmp_path):
    page = pathlib.Path(__file__, "../../../docs/checkpoints.md").resolve().read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    truth = synthetic.gpt_oss(tmp_path / "source", layers=4, experts=2, hidden=32, intermediate=32)
    names = {}
    exec(first.replace('"openai/gpt-oss-20b"', repr(str(truth.path))), names)
    y = names["moe"](np.ones((1, 32), np.float32))
    assert y.shape == (1, 32)
    exec(second.replace('"new"', repr(str(tmp_path / "new"))), names)
    same(checkpoint.load(tmp_path / "new", layer=3), names["weights"])
