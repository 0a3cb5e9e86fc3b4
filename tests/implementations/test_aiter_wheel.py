"""The one wheel of aiter on PyPI, its own functions on a CPU: our layouts, rounding rule, tables and simulation against them.

Only its Python part runs, in a process of its own (see `real_aiter`). The wheel is older than the first release that the adapter
supports; layouts, the older rounding rule and the format of tables are the same in both.
"""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import oracle
import real_aiter
from aiter_sim import numerics

from jax_mxfp4_moe import quantize
from jax_mxfp4_moe.implementations.aiter import layout, names

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 4, 2, 256, 128


@pytest.fixture(scope="module")
def reference():
    """A small layer: tokens, and raw bytes of weights and of quantized tokens."""
    rng = np.random.default_rng(3)

    def weights(rows, k):
        codes = rng.integers(0, 256, (EXPERTS, rows, k // 2), dtype=np.uint8)
        return codes, rng.integers(119, 123, (EXPERTS, rows, k // 32)).astype(np.uint8)

    x = rng.normal(size=(TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    codes, scales = numerics.quantize(x, "half_up", "nearest_even")
    (w1, w1_scale), (w2, w2_scale) = weights(2 * INTERMEDIATE, HIDDEN), weights(HIDDEN, INTERMEDIATE)
    return x, {
        "a1": codes,
        "a1_scale": scales,
        "w1": w1,
        "w1_scale": w1_scale.reshape(-1, HIDDEN // 32),
        "w2": w2,
        "w2_scale": w2_scale.reshape(-1, INTERMEDIATE // 32),
        "topk_ids": np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32),
        "topk_weights": rng.uniform(0.1, 1, (TOKENS, TOP_K)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def asked(tmp_path_factory, reference):
    """The inputs, the environment and the real answers."""
    try:
        folder = real_aiter.wheel()
    except real_aiter.UnavailableError as error:
        pytest.skip(str(error))
    inputs, environment = real_aiter.questions(tmp_path_factory.mktemp("rows"))
    return inputs, environment, real_aiter.ask(folder, inputs | {"reference": reference[1]}, **environment)


def test_simulated_wheel_answers_as_the_real_one_does(asked):
    """Bytes, signatures, padded tokens, heuristics, and what each kind of row turns into."""
    inputs, environment, real = asked
    found = real_aiter.simulated("wheel", inputs, flydsl=False, **environment)
    real = {name: answer for name, answer in real.items() if name in found}
    assert len(real["resolved"]) == len(inputs["shapes"])
    assert real_aiter.differences(real, found) == []


def test_a_difference_would_be_seen(asked):
    inputs, environment, real = asked
    found = real_aiter.simulated("v0.1.10.post3", inputs, flydsl=False, **environment)
    text = "\n".join(real_aiter.differences({name: real[name] for name in found}, found))
    for part in (
        "padded 5000: 1024 real, 2048 simulated",
        "get_2stage_cfgs",
        "split_k: ck_moe_stage1_fwd real, cktile",
    ):
        assert part in text


def test_quantizer_is_half_up_and_nearest_even(asked):
    inputs, _, real = asked
    ours = quantize(inputs["x"], scale_rule="half_up", rounding="nearest_even")
    np.testing.assert_array_equal(ours.codes, real["codes"])
    np.testing.assert_array_equal(ours.scales, real["block_scales"])
    other = quantize(inputs["x"], scale_rule="even", rounding="half_away")
    assert (np.asarray(other.scales) != real["block_scales"]).any()
    assert (np.asarray(other.codes) != real["codes"]).any()


def test_weights_are_shuffled_as_aiter_does_it(asked):
    inputs, _, real = asked
    np.testing.assert_array_equal(layout.shuffle_codes(inputs["weights"]), real["shuffled"])
    np.testing.assert_array_equal(layout.unshuffle_codes(real["shuffled"]), inputs["weights"])
    assert real["is_shuffled"] == (True, True, False)  # kept by the tensor and its dtype, lost by a slice
    assert (real["shuffled"] != inputs["weights"]).any()


def test_scales_are_shuffled_as_aiter_does_it(asked):
    inputs, _, real = asked
    np.testing.assert_array_equal(layout.shuffle_scales(inputs["scales"]), real["swizzled"])
    np.testing.assert_array_equal(layout.unshuffle_scales(real["swizzled"]), inputs["scales"])
    rows, columns = inputs["scales"].shape
    assert real["padded_shape"] == (
        rows + 256,
        columns + 8,
    )  # one row and one column more: padded in steps of 256 and 8


def test_reference_layer_is_the_oracle(asked, reference):
    """aiter's own torch code for both stages and the oracle agree, so that both mean the same by the weights' order."""
    y, h = (asked[2][name] for name in ("y", "h"))
    x, reference = reference
    w1, w2 = (
        oracle.dequantize(
            reference[name], reference[f"{name}_scale"].reshape(EXPERTS, -1, reference[name].shape[-1] // 16)
        )
        for name in ("w1", "w2")
    )
    rows = []
    expected = oracle.moe(
        x,
        w1,
        w2,
        reference["topk_weights"],
        reference["topk_ids"],
        x_dtype="bfloat16",
        activation_quant="mxfp4",
        scale_rule="half_up",
        intermediates=rows,
    )
    assert np.linalg.norm(h.reshape(-1, INTERMEDIATE) - np.stack(rows)) <= 2.0**-8 * np.linalg.norm(rows)  # bfloat16
    assert np.linalg.norm(y - expected) <= 2e-2 * np.linalg.norm(expected)  # codes of h that lie at a tie may flip


def test_rows_of_ours_are_found_under_the_keys_of_aiter(asked):
    """A row in aiter's columns, with a `gfx` column that this release does not know, is read and taken as it stands."""
    _, _, real = asked
    (stage1, stage2), fields = real["resolved"]["ck"]
    assert dict(stage1[1])["kernelName"] == names.ck_name_for(1, 64)
    assert dict(stage2[1])["kernelName"] == names.ck_name_for(2, 64)
    assert dict(fields)["block_m"] == 64
    assert real["resolved"]["other_cu"] != real["resolved"]["ck"]  # another number of compute units is another key
    assert real["float4"] == "torch.float4_e2m1fn_x2"
    assert real["resolved"]["empty"] == "TypeError"  # an empty name is read as NaN


def test_injected_rows_reach_the_table(asked):
    """This package's own way in, on the real table: the row that may run runs, the wrong one is refused, no variable is touched."""
    _, _, real = asked
    answers = real["injected"]
    ck = ("ck_moe_stage1_fwd", "ck_moe_stage2_fwd")
    for case, block_m in ((0, 64), (1, 128)):
        kernels = tuple((ck[i], names.ck_name_for(i + 1, block_m)) for i in (0, 1))
        assert answers[case] == (block_m, 0, kernels)
    assert answers[2][0] == "ValueError"
    assert "128 rows" in answers[2][1]
    assert answers[3][0] in ("ValueError", "NotImplementedError")  # no split-K for MXFP4 in the wheel
    assert answers[4][:2] == (64, 0)  # aiter's heuristic
