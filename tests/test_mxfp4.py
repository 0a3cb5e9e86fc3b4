"""Mxfp4Array, pack, unpack and dequantize against the oracle, ml_dtypes and gguf: bit by bit."""

import copy
import itertools
import pickle

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mxfp4_moe import Mxfp4Array, dequantize
from jax_mxfp4_moe.mxfp4 import pack, unpack

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Row b: the sixteen codes twice, under scale byte b.
ALL_CODES = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
ALL_SCALES = np.arange(256, dtype=np.uint8)[:, None]


def every_value() -> Mxfp4Array:
    return Mxfp4Array(jnp.asarray(oracle.pack(ALL_CODES)), jnp.asarray(ALL_SCALES))


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bits(got, expected) -> None:
    """Bitwise equal, except that one NaN is as good as another."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(got)[numbers], bits(expected)[numbers])


# Eagerly every operation is compiled by itself, which is slow: most tests decode under jit.
run_eager, run_jit = dequantize, jax.jit(dequantize, static_argnums=1)


def run_vmap(a, dtype):
    return jax.vmap(lambda row: dequantize(row, dtype))(a)


@pytest.mark.parametrize("run", [run_eager, run_jit, run_vmap])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_is_exact_for_every_code_and_scale(dtype, run):
    """Field cases 4 and 27: all 16 codes under all 256 scale bytes, the same bits eagerly, under jit and in vmap."""
    with np.errstate(over="ignore", under="ignore"):
        expected = oracle.dequantize(oracle.pack(ALL_CODES), ALL_SCALES).astype(DTYPES[dtype])
    assert_same_bits(run(every_value(), DTYPES[dtype]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_rounds_as_numpy_and_ml_dtypes_do(dtype):
    """The oracle's own rounding, on the same numbers and on midpoints between neighbours."""
    values = oracle.dequantize(oracle.pack(ALL_CODES), ALL_SCALES)
    random = np.random.default_rng(0).normal(size=4096) * 2.0 ** np.random.default_rng(1).integers(-20, 12, 4096)
    halfway = random.astype(DTYPES[dtype]).astype(np.float64)
    halfway = (halfway + np.nextafter(halfway.astype(DTYPES[dtype]), DTYPES[dtype](np.inf)).astype(np.float64)) / 2
    for x in (values, random, halfway):
        # ml_dtypes narrows float64 through float32; both steps are exact or far from a tie for these numbers.
        with np.errstate(over="ignore", under="ignore"):
            np.testing.assert_array_equal(oracle.round_to(x, dtype), x.astype(DTYPES[dtype]).astype(np.float64))


def test_extreme_scale_bytes_by_figure():
    """Field case 4: the figures of the report, written out."""
    table = {b: np.asarray(run_jit(every_value(), np.float32))[b, :16] for b in (0, 1, 127, 254)}
    assert table[0][7] == np.float32(6 * 2.0**-127)
    assert bits(table[0])[1] == 0x00200000  # 2^-128, a subnormal
    assert table[127].tolist() == oracle.CODE_VALUES.tolist()
    assert np.isposinf(table[254][4])
    assert np.isneginf(table[254][15])
    assert table[254][3] == np.float32(1.5 * 2.0**127)
    assert bits(run_jit(every_value(), jnp.bfloat16))[0, 1] == 0x0020
    half = np.asarray(run_jit(every_value(), np.float16))
    assert bits(half)[0, :16].tolist() == [0] * 8 + [0x8000] * 8
    for dtype in DTYPES.values():
        assert not np.isnan(np.asarray(run_jit(every_value(), dtype))[:255]).any()


@pytest.mark.parametrize("run", [run_eager, run_jit, run_vmap])
def test_scales_decode_to_powers_of_two(run):
    """Field case 27: code 2 (the number 1) under every byte is the scale itself, 2^-127 at byte 0 and NaN at 255."""
    codes = jnp.full((256, 16), 0x22, jnp.uint8)
    got = np.asarray(run(Mxfp4Array(codes, jnp.asarray(ALL_SCALES)), np.float32))[:, 0]
    assert bits(got)[0] == 0x00400000
    assert bits(got)[1:255].tolist() == [byte << 23 for byte in range(1, 255)]
    assert np.isnan(got[255])


def test_scale_bytes_do_not_wrap():
    """Field case 5: bytes 100, 126, 127, 128 and 250 survive packing, stacking and decoding."""
    scales = np.array([[100, 126, 127, 128, 250]], np.uint8)
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 10))
    a = Mxfp4Array(oracle.pack(codes), scales)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), a, a)
    expected = oracle.dequantize(oracle.pack(codes), scales).astype(np.float32)
    assert_same_bits(run_jit(stacked, np.float32), np.stack([expected, expected]))


def test_ml_dtypes_decodes_the_same_codes_and_scales():
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert codes.tolist() == oracle.CODE_VALUES.tolist()
    assert np.signbit(codes).tolist() == np.signbit(oracle.CODE_VALUES).tolist()
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(scales, oracle.SCALE_VALUES)
    expected = codes[ALL_CODES].astype(np.float64) * scales[ALL_SCALES]
    with np.errstate(over="ignore"):
        assert_same_bits(run_jit(every_value(), np.float32), expected.astype(np.float32))


def test_gguf_decodes_the_same_blocks():
    """Scale bytes 0 to 254 by value; gguf keeps elements j and j + 16 in a byte, and knows neither -0 nor a NaN byte."""
    split = ALL_CODES[:255, :16] | (ALL_CODES[:255, 16:] << 4)
    blocks = np.concatenate([ALL_SCALES[:255], split], axis=1)
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4).reshape(255, 32)
    ours = np.asarray(run_jit(every_value(), np.float32))[:255]
    # gguf halves the scale and doubles the codes; at byte 254 its product overflows where the code's value does.
    np.testing.assert_array_equal(ours, theirs)


def test_pack_puts_the_even_element_in_the_low_nibble():
    """Field case 21: codes 0..15 twice are the bytes 10 32 54 76 98 BA DC FE, twice."""
    codes = jnp.tile(jnp.arange(16, dtype=jnp.uint8), 2)
    expected = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2
    assert np.asarray(pack(codes)).tolist() == expected
    assert np.asarray(unpack(jnp.asarray(expected, jnp.uint8))).tolist() == codes.tolist()


@given(st.binary(min_size=96, max_size=96))
def test_pack_and_unpack_are_inverses(raw):
    packed = np.frombuffer(raw, np.uint8).reshape(2, 3, 16)
    codes = np.asarray(unpack(jnp.asarray(packed)))
    np.testing.assert_array_equal(codes, oracle.unpack(packed))
    np.testing.assert_array_equal(np.asarray(pack(jnp.asarray(codes))), packed)


@given(st.binary(min_size=64, max_size=64), st.binary(min_size=4, max_size=4), st.sampled_from(sorted(DTYPES)))
def test_dequantize_any_bytes(raw, scales, dtype):
    """Random codes under random scale bytes; shapes are fixed, so that one compilation serves all."""
    codes = np.frombuffer(raw, np.uint8).reshape(2, 32)
    scales = np.frombuffer(scales, np.uint8).reshape(2, 2)
    with np.errstate(over="ignore", under="ignore"):
        expected = oracle.dequantize(codes, scales).astype(DTYPES[dtype])
    assert_same_bits(run_jit(Mxfp4Array(jnp.asarray(codes), jnp.asarray(scales)), DTYPES[dtype]), expected)


# --- the pytree ------------------------------------------------------------------------------------------------------


def random_array(*rows, length=64, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*rows, length // 2), dtype=np.uint8)
    scales = rng.integers(100, 140, (*rows, length // 32), dtype=np.uint8)
    return Mxfp4Array(jnp.asarray(codes), jnp.asarray(scales))


def test_shape_is_logical():
    a = random_array(2, 5)
    assert a.shape == (2, 5, 64)
    assert a.ndim == 3
    assert a.layout == "packed"
    assert random_array().shape == (64,)


def test_pytree_has_two_named_leaves_and_static_length_and_layout():
    a = random_array(3)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(a)]
    assert paths == [".codes", ".scales"]
    assert jax.tree.structure(a) == jax.tree.structure(random_array(9, seed=5))  # rows are not part of the structure
    assert jax.tree.structure(a) != jax.tree.structure(random_array(3, length=96))
    tagged = Mxfp4Array(a.codes, a.scales, length=64, layout="other")
    assert jax.tree.structure(a) != jax.tree.structure(tagged)
    assert jax.tree.map(lambda leaf: leaf, tagged).layout == "other"


def test_stack_scan_and_vmap_give_what_a_loop_gives():
    parts = [random_array(4, seed=seed) for seed in range(3)]
    expected = np.stack([np.asarray(run_jit(a, np.float32)) for a in parts])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    assert stacked.shape == (3, 4, 64)
    assert_same_bits(jax.vmap(lambda a: dequantize(a, np.float32))(stacked), expected)
    _, scanned = jax.lax.scan(lambda carry, a: (carry, dequantize(a, np.float32)), None, stacked)
    assert_same_bits(scanned, expected)
    assert_same_bits(run_jit(stacked[1], np.float32), expected[1])


def test_indexing_cuts_leading_axes_only():
    a = random_array(4, 3)
    assert_same_bits(run_jit(a[1:3], np.float32), np.asarray(run_jit(a, np.float32))[1:3])
    assert a[2, 0].shape == (64,)
    with pytest.raises(ValueError, match="leading axes"):
        a[..., :32]
    with pytest.raises(ValueError, match="leading axes"):
        a[0, 0, 0]


@pytest.mark.parametrize("module", [np, jnp])
def test_length_and_iteration_follow_the_first_axis(module):
    """Python iterates over whatever can be indexed, and JAX clamps an index past the end: this has to stop by itself."""
    a = random_array(4, 3)
    a = Mxfp4Array(module.asarray(a.codes), module.asarray(a.scales))
    assert len(a) == 4
    rows = list(itertools.islice(a, 6))
    assert [row.shape for row in rows] == [(3, 64)] * 4
    np.testing.assert_array_equal(np.stack([row.codes for row in rows]), a.codes)
    np.testing.assert_array_equal(np.stack([row.scales for row in rows]), a.scales)
    assert object() not in a
    assert [row.shape for row in reversed(a)] == [(3, 64)] * 4
    first, *_, last = a
    np.testing.assert_array_equal(first.codes, a[0].codes)
    np.testing.assert_array_equal(last.codes, a[3].codes)
    assert list(random_array(0, 3)) == []
    assert not random_array(0, 3)
    with pytest.raises((TypeError, ValueError)):  # the last axis has no entries of its own
        list(itertools.islice(random_array(), 3))


@pytest.mark.parametrize("copied", [lambda a: pickle.loads(pickle.dumps(a)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("module", [np, jnp])
def test_pickle_and_copy(module, copied):
    """Bytes, length and layout, of an array in any layout."""
    a = random_array(4, 3)
    for tag in ({}, {"length": 60, "layout": "other"}):
        a = Mxfp4Array(module.asarray(a.codes), module.asarray(a.scales), **tag)
        b = copied(a)
        assert type(b) is Mxfp4Array
        assert jax.tree.structure(b) == jax.tree.structure(a)
        for old, new in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert type(new) is type(old)
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("module", [np, jnp])
def test_typed_and_signed_carriers_are_reinterpreted(module):
    """float4 codes (one an element), float8_e8m0fnu scales and int8 bytes mean the bytes they hold."""
    codes = np.random.default_rng(0).integers(0, 16, (256, 32), dtype=np.uint8)
    float4 = module.asarray(codes.view(ml_dtypes.float4_e2m1fn))
    e8m0 = module.asarray(ALL_SCALES.view(ml_dtypes.float8_e8m0fnu))
    for a in (Mxfp4Array(float4, e8m0), Mxfp4Array(module.asarray(oracle.pack(codes).view(np.int8)), ALL_SCALES)):
        assert a.shape == (256, 32)
        assert a.codes.dtype == jnp.uint8
        assert a.scales.dtype == jnp.uint8
        np.testing.assert_array_equal(np.asarray(a.codes), oracle.pack(codes))
        np.testing.assert_array_equal(np.asarray(a.scales), ALL_SCALES)


def test_typed_carriers_inside_jit():
    codes = np.random.default_rng(0).integers(0, 16, (4, 32), dtype=np.uint8)
    scales = np.array([[0], [127], [200], [254]], np.uint8)

    @jax.jit
    def decode(codes, scales):
        return run_jit(Mxfp4Array(codes, scales), jnp.float32)

    got = decode(codes.view(ml_dtypes.float4_e2m1fn), scales.view(ml_dtypes.float8_e8m0fnu))
    with np.errstate(over="ignore"):
        assert_same_bits(got, oracle.dequantize(oracle.pack(codes), scales).astype(np.float32))


# --- bad input -------------------------------------------------------------------------------------------------------

U8 = np.uint8


@pytest.mark.parametrize(
    ("codes", "scales", "keywords", "error", "texts"),
    [
        (np.zeros((3, 16), np.float32), np.zeros((3, 1), U8), {}, TypeError, ["float32", "expected uint8", "quantize"]),
        (np.zeros((3, 16), np.int32), np.zeros((3, 1), U8), {}, TypeError, ["int32", "expected uint8"]),
        (np.zeros((3, 16), U8), np.ones((3, 1), np.float32), {}, TypeError, ["float32", "expected uint8", "quantize"]),
        (np.zeros((3, 16), U8), np.zeros((3, 2), U8), {}, ValueError, ["(3, 16)", "(3, 2)", "multiple of 32", "Pad"]),
        (np.zeros((3, 16), U8), np.zeros((4, 1), U8), {}, ValueError, ["(3, 16)", "(4, 1)", "expected"]),
        (np.zeros((3, 24), U8), np.zeros((3, 1), U8), {}, ValueError, ["(3, 24)", "48", "multiple of 32", "Pad"]),
        (np.zeros((3, 8), U8), np.zeros((3, 1), U8), {}, ValueError, ["(3, 8)", "16", "multiple of 32"]),
        (np.zeros((3, 16), U8), np.zeros((3, 1), U8), {"length": 64}, ValueError, ["64", "(3, 16)", "expected"]),
        (np.zeros((), U8), np.zeros((), U8), {"length": 0}, ValueError, ["()", "expected"]),
        (np.zeros((16,), U8), np.zeros((), U8), {}, ValueError, ["()", "expected"]),
    ],
    ids=lambda value: "",
)
def test_constructor_refuses(codes, scales, keywords, error, texts):
    with pytest.raises(error) as caught:
        Mxfp4Array(codes, scales, **keywords)
    for text in ("Mxfp4Array", *texts):
        assert text in str(caught.value)


def test_odd_float4_axis_is_refused():
    """Field case 32: an odd last axis cannot be two codes a byte."""
    with pytest.raises(ValueError, match="even last axis"):
        Mxfp4Array(np.zeros((2, 31), ml_dtypes.float4_e2m1fn), np.zeros((2, 1), U8))


def test_dequantize_refuses_another_layout_and_other_types():
    a = random_array(2)
    with pytest.raises(ValueError, match=r"'shuffled'.*expected layout 'packed'"):
        dequantize(Mxfp4Array(a.codes, a.scales, length=64, layout="shuffled"))
    with pytest.raises(TypeError, match=r"int32.*expected float32, bfloat16 or float16"):
        dequantize(a, jnp.int32)
    with pytest.raises(TypeError, match="float64"):
        dequantize(a, np.float64)
