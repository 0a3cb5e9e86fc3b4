"""Faults that others met and reported, each with its smallest input and its right answer; the ids are the case numbers.

Here is the layer's part. docs/field_cases.md lists the tests of every case, wherever they are; the last test here reads it.
"""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, random_bytes, random_case

import jax_mxfp4_moe
from jax_mxfp4_moe import MoeWeights, Mxfp4Array, dequantize, device, mxfp4_moe, quantize_weights
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.testing import TOLERANCES, relative_error
from jax_mxfp4_moe.tuning import table

NAMES = ("xla", "torch")
TOLERANCE = TOLERANCES["float32", None]

every_name = pytest.mark.parametrize("name", NAMES)


def one_by_one(case: Case, expert: int) -> np.ndarray:
    """The result of one expert on every token, weight 1."""
    ids = np.full((len(case.x), 1), expert, np.int32)
    return case.replace(topk_ids=ids, topk_weights=np.ones_like(ids, np.float32)).expected()


@every_name
def test_case_03_a_weight_matrix_of_zeros(name):
    """Case 3: an expert of zeros gives exactly its bias; zero codes under byte 0 and under byte 127 are the same."""
    case = random_case(tokens=4, experts=3, biases=True, hidden=32, intermediate=32)
    ids = np.full_like(case.topk_ids, 1)
    ids[:, 1] = -1
    weights = np.ones_like(case.topk_weights)
    results = []
    for byte in (0, 127):
        down = tuple(part.copy() for part in case.down)
        down[0][1], down[1][1] = 0, byte
        zeroed = case.replace(down=down, topk_ids=ids, topk_weights=weights)
        results.append(np.asarray(zeroed.run(implementation=name)))
        np.testing.assert_array_equal(results[-1], np.tile(case.down_bias[1], (4, 1)))
        everything = zeroed.replace(gate_up=(case.gate_up[0] * 0, case.gate_up[1] * 0 + byte), gate_up_bias=None)
        np.testing.assert_array_equal(everything.run(implementation=name), np.tile(case.down_bias[1], (4, 1)))
    np.testing.assert_array_equal(*results)


@every_name
@pytest.mark.parametrize("byte", [0, 1, 2, 14, 100, 127, 150])
def test_case_04_extreme_scale_bytes_in_the_layer(name, byte):
    """Case 4: weights under an extreme scale byte, met by activations that bring the product back to size."""
    case = random_case(tokens=3, experts=2, hidden=32, intermediate=32)
    scales = np.full_like(case.gate_up[1], byte)
    if byte < 2:  # weights below 2^-126 are flushed in a CPU product; magnitudes of 2 and more are normal numbers
        case = case.replace(gate_up=(case.gate_up[0] | 0x44, scales))
    x = np.ldexp(case.x, 122 - byte if byte > 2 else 120).astype(np.float32)
    case = case.replace(x=x, gate_up=(case.gate_up[0], scales))
    y = np.asarray(case.run(implementation=name), np.float64)
    expected = case.expected()
    assert np.isfinite(y).all()
    assert np.linalg.norm(expected) > 0
    assert relative_error(y, expected) <= TOLERANCE


@pytest.mark.parametrize(("name", "answer"), [("xla", 0.0), ("torch", None)])
def test_case_04_weights_below_the_smallest_normal_number(name, answer):
    """Case 4: codes 1 under byte 0 are 2^-128; xla counts them as zero on every platform, torch on a CPU does not.

    Both answers are right by docs/numerics.md, and this test is to notice when one of them changes.
    """
    case = random_case(tokens=1, experts=1, top_k=1, hidden=32, intermediate=32)
    case = case.replace(
        x=np.full_like(case.x, 2.0**120),
        topk_weights=np.ones_like(case.topk_weights),
        gate_up=(np.full_like(case.gate_up[0], 0x11), np.zeros_like(case.gate_up[1])),
        down=(np.full_like(case.down[0], 0x22), np.full_like(case.down[1], 127)),
    )
    exact = case.expected()
    np.testing.assert_allclose(exact, 0.2656, atol=5e-5)
    for jit in (True, False):
        np.testing.assert_allclose(
            case.run(implementation=name, jit=jit), exact if answer is None else answer, rtol=1e-6
        )


@every_name
def test_case_05_scale_bytes_around_the_sign_bit(name):
    """Case 5: bytes 100, 126, 127, 128 and 250 in one weight; 250 stands over zeros and small codes alike."""
    case = random_case(tokens=3, experts=2, hidden=160, intermediate=32)
    scales = case.gate_up[1].copy()
    scales[...] = [100, 126, 127, 128, 250]
    codes = case.gate_up[0].copy()
    codes[..., 64:] = 0
    x = case.x.copy()
    x[:, 64:128] /= 64
    case = case.replace(gate_up=(codes, scales), x=x)
    assert relative_error(case.run(implementation=name), case.expected()) <= TOLERANCE
    decoded = np.asarray(jax.jit(dequantize, static_argnums=1)(case.weights.gate_up, jnp.float32), np.float64)
    np.testing.assert_array_equal(decoded, oracle.dequantize(codes, scales))


@every_name
@pytest.mark.parametrize("activation_quant", [None, "mxfp4", "fp8"])
def test_case_07_negative_ids_skip(name, activation_quant):
    """Case 7: row 0 = .4 f3 + .2 f5 with no renormalising, row 1 exactly 0; expert 7, the last, is huge."""
    case = random_case(tokens=3, experts=8, top_k=4, hidden=32, intermediate=32, dtype="bfloat16")
    down = tuple(part.copy() for part in case.down)
    down[1][7] = 200
    ids = np.array([[3, -1, 5, -1], [-1, -1, -1, -1], [0, 1, 2, 7]], np.int32)
    weights = np.tile(np.array([0.4, 0.3, 0.2, 0.1], np.float32), (3, 1))
    case = case.replace(down=down, topk_ids=ids, topk_weights=weights)
    y = np.asarray(case.run(implementation=name, activation_quant=activation_quant), np.float64)
    expected = case.expected(activation_quant=activation_quant)
    tolerance = TOLERANCES["bfloat16", activation_quant]
    for row in (0, 2):
        assert relative_error(y[row], expected[row]) <= tolerance
    assert (y[1] == 0).all()
    if activation_quant is None:
        assert relative_error(y[0], 0.4 * one_by_one(case, 3)[0] + 0.2 * one_by_one(case, 5)[0]) <= tolerance
    for negative in (-2, -100, -(2**31)):
        other = case.replace(topk_ids=np.where(ids == -1, negative, ids).astype(np.int32))
        np.testing.assert_array_equal(other.run(implementation=name, activation_quant=activation_quant), y)


@every_name
def test_case_08_global_ids_with_local_weights(name):
    """Case 8: 16 experts over four shards; the shards sum to the whole; without a map ids >= E are skipped."""
    whole = random_case(tokens=9, experts=16, top_k=4, hidden=32, intermediate=32, biases=True)
    total = np.zeros_like(whole.x, np.float64)
    for shard in range(4):
        mine = slice(4 * shard, 4 * shard + 4)
        expert_map = np.full(16, -1, np.int32)
        expert_map[mine] = np.arange(4)
        local = whole.replace(
            gate_up=tuple(part[mine] for part in whole.gate_up),
            down=tuple(part[mine] for part in whole.down),
            gate_up_bias=whole.gate_up_bias[mine],
            down_bias=whole.down_bias[mine],
        )
        y = np.asarray(local.run(implementation=name, expert_map=expert_map), np.float64)
        assert relative_error(y, local.expected(expert_map=expert_map)) <= TOLERANCE
        total += y
        if shard == 0:
            np.testing.assert_array_equal(local.run(implementation=name), y)
    assert relative_error(total, whole.run(implementation=name)) <= TOLERANCE


def test_case_08_the_eager_check_suggests_expert_map():
    """Case 8: validate() sees values, which jit cannot."""
    case = random_case(tokens=3, experts=4)
    ids = case.topk_ids.copy()
    jax_mxfp4_moe.validate(case.weights, case.topk_weights, ids)
    ids[1, 0] = 4
    with pytest.raises(ValueError, match="expert_map"):
        jax_mxfp4_moe.validate(case.weights, case.topk_weights, ids)


@every_name
def test_case_09_the_same_expert_twice(name):
    """Case 9: both of two equal ids count, each with its own weight."""
    case = random_case(tokens=1, experts=128, top_k=6, hidden=32, intermediate=32)
    case = case.replace(topk_ids=np.array([[121, 62, 117, 62, 32, 13]], np.int32))
    assert relative_error(case.run(implementation=name), case.expected()) <= TOLERANCE
    pair = random_case(tokens=1, experts=8, hidden=32, intermediate=32)
    pair = pair.replace(topk_ids=np.array([[5, 5]], np.int32), topk_weights=np.array([[0.75, 0.5]], np.float32))
    assert relative_error(pair.run(implementation=name), 1.25 * one_by_one(pair, 5)) <= TOLERANCE


@every_name
@pytest.mark.parametrize("sizes", [(8, 0, 8, 0), (16, 0, 0, 0), (0, 0, 0, 16)])
def test_case_10_empty_experts_and_a_full_one(name, sizes):
    """Case 10: group sizes by construction of the ids."""
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(4), sizes)).reshape(8, 2).astype(np.int32)
    case = random_case(tokens=8, experts=4, hidden=32, intermediate=32, biases=True).replace(topk_ids=ids)
    assert relative_error(case.run(implementation=name), case.expected()) <= TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "unused"), [((8, 0, 8, 0), [1, 3]), ((16, 0, 0, 0), [1, 2, 3]), ((0, 0, 0, 16), [0, 1, 2])]
)
def test_case_10_gradients_of_unused_experts_are_zero(sizes, unused):
    """Case 10: exactly 0, and everything else finite and not 0; that it is right is tested in test_gradient.py."""
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(4), sizes)).reshape(8, 2).astype(np.int32)
    case = random_case(tokens=8, experts=4, hidden=32, intermediate=32, biases=True).replace(topk_ids=ids)
    values, (of_x, of_weights, of_biases) = _case_10_gradients(case.x, case.topk_weights, case.weights, case.topk_ids)
    assert relative_error(values, case.expected()) <= TOLERANCE
    used = sorted(set(range(4)) - set(unused))
    for found in (of_x, of_weights, *of_biases):
        assert np.isfinite(found).all()
    assert (np.asarray(of_x) != 0).any(axis=1).all()
    assert (np.asarray(of_weights) != 0).all()
    for found in map(np.asarray, of_biases):
        assert (found[unused] == 0).all()
        assert (found[used] != 0).any(axis=1).all()


@jax.jit
def _case_10_gradients(x, topk_weights, weights, topk_ids):
    def layer(x, topk_weights, biases):
        held = weights.replace(gate_up_bias=biases[0], down_bias=biases[1])
        y = mxfp4_moe(x, held, topk_weights, topk_ids, implementation="xla")
        return (y**2).sum(), y

    biases = (weights.gate_up_bias, weights.down_bias)
    (_, y), found = jax.value_and_grad(layer, argnums=(0, 1, 2), has_aux=True)(x, topk_weights, biases)
    return y, found


@every_name
@pytest.mark.parametrize("tokens", [1, 2, 3, 33, 63, 64, 65, 130, 255, 256, 257, 511, 513])
def test_case_11_token_counts(name, tokens):
    """Case 11: no number of tokens is special: prefixes of one problem, at and beside the edges of tiles."""
    whole = _case_11()
    case = whole.replace(x=whole.x[:tokens], topk_weights=whole.topk_weights[:tokens], topk_ids=whole.topk_ids[:tokens])
    assert relative_error(case.run(implementation=name), _case_11_expected()[:tokens]) <= TOLERANCE


_memo: dict = {}


def _case_11() -> Case:
    return _memo.setdefault("case", random_case(tokens=513, experts=8, top_k=2, hidden=64, intermediate=64))


def _case_11_expected() -> np.ndarray:
    if "expected" not in _memo:
        _memo["expected"] = _case_11().expected()
    return _memo["expected"]


def _abstract(tokens, top_k, experts, hidden, intermediate):
    struct = jax.ShapeDtypeStruct
    weights = MoeWeights(
        Mxfp4Array(
            struct((experts, 2 * intermediate, hidden // 2), jnp.uint8),
            struct((experts, 2 * intermediate, hidden // 32), jnp.uint8),
        ),
        Mxfp4Array(
            struct((experts, hidden, intermediate // 2), jnp.uint8),
            struct((experts, hidden, intermediate // 32), jnp.uint8),
        ),
    )
    x = struct((tokens, hidden), jnp.bfloat16)
    return x, weights, struct((tokens, top_k), jnp.float32), struct((tokens, top_k), jnp.int32)


@every_name
@pytest.mark.parametrize(
    "sizes",
    [(40000, 8, 8, 128, 4096), (16, 8, 512, 4096, 1024)],
    ids=["rows_times_2F_over_2^31", "weights_over_2^31"],
)
def test_case_12_products_beyond_int32(name, sizes):
    """Case 12: by shapes alone: the program can be built, and its result has the right shape."""
    y = jax.eval_shape(lambda *arrays: mxfp4_moe(*arrays, implementation=name), *_abstract(*sizes))
    assert y.shape == (sizes[0], sizes[3])
    assert y.dtype == jnp.bfloat16


@every_name
@pytest.mark.parametrize("top_k", [1, 256])
@pytest.mark.parametrize("tokens", [2**24 - 1, 2**24, 2**24 + 1])
def test_case_13_more_than_2_to_the_24_tokens(name, tokens, top_k):
    """Case 13: by shapes alone: built, or refused with the limit; never a wrong answer."""
    arrays = _abstract(tokens, top_k, 256, 32, 32)
    try:
        y = jax.eval_shape(lambda *arrays: mxfp4_moe(*arrays, implementation=name), *arrays)
    except ValueError as error:
        assert tokens * top_k >= 2**31  # the slots are numbered in int32
        assert "2147483647" in str(error).replace("_", "") or "2**31" in str(error)  # noqa: PT017
    else:
        assert tokens * top_k < 2**31
        assert y.shape == (tokens, 32)


@every_name
def test_case_14_types_of_router_weights_and_ids(name):
    """Case 14: f32, bf16 and f16 weights, int32, uint32, int16 and int8 ids, and Python lists; equal to the f32 run."""
    case = random_case(tokens=5, hidden=32, intermediate=32)
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = np.asarray(jnp.asarray(case.topk_weights, dtype), np.float32)
        expected = np.asarray(case.replace(topk_weights=rounded).run(jit=False, implementation=name))
        np.testing.assert_array_equal(
            case.replace(topk_weights=rounded.astype(dtype)).run(jit=False, implementation=name), expected
        )
    expected = np.asarray(case.run(jit=False, implementation=name))
    for dtype in (np.uint32, np.int16, np.uint8, np.int8):
        np.testing.assert_array_equal(
            case.replace(topk_ids=case.topk_ids.astype(dtype)).run(jit=False, implementation=name), expected
        )
    eager = mxfp4_moe(case.x, case.weights, case.topk_weights.tolist(), case.topk_ids.tolist(), implementation=name)
    assert relative_error(eager, expected) <= TOLERANCE


def test_case_14_unsigned_ids_do_not_turn_negative():
    """Case 14: the uint32 4294967295 and the uint8 255 are ids too large, skipped like -1, and not expert 255 wrapped."""
    case = random_case(tokens=4, experts=3, hidden=32, intermediate=32)
    for dtype in (np.uint32, np.uint8):
        ids = case.topk_ids.astype(dtype)
        ids[:, 1] = np.iinfo(dtype).max
        skipped = case.topk_ids.copy()
        skipped[:, 1] = -1
        y = case.replace(topk_ids=ids).run(jit=False, implementation="xla")
        np.testing.assert_array_equal(y, case.replace(topk_ids=skipped).run(jit=False, implementation="xla"))


@pytest.mark.parametrize("far", [2**32 + 1, -(2**63), -(2**32) + 1, 2**63 - 1])
def test_case_14_wide_numpy_ids_do_not_wrap(far):
    """Case 14: int64 ids of NumPy, of which JAX without x64 keeps the low half: expert 1 or 0 here. They are skipped."""
    case = random_case(tokens=4, experts=3)
    ids = case.topk_ids.astype(np.int64)
    ids[:, 1] = far
    skipped = case.topk_ids.copy()
    skipped[:, 1] = -1
    y = mxfp4_moe(case.x, case.weights, case.topk_weights, ids, implementation="xla")
    np.testing.assert_array_equal(y, case.replace(topk_ids=skipped).run(jit=False, implementation="xla"))


def test_case_14_x64_types():
    """Case 14: float64 weights and int64 ids, which exist only with x64; ids beyond int32 do not wrap onto an expert."""
    case = random_case(tokens=4, experts=3, hidden=32, intermediate=32)
    expected = np.asarray(case.run(jit=False, implementation="xla"))
    ids = case.topk_ids.astype(np.int64)
    far = ids.copy()
    far[:, 1] = 2**32 + 1  # 1 in the low half
    with jax.enable_x64(True):
        wide = case.replace(topk_weights=case.topk_weights.astype(np.float64), topk_ids=ids)
        np.testing.assert_array_equal(wide.run(jit=False, implementation="xla"), expected)
        y = case.replace(topk_ids=far).run(jit=False, implementation="xla")
    skipped = case.topk_ids.copy()
    skipped[:, 1] = -1
    np.testing.assert_array_equal(y, case.replace(topk_ids=skipped).run(jit=False, implementation="xla"))


def test_case_16_gate_rows_come_first():
    """Case 16: with gate rows all 1 and up rows all 2, silu(g) * u is that and not silu(2g) * u / 2."""
    gate_up = np.concatenate([np.ones((1, 32, 32)), np.full((1, 32, 32), 2.0)], axis=1).astype(np.float32)
    down = np.eye(32, dtype=np.float32)[None]
    weights = quantize_weights(gate_up, down)
    x = np.full((1, 32), 1 / 16, np.float32)
    one = np.ones((1, 1), np.float32)
    y = mxfp4_moe(x, weights, one, np.zeros((1, 1), np.int32), activation_quant=None)
    np.testing.assert_allclose(y, oracle.silu(2.0) * 4, rtol=1e-6)


@every_name
@pytest.mark.parametrize("activation_quant", [None, "mxfp4", "fp8"])
def test_case_17_the_down_bias_carries_the_router_weight(name, activation_quant):
    """Case 17: zero down weights and biases 1 and 2 under weights .7 and .3 give 1.3, times the routed scaling."""
    case = random_case(tokens=1, experts=2, hidden=32, intermediate=32)
    zero = (case.down[0] * 0, case.down[1])
    bias = np.repeat(np.array([[1.0], [2.0]], np.float32), 32, axis=1)
    case = case.replace(down=zero, down_bias=bias, topk_ids=np.array([[0, 1]], np.int32))
    run = {"implementation": name, "activation_quant": activation_quant}
    for factor in (1, 2.5):
        weighted = case.replace(topk_weights=np.array([[0.7, 0.3]], np.float32) * np.float32(factor))
        np.testing.assert_allclose(weighted.run(**run), 1.3 * factor, rtol=1e-6)
    single = case.replace(topk_weights=np.array([[0.7]], np.float32), topk_ids=np.array([[1]], np.int32))
    np.testing.assert_allclose(single.run(apply_router_weight_on_input=True, **run), 2, rtol=1e-6)
    np.testing.assert_allclose(single.run(**run), 1.4, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jax_mxfp4_moe.tuning.table.UntunedWarning")
def test_case_18_rows_change_no_numbers(tmp_path, monkeypatch):
    """Case 18: E = 24 and K = 1 without any row, with a row for this shape, and with one for another shape alone."""
    case = random_case(tokens=5, experts=24, top_k=1, hidden=64, intermediate=32)
    monkeypatch.setenv(table.USER_TABLES_VARIABLE, str(tmp_path))
    xla, platform = IMPLEMENTATIONS["xla"], device.platforms()[0]
    folder = tmp_path / device.arch(platform)
    folder.mkdir()
    columns = ",".join((*table.KEY_COLUMNS, "config_tile_rows"))
    for key in (None, table.key_of(case.problem()), table.key_of(case.problem(), tokens=77)):
        if key is not None:
            (folder / "xla.csv").write_text(f"{columns}\n{','.join(key)},16\n")
        source = table.lookup(xla, case.problem(), platform, None).source
        assert (source == "default") == (key != table.key_of(case.problem()))
        assert relative_error(case.run(implementation="xla", jit=False), case.expected()) <= TOLERANCE


def test_case_19_scale_columns_not_a_multiple_of_4():
    """Case 19: 2880 / 32 = 90 scale columns, by shapes alone at D = F = 2880; small odd sizes run in the contract."""
    y = jax.eval_shape(lambda *arrays: mxfp4_moe(*arrays), *_abstract(5, 4, 32, 2880, 2880))
    assert y.shape == (5, 2880)


@every_name
@pytest.mark.parametrize("mapped", [False, True])
def test_case_20_the_output_is_not_padded(name, mapped):
    """Case 20: D = F = 96, with biases, with and without expert_map: 96 columns, and the abstract shape agrees."""
    case = random_case(tokens=5, hidden=96, intermediate=96, biases=True)
    options = {"expert_map": np.array([4, 3, -1, 1, 0], np.int32)} if mapped else {}
    y = case.run(implementation=name, **options)
    assert y.shape == (5, 96)
    assert jax.eval_shape(lambda: case.run(implementation=name, **options)).shape == (5, 96)
    assert relative_error(y, case.expected(**options)) <= TOLERANCE


@every_name
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (128, 64)])
def test_case_22_square_matrices(name, hidden, intermediate):
    """Case 22: with D = F or D = 2F a missing transpose fits; the numbers tell."""
    case = random_case(tokens=3, experts=2, hidden=hidden, intermediate=intermediate)
    assert relative_error(case.run(implementation=name), case.expected()) <= TOLERANCE


@every_name
def test_case_24_expert_0_is_an_expert(name):
    """Case 24: only expert 0 differs from zero; a shard that owns only expert 0."""
    case = random_case(tokens=4, experts=3, top_k=1, hidden=64, intermediate=32)
    down = (np.where(np.arange(3)[:, None, None] == 0, case.down[0], 0).astype(np.uint8), case.down[1])
    case = case.replace(down=down, topk_ids=np.array([[0], [1], [0], [2]], np.int32))
    y = np.asarray(case.run(implementation=name))
    assert relative_error(y, case.expected()) <= TOLERANCE
    assert (y[[0, 2]] != 0).any(axis=-1).all()
    assert (y[[1, 3]] == 0).all()
    shard = case.replace(gate_up=tuple(part[:1] for part in case.gate_up), down=tuple(part[:1] for part in case.down))
    mapped = shard.run(implementation=name, expert_map=np.array([0, -1, -1], np.int32))
    assert relative_error(mapped, y) <= TOLERANCE


@every_name
@pytest.mark.parametrize("limit", [0.0, 7.0])
def test_case_25_a_limit_is_never_dropped(name, limit):
    """Case 25: activation "silu" takes no limit; giving one is an error and not another function in silence."""
    case = random_case(tokens=2, hidden=32, intermediate=32)
    with pytest.raises(ValueError, match="activation_limit"):
        case.run(implementation=name, activation_limit=limit)


def activated(name, gate_and_up, **options) -> np.ndarray:
    """The activation of each pair by way of the layer, whose weights are identities here: y = activation(gate, up)."""
    pairs = np.array(gate_and_up, np.float32)
    x = np.zeros((1, 64), np.float32)
    x[0, : len(pairs)], x[0, 32 : 32 + len(pairs)] = pairs.T
    one = np.eye(64, dtype=np.float32)
    weights = quantize_weights(one[None], one[None, :, :32])
    route = np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32)
    y = np.asarray(mxfp4_moe(x, weights, *route, implementation=name, **options), np.float64)
    assert (y[0, 32:] == 0).all()
    return y[0, : len(pairs)]


CASE_25 = [(20, 20), (-20, 20), (7, -20), (1, -1), (3, 2)]


@every_name
def test_case_25_limits_by_figure(name):
    """Case 25: swiglu_oai at 1.702 and 7, which are its defaults, and the clamped silu at 10."""
    figures = [55.99962502642654, -2.6347e-13, -41.99971876981991, 0, 8.945786070876641]
    for options in ({}, {"activation_alpha": 1.702, "activation_limit": 7.0}):
        y = activated(name, CASE_25, activation="swiglu_oai", **options)
        assert y == pytest.approx(figures, rel=2e-5, abs=0)
    np.testing.assert_allclose(y, oracle.activate(*np.array(CASE_25).T, "swiglu_oai"), rtol=1e-5)
    y = activated(name, CASE_25, activation="silu_clamped", activation_limit=10.0)
    np.testing.assert_allclose(y[0], 99.99546, rtol=1e-7)
    np.testing.assert_allclose(y, oracle.activate(*np.array(CASE_25).T, "silu_clamped", limit=10), rtol=1e-5)
    assert activated(name, CASE_25, activation="silu")[0] == pytest.approx(400, rel=1e-6)  # no limit, no clamp


@every_name
@pytest.mark.parametrize("activation", ["swiglu_oai", "silu_clamped", "silu_post_clamped"])
@pytest.mark.parametrize("limit", [0, 0.0, -7.0, float("nan")])
def test_case_25_a_limit_of_zero_is_not_a_clamp_to_zero(name, activation, limit):
    """Case 25: nor is it no clamp: an error, like every limit that is not positive."""
    with pytest.raises(ValueError, match=r"activation_limit=.* given .*expected a positive number"):
        activated(name, CASE_25, activation=activation, activation_limit=limit)


@pytest.mark.parametrize("activation", ["silu_clamped", "silu_post_clamped"])
def test_case_25_a_clamp_without_its_limit(activation):
    """Case 25: only swiglu_oai has a default limit; for the others there is none to guess."""
    with pytest.raises(ValueError, match=r"activation_limit=None given .*expected a positive number"):
        activated("xla", CASE_25, activation=activation)


@every_name
@pytest.mark.parametrize("limit", [7.0, 10.0])
def test_case_26_clamped_before_silu_or_after_it(name, limit):
    """Case 26: two names; they agree below the limit, and above it one gives silu(limit) and the other the limit."""
    pairs = [(9.9, 1), (10.5, 1), (20, 1)]
    gate = np.array([9.9, 10.5, 20], np.float32).astype(np.float64)
    before = activated(name, pairs, activation="silu_clamped", activation_limit=limit)
    after = activated(name, pairs, activation="silu_post_clamped", activation_limit=limit)
    np.testing.assert_allclose(before, oracle.silu(np.minimum(gate, limit)), rtol=1e-6)
    np.testing.assert_allclose(after, np.minimum(oracle.silu(gate), limit), rtol=1e-6)
    assert after[2] == limit
    if limit == 7:
        np.testing.assert_allclose(before, 6.9936, atol=5e-5)
        assert (after == 7).all()
    else:
        assert before[0] == pytest.approx(after[0], rel=1e-6)
        assert (before[1:] < 9.9996).all()


def test_weights_of_zero_experts_bytes_helper_is_random_enough():
    """The cases above lean on random_bytes: all codes and several scales occur in it."""
    codes, scales = random_bytes(np.random.default_rng(0), (3, 64), 64)
    assert set(oracle.unpack(codes).ravel().tolist()) == set(range(16))
    assert len(set(scales.ravel().tolist())) >= 4


def test_every_case_is_listed_with_tests_that_exist():
    """docs/field_cases.md has each case once; what it names is there, and what is here by a case's number is named there."""
    here = pathlib.Path(__file__).parent
    rows = re.findall(
        r"^\| (\d+) \|(.*)\|$", (here.parent / "docs" / "field_cases.md").read_text(encoding="utf-8"), re.M
    )
    assert [int(number) for number, _ in rows] == list(range(1, 35))
    functions = {}
    for file in sorted(set(re.findall(r"`([\w/]+\.py)::", str(rows)))):
        body = ast.parse((here / file).read_text(encoding="utf-8")).body
        functions[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for number, row in rows:
        listed = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert listed, number
        for file, name in listed:
            assert name in functions[file], f"case {number}: tests/{file} has no {name}"
        mine = {name for name in functions["test_field_cases.py"] if name.startswith(f"test_case_{int(number):02}_")}
        assert mine <= {name for _, name in listed}, number
