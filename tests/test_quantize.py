"""quantize and quantize_fp8, in JAX and in torch, against the oracle, ml_dtypes and gguf: bit by bit."""

import fractions

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_mxfp4_moe import Mxfp4Array, dequantize, quantize
from jax_mxfp4_moe.quantize import Fp8Array, dequantize_fp8, quantize_fp8

SCALE_RULES = oracle.SCALE_RULES
ROUNDINGS = oracle.ROUNDINGS
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
F32_TINY = np.float32(2.0**-149)

_jitted = jax.jit(quantize, static_argnames=("scale_rule", "rounding"))
_jitted_dequantize = jax.jit(dequantize, static_argnums=1)


def jax_bytes(x, scale_rule="even", rounding="nearest_even"):
    a = _jitted(jnp.asarray(x), scale_rule=scale_rule, rounding=rounding)
    return np.asarray(a.codes), np.asarray(a.scales)


def eager_bytes(x, scale_rule="even", rounding="nearest_even"):
    a = quantize(jnp.asarray(x), scale_rule=scale_rule, rounding=rounding)
    return np.asarray(a.codes), np.asarray(a.scales)


def torch_bytes(x, scale_rule="even", rounding="nearest_even"):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'jax_mxfp4_moe[torch]'")
    from jax_mxfp4_moe.implementations import torch as implementation

    codes, scales = implementation.quantize(as_tensor(x), scale_rule, rounding)
    return codes.numpy(), scales.numpy()


def as_tensor(x):
    import torch

    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


every_quantizer = pytest.mark.parametrize("run", [jax_bytes, torch_bytes], ids=["xla", "torch"])
every_rule = pytest.mark.parametrize("scale_rule", SCALE_RULES)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def assert_as_oracle(run, x, scale_rule, rounding):
    codes, scales = run(x, scale_rule, rounding)
    expected_codes, expected_scales = oracle.quantize(x, scale_rule, rounding)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(oracle.unpack(codes), oracle.unpack(expected_codes))


def next_after(x, direction, dtype):
    return np.nextafter(np.asarray(x, dtype), dtype(direction))


def tie_blocks(dtype):
    """Blocks whose scale is 2^k under floor, even and rceil: 6 first, then ties or their neighbours, both signs."""
    down, up = next_after(TIES, -np.inf, dtype), next_after(TIES, np.inf, dtype)
    rows = []
    for values in (TIES.astype(dtype), down, up):
        block = np.zeros(32, dtype)
        block[0], block[1:8], block[8:15] = 6, values, -values
        rows.append(block)
    return np.stack(rows)


# --- scales ----------------------------------------------------------------------------------------------------------

SCALE_TABLE = {  # figures of the field case; half_up from its definition: 1.5 * 2^n and more goes up
    "floor": [125] * 4 + [126] * 4 + [127] * 7 + [128] * 3,
    "even": [125] * 3 + [126] * 4 + [127] * 6 + [128] * 4 + [129],
    "rceil": [125, 125] + [126] * 4 + [127] * 5 + [128] * 6 + [129],
    "ceil": [125] + [126] * 4 + [127] * 4 + [128] * 7 + [129] * 2,
    "half_up": [125] + [126] * 4 + [127] * 5 + [128] * 6 + [129] * 2,
}
AMAX = [1, 1.5, 1.74, 1.75, 2, 3, 3.49, 3.5, 4, 5.9, 6, 6.1, 6.99, 7, 7.5, 8, 12, 14]


@every_quantizer
@every_rule
@pytest.mark.parametrize("position", [0, 17, 31])
def test_scale_table(run, scale_rule, position):
    """Field case 1: one block a magnitude, the scale byte by rule."""
    x = np.zeros((len(AMAX), 32), np.float32)
    x[:, position] = AMAX
    assert run(x, scale_rule)[1][:, 0].tolist() == SCALE_TABLE[scale_rule]
    assert run(-x, scale_rule)[1][:, 0].tolist() == SCALE_TABLE[scale_rule]


@every_quantizer
@every_rule
def test_scale_thresholds_of_every_exponent(run, scale_rule):
    """Just below, at and just above every power of two, 1.5 and 1.75 times it, over all of float32."""
    powers = np.ldexp(np.ones(254), np.arange(-126, 128)).astype(np.float32)
    points = np.concatenate([powers, (1.5 * powers).astype(np.float32), (1.75 * powers).astype(np.float32)])
    with np.errstate(over="ignore", under="ignore"):
        points = np.concatenate([points, next_after(points, 0, np.float32), next_after(points, np.inf, np.float32)])
    points = np.append(points[np.isfinite(points)], np.finfo(np.float32).max)
    x = np.zeros((len(points), 32), np.float32)
    x[:, 5] = points
    x[:, 6] = -points
    assert_as_oracle(run, x, scale_rule, "nearest_even")


@every_quantizer
def test_exact_blocks_survive(run):
    """Field case 33: amax 6 * 2^k is lossless under floor, even and rceil, with byte 127 + k."""
    k = np.arange(-20, 21)
    values = np.array([6, 4, 3, 2, 1.5, 1, 0.5], np.float32)
    x = np.zeros((len(k), 32), np.float32)
    x[:, :7] = values * np.ldexp(1.0, k)[:, None]
    x[:, 7:14] = -x[:, :7]
    for scale_rule in ("floor", "even", "rceil"):
        codes, scales = run(x, scale_rule)
        assert scales[:, 0].tolist() == (127 + k).tolist()
        np.testing.assert_array_equal(oracle.dequantize(codes, scales), x)
    for scale_rule in ("ceil", "half_up"):  # half_up: 6 = 1.5 * 4 goes up as well
        assert run(x, scale_rule)[1][:, 0].tolist() == (128 + k).tolist()


# --- elements --------------------------------------------------------------------------------------------------------


@every_quantizer
@every_rounding
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_ties_and_their_neighbours(run, rounding, dtype):
    """Field case 2: ties by the named rounding, mirrored for negatives; a neighbour goes to the nearer value."""
    x = tie_blocks(dtype)
    nearest_even = [0, 1, 1, 2, 2, 4, 4]
    half_away = [0.5, 1, 1.5, 2, 3, 4, 6]
    for scale_rule in ("floor", "even", "rceil"):
        codes, scales = run(x, scale_rule, rounding)
        assert scales[:, 0].tolist() == [127] * 3
        values = oracle.dequantize(codes, scales)
        at, below, above = values[:, 1:8]
        assert at.tolist() == (nearest_even if rounding == "nearest_even" else half_away)
        assert below.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
        assert above.tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
        np.testing.assert_array_equal(values[:, 8:15], -values[:, 1:8])
        assert (oracle.unpack(codes)[:, 15:] == 0).all()  # an exact zero is code 0, not 8
    for scale_rule in SCALE_RULES:
        assert_as_oracle(run, x, scale_rule, rounding)


@every_quantizer
@every_rule
@every_rounding
def test_ties_under_every_scale(run, scale_rule, rounding):
    """The same blocks times every power of two; at the lower end scales clamp and values are subnormal."""
    blocks = tie_blocks(np.float32).astype(np.float64)
    powers = np.arange(-149, 126)
    with np.errstate(over="ignore", under="ignore"):
        x = np.concatenate([blocks * 2.0**k for k in powers]).astype(np.float32)
    assert np.isfinite(x).all()
    assert_as_oracle(run, x, scale_rule, rounding)


@every_quantizer
@every_rule
def test_every_positive_bfloat16_in_its_own_block(run, scale_rule):
    """All 32767 finite and non-finite magnitudes of bfloat16, each beside a fixed fraction of itself."""
    magnitudes = np.arange(0, 0x7F80 + 8, dtype=np.uint16)[::7].view(ml_dtypes.bfloat16)
    x = np.zeros((len(magnitudes), 32), ml_dtypes.bfloat16)
    fractions_of_amax = np.linspace(-1, 1, 32)
    with np.errstate(invalid="ignore", under="ignore"):
        products = magnitudes.astype(np.float64)[:, None] * fractions_of_amax
        x[:] = products.astype(np.float32).astype(ml_dtypes.bfloat16)
    x[:, 31] = magnitudes
    assert_as_oracle(run, x, scale_rule, "nearest_even")


@every_quantizer
@every_rounding
def test_every_bfloat16_ratio_of_a_block(run, rounding):
    """Every bfloat16 between 2^-4 and 8 under scale 1: each code's whole interval, and saturation beyond 6."""
    first, last = (np.array(v, ml_dtypes.bfloat16).view(np.uint16) for v in (2.0**-4, 7.97))
    ratios = np.arange(first, last + 1, dtype=np.uint16).view(ml_dtypes.bfloat16)
    ratios = np.pad(ratios, (0, -len(ratios) % 31)).reshape(-1, 31)
    x = np.concatenate([np.full((len(ratios), 1), 7.97, ml_dtypes.bfloat16), ratios], axis=1)
    codes, scales = run(x, "floor", rounding)
    assert (scales == 127).all()
    assert oracle.unpack(codes)[:, 0].tolist() == [7] * len(x)  # 7.97 saturates at 6
    for scale_rule in SCALE_RULES:
        assert_as_oracle(run, x, scale_rule, rounding)
        assert_as_oracle(run, -x, scale_rule, rounding)


def test_oracle_agrees_with_exact_fractions():
    """The oracle itself, once more with rationals: nearest magnitude, at a tie the even code."""
    ratios = np.concatenate([tie_blocks(np.float32).ravel(), np.linspace(0, 8, 999).astype(np.float32)])
    for ratio, code in zip(ratios, oracle.element_codes(ratios, "nearest_even"), strict=True):
        exact = abs(fractions.Fraction(float(ratio)))
        distances = [abs(exact - fractions.Fraction(float(m))) for m in oracle.MAGNITUDES]
        nearest = [i for i, distance in enumerate(distances) if distance == min(distances)]
        assert code % 8 == next((i for i in nearest if i % 2 == 0), nearest[0])


# --- special values --------------------------------------------------------------------------------------------------


@every_quantizer
@every_rule
@every_rounding
def test_zero_blocks(run, scale_rule, rounding):
    """Field case 3: zero blocks take byte 0 and keep the sign of zero; tiny blocks never decode to NaN."""
    normal = np.linspace(-3, 3, 32)
    x = np.stack(
        [
            np.concatenate([np.zeros(32), normal]),
            np.concatenate([np.full(32, -0.0), normal]),
            np.concatenate([np.array([1e-45] + [0.0] * 31), normal]),
            np.concatenate([np.full(32, 1e-40), normal]),
        ]
    ).astype(np.float32)
    codes, scales = run(x, scale_rule, rounding)
    assert scales[:, 0].tolist() == [0, 0, 0, 0]
    assert oracle.unpack(codes)[0, :32].tolist() == [0] * 32
    assert oracle.unpack(codes)[1, :32].tolist() == [8] * 32
    assert oracle.dequantize(codes, scales)[2, :32].tolist() == [0] * 32
    assert not np.isnan(oracle.dequantize(codes, scales)).any()
    assert_as_oracle(run, x, scale_rule, rounding)


@every_quantizer
@every_rule
@every_rounding
def test_subnormal_inputs_are_not_flushed(run, scale_rule, rounding):
    """Every tie and its neighbours under scale byte 0, where the inputs are subnormal; and random subnormals."""
    unit = 2.0**-127
    ties = np.concatenate([[6], TIES, -TIES, [0.5] * 17]) * unit
    rows = [ties, ties - np.sign(ties) * 2.0**-149, ties + np.sign(ties) * 2.0**-149]
    rng = np.random.default_rng(3)
    signs = rng.integers(0, 2, (16, 32), dtype=np.uint32) << 31
    random = rng.integers(0, 0x00800000, (16, 32), dtype=np.uint32) | signs
    x = np.concatenate([np.stack(rows).astype(np.float32), random.view(np.float32)])
    assert np.abs(x[3:]).max() < np.finfo(np.float32).tiny
    assert np.float32(2.5 * unit).view(np.uint32) != 0
    _, scales = run(x, scale_rule, rounding)
    assert (scales[:3] == (1 if scale_rule in ("ceil", "half_up") else 0)).all()
    assert_as_oracle(run, x, scale_rule, rounding)


@every_quantizer
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_a_block_with_nan_or_inf_is_all_nan(run, bad, dtype):
    """One bad element: scale byte 255 and codes 0 in its block, the neighbours untouched. Never lost in silence."""
    x = np.tile(np.linspace(-3, 3, 96).astype(dtype), (32, 1))
    for i in range(32):
        x[i, 32 + i] = bad
    for scale_rule in ("floor", "ceil"):  # which add nothing and the most before the exponent is read
        codes, scales = run(x, scale_rule)
        assert (scales[:, 1] == 255).all()
        assert (codes[:, 16:32] == 0).all()
        assert (scales[:, [0, 2]] != 255).all()
        assert_as_oracle(run, x, scale_rule, "nearest_even")
    decoded = np.asarray(jax.jit(lambda x: dequantize(quantize(x), jnp.float32))(x))
    assert np.isnan(decoded[:, 32:64]).all()
    assert np.isfinite(decoded[:, :32]).all()


@every_quantizer
def test_nan_with_any_payload(run):
    """The smallest and the largest NaN of either sign, and bfloat16 NaNs whose payload is in the last bit."""
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    x = np.zeros((4, 32), np.float32)
    x[:, 9] = payloads
    assert run(x)[1].tolist() == [[255]] * 4
    x = np.zeros((2, 32), ml_dtypes.bfloat16)
    x[:, 9] = np.array([0x7F81, 0xFF81], np.uint16).view(ml_dtypes.bfloat16)
    assert run(x)[1].tolist() == [[255]] * 2


@every_quantizer
@every_rule
def test_largest_numbers_saturate_or_fit(run, scale_rule):
    x = np.zeros((2, 32), np.float32)
    x[0, :2] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    x[1, :2] = 1.75 * 2.0**127, 2.0**127
    codes, scales = run(x, scale_rule)
    assert (scales <= 254).all()
    assert np.isfinite(oracle.dequantize(codes, scales)).all()
    assert_as_oracle(run, x, scale_rule, "nearest_even")


# --- second opinions -------------------------------------------------------------------------------------------------


@every_quantizer
@every_rule
def test_ml_dtypes_rounds_elements_the_same_way(run, scale_rule):
    """Given the scale, the element is ml_dtypes' own cast to float4_e2m1fn: nearest even, saturating."""
    rng = np.random.default_rng(11)
    x = (rng.normal(size=(64, 64)) * 2.0 ** rng.integers(-8, 8, (64, 1))).astype(np.float32)
    x = np.concatenate([x, np.tile(tie_blocks(np.float32), (1, 2))])
    codes, scales = run(x, scale_rule)
    scaled = x.astype(np.float64) / np.repeat(oracle.SCALE_VALUES[scales], 32, axis=-1)
    theirs = scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(oracle.unpack(codes), theirs)


@every_quantizer
def test_gguf_quantizes_the_same_way(run):
    """gguf's rule is floor; its codec is inexact at ties and beside powers of two: those are left out."""
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(512, 32)) * 2.0 ** rng.integers(-30, 30, (512, 1))).astype(np.float32)
    amax = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64)
    away_from_power = np.abs(np.frexp(amax)[0] - 0.5) > 1e-5
    away_from_power &= np.abs(np.frexp(amax)[0] - 1) > 1e-5
    ratios = np.abs(x) / 2.0 ** (np.frexp(amax)[1] - 3.0)
    no_tie = (np.abs(ratios[..., None] - TIES) > 1e-6).all(axis=(-1, -2))
    x = x[away_from_power[:, 0] & no_tie]
    assert len(x) > 400
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.MXFP4)
    split = theirs[:, 1:]
    their_codes = np.concatenate([split & 15, split >> 4], axis=1)
    codes, scales = run(x, "floor")
    np.testing.assert_array_equal(scales, theirs[:, :1])
    codes = oracle.unpack(codes)
    np.testing.assert_array_equal(np.where(codes == 8, 0, codes), np.where(their_codes == 8, 0, their_codes))


# --- transformations and properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_eager_jit_and_vmap_agree(dtype):
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(3, 4, 96)) * 2.0 ** rng.integers(-140, 100, (3, 4, 1))).astype(dtype)
    expected = jax_bytes(x)
    mapped = jax.vmap(jax.vmap(quantize))(jnp.asarray(x))
    for got in (eager_bytes(x), (np.asarray(mapped.codes), np.asarray(mapped.scales)), oracle.quantize(x)):
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])
    assert mapped.shape == (3, 4, 96)


@pytest.mark.parametrize("shape", [(32,), (0, 64), (2, 0, 32), (1, 1, 1, 96)])
def test_any_leading_axes(shape):
    x = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    a = _jitted(jnp.asarray(x))
    assert a.shape == shape
    assert a.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert a.scales.shape == (*shape[:-1], shape[-1] // 32)
    np.testing.assert_array_equal(np.asarray(a.codes), oracle.quantize(x)[0])


@settings(max_examples=8)
@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    blocks=st.integers(0, 5),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
    seed=st.integers(0, 99),
)
def test_any_shape(leading, blocks, dtype, seed):
    """Any leading axes and any number of blocks, none included: the oracle's bytes, and back to the values they stand for.

    Each example compiles, so there are few; the torch side has no compilation and sees the same ones.
    """
    rng = np.random.default_rng(seed)
    shape = (*leading, 32 * blocks)
    x = (rng.normal(size=shape) * 2.0 ** rng.integers(-8, 8, shape)).astype(dtype)
    expected = oracle.quantize(x)
    for codes, scales in (jax_bytes(x), torch_bytes(x)):
        assert codes.shape == (*leading, 16 * blocks)
        assert scales.shape == (*leading, blocks)
        np.testing.assert_array_equal(codes, expected[0])
        np.testing.assert_array_equal(scales, expected[1])
    a = Mxfp4Array(*map(jnp.asarray, expected))
    assert a.shape == shape
    decoded = _jitted_dequantize(a, jnp.float32)
    assert decoded.shape == shape
    np.testing.assert_array_equal(np.asarray(decoded, np.float64), oracle.dequantize(*expected))


_floats = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 6.0, -6.0, *TIES.tolist(), *(-TIES).tolist()]),
)


@every_quantizer
@given(
    values=st.lists(_floats, min_size=64, max_size=64),
    scale_rule=st.sampled_from(SCALE_RULES),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_any_values_any_rule(run, values, scale_rule, rounding):
    """Any 64 float32 values; the shape is fixed, so that one compilation a rule serves all examples."""
    assert_as_oracle(run, np.array(values, np.float32).reshape(2, 32), scale_rule, rounding)


@given(raw=st.binary(min_size=64, max_size=64), scales=st.lists(st.integers(2, 250), min_size=4, max_size=4))
def test_quantize_undoes_dequantize(raw, scales):
    """A block that holds a 6 is a fixed point of dequantize and quantize under floor."""
    codes = oracle.unpack(np.frombuffer(raw, np.uint8).reshape(4, 16)).copy()
    codes[:, 13] = 7
    scales = np.array(scales, np.uint8)[:, None]
    x = oracle.dequantize(oracle.pack(codes), scales).astype(np.float32)
    got_codes, got_scales = jax_bytes(x, "floor")
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(oracle.unpack(got_codes), codes)


# --- float8 rows -----------------------------------------------------------------------------------------------------

_jitted_fp8 = jax.jit(quantize_fp8)


def jax_fp8(x, scale=None):
    return tuple(map(np.asarray, _jitted_fp8(jnp.asarray(x), scale)))


def constant_fp8(x, scale=None):
    """With a scale that the compiler knows, as in a program that closes over its weights."""
    return tuple(map(np.asarray, jax.jit(lambda x: quantize_fp8(x, scale))(jnp.asarray(x))))


def torch_fp8(x, scale=None):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'jax_mxfp4_moe[torch]'")
    from jax_mxfp4_moe.implementations import torch as implementation

    codes, scales = implementation.quantize_fp8(as_tensor(x), None if scale is None else torch.tensor(scale))
    return codes.numpy(), scales.numpy()


every_fp8 = pytest.mark.parametrize("run", [jax_fp8, constant_fp8, torch_fp8], ids=["xla", "xla_constant", "torch"])
every_float = pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])


def assert_fp8_as_oracle(run, x, scale=None):
    codes, scales = run(x, scale)
    expected_codes, expected_scales = oracle.quantize_fp8(x, scale)
    assert codes.dtype == np.uint8
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)


def test_oracle_has_the_values_of_ml_dtypes():
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracle.E4M3_VALUES, theirs)
    np.testing.assert_array_equal(np.signbit(oracle.E4M3_VALUES[128]), True)
    decoded = dequantize_fp8(Fp8Array(jnp.arange(256, dtype=jnp.uint8), jnp.float32(0.5)))
    np.testing.assert_array_equal(decoded, oracle.E4M3_VALUES / 2)


@every_fp8
def test_fp8_codes_of_every_bfloat16(run):
    """Under scale 1 each is the cast of ml_dtypes, but saturated; NaN and infinity are NaN."""
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    codes, scales = run(x, 1.0)
    assert (scales == 1).all()
    with np.errstate(invalid="ignore"):
        theirs = np.clip(x.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    finite = np.isfinite(x.astype(np.float32))
    np.testing.assert_array_equal(codes[finite], theirs[finite])
    assert (codes[~finite] == 0x7F).all()
    assert {0x00, 0x80, 0x7E, 0xFE} <= set(codes[finite].tolist())


@every_fp8
def test_fp8_ties_and_their_neighbours(run):
    """Every midpoint of two codes and the float32 numbers beside it, both signs; beyond 448 nothing overflows."""
    midpoints = (oracle.E4M3_MAGNITUDES[1:] + oracle.E4M3_MAGNITUDES[:-1]) / 2
    points = np.concatenate([midpoints, [448, 449, 463.9, 464, 465, 480, 1e30, 3e38]]).astype(np.float32)
    rows = [points, next_after(points, 0, np.float32), next_after(points, np.inf, np.float32)]
    x = np.stack([*rows, *(-row for row in rows)])
    assert_fp8_as_oracle(run, x, 1.0)
    with np.errstate(over="ignore"):
        theirs = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(run(x, 1.0)[0], theirs)


@every_fp8
def test_fp8_quotients_are_rounded_as_documented(run):
    """Numbers whose quotient is a midpoint but for the rounding of 1 / scale and of the product, which decide."""
    midpoints = (oracle.E4M3_MAGNITUDES[1:] + oracle.E4M3_MAGNITUDES[:-1]) / 2
    scales = np.random.default_rng(0).uniform(0.5, 2, 64).astype(np.float32)
    x = (midpoints * scales[:, None].astype(np.float64)).astype(np.float32)
    divided = oracle.e4m3_codes(x / scales[:, None])  # the same without the rounding of 1 / scale
    x = np.concatenate([x, 448 * scales[:, None]], axis=1)
    assert_fp8_as_oracle(run, x)
    codes, found = run(x)
    assert (codes[:, -1] == 0x7E).all()
    assert (codes[:, :-1] != divided).any()
    np.testing.assert_allclose(found, scales, rtol=2e-7)
    for scale, row in zip(scales[:3], x[:3], strict=True):
        assert_fp8_as_oracle(run, row[None], scale)


@every_fp8
@every_float
@pytest.mark.parametrize("scale", [None, 0.0123, 3.7e-20, 2.0**100])
def test_fp8_of_numbers_of_every_size(run, dtype, scale):
    """Bit by bit as the oracle, from the largest to the subnormal numbers of each type."""
    rng = np.random.default_rng(0)
    least, most = (-24, 14) if dtype == np.float16 else (-150, 126)
    with np.errstate(over="ignore"):
        x = (rng.normal(size=(400, 64)) * 2.0 ** rng.integers(least, most, (400, 1))).astype(np.float32).astype(dtype)
    assert_fp8_as_oracle(run, x, scale)


@every_fp8
def test_fp8_scales_by_figure(run):
    """A row's largest magnitude becomes +-448; a row of zeros keeps signs under a scale that is not 0."""
    x = np.array([[448, 1, -2, 0], [-896, 896, 1, 3], [0, -0.0, 0, 0], [1e-45, -1e-40, 1e-38, 0]], np.float32)
    codes, scales = run(x)
    assert scales.tolist() == [1, 2, 2.0**-100, 2.0**-100]
    assert codes[:2].tolist() == [[0x7E, 0x38, 0xC0, 0x00], [0xFE, 0x7E, 0x30, 0x3C]]
    assert codes[2:].tolist() == [[0, 0x80, 0, 0], [0, 0x80, 0, 0]]
    np.testing.assert_array_equal(oracle.dequantize_fp8(codes, scales)[:2], [[448, 1, -2, 0], [-896, 896, 1, 3]])


@every_fp8
@every_float
def test_fp8_nan_and_infinity_are_never_lost(run, dtype):
    """Without a static scale a bad element makes its row NaN, with one only itself; the neighbours stay as they were."""
    x = np.tile(np.linspace(-3, 3, 32).astype(dtype), (6, 1))
    x[[1, 2, 3], [0, 9, 31]] = np.array([np.nan, np.inf, -np.inf], dtype)
    codes, scales = run(x)
    assert np.isnan(scales).tolist() == [False, True, True, True, False, False]
    assert (codes[1:4] == 0).all()
    assert_fp8_as_oracle(run, x)
    codes, scales = run(x, 0.01)
    assert np.argwhere(codes == 0x7F).tolist() == [[1, 0], [2, 9], [3, 31]]
    assert_fp8_as_oracle(run, x, 0.01)


@every_fp8
@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf, 1e-45, 2.0**-101, 2.0**101])
def test_fp8_of_a_scale_that_is_none(run, scale):
    """Everything becomes NaN, which cannot be overlooked."""
    codes, scales = run(np.ones((2, 32), np.float32), scale)
    assert np.isnan(scales).all()
    assert (codes == 0).all()
    assert np.isnan(dequantize_fp8(Fp8Array(jnp.asarray(codes), jnp.asarray(scales)))).all()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "keywords", "error", "texts"),
    [
        (np.zeros((2, 33), np.float32), {}, ValueError, ["(2, 33)", "multiple of 32", "Pad"]),
        (np.zeros((), np.float32), {}, ValueError, ["()", "multiple of 32"]),
        (np.zeros((2, 32), np.int32), {}, TypeError, ["int32", "expected float32, bfloat16", "Cast"]),
        (np.zeros((2, 32), np.float32), {"scale_rule": "round"}, ValueError, ["'round'", *SCALE_RULES]),
        (np.zeros((2, 32), np.float32), {"rounding": "up"}, ValueError, ["'up'", *ROUNDINGS]),
    ],
    ids=["odd_length", "rank_0", "integers", "scale_rule", "rounding"],
)
def test_quantize_refuses(x, keywords, error, texts):
    with pytest.raises(error) as caught:
        quantize(x, **keywords)
    for text in ("quantize", *texts):
        assert text in str(caught.value)
