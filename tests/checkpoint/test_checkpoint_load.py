"""Loading: every format gives the bytes that were written, whole or in parts, and what would be silently wrong is refused."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import synthetic

from jax_mxfp4_moe import append_shared_experts, dequantize, mxfp4_moe, topk_routing
from jax_mxfp4_moe.checkpoint import describe, load, load_router, open_checkpoint


def stack(weights):
    """[codes, scales] of both products, in NumPy."""
    return [np.asarray(a) for part in (weights.gate_up, weights.down) for a in (part.codes, part.scales)]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def rewrite(made, folder, *, change=None, config=None, shards=3):
    """The checkpoint once more, with changes to its tensors (None removes one) and its configuration."""
    tensors = {**made.tensors, **(change or {})}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    synthetic.write_model(folder, kept, made.config if config is None else config, shards=shards)
    return folder


def dealt(made, folder, config, **quantization):
    """The checkpoint with another quantization_config."""
    table = {**made.config["quantization_config"], **quantization}
    return rewrite(made, folder, config={**made.config, **config, "quantization_config": table})


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Checkpoints by format, each written once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = synthetic.FORMATS[name](tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return get


# --- what is read ----------------------------------------------------------------------------------------------------


def check_stack(array, stack, rule="even"):
    """Bytes of a loaded stack against the truth: that in the file, or the oracle's quantization of its floats."""
    if stack.codes is None:
        codes, scales = oracle.quantize(stack.values, rule)
    else:
        codes, scales = stack.packed, stack.scales
    np.testing.assert_array_equal(np.asarray(array.codes), codes)
    np.testing.assert_array_equal(np.asarray(array.scales), scales)


values = jax.jit(lambda array: dequantize(array, jnp.float32))


def check_values(array, stack):
    with np.errstate(over="ignore"):  # 6 * 2 ** 127
        np.testing.assert_array_equal(np.asarray(values(array)), stack.values.astype(np.float32))


def check_floats(found, truth):
    assert (found is None) == (truth is None)
    if truth is not None:
        np.testing.assert_array_equal(np.asarray(found).astype(np.float64), truth)


@pytest.mark.parametrize("name", synthetic.FORMATS)
def test_format_is_read_exactly(name, written):
    made = written(name)
    for number, truth in made.layers.items():
        weights = load(made.path, layer=number)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(weights))
        assert weights.layout == "packed"
        check_stack(weights.gate_up, truth.gate_up)
        check_stack(weights.down, truth.down)
        if truth.gate_up.codes is not None:
            check_values(weights.gate_up, truth.gate_up)
            check_values(weights.down, truth.down)
        check_floats(weights.gate_up_bias, truth.gate_up_bias)
        check_floats(weights.down_bias, truth.down_bias)
        router = load_router(made.path, layer=number)
        check_floats(router.weight, truth.router)
        check_floats(router.bias, truth.router_bias)
        check_floats(router.correction_bias, truth.correction_bias)


def test_values_of_a_dequantized_checkpoint_survive(written):
    made = written("gpt_oss_dequantized")
    for number, truth in made.layers.items():
        weights = load(made.path, layer=number)
        check_values(weights.gate_up, truth.gate_up)
        check_values(weights.down, truth.down)


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (128, 64)])
def test_square_matrices_are_turned_the_right_way(hidden, intermediate, tmp_path):
    made = synthetic.gpt_oss_dequantized(tmp_path / "model", layers=1, hidden=hidden, intermediate=intermediate)
    weights = load(made.path, layer=0)
    check_stack(weights.gate_up, made.layers[0].gate_up)
    check_stack(weights.down, made.layers[0].down)


def stacked(made, folder, model_type, transposed):
    """A checkpoint with tensors for each expert as one with stacked floats, gate rows first."""
    (number, layer), *_ = made.layers.items()
    base = f"model.layers.{number}.mlp.experts."
    turn = (lambda a: a.swapaxes(1, 2).copy()) if transposed else np.asarray
    tensors = {
        base + "gate_up_proj": synthetic.Tensor.of("BF16", turn(layer.gate_up.values)),
        base + "down_proj": synthetic.Tensor.of("BF16", turn(layer.down.values)),
    }
    synthetic.write_model(folder, tensors, {**made.config, "model_type": model_type})
    return folder


@pytest.mark.parametrize(("model_type", "transposed"), [("qwen3_moe", False), ("qwen3_vl_moe", True)])
def test_stacked_floats_are_ordered_by_model_type(model_type, transposed, written, tmp_path):
    made = written("qwen3")
    same(load(stacked(made, tmp_path / "model", model_type, transposed), layer=0), load(made.path, layer=0))


def test_stacked_floats_of_unknown_order_are_refused(written, tmp_path):
    with pytest.raises(
        ValueError, match=r"gate_up_proj' BF16 .* model_type='mystery'; expected one of gpt_oss, .*Set model_type"
    ):
        load(stacked(written("qwen3"), tmp_path / "model", "mystery", False), layer=0)


def test_both_gpt_oss_namings_are_one(written, tmp_path):
    made = written("gpt_oss")
    words = {
        "model.layers.": "block.", "experts.gate_up_proj_bias": "mlp1_bias", "experts.down_proj_bias": "mlp2_bias",
        "experts.gate_up_proj_": "mlp1_weight.", "experts.down_proj_": "mlp2_weight.", "router.": "gate.",
    }  # fmt: skip
    renamed = {}
    for name, tensor in made.tensors.items():
        if ".mlp." in name:
            for old, new in words.items():
                name = name.replace(old, new)
            renamed[name] = tensor
    config = {k: v for k, v in made.config.items() if k not in ("quantization_config", "model_type")}
    synthetic.write_model(tmp_path / "original", renamed, config, shards=1)
    for layer in made.layers:
        same(load(tmp_path / "original", layer=layer), load(made.path, layer=layer))
        same(load_router(tmp_path / "original", layer=layer), load_router(made.path, layer=layer))
    assert describe(tmp_path / "original") == describe(made.path)


def test_interleaved_and_separate_rows_load_alike(tmp_path):
    """Gate rows all +1 (code 2), up rows all +2 (code 4), in three formats."""
    experts, hidden, intermediate = 2, 64, 32
    gate, up = (np.full((intermediate, hidden // 2), code * 17, np.uint8) for code in (2, 4))
    down, one = np.full((hidden, intermediate // 2), 34, np.uint8), np.uint8(127)
    scale = {"gate": np.full((intermediate, 2), one), "down": np.full((hidden, 1), one)}
    bias = {"gate": np.full(intermediate, 1.0), "up": np.full(intermediate, 2.0), "down": np.zeros(hidden)}
    alternate = {
        "weight": np.stack([gate, up], 1).reshape(2 * intermediate, -1), "weight_scale": np.repeat(scale["gate"], 2, 0),
        "bias": np.stack([bias["gate"], bias["up"]], 1).reshape(-1),
    }  # fmt: skip
    base = "model.layers.0.mlp.experts."
    separate, fused, whole = {}, {}, {}
    for e in range(experts):
        for part, codes in (("gate", gate), ("up", up), ("down", down)):
            name = f"{base}{e}.{part}_proj"
            separate[f"{name}.weight"] = synthetic.Tensor.of("U8", codes)
            separate[f"{name}.weight_scale"] = synthetic.Tensor.of("U8", scale["down" if part == "down" else "gate"])
            separate[f"{name}.bias"] = synthetic.Tensor.of("F32", bias[part])
        fused.update({n: t for n, t in separate.items() if f".{e}.down_proj" in n})
        for what, array in alternate.items():
            fused[f"{base}{e}.gate_up_proj.{what}"] = synthetic.Tensor.of("F32" if what == "bias" else "U8", array)
    for name, parts in (
        ("gate_up_proj", alternate),
        ("down_proj", {"weight": down, "weight_scale": scale["down"], "bias": bias["down"]}),
    ):
        for what, array in parts.items():
            word = {"weight": "blocks", "weight_scale": "scales", "bias": "bias"}[what]
            array = array.reshape(len(array), -1, 16) if what == "weight" else array
            whole[f"{base}{name}_{word}"] = synthetic.Tensor.of(
                "F32" if what == "bias" else "U8", np.stack([array] * experts)
            )
    loaded = []
    for name, tensors in (("separate", separate), ("fused", fused), ("whole", whole)):
        synthetic.write_model(tmp_path / name, tensors, None, shards=1)
        loaded.append(load(tmp_path / name, layer=0))
    rows = oracle.dequantize(*stack(loaded[0])[:2])
    assert (rows[:, :intermediate] == 1).all()
    assert (rows[:, intermediate:] == 2).all()
    assert (np.asarray(loaded[0].gate_up_bias) == [1] * intermediate + [2] * intermediate).all()
    same(loaded[0], loaded[1])
    same(loaded[0], loaded[2])


def test_blocks_without_an_axis_of_their_own(written, tmp_path):
    made = written("gpt_oss")
    change = {
        name: dataclasses.replace(tensor, shape=(*tensor.shape[:2], tensor.shape[2] * 16))
        for name, tensor in made.tensors.items()
        if name.endswith("_blocks")
    }
    same(load(rewrite(made, tmp_path / "model", change=change), layer=0), load(made.path, layer=0))


def test_rows_that_may_lie_apart_are_not_taken_for_alternating(written, tmp_path):
    made = written("quark_gpt_oss")
    path = rewrite(made, tmp_path / "model", config={**made.config, "model_type": "llama4"})
    with pytest.raises(
        ValueError,
        match=r"gate and up in one tensor, with model_type='llama4'; expected 'gpt_oss', .* as two tensors\.$",
    ):
        load(path, layer=0)


def test_gguf_nibbles_are_split_and_those_of_other_formats_are_not(tmp_path):
    """One block of codes 0..15, 0..15 is 10 32 ... FE twice in pairs, and 00 11 ... FF in GGUF's order."""
    from jax_mxfp4_moe.checkpoint.gguf import merge_nibbles

    split = np.arange(16, dtype=np.uint8) * 17
    pairs = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), 2)
    np.testing.assert_array_equal(merge_nibbles(split), pairs)
    np.testing.assert_array_equal(oracle.unpack(merge_nibbles(split)), np.tile(np.arange(16), 2))


@pytest.mark.parametrize(("codes", "scales"), [("U8", "U8"), ("I8", "F8_E8M0"), ("F4", "F8_E8M0"), ("F4", "U8")])
def test_all_types_of_the_same_bytes_load_alike(codes, scales, written, tmp_path):
    made = written("quark_qwen3")
    change = {}
    for name, tensor in made.tensors.items():
        if name.endswith("proj.weight") and ".experts." in name:
            rows, columns = tensor.shape
            change[name] = synthetic.Tensor(codes, (rows, columns * (2 if codes == "F4" else 1)), tensor.data)
        elif name.endswith(".weight_scale"):
            change[name] = synthetic.Tensor(scales, tensor.shape, tensor.data)
    same(load(rewrite(made, tmp_path / "model", change=change), layer=1), load(made.path, layer=1))


def test_a_single_file_and_an_open_checkpoint_will_do(written, tmp_path):
    made = written("quark_qwen3")
    whole = load(made.path, layer=0)
    opened = open_checkpoint(made.path)
    same(load(opened, layer=0), whole)
    assert describe(opened) == describe(made.path)
    # Without a configuration nothing says that activations are quantized.
    synthetic.write_model(tmp_path, made.tensors, None, shards=1)
    alone = load(tmp_path / "model.safetensors", layer=0)
    assert alone.activation_quant is None
    same(alone, load(made.path, layer=0, activation_quant=None))
    assert load(tmp_path, layer=0, activation_quant="mxfp4").activation_quant == "mxfp4"


def test_prepared_for_an_implementation(written):
    made = written("quark_qwen3")
    same(load(made.path, layer=0, implementation="xla"), load(made.path, layer=0))
    with pytest.raises(ValueError, match="implementation='nosuch'"):
        load(made.path, layer=0, implementation="nosuch")


# --- experts with tensors of their own -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def twelve(tmp_path_factory):
    return synthetic.quark(
        tmp_path_factory.mktemp("twelve") / "model",
        style="qwen3",
        layers=1,
        experts=12,
        hidden=32,
        intermediate=32,
        shards=2,
    )


EXPERT = "model.layers.0.mlp.experts."


def test_experts_are_in_numeric_order(twelve):
    weights = load(twelve.path, layer=0)
    check_stack(weights.gate_up, twelve.layers[0].gate_up)
    check_stack(weights.down, twelve.layers[0].down)


@pytest.mark.parametrize(
    ("remove", "add", "told"),
    [
        ([f"{EXPERT}7.up_proj.weight_scale"], [], r"lacks 1 of the 72 tensors of its experts. Missing: .*experts.7.up_proj.weight_scale."),
        ([f"{EXPERT}7."], [], r"has 11 experts; expected ids 0\.\.11, as its configuration says. Missing: 7. Complete"),
        ([f"{EXPERT}0."], [], r"expected ids 0\.\.11.* Missing: 0."),
        ([f"{EXPERT}{e}." for e in range(4, 12)], [], r"Missing: 4, 5, 6, 7, 8 and 3 more. "),
        ([], ["12"], r"has 13 experts; expected ids 0\.\.11, as its configuration says. Extra: 12. Complete"),
        ([f"{EXPERT}{e}.up_proj.weight" for e in range(12)], [], r"lacks 24 of the 72 tensors.* and 19 more. Complete"),
    ],
)  # fmt: skip
def test_missing_and_extra_experts_are_named(remove, add, told, twelve, tmp_path):
    change = {n: None for n in twelve.tensors for prefix in remove if n.startswith(prefix)}
    for expert in add:
        copied = {n.replace(".3.", f".{expert}."): t for n, t in twelve.tensors.items() if n.startswith(f"{EXPERT}3.")}
        change.update(copied)
    path = rewrite(twelve, tmp_path / "model", change=change)
    with pytest.raises(ValueError, match=rf"layer 0 of {re.escape(str(path))} .*{told}"):
        load(path, layer=0)


def test_a_configuration_that_states_billions_of_experts_costs_nothing(twelve, tmp_path):
    path = rewrite(twelve, tmp_path / "model", config={**twelve.config, "num_experts": 2**31 - 1})
    told = (
        r"has 12 experts; expected ids 0\.\.2147483646, .* Missing: 12, 13, 14, 15, 16 and 2147483630 more\. Complete"
    )
    with pytest.raises(ValueError, match=told):
        load(path, layer=0)


def test_expert_0_is_an_expert(twelve, tmp_path):
    zeros = {
        name: dataclasses.replace(tensor, data=bytes(len(tensor.data)))
        for name, tensor in twelve.tensors.items()
        if name.startswith(EXPERT) and not name.startswith(f"{EXPERT}0.")
    }
    path = rewrite(twelve, tmp_path / "model", change=zeros)
    truth = twelve.layers[0].gate_up.packed[0]
    codes = np.asarray(load(path, layer=0).gate_up.codes)
    np.testing.assert_array_equal(codes[0], truth)
    assert not codes[1:].any()
    np.testing.assert_array_equal(np.asarray(load(path, layer=0, experts=[0]).gate_up.codes), truth[None])


# --- parts -----------------------------------------------------------------------------------------------------------

SHARDED = [
    "gpt_oss",
    "quark_deepseek",
    "quark_gpt_oss",
    "compressed_tensors",
    "deepseek_v4",
    "gpt_oss_dequantized",
    "mixtral",
    "gguf",
]


def part_of(weights, experts, start, stop):
    """A shard, cut from whole weights."""
    f = weights.intermediate_size
    rows = np.r_[start:stop, f + start : f + stop]
    gate_up, down = weights.gate_up, weights.down
    found = [
        np.asarray(gate_up.codes)[experts][:, rows],
        np.asarray(gate_up.scales)[experts][:, rows],
        np.asarray(down.codes)[experts][..., start // 2 : stop // 2],
        np.asarray(down.scales)[experts][..., start // 32 : stop // 32],
    ]
    if weights.gate_up_bias is not None:
        found += [np.asarray(weights.gate_up_bias)[experts][:, rows], np.asarray(weights.down_bias)[experts]]
    return found


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_is_a_slice_of_the_whole(name, written):
    opened = open_checkpoint(written(name).path)
    layer = max(written(name).layers)
    whole = load(opened, layer=layer)
    cases = [(slice(1, None), slice(None, 32)), ([2, 0], slice(32, 96)), (np.array([0]), None), (None, slice(96, 96))]
    for experts, columns in cases:
        shard = load(opened, layer=layer, experts=experts, intermediate=columns)
        start, stop, _ = (columns or slice(None)).indices(96)
        ids = np.arange(3)[slice(None) if experts is None else experts]
        biases = [np.asarray(b) for b in (shard.gate_up_bias, shard.down_bias) if b is not None]
        for found, expected in zip([*stack(shard), *biases], part_of(whole, ids, start, stop), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert shard.intermediate_size == stop - start
        same(shard.activation_scale, whole.activation_scale)


@pytest.mark.parametrize(
    "columns", [slice(0, 40), slice(8, 96), slice(0, 128), slice(-32, 96), slice(64, 32), slice(0, 96, 2)]
)
def test_a_part_that_cuts_a_block_is_refused(columns, written):
    with pytest.raises(
        ValueError, match=r"intermediate=slice.* given for F=96 of layer 0 .* multiples of 32.* Divide the 3 blocks"
    ):
        load(written("gpt_oss").path, layer=0, intermediate=columns)


@pytest.mark.parametrize("experts", [[3], [-1], [], slice(3, 9), [True], [0.0]])
def test_experts_that_do_not_exist_are_refused(experts, written):
    with pytest.raises(
        ValueError, match=r"experts=.* given; expected at least one id from 0 to 2, those of layer 0 .* Shared experts"
    ):
        load(written("gpt_oss").path, layer=0, experts=experts)


# --- shared experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quark_deepseek", "quark_kimi_multimodal", "compressed_tensors_kimi", "deepseek"])
def test_shared_experts_stand_behind_the_routed(name, written):
    made = written(name)
    assert describe(made.path).num_shared_experts == 1
    for number, truth in made.layers.items():
        both = load(made.path, layer=number, include_shared=True)
        routed = load(made.path, layer=number)
        assert (routed.num_experts, both.num_experts) == (3, 4)
        same(jax.tree.map(lambda a: a[:3], both), routed)
        last = load(made.path, layer=number, include_shared=True, experts=[3])
        same(jax.tree.map(lambda a: a[3:], both), last)
        check_stack(last.gate_up, truth.shared_gate_up)
        check_stack(last.down, truth.shared_down)


def test_shared_experts_in_floats_are_quantized_when_asked(written):
    made = written("quark_kimi")
    description = describe(made.path)
    assert description.num_shared_experts == 1
    assert "The shared experts are in floats" in description.notes[0]
    told = r"the shared experts of layer 1 .* are in floats, in a checkpoint that is quantized otherwise; .* Pass quantize=True"
    with pytest.raises(ValueError, match=told):
        load(made.path, layer=1, include_shared=True)
    with pytest.raises(ValueError, match=told.replace("1 ", "2 ")):
        load(made.path, layer=2, include_shared=True, experts=[0])
    weights = load(made.path, layer=1, include_shared=True, quantize=True, experts=[3])
    check_stack(weights.gate_up, made.layers[1].shared_gate_up)


def test_a_wide_shared_expert_is_several(written, tmp_path):
    made = written("quark_deepseek")
    change = {}
    base = "model.layers.1.mlp."
    for name in ("gate_proj", "up_proj", "down_proj"):
        for what in ("weight", "weight_scale"):
            own, other = (made.tensors[f"{base}{e}.{name}.{what}"] for e in ("shared_experts", "experts.2"))
            axis = 1 if name == "down_proj" else 0
            wide = np.concatenate([own.array(), other.array()], axis)
            change[f"{base}shared_experts.{name}.{what}"] = synthetic.Tensor.of("U8", wide)
    path = rewrite(made, tmp_path / "model", change=change)
    assert describe(path).num_shared_experts == 2
    weights = load(path, layer=1, include_shared=True, intermediate=slice(32, 96))
    expected = load(made.path, layer=1, include_shared=True, experts=[0, 1, 2, 3, 2], intermediate=slice(32, 96))
    same(weights, expected)


def test_shared_experts_in_float8_are_refused(written):
    made = written("deepseek_v4")
    with pytest.raises(
        ValueError,
        match=r"shared experts are float8 \(tensor 'layers.0.ffn.shared_experts.w1.weight' F8_E4M3 .* Load without",
    ):
        load(made.path, layer=0, include_shared=True)
    description = describe(made.path)
    assert description.num_shared_experts == 0
    assert description.notes[0].startswith(
        "The shared experts cannot be loaded beside the routed ones: the shared experts are float8"
    )
    assert description.notes[1].startswith("The model's own kernels quantize activations to float8 in blocks of 128")


def test_shared_experts_that_are_missing_or_gated_are_refused(written, tmp_path):
    with pytest.raises(ValueError, match=r"layer 0 .* has no shared experts; .* Leave it out"):
        load(written("quark_qwen3").path, layer=0, include_shared=True)
    made = written("deepseek")
    change = {n: None for n in made.tensors if "shared_experts" in n}
    change |= {
        n.replace("shared_experts", "shared_expert"): t for n, t in made.tensors.items() if "shared_experts" in n
    }
    gate = "model.layers.1.mlp.shared_expert_gate.weight"
    change[gate] = synthetic.Tensor.of("BF16", np.zeros((1, 160)))
    path = rewrite(made, tmp_path / "model", change=change)
    with pytest.raises(ValueError, match=rf"has a gate of its own, {gate}; expected one that counts with weight 1"):
        load(path, layer=1, include_shared=True)
    assert load(path, layer=1).num_experts == 3


# --- what the configuration says -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["mxfp4", "fp8", None])
def test_activation_quant_of_quark(inputs, tmp_path):
    made = synthetic.quark_gpt_oss(tmp_path / "model", layers=1, inputs=inputs)
    for options in ({}, {"experts": [1]}):
        weights = load(made.path, layer=0, **options)
        assert weights.activation_quant == inputs == describe(made.path).activation_quant
        if inputs == "fp8":  # the largest over all experts, whichever are loaded
            scales = made.layers[0].input_scales
            expected = np.array([scales["gate_up_proj"].max(), scales["down_proj"].max()], np.float32)
            np.testing.assert_array_equal(np.asarray(weights.activation_scale), expected)
        else:
            assert weights.activation_scale is None
    assert load(made.path, layer=0, activation_quant=None).activation_scale is None


@pytest.mark.parametrize("inputs", ["mxfp4", None])
def test_activation_quant_of_compressed_tensors(inputs, tmp_path):
    made = synthetic.compressed_tensors(tmp_path / "model", layers=1, inputs=inputs)
    assert load(made.path, layer=0).activation_quant == inputs
    assert describe(made.path).activation_quant == inputs


def test_a_layer_that_quark_left_in_floats(tmp_path):
    made = synthetic.quark(tmp_path / "model", style="deepseek", layers=1, mtp=True, scale_rule="ceil")
    description = describe(made.path)
    assert description.layers == {1: "quark", 2: "dense"}
    assert description.scale_rule == "ceil"
    assert "Layers 2 are in floats" in description.notes[0]
    with pytest.raises(
        ValueError,
        match=r"experts of layer 2 .* are in floats, in a checkpoint that is quantized otherwise; .*quantize=True",
    ):
        load(made.path, layer=2)
    check_stack(load(made.path, layer=2, quantize=True).gate_up, made.layers[2].gate_up, "ceil")
    check_stack(load(made.path, layer=2, quantize=True, scale_rule="floor").down, made.layers[2].down, "floor")


def test_quantization_rules_of_plain_floats(written):
    made = written("mixtral")
    truth = made.layers[1].down
    weights = load(made.path, layer=1, scale_rule="rceil", rounding="half_away", experts=[2])
    codes, scales = oracle.quantize(truth.values[2:], "rceil", "half_away")
    np.testing.assert_array_equal(np.asarray(weights.down.codes), codes)
    np.testing.assert_array_equal(np.asarray(weights.down.scales), scales)
    with pytest.raises(
        ValueError, match=r"experts of layer 1 .* are in floats, and quantize=False was given; expected MXFP4"
    ):
        load(made.path, layer=1, quantize=False)
    with pytest.raises(ValueError, match="scale_rule='up' given; expected one of floor, even"):
        load(made.path, layer=1, scale_rule="up")


def test_quantizing_in_chunks_changes_nothing(written, monkeypatch):
    from jax_mxfp4_moe.checkpoint import dense

    made = written("mixtral")
    whole = load(made.path, layer=0, experts=[1])
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", 36 * 160)  # gate in chunks of 36, 36 and 24 rows
    same(load(made.path, layer=0, experts=[1]), whole)


DESCRIPTIONS = {
    "gpt_oss": {
        "activation": "swiglu_oai",
        "activation_alpha": 1.702,
        "activation_limit": 7.0,
        "scoring": "softmax_after_topk",
        "use_bias": True,
        "router_bias": True,
    },
    "quark_gpt_oss": {
        "activation": "swiglu_oai",
        "activation_limit": 7.0,
        "scoring": "softmax_after_topk",
        "activation_quant": "fp8",
    },
    "gguf": {
        "activation": "swiglu_oai",
        "activation_alpha": 1.702,
        "activation_limit": 7.0,
        "scoring": "softmax_after_topk",
        "router_bias": True,
    },
    "quark_deepseek": {
        "activation": "silu",
        "scoring": "sigmoid",
        "renormalize": True,
        "routed_scaling_factor": 2.5,
        "correction_bias": True,
        "num_groups": None,
    },
    "quark_kimi_multimodal": {
        "activation": "silu",
        "scoring": "sigmoid",
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "deepseek_v4": {
        "activation": "silu_clamped",
        "activation_limit": 10.0,
        "scoring": "sqrtsoftplus",
        "renormalize": True,
        "routed_scaling_factor": 1.5,
    },
    "mixtral": {
        "activation": "silu",
        "activation_limit": None,
        "scoring": "softmax",
        "renormalize": True,
        "correction_bias": False,
        "use_bias": False,
    },
    "qwen3": {
        "activation": "silu",
        "scoring": "softmax",
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_shared_experts": 0,
    },
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_describe(name, written):
    made = written(name)
    found = describe(made.path)
    assert (found.num_experts, found.hidden_size, found.intermediate_size, found.num_experts_per_tok) == (3, 160, 96, 2)
    assert list(found.layers) == list(made.layers)
    assert {key: getattr(found, key) for key in DESCRIPTIONS[name]} == DESCRIPTIONS[name]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_group": 8, "topk_group": 4}, {"num_groups": 8, "topk_groups": 4, "group_score": None}),
        ({"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}, {"num_groups": 8, "topk_groups": 3, "group_score": "max"}),
        ({"n_group": 8, "topk_group": 3, "topk_method": "greedy"}, {"num_groups": None, "topk_groups": None}),
        ({"norm_topk_prob": False}, {"renormalize": False}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_tanh"}),
        ({"hidden_act": "situ"}, {"activation": "situ"}),
        ({"swiglu_limit": 5.0}, {"activation": "silu with swiglu_limit", "activation_limit": 5.0}),
        ({"routed_scaling_factor": 0.0}, {"routed_scaling_factor": 0.0}),
        ({"norm_topk_prob": None, "model_type": "qwen3_moe"}, {"renormalize": False}),
        ({"norm_topk_prob": None, "model_type": "new"}, {"renormalize": True, "guessed": ("renormalize",)}),
        ({"norm_topk_prob": None, "model_type": "new", "scoring_func": "softmax_after_topk"}, {"guessed": ()}),
        ({"model_type": "new"}, {"scoring": "sigmoid", "guessed": ()}),
        ({"scoring_func": None}, {"scoring": "sigmoid", "guessed": ()}),
        *(({"model_type": name}, {"scoring": "sigmoid", "renormalize": False, "apply_router_weight_on_input": True})
          for name in ("llama4", "llama4_text")),
        ({"hidden_size": 320}, {"hidden_size": 160}),
    ],
)  # fmt: skip
def test_describe_reads_the_configuration(changes, expected, written, tmp_path):
    made = written("deepseek")
    found = describe(rewrite(made, tmp_path / "model", config={**made.config, **changes}))
    assert {key: getattr(found, key) for key in expected} == expected
    assert bool(found.notes) == bool(found.guessed or "hidden_size" in changes)


@pytest.mark.parametrize(
    ("architecture", "scoring", "renormalize"),
    [("deepseek2", "softmax", False), ("llama", "softmax", True), ("llama4", "sigmoid", False), ("qwen2moe", "softmax", False),
     ("qwen3moe", "softmax", True)],
)  # fmt: skip
def test_routing_of_a_gguf_file_by_architecture(architecture, scoring, renormalize, tmp_path):
    found = describe(synthetic.gguf(tmp_path, architecture=architecture).path)
    assert (found.scoring, found.renormalize, found.guessed) == (scoring, renormalize, ())
    assert found.apply_router_weight_on_input == (architecture == "llama4")


@pytest.mark.parametrize("model_type", ["phimoe", "jamba", None])
def test_routing_that_is_not_known_is_refused(model_type, written, tmp_path):
    made = written("mixtral")
    found = describe(rewrite(made, tmp_path / "model", config={**made.config, "model_type": model_type}))
    assert found.guessed == ("scoring", "renormalize")
    assert f"model_type={model_type!r} decides" in found.notes[0]
    told = rf"the routing of model_type={model_type!r}, .* expected scoring and renormalize .* Pass scoring=\.\.\., renormalize=\.\.\.\.$"
    with pytest.raises(ValueError, match=told):
        found.routing_options()
    with pytest.raises(ValueError, match=r"Pass renormalize=\.\.\.\.$"):
        found.routing_options(scoring="softmax")
    options = found.routing_options(scoring="sigmoid", renormalize=False)
    assert (options["scoring"], options["renormalize"]) == ("sigmoid", False)


def test_a_missing_correction_bias_is_noted(written, tmp_path):
    made = written("deepseek")
    change = {name: None for name in made.tensors if "e_score_correction_bias" in name}
    assert change
    found = describe(rewrite(made, tmp_path / "model", change=change))
    assert any("topk_method='noaux_tc' chooses experts with a correction bias" in note for note in found.notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_routed_experts", value) for value in ("3", 10**30, -1)),
        *(("num_experts_per_tok", value) for value in (0, True)),
        ("hidden_act", 3),
        ("hidden_act", "x" * 5000),
        ("routed_scaling_factor", "x"),
        ("norm_topk_prob", 1),
        ("n_group", 1.5),
        ("swiglu_limit", [1]),
        ("quantization_config", []),
    ],
)
def test_configuration_of_wrong_types_is_refused(key, value, written, tmp_path):
    made = written("quark_deepseek")
    path = rewrite(made, tmp_path / "model", config={**made.config, key: value})
    with pytest.raises(
        ValueError, match=rf"configuration: {key}=.{{1,80}} found; expected .*\. Correct config.json\.$"
    ):
        describe(path)


def test_without_a_configuration_the_description_says_so(written, tmp_path):
    made = written("gpt_oss")
    synthetic.write_model(tmp_path / "model", made.tensors, None)
    found = describe(tmp_path / "model")
    assert found.activation == "swiglu_oai"
    assert found.notes == ("There is no config.json: activation and routing are assumptions.",)


def test_words_that_the_package_lacks_are_refused_where_they_are_used(written, tmp_path):
    made = written("deepseek")
    config = {**made.config, "hidden_act": "situ", "scoring_func": "cosine"}
    path = rewrite(made, tmp_path / "model", config=config)
    found = describe(path)
    x = jnp.zeros((1, 160))
    with pytest.raises(ValueError, match="scoring='cosine'"):
        topk_routing(jnp.zeros((1, 3)), 2, **found.routing_options())
    ids = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="activation='situ'"):
        mxfp4_moe(x, load(path, layer=1), jnp.ones((1, 1)), ids, **found.activation_options())


def test_a_layer_runs_from_its_checkpoint(written):
    """From files to numbers: router, experts and options of gpt-oss, against the oracle."""
    made = written("gpt_oss_dequantized")
    truth, found = made.layers[1], describe(made.path)
    weights, router = load(made.path, layer=1), load_router(made.path, layer=1)
    x = np.random.default_rng(0).normal(size=(5, 160)).astype(np.float32) / 8
    logits = x @ np.asarray(router.weight, np.float32).T + np.asarray(router.bias, np.float32)
    topk_weights, ids = topk_routing(jnp.asarray(logits), found.num_experts_per_tok, **found.routing_options())
    y = mxfp4_moe(x, weights, topk_weights, ids, **found.activation_options())

    exact = x.astype(np.float64) @ truth.router.T + truth.router_bias
    order = np.argsort(-exact, axis=-1)[:, :2]
    chosen = np.exp(np.take_along_axis(exact, order, -1))
    expected = oracle.moe(
        x, truth.gate_up.values, truth.down.values, chosen / chosen.sum(-1, keepdims=True), order,
        gate_up_bias=truth.gate_up_bias, down_bias=truth.down_bias, x_dtype="float32", activation="swiglu_oai",
        activation_alpha=1.702, activation_limit=7.0,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(y), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_shared_experts_run_beside_the_routed(written):
    made = written("deepseek")
    truth, found = made.layers[1], describe(made.path)
    weights = load(made.path, layer=1, include_shared=True)
    x = np.random.default_rng(1).normal(size=(3, 160)).astype(np.float32)
    ids, routed = jnp.array([[0, 2], [1, 0], [2, 1]], jnp.int32), jnp.full((3, 2), 0.5)
    topk_weights, ids = append_shared_experts(routed, ids, found.num_experts, found.num_shared_experts)
    y = mxfp4_moe(x, weights, topk_weights, ids, activation_quant=None)
    both = (
        np.concatenate([truth.gate_up.values, truth.shared_gate_up.values]),
        np.concatenate([truth.down.values, truth.shared_down.values]),
    )
    gate_up, down = (oracle.quantize_dequantize(stack, "even", "nearest_even") for stack in both)
    expected = oracle.moe(x, gate_up, down, np.asarray(topk_weights), np.asarray(ids), x_dtype="float32")
    np.testing.assert_allclose(np.asarray(y), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- what is refused -------------------------------------------------------------------------------------------------


def of(dtype, *shape):
    itemsize = {"F4": 0.5}.get(dtype) or synthetic.DTYPES.get(dtype, np.dtype(np.uint8)).itemsize
    return synthetic.Tensor(dtype, shape, bytes(int(np.prod(shape) * itemsize)))


GATE = "model.layers.0.mlp.experts.1.gate_proj"
DOWN = "model.layers.0.mlp.experts.1.down_proj"
REFUSED = {
    # format, changed tensors, expected in the message
    "scale_of_other_rows": (
        "quark_qwen3",
        {f"{GATE}.weight_scale": of("U8", 95, 5)},
        r"gate_proj.weight_scale' U8 \[95, 5\] .*: found; expected U8 or F8_E8M0 \[96, 5\]",
    ),
    "scale_of_other_columns": (
        "quark_qwen3",
        {f"{DOWN}.weight_scale": of("U8", 160, 4)},
        r"down_proj.weight_scale' U8 \[160, 4\] .* expected U8 or F8_E8M0 \[160, 3\]",
    ),
    "down_not_of_gate": (
        "quark_qwen3",
        {f"{DOWN}.weight": of("U8", 160, 32)},
        r"down_proj.weight' U8 \[160, 32\] .* expected U8 or I8 or F4 \[160, 48\]",
    ),
    "one_expert_differs": (
        "quark_qwen3",
        {f"{GATE}.weight": of("U8", 64, 80)},
        r"experts.1.gate_proj.weight' U8 \[64, 80\] .* expected .* \[96, 80\]",
    ),
    "one_axis": (
        "gpt_oss",
        {"model.layers.0.mlp.experts.gate_up_proj_blocks": of("U8", 3)},
        r"\[3\] .* found; expected \[E, rows, columns / 2\], an even number of rows",
    ),
    "odd_rows": (
        "gpt_oss",
        {"model.layers.0.mlp.experts.gate_up_proj_blocks": of("U8", 3, 191, 5, 16)},
        r"\[3, 191, 5, 16\] .* an even number of rows",
    ),
    "other_experts": (
        "gpt_oss",
        {"model.layers.0.mlp.experts.down_proj_scales": of("U8", 4, 160, 3)},
        r"down_proj_scales' U8 \[4, 160, 3\] .* expected U8 or F8_E8M0 \[3, 160, 3\]",
    ),
    "bias_of_wrong_size": (
        "gpt_oss",
        {"model.layers.0.mlp.experts.gate_up_proj_bias": of("BF16", 3, 96)},
        r"gate_up_proj_bias' BF16 \[3, 96\] .* expected F32 or BF16 or F16 \[3, 192\]",
    ),
    "bias_of_integers": (
        "gpt_oss",
        {"model.layers.0.mlp.experts.down_proj_bias": of("I8", 3, 160)},
        r"down_proj_bias' I8 \[3, 160\] .* expected F32 or BF16 or F16",
    ),
    "nvfp4_scale_type": (
        "quark_qwen3",
        {f"{GATE}.weight_scale": of("F8_E4M3", 96, 10)},
        r"F8_E4M3 \[96, 10\] .* one scale byte for each 32 elements. Blocks of 16 are NVFP4",
    ),
    "nvfp4_scale_shape": (
        "quark_qwen3",
        {f"{GATE}.weight_scale": of("U8", 96, 10)},
        r"U8 \[96, 10\] .* Blocks of 16 are NVFP4",
    ),
    "nvfp4_global_scale": (
        "compressed_tensors",
        {"model.layers.0.mlp.experts.0.gate_proj.weight_global_scale": of("F32", 1)},
        r"gate_proj.weight_global_scale' F32 \[1\] .* belongs to NVFP4",
    ),
    "scale_of_floats": (
        "quark_qwen3",
        {f"{GATE}.weight_scale": of("BF16", 96, 5)},
        r"weight_scale' BF16 \[96, 5\] .* expected U8 or F8_E8M0",
    ),
    "float8_experts": (
        "qwen3",
        {f"{GATE}.weight": of("F8_E4M3", 96, 160)},
        r"gate_proj.weight' F8_E4M3 \[96, 160\] .*expected F32, BF16, F16, or MXFP4 codes .*convert them to bfloat16",
    ),
    "dense_not_of_one_size": (
        "qwen3",
        {f"{DOWN}.weight": of("BF16", 160, 64)},
        r"down_proj.weight' BF16 \[160, 64\] .* \[160, 96\]",
    ),
    "half_a_block": (
        "qwen3",
        {
            n: of("BF16", *((96, 144) if "down" not in n else (144, 96)))
            for e in range(3)
            for n in (f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for p in ("gate", "up", "down"))
        },
        r"layer 0 .* has D=144; expected a multiple of 32",
    ),
    "scale_that_is_no_scale": (
        "quark_gpt_oss",
        {"model.layers.0.mlp.experts.1.down_proj.input_scale": synthetic.Tensor.of("F32", -1.0)},
        r"input_scale' F32 \[\] .*: \[-1.\] found; expected one positive number",
    ),
    "some_input_scales": (
        "quark_gpt_oss",
        {"model.layers.0.mlp.experts.1.down_proj.input_scale": None},
        r"lacks 1 of the 24 tensors .*experts.1.down_proj.input_scale",
    ),
    "no_input_scales": (
        "quark_gpt_oss",
        {f"model.layers.0.mlp.experts.{e}.{p}_proj.input_scale": None for e in range(3) for p in ("gate_up", "down")},
        r"static scales of activations .*experts.0.gate_up_proj.input_scale', which are missing",
    ),
    "two_formats": (
        "quark_qwen3",
        {
            f"model.layers.0.mlp.experts.{p}_proj_{w}": of("U8", 3, 192, 5, 16)
            for p in ("gate_up", "down")
            for w in ("blocks", "scales")
        },
        r"but quantization_config.quant_method='quark'; expected 'mxfp4'",
    ),
    "two_places": (
        "quark_qwen3",
        {f"draft.layers.0.mlp.experts.0.gate_proj.{w}": of("U8", 96, 80) for w in ("weight", "weight_scale")},
        r"layer 0 .* has experts in 2 places, 'draft.mlp', 'model.mlp'; expected one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_do_not_fit_are_refused(name, written, tmp_path):
    format, change, told = REFUSED[name]
    path = rewrite(written(format), tmp_path / "model", change=change)
    with pytest.raises(ValueError, match=told) as raised:
        load(path, layer=0)
    assert str(path) in str(raised.value)


QUARK, COMPRESSED = "quark_qwen3", "compressed_tensors"
GROUP = synthetic.compressed_tensors_config()["config_groups"]["group_0"]


def quark_of(**weight):
    return {"global_quant_config": {"weight": {**synthetic.QUARK_MXFP4, **weight}, "input_tensors": None}}


def quark_inputs(**inputs):
    return {
        "global_quant_config": {"weight": synthetic.QUARK_MXFP4, "input_tensors": {**synthetic.QUARK_MXFP4, **inputs}}
    }


def groups(**group):
    return {"format": group.get("format", "mxfp4-pack-quantized"), "config_groups": {"group_0": {**GROUP, **group}}}


REFUSED_CONFIGS = {
    "of_another_checkpoint": (
        QUARK,
        {},
        {"quant_method": "awq"},
        r"format 'quark', but quantization_config.quant_method='awq'; expected 'quark'",
    ),
    "legacy_mx": (QUARK, {}, quark_of(dtype="mx"), r"weights quantized with dtype='mx'; expected 'fp4'"),
    "group_of_16": (QUARK, {}, quark_of(group_size=16), r"group_size='16'; expected 32"),
    "scale_of_floats": (QUARK, {}, quark_of(scale_format="float32"), r"scale_format='float32'; expected 'e8m0'"),
    "two_steps": (QUARK, {}, {"global_quant_config": {"weight": [{}, {}]}}, r"expected one object"),
    "mxfp6_inputs": (
        QUARK,
        {},
        quark_inputs(dtype="fp6_e2m3"),
        r"activations quantized as dtype='fp6_e2m3'.*Set input_tensors to null",
    ),
    "regular_expression": (
        QUARK,
        {},
        {"layer_quant_config": {"re:.*": {}}},
        r"regular expression 're:\.\*' in layer_quant_config",
    ),
    "shuffled": (QUARK, {}, {"is_shuffled": True}, r"is marked is_shuffled=True .* let prepare\(\) make the layout"),
    "nvfp4": (
        COMPRESSED,
        {},
        {"format": "nvfp4-pack-quantized", "config_groups": {}},
        r"format='nvfp4-pack-quantized'; expected 'mxfp4-pack-quantized'",
    ),
    "compressed_groups_of_16": (
        COMPRESSED,
        {},
        groups(weights={**GROUP["weights"], "group_size": 16}),
        r"group_size='16'; expected 32",
    ),
    "integers": (COMPRESSED, {}, groups(weights={**GROUP["weights"], "type": "int"}), r"type='int'; expected 'float'"),
    "integer_inputs": (
        COMPRESSED,
        {},
        groups(input_activations={"num_bits": 8, "type": "int"}),
        r"input_activations .*; expected 4-bit floats in groups of 32",
    ),
    "groups_that_differ": (
        COMPRESSED,
        {},
        {"config_groups": {"a": GROUP, "b": {**GROUP, "input_activations": GROUP["weights"]}}},
        r"differ in their inputs",
    ),
    "float8_experts": (
        "deepseek_v4",
        {"expert_dtype": "fp8"},
        {},
        r"expert_dtype='fp8' in its configuration; expected 'fp4'",
    ),
    "of_fewer_experts": (
        "gpt_oss",
        {"num_local_experts": 2},
        {},
        r"layer 0 .* has 3 experts; expected 2, as its configuration says",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_configurations_of_other_formats_are_refused(name, written, tmp_path):
    format, config, quantization, told = REFUSED_CONFIGS[name]
    path = dealt(written(format), tmp_path / "model", config, **quantization)
    with pytest.raises(ValueError, match=told):
        load(path, layer=0)


def test_an_override_by_name_decides(written, tmp_path):
    made = written(QUARK)
    override = {"weight": synthetic.QUARK_MXFP4, "input_tensors": None}
    path = dealt(made, tmp_path / "a", {}, layer_quant_config={"*mlp.experts*": override})
    assert load(path, layer=0).activation_quant is None
    path = dealt(made, tmp_path / "b", {}, layer_quant_config={"*self_attn*": override})
    assert load(path, layer=0).activation_quant == "mxfp4"


@pytest.mark.parametrize("name", ["*experts.0.gate_proj", "*experts.1.*", "*down_proj"])
@pytest.mark.parametrize("key", ["layer_quant_config", "exclude"])
def test_overrides_of_some_tensors_of_a_layer_are_refused(key, name, written, tmp_path):
    override = {"weight": synthetic.QUARK_MXFP4, "input_tensors": None}
    value = [name] if key == "exclude" else {name: override}
    path = dealt(written(QUARK), tmp_path / "model", {}, **{key: value})
    told = {
        "layer_quant_config": r"'model\.layers\.0\.mlp\.experts\..*_proj' and 'model\..*_proj', which .* quantized differently",
        "exclude": rf"'model\.layers\.0\.mlp\.experts\..*_proj' in MXFP4, and '{re.escape(name)}' in exclude",
    }
    with pytest.raises(ValueError, match=told[key]):
        load(path, layer=0)


def test_overrides_that_agree_are_followed(written, tmp_path):
    override = {"weight": synthetic.QUARK_MXFP4, "input_tensors": None}
    path = dealt(
        written(QUARK), tmp_path / "model", {}, layer_quant_config={"*gate_proj": override, "*_proj": override}
    )
    assert load(path, layer=0).activation_quant is None


def with_scales(made, parts):
    """An `input_scale` for each expert's projections of `parts`."""
    return {
        name.removesuffix("weight_scale") + "input_scale": synthetic.Tensor.of("F32", np.float32(0.5))
        for name in made.tensors
        if ".experts." in name and name.endswith("weight_scale") and name.split(".")[-2] in parts
    }


FLOAT8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def test_static_scales_count_only_where_the_configuration_says_so(written, tmp_path):
    made = written(QUARK)
    change = with_scales(made, ("gate_proj", "up_proj", "down_proj"))
    for is_dynamic in (False, True):
        table = {**made.config["quantization_config"], **quark_inputs(**FLOAT8, is_dynamic=is_dynamic)}
        config = {**made.config, "quantization_config": table}
        weights = load(rewrite(made, tmp_path / str(is_dynamic), change=change, config=config), layer=0)
        assert weights.activation_quant == "fp8"
        assert (weights.activation_scale is None) == is_dynamic


@pytest.mark.parametrize("parts", [("down_proj",), ("gate_proj", "up_proj")])
def test_static_scales_of_one_product_are_refused(parts, written, tmp_path):
    made = written(QUARK)
    table = {**made.config["quantization_config"], **quark_inputs(**FLOAT8, is_dynamic=False)}
    config = {**made.config, "quantization_config": table}
    path = rewrite(made, tmp_path / "model", change=with_scales(made, parts), config=config)
    missing = "gate_proj" if parts == ("down_proj",) else "down_proj"
    with pytest.raises(
        ValueError, match=rf"expected them in tensors such as '.*{missing}\.input_scale', which are missing"
    ):
        load(path, layer=0)
    with pytest.raises(
        ValueError, match=rf"{missing}\.input_scale', which are missing"
    ):  # no configuration, and fp8 asked for
        load(
            rewrite(made, tmp_path / "plain", change=with_scales(made, parts), config={}),
            layer=0,
            activation_quant="fp8",
        )


@pytest.mark.parametrize(
    ("method", "codes", "scales", "told"),
    [
        (
            "compressed-tensors",
            "F8_E4M3",
            "F32",
            "quant_method='compressed-tensors': weights in float8; expected MXFP4",
        ),
        ("modelopt", "U8", "F8_E4M3", "quant_method='modelopt'; expected .* Blocks of 16 are NVFP4"),
    ],
)
def test_other_formats_of_the_same_names_are_called_by_theirs(method, codes, scales, told, written, tmp_path):
    made = written(QUARK)
    change = {}
    for name in made.tensors:
        if ".experts." in name:
            is_scale = name.endswith("weight_scale")
            shape = (
                (96, 1)
                if is_scale and scales == "F32"
                else (96, 10)
                if is_scale
                else (96, 160 if codes != "U8" else 80)
            )
            change[name] = of(scales if is_scale else codes, *shape)
    path = rewrite(
        made, tmp_path / "model", change=change, config={**made.config, "quantization_config": {"quant_method": method}}
    )
    with pytest.raises(ValueError, match=told):
        load(path, layer=0)


def test_inputs_in_float8_with_a_scale_for_each_token(written, tmp_path):
    path = dealt(
        written(QUARK), tmp_path / "a", {}, **quark_inputs(dtype="fp8_e4m3", qscheme="per_channel", is_dynamic=True)
    )
    weights = load(path, layer=0)
    assert (weights.activation_quant, weights.activation_scale) == ("fp8", None)
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    path = dealt(written(COMPRESSED), tmp_path / "b", {}, **groups(input_activations=inputs))
    assert load(path, layer=0).activation_quant == "fp8"


def test_layers_without_experts_are_named(written):
    made = written("quark_deepseek")
    told = r"layer 0 of .* has no experts in a known format. Looked for layers.0.mlp.experts.gate_up_proj_blocks, .*; found \d tensors, "
    with pytest.raises(ValueError, match=told):
        load(made.path, layer=0)
    with pytest.raises(ValueError, match=r"layer 9 of .* asked for; expected one of 3 layers, 0 to 2"):
        load(made.path, layer=9)
    with pytest.raises(TypeError, match=r"layer of type str given; expected an integer"):
        load(made.path, layer="1")


def test_a_checkpoint_without_experts_is_refused(tmp_path):
    synthetic.write_model(tmp_path / "model", {"embed.weight": of("BF16", 4, 32)}, {}, shards=1)
    with pytest.raises(ValueError, match=r"no experts in a known format.* found 1 tensors, embed.weight"):
        describe(tmp_path / "model")
    with pytest.raises(ValueError, match=r"layer 0 of .* asked for; expected one of 0 layers\. "):
        load(tmp_path / "model", layer=0)


def test_two_packed_formats_in_one_layer_are_refused(written, tmp_path):
    made = written(QUARK)
    packed = {
        n.replace(".weight", ".weight_packed"): t
        for n, t in made.tensors.items()
        if n.endswith("proj.weight") and ".experts." in n
    }
    config = {k: v for k, v in made.config.items() if k != "quantization_config"}
    path = rewrite(made, tmp_path / "model", change=packed, config=config)
    with pytest.raises(ValueError, match=r"has the tensors of 2 formats, quark and compressed_tensors; expected one"):
        load(path, layer=0)


def test_heads_for_further_tokens_do_not_make_a_layer_ambiguous(written, tmp_path):
    made = written(QUARK)
    head = {n.replace("model.", "mtp.", 1): t for n, t in made.tensors.items() if n.startswith("model.layers.0.mlp.")}
    zeros = {n: dataclasses.replace(t, data=bytes(len(t.data))) for n, t in head.items()}
    path = rewrite(made, tmp_path / "model", change=zeros)
    same(load(path, layer=0), load(made.path, layer=0))
    same(load_router(path, layer=0), load_router(made.path, layer=0))


def test_router_errors(written, tmp_path):
    made = written("deepseek_v4")
    table = {"layers.0.ffn.gate.tid2eid": synthetic.Tensor.of("I64", np.zeros((11, 2), np.int64))}
    path = rewrite(made, tmp_path / "a", change=table)
    with pytest.raises(
        ValueError,
        match=r"layer 0 .* looks its experts up by token, in tensor 'layers.0.ffn.gate.tid2eid' I64 \[11, 2\]",
    ):
        load_router(path, layer=0)
    assert load_router(path, layer=1).correction_bias is not None
    assert "1 layers look experts up by token" in describe(path).notes[1]
    path = rewrite(made, tmp_path / "b", change={"layers.0.ffn.gate.weight": None})
    with pytest.raises(ValueError, match=r"layer 0 .* has no router; expected one of .*layers.0.mlp.gate.weight"):
        load_router(path, layer=0)
    path = rewrite(made, tmp_path / "c", change={"layers.0.ffn.gate.weight": of("BF16", 4, 160)})
    with pytest.raises(ValueError, match=r"gate.weight' BF16 \[4, 160\] .* expected F32 or BF16 or F16 \[3, any\]"):
        load_router(path, layer=0)


def test_activation_quant_is_checked(written):
    with pytest.raises(ValueError, match=r"activation_quant='int8' given; expected 'auto' or one of"):
        load(written("gpt_oss").path, layer=0, activation_quant="int8")


# --- memory and imports ----------------------------------------------------------------------------------------------

MEASURE = """
import gc, json, sys
import jax
import jax.numpy as jnp
from jax_mxfp4_moe.checkpoint import load

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

jax.block_until_ready(jax.device_put(jnp.zeros(8)))
found = {}
for path in sys.argv[1:]:
    jax.block_until_ready(load(path, layer=0, experts=[0]))  # what is made once: threads, compiled functions
    gc.collect()
    before = status("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    weights = jax.block_until_ready(load(path, layer=0))
    found[path] = weights.nbytes, status("VmHWM:") - before
    del weights
found["modules"] = [m for m in ("torch", "safetensors", "flax", "gguf", "triton") if m in sys.modules]
print(json.dumps(found))
"""


def test_peak_memory_is_the_result_and_one_expert(tmp_path):
    """In a process of its own, by the kernel's count; also that nothing heavy is imported."""
    experts, hidden, intermediate = 16, 1024, 1024
    base = "model.layers.0.mlp.experts."
    codes, scales = (
        np.full((2 * intermediate, hidden // 2), 0x21, np.uint8),
        np.full((2 * intermediate, hidden // 32), 120, np.uint8),
    )
    packed, separate, floats = {}, {}, {}
    for name, rows in (("gate_up_proj", 2 * intermediate), ("down_proj", hidden)):
        packed[f"{base}{name}_blocks"] = synthetic.Tensor.of("U8", np.stack([codes[:rows]] * experts))
        packed[f"{base}{name}_scales"] = synthetic.Tensor.of("U8", np.stack([scales[:rows]] * experts))
    for e in range(experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            separate[f"{base}{e}.{name}.weight"] = synthetic.Tensor.of("U8", codes[:1024])
            separate[f"{base}{e}.{name}.weight_scale"] = synthetic.Tensor.of("U8", scales[:1024])
            floats[f"{base}{e}.{name}.weight"] = synthetic.Tensor("BF16", (1024, 1024), bytes(2**21))
    paths = []
    for name, tensors in (("packed", packed), ("separate", separate), ("floats", floats)):
        synthetic.write_model(tmp_path / name, tensors, None, shards=1)
        paths.append(str(tmp_path / name))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # so that what is freed is given back
    }
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("modules") == []
    slack = 3 << 20  # allocator and page rounding
    for path, (nbytes, peak) in found.items():
        expert = (2 if path.endswith("floats") else 17 / 32) * 3 * hidden * intermediate
        assert nbytes == experts * 3 * hidden * intermediate * 17 // 32
        assert 0.9 * nbytes < peak < nbytes + expert + slack, (path, nbytes, peak)


def test_bfloat16_stays_bfloat16(written):
    weights = load(written("gpt_oss").path, layer=0)
    assert weights.gate_up_bias.dtype == weights.down_bias.dtype == ml_dtypes.bfloat16
    assert load_router(written("gpt_oss").path, layer=0).weight.dtype == ml_dtypes.bfloat16
