"""The simulated aiter itself: its bytes against the published formulas and vectors, its layer against the oracle, its faults."""

import functools
import inspect
import os
import sys

import aiter_sim
import ml_dtypes
import numpy as np
import oracle
import pytest
from aiter_sim import config, numerics, stages

torch = pytest.importorskip("torch")

NAMES = tuple(aiter_sim.PROFILES)
SHAPE = {"tokens": 20, "experts": 5, "top_k": 3, "hidden": 256, "intermediate": 256}


# --- the pipeline, written once as an adapter would write it ---------------------------------------------------------


class Layer:
    """Random weights and tokens of one shape: bytes for the oracle, prepared tensors for aiter."""

    def __init__(self, seed=0, *, tokens, experts, top_k, hidden, intermediate):
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(tokens, hidden)).astype(ml_dtypes.bfloat16)
        self.gate_up = self._weights(rng, experts, 2 * intermediate, hidden)
        self.down = self._weights(rng, experts, hidden, intermediate)
        self.topk_ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
        self.topk_weights = rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32)
        self.sizes = (tokens, top_k, experts, hidden, intermediate)

    @staticmethod
    def _weights(rng, experts, rows, k):
        center = 127 - round(np.log2(1.5 * np.sqrt(k)))
        codes = rng.integers(0, 256, (experts, rows, k // 2), dtype=np.uint8)
        return codes, rng.integers(center - 2, center + 2, (experts, rows, k // 32)).astype(np.uint8)

    @functools.cache  # noqa: B019 - a handful of layers, and the oracle is slow
    def expected(self, scale_rule, rounding, activation_quant="mxfp4"):
        weights = (oracle.dequantize(*self.gate_up), oracle.dequantize(*self.down))
        rules = {"scale_rule": scale_rule, "rounding": rounding, "activation_quant": activation_quant}
        return oracle.moe(self.x, *weights, self.topk_weights, self.topk_ids, x_dtype="bfloat16", **rules)

    def prepared(self, sim):
        """w1, w1_scale, w2, w2_scale in aiter's layouts, by aiter's own functions."""
        shuffle, utils = sim.module("aiter.ops.shuffle"), sim.module("aiter.utility.fp4_utils")
        tensors = []
        for codes, scales in (self.gate_up, self.down):
            tensors.append(shuffle.shuffle_weight(torch.from_numpy(codes.copy()).view(numerics.FLOAT4)))
            flat = torch.from_numpy(scales.reshape(-1, scales.shape[-1]).copy())
            tensors.append(utils.e8m0_shuffle(flat).view(numerics.FLOAT8_E8M0))
        return tensors

    def arguments(self):
        return tuple(torch.from_numpy(a) for a in (self.topk_ids, self.topk_weights)), as_torch(self.x)


@functools.cache
def standard():
    """A layer that no test changes."""
    return Layer(**SHAPE)


def as_torch(x):
    return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)


def metadata_for(sim, layer):
    tokens, top_k, experts, hidden, intermediate = layer.sizes
    moe, kinds = sim.module("aiter.fused_moe"), sim.aiter
    names = inspect.signature(moe.get_2stage_cfgs).parameters
    extra = {"bias1": None, "bias2": None} if "bias1" in names else {}
    return moe.get_2stage_cfgs(
        *(
            moe.get_padded_M(tokens),
            hidden,
            intermediate,
            experts,
            top_k,
            torch.bfloat16,
            numerics.FLOAT4,
            numerics.FLOAT4,
        ),
        *(kinds.QuantType.per_1x32, True, kinds.ActivationType.Silu, False, 0, 0),
        **extra,
    )


def sort(sim, layer, block_m, **options):
    tokens, top_k, experts, hidden, _ = layer.sizes
    length = tokens * top_k + experts * block_m - top_k
    outputs = (
        numerics.poisoned((length,), torch.int32),
        numerics.poisoned((length,), torch.float32),
        numerics.poisoned((-(-length // block_m),), torch.int32),
        numerics.poisoned((2,), torch.int32),
        numerics.poisoned((tokens, hidden), torch.bfloat16),
    )
    (ids, weights), _ = layer.arguments()
    sim.aiter.moe_sorting_fwd(ids, weights, *outputs, experts, block_m, **options)
    return outputs


def quantize(sim, x, ids, valid, tokens, top_k, how):
    if how == "hip":
        if sim.profile.hip_fused:
            return sim.aiter.fused_dynamic_mxfp4_quant_moe_sort(x, ids, valid, tokens, top_k, 32)
        codes, scale = sim.aiter.get_hip_quant(sim.aiter.QuantType.per_1x32)(x)
        scale = scale.view(tokens, -1, scale.shape[-1]) if len(x) > tokens else scale
        return codes, sim.module("aiter.utility.fp4_utils").moe_mxfp4_sort(scale, ids, valid, tokens, 32)
    wrapper = sim.module(f"aiter.ops.triton.{sim.profile.triton_package}fused_mxfp4_quant")
    return wrapper.fused_dynamic_mxfp4_quant_moe_sort(x, ids, valid, tokens, len(x) // tokens)


def run(sim, layer, how="hip", metadata=None, weights=None, stage1_options=None):
    """The layer by the stages of `metadata`; float64."""
    tokens, top_k, _, _, intermediate = layer.sizes
    metadata = metadata or metadata_for(sim, layer)
    w1, w1_scale, w2, w2_scale = weights or layer.prepared(sim)
    ids, sorted_weights, experts, valid, out = sort(sim, layer, metadata.block_m)
    _, x = layer.arguments()
    plain = metadata.stage1.func.__name__ == "cktile_moe_stage1"
    a1, a1_scale = (x, None) if plain else quantize(sim, x, ids, valid, tokens, top_k, how)
    buffer = numerics.poisoned((tokens, top_k, intermediate), torch.bfloat16)
    common = (w1, w2, ids, experts, valid)
    scales = {"a1_scale": a1_scale, "w1_scale": w1_scale, "sorted_weights": None}
    a2 = metadata.stage1(a1, *common, buffer, top_k, block_m=metadata.block_m, **scales, **(stage1_options or {}))
    a2_scale = None
    if not plain:
        a2, a2_scale = quantize(sim, a2.view(-1, intermediate), ids, valid, tokens, top_k, how)
        a2 = a2.view(tokens, top_k, -1)
    scales = {"a2_scale": a2_scale, "w2_scale": w2_scale, "sorted_weights": sorted_weights}
    metadata.stage2(a2, *common, out, top_k, block_m=metadata.block_m, **scales)
    return out.double().numpy()


def error(y, expected):
    return np.linalg.norm(y - expected) / np.linalg.norm(expected) if np.isfinite(y).all() else np.inf


TOLERANCE = (
    8e-3  # bfloat16 sums over the slots and codes of h that flip at a tie; a wrong row or scale gives more than 0.1
)


def with_rows(monkeypatch, tmp_path, *rows, **columns):
    """Points AITER_CONFIG_FMOE to a file of these rows."""
    path = tmp_path / "rows.csv"
    names = [*config.COLUMNS, *columns]
    lines = [",".join(str({**row, **columns}.get(name, "")) for name in names) for row in rows]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(path))


def row_for(sim_or_name, layer, **values):
    profile = aiter_sim.PROFILES[sim_or_name] if isinstance(sim_or_name, str) else sim_or_name.profile
    tokens, top_k, experts, hidden, intermediate = layer.sizes
    padded = config.PADDED_M[profile.padded_m](tokens)
    return config.row(padded, hidden, intermediate, experts, top_k, **values)


def ck_row(name, layer, block_m=32, tile="256x32x128x128_1x4", **values):
    names = {"kernelName1": stages.ck_name(1, tile), "kernelName2": stages.ck_name(2, tile)}
    return row_for(name, layer, **{"block_m": block_m, **names, **values})


# --- numbers and layouts ---------------------------------------------------------------------------------------------

AMAX = [
    0,
    2.0**-126,
    0.5,
    0.75,
    1,
    1.4375,
    1.5,
    1.5078125,
    1.75,
    2,
    3,
    3.015625,
    3.5,
    4,
    5,
    6,
    6.03125,
    6.96875,
    7,
    8,
    448,
]
AMAX.append(3.004e38)
SCALES = {
    "half_up": "0 0 124 125 125 125 126 126 126 126 127 127 127 127 127 128 128 128 128 128 134 253",
    "rceil": "0 1 124 124 125 125 125 126 126 126 126 127 127 127 127 127 128 128 128 128 134 253",
    "even": "0 0 124 124 125 125 125 125 126 126 126 126 127 127 127 127 127 127 128 128 134 254",
}
CODES = {
    "half_up": "0 4 6 5 6 7 5 5 6 6 5 5 6 6 6 5 5 5 6 6 6 6",
    "rceil": "0 2 6 7 6 7 7 5 6 6 7 5 6 6 6 7 5 5 6 6 6 6",
    "even": "0 4 6 7 6 7 7 7 6 6 7 7 6 6 7 7 7 7 6 6 6 4",
}


@pytest.mark.parametrize("rule", ["half_up", "rceil", "even"])
def test_scale_bytes_and_codes_of_the_published_vectors(rule):
    x = np.zeros((len(AMAX), 32), np.float32)
    x[:, 5] = np.asarray(AMAX, ml_dtypes.bfloat16)
    codes, scales = numerics.quantize(x, rule, "half_away" if rule == "even" else "nearest_even")
    assert scales[:, 0].tolist() == [int(byte) for byte in SCALES[rule].split()]
    assert (codes[:, 2] >> 4).tolist() == [int(code) for code in CODES[rule].split()]
    assert not np.delete(codes, 2, axis=1).any()


def test_hip_before_v0_1_16_has_a_floor_under_the_scale():
    codes, scales = numerics.quantize(np.zeros((1, 32), np.float32), "hip_half_up", "nearest_even")
    assert scales[0, 0] == 92
    assert not codes.any()


def test_ties():
    ties = np.array(numerics.MIDPOINTS)
    assert numerics.element_codes(ties, "nearest_even").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert numerics.element_codes(-ties, "half_away").tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert numerics.element_codes(np.array([-0.0, 7.0, -np.inf]), "nearest_even").tolist() == [8, 7, 15]


@pytest.mark.parametrize(("rule", "name"), [("half_up", "half_up"), ("rceil", "rceil"), ("even", "even")])
@pytest.mark.parametrize("rounding", ["nearest_even", "half_away"])
def test_quantizer_agrees_with_the_oracle(rule, name, rounding):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(40, 64)) * 2.0 ** rng.integers(-20, 20, (40, 1))).astype(ml_dtypes.bfloat16)
    x[0, :32] = 0
    x[1, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    for mine, theirs in zip(numerics.quantize(x, rule, rounding), oracle.quantize(x, name, rounding), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    codes, scales = numerics.quantize(x, rule, rounding)
    np.testing.assert_array_equal(numerics.dequantize(codes, scales), oracle.dequantize(codes, scales))


def test_layout_vectors():
    at = numerics.shuffled_offset
    for row_bytes, n, kb, expected in ((32, 0, 15, 15), (32, 1, 0, 16), (32, 0, 16, 256), (32, 15, 31, 511)):
        assert at(n, kb, row_bytes) == expected
    assert (at(0, 32, 64), at(16, 0, 64)) == (512, 1024)
    address = numerics.scale_address
    for row, column, expected in ((1, 0, 4), (16, 0, 1), (0, 1, 64), (0, 4, 2), (16, 4, 3), (32, 0, 512), (0, 8, 256)):
        assert address(row, column, 16) == expected
    row, column = np.meshgrid(np.arange(64), np.arange(16), indexing="ij")
    index = np.empty((2, 2, 4, 16, 4), int)
    index[row // 32, column // 8, column % 4, row % 16, ((column % 8) // 4) * 2 + (row % 32) // 16] = row * 16 + column
    np.testing.assert_array_equal(index.reshape(-1)[address(row, column, 16)], row * 16 + column)


def test_shuffled_weights_keep_their_attribute_only_themselves():
    with aiter_sim.installed("v0.1.11") as sim:
        w = sim.module("aiter.ops.shuffle").shuffle_weight(
            torch.zeros(2, 16, 32, dtype=torch.uint8).view(numerics.FLOAT4)
        )
        assert w.is_shuffled
        for view in (w.view(torch.uint8), w[0], w.detach()):
            assert not hasattr(view, "is_shuffled")


# --- sorting and sorted scales ---------------------------------------------------------------------------------------


def sorted_by_definition(ids, weights, experts, block_m, mask=None):
    """Position by position: experts ascending, tokens ascending, each expert's run padded."""
    tokens, top_k = ids.shape
    out_ids, out_weights, blocks, index = [], [], [], 0
    for expert in range(experts):
        if mask is not None and not mask[expert]:
            continue
        pairs = [(t, s) for t in range(tokens) for s in range(top_k) if ids[t, s] == expert]
        padding = -len(pairs) % block_m
        out_ids += [t | (s << 24) for t, s in pairs] + [tokens | (top_k << 24)] * padding
        out_weights += [weights[t, s] for t, s in pairs] + [0.0] * padding
        blocks += [index] * ((len(pairs) + padding) // block_m)
        index += 1
    return out_ids, out_weights, blocks


@pytest.mark.parametrize("block_m", [16, 32, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_sorting_is_what_the_formula_says(block_m, masked):
    layer = Layer(**{**SHAPE, "experts": 7})
    layer.topk_ids[layer.topk_ids == 2] = 6  # an expert that nobody chose
    layer.topk_ids[:, 0] = np.where((layer.topk_ids[:, 1:] == 6).any(axis=1), 0, layer.topk_ids[:, 0])
    layer.topk_ids = np.stack([row if len(set(row)) == 3 else [0, 1, 3] for row in layer.topk_ids]).astype(np.int32)
    mask = np.array([1, 0, 1, 1, 0, 1, 1], np.int32) if masked else None
    expected = sorted_by_definition(layer.topk_ids, layer.topk_weights, 7, block_m, mask)
    with aiter_sim.installed("v0.1.11") as sim:
        for policy in (0, 1, 2):
            options = {"local_expert_mask": torch.from_numpy(mask)} if masked else {}
            ids, weights, experts, valid, out = sort(sim, layer, block_m, dispatch_policy=policy, **options)
            n = len(expected[0])
            assert valid.tolist() == [n, 20]
            assert ids[:n].tolist() == expected[0]
            np.testing.assert_array_equal(weights[:n].numpy(), np.float32(expected[1]))
            assert experts[: n // block_m].tolist() == expected[2]
            assert (numerics.raw(ids[n:]) == numerics.GARBAGE).all()  # left as it was
            assert not out.any()


def test_sorting_of_some_tokens():
    with aiter_sim.installed("v0.1.11") as sim:
        layer = Layer(**SHAPE)
        ids, _, _, valid, _ = sort(sim, layer, 32, num_local_tokens=torch.tensor([7], dtype=torch.int32))
        real = ids[: valid[0]].numpy()[ids[: valid[0]].numpy() >> 24 < 3] & 0xFFFFFF
        assert valid[1] == 7
        assert sorted(set(real.tolist())) == list(range(7))


def test_sorting_loses_repeated_experts_and_misplaces_foreign_ids():
    with aiter_sim.installed("v0.1.11") as sim:
        layer = Layer(**SHAPE)
        layer.topk_ids[3] = [1, 1, 4]
        ids, *_ = sort(sim, layer, 32)
        assert 3 | (0 << 24) not in ids.tolist()
        layer.topk_ids[2], layer.topk_ids[3] = [0, 1, 2], [-1, 1, 2]
        ids, _, experts, *_ = sort(sim, layer, 32)
        assert 3 | (0 << 24) not in ids.tolist()
        twice = [int(experts[i // 32]) for i, entry in enumerate(ids.tolist()) if entry == 2 | (0 << 24)]
        assert twice == [0, 4]  # token 2 got the last expert as well


def test_sorting_wants_int32_ids_and_float32_weights():
    with aiter_sim.installed("v0.1.11") as sim:
        layer = Layer(**SHAPE)
        layer.topk_ids = layer.topk_ids.astype(np.int64)
        with pytest.raises(RuntimeError, match="int32"):
            sort(sim, layer, 32)


@pytest.mark.parametrize("how", ["hip", "triton"])
@pytest.mark.parametrize("stage", [1, 2])
def test_sorted_scales(how, stage):
    """Row r holds the scales of the pair at sorted_ids[r]; the codes stay in the order of the input."""
    layer = Layer(**{**SHAPE, "hidden": 512})
    rng = np.random.default_rng(5)
    rows = layer.sizes[0] * (layer.sizes[1] if stage == 2 else 1)
    x = (rng.normal(size=(rows, 512)) * 2.0 ** rng.integers(-9, 9, (rows, 512 // 32)).repeat(32, 1)).astype(
        ml_dtypes.bfloat16
    )
    with aiter_sim.installed("v0.1.13") as sim:
        ids, _, _, valid, _ = sort(sim, layer, 32)
        codes, scale = quantize(sim, as_torch(x), ids, valid, 20, 3, how)
    rules = ("even", "half_away") if how == "triton" else ("hip_half_up", "nearest_even")
    expected_codes, expected = numerics.quantize(x, *rules)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)
    memory = scale.view(torch.uint8).numpy().reshape(-1)
    assert memory.size == -(-len(ids) // 32) * 32 * 16
    for r in range(len(ids)):
        token, slot = int(ids[r]) & 0xFFFFFF, int(ids[r]) >> 24
        found = [
            memory[(r // 32) * 512 + (c // 8) * 256 + (c % 4) * 64 + (r % 16) * 4 + (c % 8) // 4 * 2 + r % 32 // 16]
            for c in range(16)
        ]
        if r < valid[0] and token < 20:
            assert found == expected[token * 3 + slot if stage == 2 else token].tolist()
        else:  # padding: the Triton kernel computes it from zeros, as far as num_valid; the HIP one leaves it
            assert set(found) == ({0} if how == "triton" and r < valid[0] else {numerics.GARBAGE})


@pytest.mark.parametrize("name", ["v0.1.11", "v0.1.12"])
def test_triton_kernel_gives_what_its_wrapper_gives(name):
    layer = Layer(**SHAPE)
    with aiter_sim.installed(name) as sim:
        ids, _, _, valid, _ = sort(sim, layer, 32)
        x = as_torch(layer.x)
        codes, scale = quantize(sim, x, ids, valid, 20, 3, "triton")
        kernel = sim.module(
            "aiter.ops.triton._triton_kernels.quant.fused_mxfp4_quant"
        )._fused_dynamic_mxfp4_quant_moe_sort_kernel
        out = torch.empty(20, 128, dtype=torch.uint8)
        scales = numerics.poisoned((-(-len(ids) // 32), 1, 4, 16, 4), torch.uint8)
        strides = dict(
            zip(("stride_o3", "stride_o2", "stride_o1", "stride_o0", "stride_o4"), scales.stride(), strict=True)
        )
        pointers = (x, out, ids, valid, scales)
        names = ("x_ptr", "x_fp4_ptr", "sorted_ids_ptr", "num_valid_ids_ptr", "blockscale_e8m0_sorted_ptr")
        values = strides | dict(zip(names, pointers, strict=True))
        values |= {"Mx": 20, "Nx": 256, "scaleNx": 8, "token_num": 20, "N_i": 8, "TOPK": 1}
        values |= {"stride_x_m": 256, "stride_x_n": 1, "stride_x_fp4_m": 128, "stride_x_fp4_n": 1}
        values |= {"MXFP4_QUANT_BLOCK_SIZE": 32, "BLOCK_SIZE_Mx": 64, "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 4}
        grid = (8 + scales.shape[0],)
        if "M_i" in kernel.arg_names:
            with pytest.raises(TypeError, match="M_i"):
                kernel[grid](**values)
            values["M_i"] = 20
        else:
            with pytest.raises(TypeError, match="M_i"):
                kernel[grid](**values, M_i=20)
        kernel[grid](**values)
    np.testing.assert_array_equal(out.numpy(), codes.view(torch.uint8).numpy())
    np.testing.assert_array_equal(scales.numpy().reshape(-1), scale.view(torch.uint8).numpy().reshape(-1))


def test_triton_wrapper_wants_256_columns_before_v0_1_16():
    """Its result has the width of the data where the storage has that of the padding."""
    layer = Layer(**SHAPE)
    x = torch.ones(20, 384, dtype=torch.bfloat16)
    with aiter_sim.installed("v0.1.12") as sim:
        ids, _, _, valid, _ = sort(sim, layer, 32)
        with pytest.raises(RuntimeError, match="shape"):
            quantize(sim, x, ids, valid, 20, 3, "triton")
    with aiter_sim.installed("v0.1.16") as sim:
        ids, _, _, valid, _ = sort(sim, layer, 32)
        assert quantize(sim, x, ids, valid, 20, 3, "triton")[1].shape[1] == 16


# --- the layer in every release --------------------------------------------------------------------------------------


def rules_of(profile, how):
    scale = {"hip_half_up": "half_up"}.get(profile.hip_scale_rule, profile.hip_scale_rule)
    return ("even", "half_away") if how == "triton" else (scale, "nearest_even")


@pytest.mark.parametrize(("name", "flydsl"), aiter_sim.CASES)
def test_layer_equals_the_oracle(name, flydsl, monkeypatch, tmp_path):
    """With the kernels of a row, and with what the release picks by itself, through its stages and through fused_moe."""
    layer, profile = standard(), aiter_sim.PROFILES[name]
    results = {}
    monkeypatch.delenv("AITER_CONFIG_FMOE", raising=False)
    for source in ("heuristics", "row"):
        if source == "row":
            with_rows(monkeypatch, tmp_path, ck_row(name, layer))
        with aiter_sim.installed(name, flydsl=flydsl) as sim:
            metadata = metadata_for(sim, layer)
            if source == "row" and not (flydsl and profile.flydsl_forced):
                assert metadata.stage2.keywords["kernelName"] == ck_row(name, layer)["kernelName2"]
            ways = ["hip"] if profile.triton_package is None else ["hip", "triton"]
            for how in ways:
                results[source, how] = run(sim, layer, how, metadata)
            w1, w1_scale, w2, w2_scale = layer.prepared(sim)
            (ids, weights), x = layer.arguments()
            kind = {"quant_type": sim.aiter.QuantType.per_1x32, "w1_scale": w1_scale, "w2_scale": w2_scale}
            y = sim.module("aiter.fused_moe").fused_moe(x, w1, w2, weights, ids, **kind)
            results[source, "triton" if profile.default_quant == "triton" else "hip"] = y.double().numpy()
    for (_, how), y in results.items():
        assert error(y, layer.expected(*rules_of(profile, how))) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, profile in aiter_sim.PROFILES.items() if profile.cktile_split_k])
def test_split_k_pairs_gate_and_up_as_the_release_does(name, monkeypatch, tmp_path):
    """Right where the halves are taken; wrong, and right for weights in alternating groups of 16 rows, where not."""
    layer, profile = standard(), aiter_sim.PROFILES[name]
    with_rows(
        monkeypatch,
        tmp_path,
        row_for(name, layer, block_m=64, ksplit=2, kernelName1="placeholder", kernelName2="placeholder"),
    )
    monkeypatch.setenv("AITER_FLYDSL_FORCE", "0")
    with aiter_sim.installed(name, flydsl=profile.cktile_silu_needs_flydsl) as sim:
        metadata = metadata_for(sim, layer)
        assert (metadata.stage1.func.__name__, metadata.block_m, metadata.ksplit) == ("cktile_moe_stage1", 16, 2)
        expected = layer.expected("even", "half_away", activation_quant=None)
        if profile.cktile_layout == "halves":
            assert error(run(sim, layer), expected) < TOLERANCE
            return
        assert error(run(sim, layer), expected) > 0.1
        codes, scales = layer.gate_up
        groups = np.arange(512).reshape(2, 16, 16).swapaxes(0, 1).reshape(-1)
        interleaved = Layer(**SHAPE)
        interleaved.gate_up = (codes[:, groups], scales[:, groups])
        assert error(run(sim, interleaved), expected) < TOLERANCE
        if profile.cktile_layout == "auto":
            assert error(run(sim, layer, stage1_options={"post_activation_layout": "standard"}), expected) < TOLERANCE


def test_split_k_ignores_out_until_v0_1_14(monkeypatch, tmp_path):
    for name, reuses in (("v0.1.11", False), ("v0.1.13.post1", False), ("v0.1.14", True)):
        layer = standard()
        with_rows(monkeypatch, tmp_path, row_for(name, layer, block_m=16, ksplit=2, kernelName1="x", kernelName2="x"))
        with aiter_sim.installed(name) as sim:
            w1, w1_scale, w2, _ = layer.prepared(sim)
            ids, _, experts, valid, _ = sort(sim, layer, 16)
            out = torch.zeros(20, 3, 256, dtype=torch.bfloat16)
            common = (w1, w2, ids, experts, valid, out, 3)
            a2 = metadata_for(sim, layer).stage1(
                as_torch(layer.x), *common, block_m=16, a1_scale=None, w1_scale=w1_scale
            )
            assert (a2 is out) == bool(out.any()) == reuses


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_128_row_tile_is_right_only_for_blocks_of_128(name, monkeypatch, tmp_path):
    """In every release: the tile takes its expert from the block of the same index."""
    monkeypatch.setenv("AITER_FLYDSL_FORCE", "0")
    layer = standard()
    expected = layer.expected(*rules_of(aiter_sim.PROFILES[name], "hip"))
    for block_m, right in ((32, False), (64, False), (128, True)):
        with_rows(monkeypatch, tmp_path, ck_row(name, layer, block_m, "256x128x128x128_1x4"))
        with aiter_sim.installed(name) as sim:
            y = run(sim, layer)
        assert (error(y, expected) < TOLERANCE) == right, block_m


@pytest.mark.parametrize("name", ["wheel", "v0.1.9", "v0.1.11", "v0.1.16", "HEAD"])
@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_weights_that_lost_is_shuffled_give_wrong_numbers(name, lost):
    layer = standard()
    with aiter_sim.installed(name) as sim:
        weights = layer.prepared(sim)
        place = ("w1", "w1_scale", "w2").index(lost)
        weights[place] = weights[place].view(weights[place].shape)
        y = run(sim, layer, weights=weights)
        # Up to v0.1.9 both stages ask w1.
        still_right = lost == "w2" and sim.profile.stage2_shuffled_from == "w1"
        assert (error(y, layer.expected(*rules_of(sim.profile, "hip"))) < TOLERANCE) == still_right


def test_bytes_instead_of_float4_are_misread():
    layer = Layer(**{**SHAPE, "hidden": 512, "intermediate": 512})
    with aiter_sim.installed("v0.1.11") as sim:
        w1, w1_scale, w2, w2_scale = layer.prepared(sim)
        plain = w1.view(torch.uint8)
        plain.is_shuffled = True
        y = run(sim, layer, weights=(plain, w1_scale, w2, w2_scale))
        assert error(y, layer.expected("half_up", "nearest_even")) > 0.1


def test_stage2_adds_to_what_is_there():
    layer = standard()
    with aiter_sim.installed("v0.1.11") as sim:
        metadata = metadata_for(sim, layer)
        twice = lambda *args, **kwargs: (metadata.stage2(*args, **kwargs), metadata.stage2(*args, **kwargs))  # noqa: E731
        expected = layer.expected("half_up", "nearest_even")
        doubled = run(sim, layer, metadata=type(metadata)(metadata.stage1, twice, metadata.block_m, 0))
        assert error(doubled, 2 * expected) < TOLERANCE


def test_a_wrong_scale_layout_gives_wrong_numbers():
    layer = standard()
    with aiter_sim.installed("v0.1.11") as sim:
        w1, _, w2, w2_scale = layer.prepared(sim)
        flat = torch.from_numpy(layer.gate_up[1].reshape(-1, 8).copy()).view(numerics.FLOAT8_E8M0)
        y = run(sim, layer, weights=(w1, flat, w2, w2_scale))
        assert error(y, layer.expected("half_up", "nearest_even")) > 0.1


T16 = "flydsl_moe2_afp4_wfp4_bf16_t16x128x128_atomic"
T32 = "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic"
T16_PARAMS = {
    "stage": 2,
    "a_dtype": "fp4",
    "b_dtype": "fp4",
    "out_dtype": "bf16",
    "tile_m": 16,
    "tile_n": 128,
    "tile_k": 128,
}


def flydsl_row(name, layer, name2, block_m=32, **values):
    return ck_row(name, layer, block_m, f"256x{block_m}x128x128_1x4", kernelName2=name2, **values)


@pytest.mark.parametrize("name", [name for name, profile in aiter_sim.PROFILES.items() if profile.flydsl_stages])
def test_flydsl_stage2(name, monkeypatch, tmp_path):
    """Tiles of the block's size are right everywhere; smaller ones need sort_block_m, which v0.1.11 does not have."""
    layer, profile = standard(), aiter_sim.PROFILES[name]
    expected = layer.expected(*rules_of(profile, "hip"))

    def result(name2, block_m=32):
        with_rows(monkeypatch, tmp_path, flydsl_row(name, layer, name2, block_m))
        with aiter_sim.installed(name, flydsl=True) as sim:
            metadata = metadata_for(sim, layer)
            assert metadata.stage2.func.__name__ == "_flydsl_stage2_wrapper"
            assert metadata.block_m == block_m
            return error(run(sim, layer), expected) < TOLERANCE

    assert result(T32)
    assert result(T32.replace("atomic", "reduce"))
    assert not result(T32, block_m=64)  # pairs a tile with another tile's expert
    if profile.flydsl_has_sort_block_m:
        assert result(f"{T32}_sbm64", block_m=64)


@pytest.mark.parametrize("name", [name for name, profile in aiter_sim.PROFILES.items() if profile.flydsl_stages])
def test_the_16_row_kernel_of_the_tuned_program(name, monkeypatch, tmp_path):
    """Not registered before v0.1.16; added by hand and told the block, it is right from there on, and for short sums at v0.1.12."""
    layer, profile = standard(), aiter_sim.PROFILES[name]
    expected = layer.expected(*rules_of(profile, "hip"))
    with_rows(monkeypatch, tmp_path, flydsl_row(name, layer, T16))
    for sort_block_m in (0, 32):
        with aiter_sim.installed(name, flydsl=True) as sim:
            registry = sim.module("aiter.ops.flydsl.moe_kernels")._KERNEL_PARAMS
            assert (T16 in registry) == profile.flydsl_t16_registered
            if T16 not in registry:
                with pytest.raises(ValueError, match="Invalid FlyDSL kernel name"):
                    run(sim, layer)
            registry[T16] = {**T16_PARAMS, "sort_block_m": sort_block_m}
            y = run(sim, layer)
            right = error(y, expected) < TOLERANCE
            compiles = profile.flydsl_t16_registered or name in ("v0.1.12", "v0.1.12.post2")
            assert right == (compiles and sort_block_m == 32)
            if name == "v0.1.11":
                assert not y.any()


def test_what_flydsl_stage2_returns(monkeypatch, tmp_path):
    for name, returns in (("v0.1.11", False), ("v0.1.12", True)):
        layer = standard()
        with_rows(monkeypatch, tmp_path, flydsl_row(name, layer, T32))
        with aiter_sim.installed(name, flydsl=True) as sim:
            metadata, seen = metadata_for(sim, layer), []

            def keep(*args, _stage2=metadata.stage2, _seen=seen, **kwargs):
                _seen.append(_stage2(*args, **kwargs))

            run(sim, layer, metadata=type(metadata)(metadata.stage1, keep, 32, 0))
            assert (seen[0] is not None) == returns


def test_a_flydsl_stage1_may_quantize(monkeypatch, tmp_path):
    """Then it is given no buffer and returns codes and sorted scales, which fused_moe hands on."""
    name1 = "flydsl_moe1_afp4_wfp4_bf16_t32x64x256_fp4"
    layer = standard()
    with_rows(monkeypatch, tmp_path, row_for("v0.1.15", layer, block_m=32, kernelName1=name1, kernelName2=T32))
    with aiter_sim.installed("v0.1.15", flydsl=True) as sim:
        assert metadata_for(sim, layer).fuse_quant == "fp4"
        w1, w1_scale, w2, w2_scale = layer.prepared(sim)
        (ids, weights), x = layer.arguments()
        kind = {"quant_type": sim.aiter.QuantType.per_1x32, "w1_scale": w1_scale, "w2_scale": w2_scale}
        y = sim.module("aiter.fused_moe").fused_moe(x, w1, w2, weights, ids, **kind).double().numpy()
        assert error(y, layer.expected("half_up", "nearest_even")) < TOLERANCE


# --- configs ---------------------------------------------------------------------------------------------------------

PADDED = {
    "wheel": {1: 16, 16: 16, 17: 32, 1024: 1024, 1025: 1024, 5000: 1024, 20000: 1024, 200000: 1024},
    "v0.1.8": {1: 16, 17: 32, 1025: 1024, 5000: 2048, 20000: 16384, 200000: 16384},
    "v0.1.9": {1: 1, 3: 4, 1025: 1024, 5000: 2048, 20000: 16384},
    "v0.1.11": {0: 1, 16: 16, 1023: 1024, 2047: 1024, 5000: 2048, 40000: 16384},
    "v0.1.12": {1025: 2048, 5000: 8192, 16384: 16384, 20000: 32768, 200000: 32768},
    "v0.1.14": {1025: 2048, 20000: 32768, 131071: 32768, 131072: 131072, 200000: 131072},
    "HEAD": {0: 1, 1025: 2048, 131072: 131072},
}


@pytest.mark.parametrize("name", PADDED)
def test_padded_tokens(name):
    with aiter_sim.installed(name) as sim:
        padded = sim.module("aiter.fused_moe").get_padded_M
        assert {m: padded(m) for m in PADDED[name]} == PADDED[name]
        get_inter_dim = sim.module("aiter.fused_moe").get_inter_dim
        assert get_inter_dim(torch.Size((33, 1024, 3584)), torch.Size((33, 7168, 256))) == (33, 7168, 512)


def test_heuristic_blocks_of_the_seven_shapes():
    shapes = [
        (16, 257, 256),
        (128, 257, 256),
        (512, 257, 256),
        (16, 33, 512),
        (128, 33, 512),
        (512, 33, 512),
        (512, 33, 2048),
    ]
    assert [config.block_size_m(m, 9, e, i) for m, e, i in shapes] == [32, 32, 64, 32, 64, 64, 128]
    assert [config.heuristic_ksplit(m, 9, e, i, 7168) for m, e, i in shapes] == [0] * 7


class Decode(Layer):
    """Only the sizes of one decode problem, for questions about configs."""

    def __init__(self, tokens=16, experts=33, intermediate=512):
        self.sizes = (tokens, 9, experts, 7168, intermediate)


G1, G2 = (stages.ck_name(stage, "256x64x128x128_1x4") for stage in (1, 2))
FLY1 = "flydsl_moe1_afp4_wfp4_bf16_t64x128x256"
HEURISTIC = ("_flydsl_stage1_wrapper", "_flydsl_stage2_wrapper", 32, -1)
CK = ("ck_moe_stage1", "ck_moe_stage2_fwd", 64, 0)
NO_ROW = ("ck_moe_stage1", "ck_moe_stage2_fwd", 32, 0)


def expected_resolution(name, flydsl, row):
    """The published table of what a row turns into; block_m 64 in every row."""
    profile = aiter_sim.PROFILES[name]
    order = list(NAMES).index
    late, from_12 = order(name) >= order("v0.1.16"), order(name) >= order("v0.1.12")
    has_fallback = order("v0.1.11") <= order(name) <= order("v0.1.17")
    first = "ck_moe_stage1" if order(name) >= order("v0.1.9") else "ck_moe_stage1_fwd"
    if row == "ck":
        return HEURISTIC if late and flydsl else (first, *CK[1:])
    if row == "none":
        return HEURISTIC if late and flydsl else (first, *NO_ROW[1:])
    if row == "splitk":
        if late and flydsl:
            return HEURISTIC
        if not profile.cktile_split_k:
            return (first, "ck_moe_stage2_fwd", 64, 2)
        return ("cktile_moe_stage1", "cktile_moe_stage2", 16, 2)
    if row == "ck_flydsl":
        if flydsl:
            return ("ck_moe_stage1", "_flydsl_stage2_wrapper", 64, 0)
        return NO_ROW if has_fallback else CK
    if flydsl:
        wrappers = ("_flydsl_stage1_wrapper", "_flydsl_stage2_wrapper", 64, 0)
        return wrappers if from_12 else ("asm_stage1", "ck_moe_stage2_fwd", 64, 0)
    return NO_ROW if has_fallback else ("asm_stage1", "ck_moe_stage2_fwd", 64, 0)


ROWS = [
    (name, flydsl, row)
    for name, flydsl in aiter_sim.CASES
    for row in ("ck", "none", "splitk", "ck_flydsl", "flydsl")
    if aiter_sim.PROFILES[name].flydsl_stages or not row.endswith("flydsl")
]


@pytest.mark.parametrize(("name", "flydsl", "row"), ROWS)
def test_what_a_row_turns_into(name, flydsl, row, monkeypatch, tmp_path):
    names = {
        "ck": (G1, G2),
        "splitk": ("placeholder", "placeholder"),
        "ck_flydsl": (G1, T32),
        "flydsl": (FLY1, T32),
        "none": (G1, G2),
    }
    kernels = dict(zip(("kernelName1", "kernelName2"), names[row], strict=True))
    layer = Decode()
    entry = row_for(name, layer, block_m=64, ksplit=2 if row == "splitk" else 0, **kernels)
    if row == "none":
        entry["topk"] = 8
    with_rows(monkeypatch, tmp_path, entry, gfx="gfx950")
    monkeypatch.delenv("AITER_FLYDSL_FORCE", raising=False)
    with aiter_sim.installed(name, flydsl=flydsl) as sim:
        found = metadata_for(sim, layer)
        seen = (found.stage1.func.__name__, found.stage2.func.__name__, found.block_m, found.ksplit)
        assert seen == expected_resolution(name, flydsl, row)
        if seen == HEURISTIC:
            assert found.stage1.keywords["kernelName"] == "flydsl_moe1_afp4_wfp4_bf16_t32x128x256_w2"
            assert found.stage2.keywords["kernelName"] == "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic_bnt2"
            monkeypatch.setenv("AITER_FLYDSL_FORCE", "0")
            sim.module("aiter.fused_moe").get_2stage_cfgs.cache_clear()
            found = metadata_for(sim, layer)
            assert (found.stage1.func.__name__, found.block_m) == expected_resolution(name, False, row)[::2]


# Empty kernel names, by release: the error for a row without split-K, and for one with it (None: it works).
EMPTY_NAMES = {
    "wheel": (TypeError, TypeError),
    "v0.1.9": (TypeError, TypeError),
    "v0.1.10.post3": (TypeError, None),
    "v0.1.11": (TypeError, None),
    "v0.1.12": (AttributeError, AttributeError),
    "v0.1.15": (AttributeError, AttributeError),
    "v0.1.16": (AttributeError, AttributeError),
    "v0.1.16.post6": (TypeError, None),
    "v0.1.17": (AttributeError, AttributeError),
    "v0.1.18": (TypeError, None),
    "HEAD": (TypeError, None),
}


@pytest.mark.parametrize("name", EMPTY_NAMES)
def test_empty_kernel_names_become_nan(name, monkeypatch, tmp_path):
    layer = Decode()
    for ksplit, error_type in zip((0, 2), EMPTY_NAMES[name], strict=True):
        with_rows(
            monkeypatch, tmp_path, row_for(name, layer, block_m=64, ksplit=ksplit, kernelName1="", kernelName2="")
        )
        with aiter_sim.installed(name) as sim:
            if error_type is None:
                assert metadata_for(sim, layer).stage1.func.__name__ == "cktile_moe_stage1"
            else:
                with pytest.raises(error_type):
                    metadata_for(sim, layer)


HITS = {  # which of the injected keys are found: in the dict or primary table by str or enum, in the fallback table
    "wheel": ("str", 13),
    "v0.1.11": ("str", 13),
    "v0.1.13.post1": ("str", 13),
    "v0.1.14": ("enum", 13),
    "v0.1.16": ("enum", 14),
    "v0.1.17": ("enum", 14),
    "v0.1.18": ("str", 14),
    "v0.1.19": ("str", 14),
    "v0.1.20.post1": ("enum", 14),
    "HEAD": ("enum", 14),
}


@pytest.mark.parametrize("name", HITS)
@pytest.mark.parametrize("form", ["str", "enum", "ignored"])
def test_injected_keys(name, form, monkeypatch, tmp_path):
    layer = Decode()
    with_rows(monkeypatch, tmp_path, ck_row(name, layer, 32))
    with aiter_sim.installed(name) as sim:
        moe = sim.module("aiter.fused_moe")
        assert metadata_for(sim, layer).block_m == 32
        silu = sim.aiter.ActivationType.Silu
        activation = {"str": str(silu), "enum": silu, "ignored": "__ignore__"}[form]
        key = (
            256,
            16,
            7168,
            512,
            33,
            9,
            activation,
            "torch.bfloat16",
            *(str(numerics.FLOAT4),) * 2,
            "QuantType.per_1x32",
            True,
            False,
        )
        key = ("gfx950", *key) if HITS[name][1] == 14 else key
        row = {"block_m": 64, "ksplit": 0, "kernelName1": G1, "kernelName2": G2, "run_1stage": False}
        pair = isinstance(moe.cfg_2stages, tuple)
        assert pair == aiter_sim.PROFILES[name].table_is_pair
        if pair:
            for table in moe.cfg_2stages:
                table.clear()
            with pytest.raises(AttributeError):
                moe.cfg_2stages.update({key: row})
            moe.cfg_2stages[form == "ignored"][key] = row
        elif form != "ignored":
            moe.cfg_2stages.clear()
            moe.cfg_2stages[key] = row
        moe.get_2stage_cfgs.cache_clear()
        hit = form == HITS[name][0] or (form == "ignored" and pair)
        assert (metadata_for(sim, layer).block_m == 64) == hit


def test_when_the_variable_is_read(monkeypatch, tmp_path):
    """The wheel reads it when aiter is imported, later releases at the first question, and a new value needs three steps."""
    for name, late in (("wheel", False), ("v0.1.8", True), ("v0.1.11", True), ("HEAD", True)):
        monkeypatch.delenv("AITER_CONFIG_FMOE", raising=False)
        with aiter_sim.installed(name) as sim:
            sim.module("aiter")
            layer = Decode()
            with_rows(monkeypatch, tmp_path, ck_row(name, layer, 128))
            assert (metadata_for(sim, layer).block_m == 128) == late
            if late:
                moe, core = sim.module("aiter.fused_moe"), sim.module("aiter.jit.core")
                (tmp_path / "other").mkdir(exist_ok=True)
                with_rows(monkeypatch, tmp_path / "other", ck_row(name, layer, 64))
                moe.cfg_2stages = None
                moe.get_2stage_cfgs.cache_clear()
                assert metadata_for(sim, layer).block_m == 128
                core.AITER_CONFIG.get_config_file.cache_clear()
                moe.cfg_2stages = None
                moe.get_2stage_cfgs.cache_clear()
                assert metadata_for(sim, layer).block_m == 64


def test_tags(monkeypatch, tmp_path):
    layer = Decode()
    for name, tag, kept in (
        ("v0.1.10.post3", "mine", True),
        ("v0.1.11", "mine", False),
        ("v0.1.17", "mine", False),
        ("v0.1.16.post6", "mine", True),
        ("HEAD", "mine", True),
        ("HEAD", "flydsl_fallback", False),
    ):
        with_rows(monkeypatch, tmp_path, ck_row(name, layer, 128), _tag=tag)
        with aiter_sim.installed(name) as sim:
            assert (metadata_for(sim, layer).block_m == 128) == kept, (name, tag)


def test_fallback_rows_stand_in_for_flydsl(monkeypatch, tmp_path):
    layer = Decode()
    for name, used in (("v0.1.11", True), ("v0.1.15", True), ("v0.1.18", False)):
        rows = [{**flydsl_row(name, layer, T32), "_tag": ""}, {**ck_row(name, layer, 128), "_tag": "flydsl_fallback"}]
        with_rows(monkeypatch, tmp_path, *rows)
        path = tmp_path / "rows.csv"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0] + ",_tag", lines[1] + ",", lines[2] + ",flydsl_fallback"]) + "\n")
        with aiter_sim.installed(name) as sim:
            assert (metadata_for(sim, layer).block_m == 128) == used


def test_vendor_rows_and_other_cu_counts(monkeypatch):
    monkeypatch.delenv("AITER_CONFIG_FMOE", raising=False)
    for name, block in (("v0.1.10.post3", 64), ("v0.1.11", 32), ("v0.1.15", 32), ("HEAD", 32)):
        flydsl = 1 in aiter_sim.PROFILES[name].flydsl_stages
        with aiter_sim.installed(name, flydsl=flydsl) as sim:
            assert metadata_for(sim, Decode(512, 257, 256)).block_m == block
    monkeypatch.setenv("CU_NUM", "304")
    with aiter_sim.installed("v0.1.11") as sim:
        assert metadata_for(sim, Decode(512, 257, 256)).stage1.keywords["kernelName"] == ""


def test_merging_files(monkeypatch, tmp_path):
    """Several files become one: the fastest row of a key before v0.1.12, an error from then on."""
    layer = Decode()
    for name, merges in (("v0.1.11", True), ("v0.1.13", False)):
        for folder, block, us in (("a", 64, 9.0), ("b", 128, 5.0)):
            (tmp_path / folder).mkdir(exist_ok=True)
            with_rows(monkeypatch, tmp_path / folder, ck_row(name, layer, block, us=us))
        monkeypatch.setenv("AITER_CONFIG_FMOE", f"{tmp_path}/a/rows.csv{os.pathsep}{tmp_path}/b/rows.csv")
        with aiter_sim.installed(name) as sim:
            if merges:
                assert metadata_for(sim, layer).block_m == 128
            else:
                with pytest.raises(RuntimeError, match="duplicate"):
                    metadata_for(sim, layer)


# --- the module tree -------------------------------------------------------------------------------------------------


def test_signatures_are_those_of_the_release():
    layer = Decode()
    with aiter_sim.installed("v0.1.9") as sim:
        moe = sim.module("aiter.fused_moe")
        with pytest.raises(TypeError, match="too many positional arguments"):
            moe.get_2stage_cfgs(*range(14), True)
        with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
            moe.ck_moe_stage1(*range(12), bias=None)
        assert metadata_for(sim, layer).block_m == 32
    with aiter_sim.installed("HEAD") as sim:
        names = tuple(inspect.signature(sim.module("aiter.fused_moe").get_2stage_cfgs).parameters)[14:]
        assert names == ("is_shuffled", "gate_mode", "is_ep", "has_stage2_bias", "opus_weights_shuffled", "config_file")


def test_importing_the_flydsl_registry_without_flydsl():
    for name, works in (
        ("v0.1.11", True),
        ("v0.1.12", False),
        ("v0.1.13", True),
        ("v0.1.17", True),
        ("v0.1.18", False),
    ):
        with aiter_sim.installed(name) as sim:
            assert not sim.module("aiter.ops.flydsl").is_flydsl_available()
            if works:
                assert sim.module("aiter.ops.flydsl.moe_kernels").get_flydsl_kernel_params(T32)
            else:
                with pytest.raises(ModuleNotFoundError, match="flydsl"):
                    sim.module("aiter.ops.flydsl.moe_kernels")
    with aiter_sim.installed("v0.1.10.post3") as sim, pytest.raises(ModuleNotFoundError):
        sim.module("aiter.ops.flydsl")


def test_nothing_is_left_behind(monkeypatch):
    monkeypatch.setenv("AITER_CONFIG_FMOE", "kept")
    with aiter_sim.installed("HEAD", flydsl=True) as sim:
        import aiter

        assert aiter.__simulated__
        assert sys.modules["aiter"] is sim.aiter
        sim.module("aiter.ops.flydsl.moe_kernels")
        os.environ["AITER_FLYDSL_FORCE"] = "0"
        os.environ["AITER_CONFIG_FMOE"] = "changed"
    assert not [name for name in sys.modules if name.split(".")[0] in ("aiter", "flydsl")]
    assert "AITER_FLYDSL_FORCE" not in os.environ
    assert os.environ["AITER_CONFIG_FMOE"] == "kept"
