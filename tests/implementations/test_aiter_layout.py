"""aiter's layouts: every byte where the published formula puts it, and back again; what lies in the padding; the routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_bytes

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, prepare
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.aiter import layout, slots


def code_address(row, byte, size):
    """Place of a byte of one expert's [rows, size] codes, tile by tile."""
    tile = (row // 16) * (size // 32) + byte // 32
    return ((tile * 2 + byte % 32 // 16) * 16 + row % 16) * 16 + byte % 16


def scale_address(row, block, blocks):
    """Place of a scale byte in a matrix of `blocks` columns."""
    return (
        (row // 32) * blocks * 32 + (block // 8) * 256 + (block % 4) * 64 + (row % 16) * 4 + (block % 8) // 4 * 2 + row % 32 // 16
    )  # fmt: skip


def scattered(a, address):
    """The matrix `a`, each entry moved to its address."""
    rows, columns = a.shape
    moved = np.zeros(a.size, a.dtype)
    for r in range(rows):
        for c in range(columns):
            moved[address(r, c, columns)] = a[r, c]
    return moved.reshape(a.shape)


def test_aiter_code_addresses():
    """Known pairs, so that the formula above is itself tested."""
    known = {(0, 15, 64): 15, (1, 0, 64): 16, (0, 16, 64): 256, (15, 31, 64): 511, (0, 32, 64): 512, (16, 0, 64): 1024}
    assert {where: code_address(*where) for where in known} == known


def test_aiter_scale_addresses():
    known = {
        (1, 0, 8): 4,
        (16, 0, 8): 1,
        (0, 1, 8): 64,
        (0, 4, 8): 2,
        (16, 4, 8): 3,
        (32, 0, 8): 256,
        (0, 8, 16): 256,
        (32, 0, 16): 512,
    }
    assert {where: scale_address(*where) for where in known} == known


@pytest.mark.parametrize(("rows", "size"), [(16, 32), (48, 32), (32, 96), (64, 128)])
def test_aiter_codes_there_and_back(rows, size):
    codes = np.random.default_rng(rows + size).integers(0, 256, (3, rows, size), dtype=np.uint8)
    shuffled = np.asarray(layout.shuffle_codes(jnp.asarray(codes)))
    np.testing.assert_array_equal(shuffled, np.stack([scattered(expert, code_address) for expert in codes]))
    np.testing.assert_array_equal(layout.unshuffle_codes(jnp.asarray(shuffled)), codes)


@pytest.mark.parametrize(("rows", "blocks"), [(32, 8), (96, 8), (64, 24), (256, 16)])
def test_aiter_scales_there_and_back(rows, blocks):
    scales = np.random.default_rng(rows + blocks).integers(0, 256, (rows, blocks), dtype=np.uint8)
    shuffled = np.asarray(layout.shuffle_scales(jnp.asarray(scales)))
    np.testing.assert_array_equal(shuffled, scattered(scales, scale_address))
    np.testing.assert_array_equal(layout.unshuffle_scales(jnp.asarray(shuffled)), scales)


@pytest.mark.parametrize("positions", [32, 70])
def test_aiter_sorted_scales_there_and_back(positions):
    """The five-axis array [positions / 32, blocks / 8, 4, 16, 4] of the activations, holes at random positions."""
    rng = np.random.default_rng(positions)
    scales = rng.integers(1, 256, (40, 16), dtype=np.uint8)
    source = rng.permutation(np.concatenate([np.arange(30), np.full(positions - 30, 40)])).astype(np.int32)
    expected = np.zeros((-(-positions // 32), 2, 4, 16, 4), np.uint8)
    for r, row in enumerate(source):
        if row < 40:
            for c in range(16):
                expected[r // 32, c // 8, c % 4, r % 16, c % 8 // 4 * 2 + r % 32 // 16] = scales[row, c]
    found = jax.jit(layout.sort_scales)(jnp.asarray(scales), jnp.asarray(source))
    np.testing.assert_array_equal(found, expected.reshape(-1, 16))
    back = np.asarray(jax.jit(layout.unsort_scales, static_argnums=2)(found, jnp.asarray(source), 40))
    np.testing.assert_array_equal(back[:30], scales[:30])
    assert not back[30:].any()


def random_weights(experts, hidden, intermediate, **rest) -> MoeWeights:
    rng = np.random.default_rng(hidden + intermediate)
    return MoeWeights(
        Mxfp4Array(*map(jnp.asarray, random_bytes(rng, (experts, 2 * intermediate), hidden))),
        Mxfp4Array(*map(jnp.asarray, random_bytes(rng, (experts, hidden), intermediate))),
        **rest,
    )


@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 256), (512, 256), (96, 288), (320, 32)])
def test_aiter_weights_there_and_back(hidden, intermediate):
    bias = jnp.arange(2 * 2 * intermediate, dtype=jnp.float32).reshape(2, -1)
    weights = random_weights(2, hidden, intermediate, gate_up_bias=bias, activation_quant="mxfp4")
    prepared = prepare(weights, "aiter")
    assert prepared.layout == layout.TAG
    assert (prepared.hidden_size, prepared.intermediate_size, prepared.num_experts) == (hidden, intermediate, 2)
    d, f = layout.padded(hidden), layout.padded(intermediate)
    assert prepared.gate_up.codes.shape == (2, 2 * f, d // 2)
    assert prepared.down.scales.shape == (2, d, f // 32)
    assert prepared.activation_quant == "mxfp4"
    back = IMPLEMENTATIONS["aiter"].unprepare(prepared)
    assert jax.tree.structure(back) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, back, weights)


def test_aiter_pads_gate_and_up_apart_with_zeros():
    """Row F padded + i is row i of the up projection, and every other new code is 0."""
    weights = random_weights(2, 96, 32)
    codes = np.asarray(layout.unshuffle_codes(prepare(weights, "aiter").gate_up.codes))
    original = np.asarray(weights.gate_up.codes)
    np.testing.assert_array_equal(codes[:, :32, :48], original[:, :32])
    np.testing.assert_array_equal(codes[:, 256:288, :48], original[:, 32:])
    rest = codes.copy()
    rest[:, :32, :48] = rest[:, 256:288, :48] = 0
    assert not rest.any()


def test_aiter_scales_of_all_experts_are_one_matrix():
    """Expert e's rows begin at e * N, as the kernels count them."""
    weights = random_weights(2, 256, 256)
    prepared = prepare(weights, "aiter").down.scales.reshape(-1, 8)
    np.testing.assert_array_equal(prepared, scattered(np.asarray(weights.down.scales).reshape(-1, 8), scale_address))


def test_packed_weights_are_refused_with_the_remedy():
    from jax_mxfp4_moe import mxfp4_moe

    x = jnp.zeros((2, 96), jnp.bfloat16)
    ids = jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(
        ValueError,
        match=r"packed weights given, but implementation='aiter'.*\n.*prepare\(weights, implementation='aiter'\)",
    ):
        mxfp4_moe(x, random_weights(2, 96, 32), jnp.ones((2, 1)), ids, implementation="aiter")


# --- routing ---------------------------------------------------------------------------------------------------------

IDS = np.array([[1, 4, 0], [2, 2, 1], [-1, 5, 3], [3, 3, 3], [-7, 2**31 - 1, 5], [0, 2, 0]], np.int32)
"""Five experts: a good row, a repeated expert, two skipped slots, one expert three times, no expert at all, a repeated one apart."""


jitted = functools.cache(functools.partial(jax.jit, static_argnums=2))


def by_expert(weights, ids, experts):
    """[tokens, experts] float64: how much of each expert a row takes, by a loop over slots."""
    total = np.zeros((len(ids), experts))
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row):
            if 0 <= expert < experts:
                total[token, expert] += weights[token, slot]
    return total


@pytest.mark.parametrize("route", [slots.to_masked_experts, slots.to_unnamed_experts])
def test_aiter_routing_names_no_expert_twice_and_keeps_every_weight(route):
    weights = np.random.default_rng(0).uniform(0.5, 1, IDS.shape).astype(np.float32)
    new_weights, new_ids, _ = map(np.asarray, jitted(route)(jnp.asarray(weights), jnp.asarray(IDS), 5))
    assert new_ids.dtype == np.int32
    assert all(len(set(row)) == len(row) for row in new_ids)
    np.testing.assert_allclose(by_expert(new_weights, new_ids, 5), by_expert(weights, IDS, 5), rtol=1e-6)


def test_aiter_masked_experts_are_one_for_each_slot():
    weights, ids, mask = jitted(slots.to_masked_experts)(jnp.ones(IDS.shape), jnp.asarray(IDS), 5)
    np.testing.assert_array_equal(mask, [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(ids[4], [5, 6, 7])
    np.testing.assert_array_equal(ids[1], [2, 6, 1])
    np.testing.assert_array_equal(weights[1], [2, 0, 1])


def test_aiter_unnamed_experts_count_nothing():
    """All ids are real experts, and what a slot was given in a skipped one's place has weight 0."""
    weights, ids, used = jitted(slots.to_unnamed_experts)(jnp.ones(IDS.shape), jnp.asarray(IDS), 5)
    assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 5)).all()
    np.testing.assert_array_equal(used, [True, True, True, True, False, True])
    np.testing.assert_array_equal(weights[4], [0, 0, 0])


def test_aiter_unnamed_experts_are_sought_among_as_many_as_there_are_slots():
    """Not among all: no array of [tokens, experts], and no sorting of one, in every call."""
    ids = jnp.asarray(IDS)
    traced = jax.make_jaxpr(slots.to_unnamed_experts, static_argnums=2)(jnp.ones(ids.shape), ids, 61)
    text = str(traced)
    assert ",3]" in text
    assert ",61]" not in text


def test_aiter_unnamed_experts_with_as_many_slots_as_experts():
    ids = jnp.array([[2, 2, 2]], jnp.int32)
    assert sorted(np.asarray(jitted(slots.to_unnamed_experts)(jnp.ones((1, 3)), ids, 3)[1])[0]) == [0, 1, 2]
