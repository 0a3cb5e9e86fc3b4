"""The aiter implementation through the real bridge against every simulated release: its numbers, its refusals, the faults it avoids."""

import contextlib
import csv
import dataclasses
import functools
import itertools
import os
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_case

from jax_mxfp4_moe import device, mxfp4_moe, prepare
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.aiter import calls, kernels, names, release, tables
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.testing import relative_error
from jax_mxfp4_moe.tuning import table

torch = pytest.importorskip("torch")
import aiter_sim
from aiter_sim import config

AITER = IMPLEMENTATIONS["aiter"]
TRITON = {"scale_rule": "even", "rounding": "half_away"}
HALF_UP = {"scale_rule": "half_up", "rounding": "nearest_even"}
RCEIL = {"scale_rule": "rceil", "rounding": "nearest_even"}
# Between y and the oracle lie one rounding to bfloat16 for each slot and one for each addition. That is some 3e-3; the tolerance of
# the recipe, 2e-2, also has room for other summation orders, and would hide an expert's block that is out of place.
TOLERANCE = 5e-3
PROBLEM = MoeProblem(16, 4, 32, 512, 256, activation_quant="mxfp4", **TRITON)


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Tables for aiter go to a folder of the test, and none of the user's are read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("AITER_") or name == table.USER_TABLES_VARIABLE]:
        monkeypatch.delenv(name)


_builds = itertools.count()


@contextlib.contextmanager
def installed(profile, flydsl=False, build=None):
    """A simulated aiter that was imported; only then does it count.

    A process has one aiter. Here each is a build of its own, so that what was compiled for one is not used for the next.
    """
    build = f"+test{next(_builds)}" if build is None else build
    profile = aiter_sim.PROFILES[profile]
    with aiter_sim.installed(dataclasses.replace(profile, version=profile.version + build), flydsl=flydsl) as sim:
        assert sim.aiter.__simulated__
        yield sim


@functools.cache
def odd_case():
    """Sizes that are padded, an expert that nobody names, one that a row names twice, ids out of range, a token without experts."""
    case = random_case(seed=3, tokens=37, experts=6, top_k=3, hidden=160, intermediate=96, dtype="bfloat16")
    ids = np.where(case.topk_ids == 5, [[-1, 5000, 6]], case.topk_ids).astype(np.int32)
    ids[:4] = [[2, 2, 2], [4, 1, 4], [-1, 2, 6], [-1, -1, -5]]
    return case.replace(topk_ids=ids)


@functools.cache
def expected(**options):
    return odd_case().expected(**options)


@functools.cache
def prepared():
    return prepare(odd_case().weights, "aiter")


def call(case, weights, *, activation_quant="mxfp4", **options):
    function = functools.partial(mxfp4_moe, implementation="aiter", activation_quant=activation_quant, **options)
    arrays = [jnp.asarray(a) for a in (case.topk_weights, case.topk_ids)]
    quickly = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
    return quickly(jnp.asarray(case.x), weights, *arrays)


def check(**options):
    """Runs the odd case and compares with the oracle; returns y."""
    y = call(odd_case(), prepared(), **options)
    assert y.shape == odd_case().x.shape
    assert y.dtype == jnp.bfloat16
    facts = {name: options[name] for name in ("scale_rule", "rounding") if name in options}
    right = expected(activation_quant=options.get("activation_quant", "mxfp4"), **facts)
    assert relative_error(np.asarray(y, np.float64), right) <= TOLERANCE
    assert not np.asarray(y[3]).any()  # the token without experts
    return y


def row(block_m, first=None, second=None, **more):
    """A mapping for `config`: the CK kernels for block_m, or others."""
    jax.clear_caches()  # a config from an argument says nothing of the build
    kernels = {
        "kernel_name1": first or names.ck_name_for(1, block_m),
        "kernel_name2": second or names.ck_name_for(2, block_m),
    }
    return {"block_m": block_m, **kernels, **more}


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "flydsl"), aiter_sim.CASES)
def test_aiter_equals_the_oracle(profile, flydsl):
    """By every quantizer that a release has, and by its own fused_moe with the rule that is its own."""
    with installed(profile, flydsl) as sim:
        rules = release.load().activation_rules
        own = next(rule for rule in rules if _is_own_rule(sim, rule))
        for rule, quantizer in rules.items():
            if flydsl and rule == own:
                continue  # quantizers are the same without flydsl
            sim.calls.clear()
            check(scale_rule=rule[0], rounding=rule[1])
            assert sim.calls.count("moe_sorting_fwd") == 1
            assert "fused_moe" not in sim.calls
            assert any("Triton" in name for name in sim.calls) == (quantizer == "triton")
        check(scale_rule=own[0], rounding=own[1], config="vendor")
        assert "fused_moe" in sim.calls


def test_aiter_gradients_are_those_of_xla():
    """Of x and topk_weights, beside the value, from weights in aiter's layout, under one rule of rounding."""
    case = odd_case()
    ids, dy = jnp.asarray(case.topk_ids), np.random.default_rng(7).normal(size=case.x.shape).astype(np.float32)

    def value_and_gradients(implementation, weights):
        def loss(x, topk_weights):
            options = {"implementation": implementation, "activation_quant": "mxfp4", **TRITON}
            return (mxfp4_moe(x, weights, topk_weights, ids, **options).astype(jnp.float32) * dy).sum()

        quickly = jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options={"xla_backend_optimization_level": 0})
        value, parts = quickly(jnp.asarray(case.x), jnp.asarray(case.topk_weights))
        return np.asarray(value), *parts

    with installed("v0.1.13") as sim:
        found = value_and_gradients("aiter", prepared())
        assert sim.calls.count("moe_sorting_fwd") == 1
    for part, right in zip(found, value_and_gradients("xla", case.weights), strict=True):
        assert np.asarray(right, np.float64).any()
        assert relative_error(np.asarray(part, np.float64), np.asarray(right, np.float64)) <= TOLERANCE


def _is_own_rule(sim, rule):
    return (rule == ("even", "half_away")) == (sim.profile.default_quant == "triton")


@pytest.mark.parametrize("profile", aiter_sim.PROFILES)
def test_aiter_keeps_activations_in_bfloat16_where_split_k_is_right(profile):
    """From v0.1.10.post3 on, but for v0.1.13.post1, whose kernel takes the gate rows and up rows for interleaved."""
    with installed(profile) as sim:
        problem = odd_case().problem()
        if profile in ("wheel", "v0.1.8", "v0.1.9", "v0.1.13.post1"):
            sentence = AITER.why_not(problem, "cpu")
            reason = "pair gate and up columns in another order" if profile == "v0.1.13.post1" else "do not exist"
            assert reason in sentence
            assert "pass activation_quant='mxfp4'" in sentence
            return
        check(activation_quant=None)
        assert any("cktile" in name for name in sim.calls)
        assert not any("quant" in name for name in sim.calls)


@pytest.mark.parametrize("block_m", [32, 64, 128])
@pytest.mark.parametrize("profile", ["v0.1.11", "v0.1.17"])
def test_aiter_rows_given_as_config(profile, block_m):
    with installed(profile):
        check(config=row(block_m, dispatch_policy=2), **TRITON)


@pytest.mark.parametrize(
    ("profile", "second"),
    [
        ("v0.1.11", "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic"),  # its stage 2 returns None
        ("v0.1.13", "flydsl_moe2_afp4_wfp4_bf16_t16x128x256_atomic_sbm32"),  # smaller tiles than blocks
        ("v0.1.17", "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_reduce"),  # sums the rows of all slots, skipped ones too
    ],
)
def test_aiter_flydsl_stage_2(profile, second):
    with installed(profile, flydsl=True) as sim:
        check(config=row(32, None, second), **TRITON)
        assert any(name.startswith("flydsl_moe2") for name in sim.calls)


T16 = release.FLYDSL_T16


@pytest.mark.parametrize("profile", ["v0.1.12", "v0.1.12.post2"])
def test_the_tuned_programs_flydsl_kernel_is_registered_where_aiter_makes_it_right(profile):
    """aiter finds it by name only after it was added to its registry; it is not taken for aiter's own afterwards."""
    with installed(profile, flydsl=True) as sim:
        registry = sim.module("aiter.ops.flydsl.moe_kernels")._KERNEL_PARAMS
        assert T16 not in registry
        check(config=row(32, None, f"{T16}_sbm32"), **TRITON)
        assert f"{T16}_sbm32" in sim.calls
        assert {name: registry[T16][name] for name in ("tile_m", "tile_n", "tile_k", "mode")} == {
            "tile_m": 16, "tile_n": 128, "tile_k": 128, "mode": "atomic",
        }  # fmt: skip
        release.detect.cache_clear()
        again = release.load()
        assert (again.flydsl_t16, again.flydsl_t16_registrable) == (False, True)


def test_the_tuned_programs_flydsl_kernel_on_longer_sums_is_refused_where_aiter_cannot_compile_it(monkeypatch):
    """More than two tiles: v0.1.12 fails in its compile function, which the refusal comes before."""
    case = random_case(seed=4, tokens=5, experts=4, top_k=2, hidden=256, intermediate=512, dtype="bfloat16")
    given = row(32, None, f"{T16}_sbm32")
    with installed("v0.1.12", flydsl=True):
        with pytest.raises(
            ValueError, match=r"intermediate sizes of at most 256, found 512\. The nearest that may run: .*t16x128x256"
        ):
            call(case, prepare(case.weights, "aiter"), config=given, **TRITON)
        monkeypatch.setattr(kernels, "FLYDSL_T16_MAX_INTERMEDIATE", 512)
        with pytest.raises(Exception, match="attempting to create the operation"):
            call(case, prepare(case.weights, "aiter"), config=given, **TRITON)


@pytest.mark.parametrize("profile", ["v0.1.11", "v0.1.13", "v0.1.14", "v0.1.15"])
def test_the_tuned_programs_flydsl_kernel_is_refused_where_it_would_be_wrong(profile, monkeypatch):
    """Also where somebody has registered it: the program does so, whatever the release."""
    with installed(profile, flydsl=True) as sim:
        registry = sim.module("aiter.ops.flydsl.moe_kernels")._KERNEL_PARAMS
        registry[T16] = dict(release._FLYDSL_T16_PARAMETERS)
        found = release.load()
        assert (found.flydsl_t16, found.flydsl_t16_registrable) == (False, False)
        block_m, name = (32, f"{T16}_sbm32") if found.flydsl_sort_block_m else (16, T16)
        with pytest.raises(ValueError, match=r"has tile_k 128|would skip its products"):
            call(odd_case(), prepared(), config=row(block_m, names.ck_name_for(1, 32), name), **TRITON)
        if not found.flydsl_sort_block_m:
            return  # nothing is stored there: no answer to compare
        monkeypatch.setattr(release, "load", lambda: dataclasses.replace(found, flydsl_t16_registrable=True))
        y = call(odd_case(), prepared(), config=row(block_m, None, name), **TRITON)
        assert not relative_error(np.asarray(y, np.float64), expected(activation_quant="mxfp4", **TRITON)) < 0.1


@pytest.mark.parametrize(
    ("block_m", "first", "second", "told"),
    [
        (64, "t32x64x256_w3", "t64x128x256_atomic", "tiles of 32 rows and expects rows sorted by 32, found block_m 64"),
        (16, "t16x64x256", "t16x128x256_atomic", "needs 32 or more"),
    ],
)
def test_aiter_flydsl_stage_1_whose_tiles_are_no_blocks_is_replaced(block_m, first, second, told, monkeypatch):
    """Stage 1 steps by its own tile, 32 rows at least: on other blocks it multiplies by the weights of another expert."""
    first, second = f"flydsl_moe1_afp4_wfp4_bf16_{first}", f"flydsl_moe2_afp4_wfp4_bf16_{second}"
    asked = tables.Row(64, 256, 256, 6, 3, block_m, 0, first, second, table="own.csv line 2")
    monkeypatch.setattr(tables, "user_rows", lambda: (asked,))
    with installed("v0.1.13", flydsl=True) as sim:
        registry = sim.module("aiter.ops.flydsl.moe_kernels")._KERNEL_PARAMS
        registry.setdefault(first, {**registry["flydsl_moe1_afp4_wfp4_bf16_t32x64x256"], "tile_m": block_m})
        with pytest.warns(tables.RowReplacedWarning, match=told):
            check(**TRITON)
        assert any(name.startswith("flydsl_moe1") for name in sim.calls)


PRESET_ROW = tables.Row(64, 256, 256, 6, 3, 16, 2, "", "", dispatch_policy=2, table="aiter.seed_dispatch.csv line 2")


@pytest.mark.parametrize(
    ("profile", "runs"), [("v0.1.11", None), ("v0.1.13.post1", "mxfp4"), ("v0.1.16", None), ("v0.1.9", "mxfp4")]
)
def test_aiter_presets_bring_their_own_precision(profile, runs, monkeypatch):
    """A row with ksplit 2 keeps activations in bfloat16 where a release can, and is replaced, with a warning, where it cannot."""
    monkeypatch.setattr(tables, "preset_rows", lambda preset: (PRESET_ROW,))
    with installed(profile) as sim:
        policies = []
        sort = sim.aiter.moe_sorting_fwd
        monkeypatch.setattr(sim.aiter, "moe_sorting_fwd", lambda *a: (policies.append(a[-1]), sort(*a)))
        told = contextlib.nullcontext() if runs is None else pytest.warns(tables.RowReplacedWarning, match="ksplit=2")
        with told:
            y = call(odd_case(), prepared(), config="seed_dispatch", **TRITON)
        right = expected(activation_quant=runs, **TRITON)
        assert relative_error(np.asarray(y, np.float64), right) <= TOLERANCE
        assert policies == [2]


def test_aiter_skipped_tokens_may_hold_anything():
    """NaN in a token without experts stays out of its own row and of all others, in both pipelines."""
    case = odd_case()
    x = case.x.copy()
    x[3] = np.nan
    for options in ({}, {"config": "vendor"}):
        with installed("v0.1.16") as sim:
            y = call(case.replace(x=x), prepared(), **RCEIL, **options)
            np.testing.assert_array_equal(y, call(case, prepared(), **RCEIL, **options))
            assert sim.calls


def test_aiter_of_no_tokens_calls_nothing():
    case = random_case(tokens=0, hidden=160, intermediate=96, dtype="bfloat16")
    with installed("v0.1.13") as sim:
        y = call(case, prepare(case.weights, "aiter"), **TRITON)
        assert y.shape == (0, 160)
        assert not [name for name in sim.calls if name != "get_torch_quant"]


def test_aiter_results_of_two_calls_are_two_results():
    """The second call neither overwrites the first one's result nor adds to what it left behind."""
    case, rng = odd_case(), np.random.default_rng(1)
    other = case.replace(x=rng.normal(size=case.x.shape).astype(case.x.dtype))
    with installed("v0.1.13"):
        function = jax.jit(functools.partial(mxfp4_moe, implementation="aiter", activation_quant="mxfp4", **TRITON))

        def run(case):
            return function(jnp.asarray(case.x), prepared(), jnp.asarray(case.topk_weights), jnp.asarray(case.topk_ids))

        first = run(case)
        kept = np.array(first)
        run(other)
        np.testing.assert_array_equal(first, kept)
        np.testing.assert_array_equal(run(case), kept)


def test_aiter_through_the_host():
    """The callback gives the same bits."""
    with installed("v0.1.13"):
        y = check(**TRITON)
        np.testing.assert_array_equal(check(bridge="callback", **TRITON), y)


@pytest.mark.parametrize("profile", ["v0.1.9", "v0.1.11", "v0.1.12", "v0.1.13.post1", "v0.1.16", "HEAD"])
def test_aiter_allocates_nothing_in_a_call_that_is_recorded(profile, monkeypatch):
    """CK rows with the Triton rule: its own kernel, on our buffers. What is compiled at first use was compiled before."""
    given, plain = row(32), calls.run
    runs, policies = [], []

    def forbidden(*arguments, **options):
        raise AssertionError("a tensor was made")

    def run(facts, *arguments):
        runs.append((facts.recorded, tuple(arguments[2][1].shape)))
        if len(runs) == 1:  # the one that warms
            return plain(facts, *arguments)
        with monkeypatch.context() as patch:
            for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "tensor", "arange"):
                patch.setattr(torch, name, forbidden)
            return plain(facts, *arguments)

    with installed(profile) as sim:
        y = check(config=given, **TRITON)
        sim.calls.clear()
        sort = sim.aiter.moe_sorting_fwd
        monkeypatch.setattr(sim.aiter, "moe_sorting_fwd", lambda *a: (policies.append(a[-1]), sort(*a)))
        monkeypatch.setattr(calls, "run", run)
        np.testing.assert_array_equal(check(config=given, bridge="graph", **TRITON), y)
        assert sim.calls.count("_fused_dynamic_mxfp4_quant_moe_sort_kernel") == 4
        assert not [name for name in sim.calls if "(Triton)" in name]
    assert runs == [(True, (3, 512, 128)), (True, (6, 512, 128))]  # of 3 experts, then of all
    assert policies == [1, 1]


def test_aiter_calls_that_allocate_are_not_recorded(monkeypatch):
    """Each says what it is that does."""
    monkeypatch.setenv("JAX_MXFP4_MOE_BRIDGE", "graph")
    second = "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic"
    with installed("v0.1.13", flydsl=True) as sim:
        for told, options in (
            ("its HIP quantizer allocates what it returns", {"config": row(32), **HALF_UP}),
            ("its split-K stage 1 allocates", {"activation_quant": None}),
            ("its FlyDSL stages allocate", {"config": row(32, None, second), **TRITON}),
            (
                r"several kernels \(dispatch_policy 2\) allocates a workspace",
                {"config": row(32, dispatch_policy=2), **TRITON},
            ),
            ("its fused_moe allocates", {"config": "vendor", **HALF_UP}),
        ):
            with pytest.raises(
                NotImplementedError, match=rf"bridge='graph' .*cannot be recorded: .*{told}.*bridge='eager'"
            ):
                check(**options)
        kernel = sim.module(release.load().triton_quant)._fused_dynamic_mxfp4_quant_moe_sort_kernel
        kernel.arg_names.append("stride_new")
        with pytest.raises(NotImplementedError, match="arguments that are not known: stride_new"):
            check(config=row(32), **TRITON)


def test_aiter_weights_are_unprepared_inside_jit():
    """As the backward pass does."""
    jax.tree.map(np.testing.assert_array_equal, jax.jit(AITER.unprepare)(prepared()), odd_case().weights)


# --- faults ----------------------------------------------------------------------------------------------------------


def test_aiter_weights_are_marked_as_shuffled_in_every_call(monkeypatch):
    """Without the mark on either stack, aiter reads them in another order and says nothing."""
    with installed("v0.1.13"):
        check(**TRITON)
    for lost in ("gate_up", "down"):

        def forget(buffers, lost=lost, mark=calls.weights_of):
            weights = mark(buffers)
            stack = getattr(weights, lost)
            return weights._replace(**{lost: stack._replace(codes=stack.codes.view(stack.codes.shape))})

        with monkeypatch.context() as patch, installed("v0.1.13"):
            patch.setattr(calls, "weights_of", forget)
            y = call(odd_case(), prepared(), **TRITON)
            assert relative_error(np.asarray(y, np.float64), expected(activation_quant="mxfp4", **TRITON)) > 0.1


def test_aiter_split_k_is_told_where_gate_and_up_are(monkeypatch):
    """From v0.1.14 on stage 1 guesses the order, and guesses wrongly, unless it is told."""
    with installed("v0.1.14"):
        found = release.detect(sys.modules["aiter"])
        assert found.split_k == "choice"
        untold = dataclasses.replace(found, split_k="halves")
        monkeypatch.setattr(release, "load", lambda: untold)
        y = call(odd_case(), prepared(), activation_quant=None)
        assert not relative_error(np.asarray(y, np.float64), expected(activation_quant=None)) < 0.1


@pytest.mark.parametrize("profile", ["v0.1.11", "v0.1.20.post1"])
def test_aiter_tiles_of_128_rows_on_blocks_of_32_are_refused(profile):
    """The tuned program's pairing, which every release runs and none gives right numbers for."""
    with (
        installed(profile),
        pytest.raises(ValueError, match=r"multiplies 128 rows by one expert's weights.*blocks of 32"),
    ):
        call(odd_case(), prepared(), config=row(32, names.ck_name_for(1, 128)), **TRITON)


def test_aiter_sums_over_skipped_slots_are_refused():
    """Before v0.1.16 the reducing stage 2 takes no mask, and adds up rows that nobody wrote."""
    second = "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_reduce"
    with (
        installed("v0.1.13", flydsl=True),
        pytest.raises((ValueError, NotImplementedError), match="sums over every slot"),
    ):
        call(odd_case(), prepared(), config=row(32, None, second), **TRITON)


def test_aiter_own_fused_moe_is_refused_where_it_would_be_wrong(monkeypatch):
    """Its own choice for few tokens can be split K, which from v0.1.13.post1 on pairs gate and up wrongly for these weights."""
    case = random_case(tokens=1, experts=4, top_k=2, hidden=512, intermediate=256, dtype="bfloat16")
    weights = prepare(case.weights, "aiter")
    for profile, right in (("v0.1.13", True), ("v0.1.13.post1", False), ("v0.1.14", False)):
        with installed(profile):
            # Split K keeps activations in bfloat16: a preset may carry a precision of its own.
            wanted = case.expected(activation_quant=None)
            if right:
                y = call(case, weights, config="vendor", **HALF_UP)
                assert relative_error(np.asarray(y, np.float64), wanted) <= TOLERANCE
                continue
            with pytest.raises(ValueError, match=r"split K.*set AITER_KSPLIT=-1"):
                call(case, weights, config="vendor", **HALF_UP)
    with monkeypatch.context() as patch, installed("v0.1.14"):
        patch.setenv("AITER_KSPLIT", "-1")
        y = call(case, weights, config="vendor", **HALF_UP)
        assert (
            relative_error(np.asarray(y, np.float64), case.expected(activation_quant="mxfp4", **HALF_UP)) <= TOLERANCE
        )


def test_aiter_own_fused_moe_is_refused_with_another_rule():
    with (
        installed("v0.1.16"),
        pytest.raises(ValueError, match=r"quantizes activations by scale_rule='rceil'.*pass its own"),
    ):
        call(odd_case(), prepared(), config="vendor", **TRITON)


def test_aiter_own_fused_moe_is_refused_in_a_mapping_too():
    """A mapping goes by no preset and no table."""
    with (
        installed("v0.1.16"),
        pytest.raises(ValueError, match=r"'pipeline': 'vendor'.*by scale_rule='rceil'.*pass its own"),
    ):
        call(odd_case(), prepared(), config={"pipeline": "vendor"}, **TRITON)


def test_aiter_own_fused_moe_is_refused_where_activations_are_to_stay_as_they_are():
    with (
        installed("v0.1.16"),
        pytest.raises(
            ValueError, match=r"quantizes activations, and activation_quant=None .*: pass activation_quant='mxfp4'"
        ),
    ):
        call(odd_case(), prepared(), activation_quant=None, config="vendor", **RCEIL)


def test_aiter_own_fused_moe_is_refused_where_its_rule_cannot_be_told(monkeypatch):
    with installed("v0.1.16"):
        unknown = dataclasses.replace(release.load(), hip_scale_rule=None)
        monkeypatch.setattr(release, "load", lambda: unknown)
        with pytest.raises(ValueError, match=r"by a rule that could not be told.*leave config unset"):
            call(odd_case(), prepared(), config="vendor", **TRITON)


@pytest.mark.parametrize(
    ("profile", "suffix", "rule"),
    [("v0.1.12.post2", "fq", HALF_UP), ("v0.1.13", "fp4", HALF_UP), ("v0.1.17", "fp4", RCEIL)],
)
def test_aiter_own_rows_that_quantize_inside_stage_1_run_without(profile, suffix, rule, monkeypatch):
    """FlyDSL's rule is none of the quantizers': with what aiter's own row says, `fused_moe` would give other numbers."""
    first = f"flydsl_moe1_afp4_wfp4_bf16_t32x64x256_{suffix}"
    own = config.row(64, 256, 256, 6, 3, block_m=32, kernelName1=first, kernelName2=names.ck_name_for(2, 32), us=1.0)
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])
    with installed(profile, flydsl=True) as sim:
        check(**rule)
        assert "fused_moe" not in sim.calls
        assert first.removesuffix(f"_{suffix}") in sim.calls
        with pytest.raises(
            ValueError, match=r"quantizes inside stage 1 by FlyDSL's own rule, and scale_rule=.* leave config unset"
        ):
            call(odd_case(), prepared(), config="vendor", **rule)


def test_aiter_runs_other_kernels_where_its_fused_moe_is_refused(monkeypatch):
    """aiter's own row is one that only its `fused_moe` can run; where what it resolves must not run, neither may the row."""
    first, second = "flydsl_moe1_afp4_wfp4_bf16_t32x64x256", "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_reduce"
    own = config.row(64, 256, 256, 6, 3, block_m=32, kernelName1=first, kernelName2=second, us=1.0)
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])
    problem = odd_case().problem(activation_quant="mxfp4", **HALF_UP)
    with installed("v0.1.13", flydsl=True):
        assert AITER.configs(problem, "cpu")[0]["pipeline"] == "vendor"
        monkeypatch.setattr(kernels, "rounds_by_own_rule", lambda metadata: True)
        chosen = AITER.configs(problem, "cpu")[0]
        assert (chosen["pipeline"], chosen["kernel_name1"], chosen["block_m"]) == ("two_stage", first, 32)


@pytest.mark.parametrize(
    ("experts", "intermediate", "top_k", "us"), [(257, 512, 9, "206.9"), (32, 2048, 8, "239"), (257, 256, 9, "111.8")]
)
@pytest.mark.parametrize("profile", ["v0.1.16.post6", "v0.1.18", "v0.1.19.post2", "v0.1.20.post1", "HEAD"])
def test_the_default_is_aiters_fused_moe_where_its_newer_pipeline_has_the_best_figure(
    profile, experts, intermediate, top_k, us, monkeypatch
):
    own = config.row(
        128, 7168, intermediate, experts, top_k, block_m=16, kernelName1="flydsl_mxmoe_g1_a4w4_16x256x256_f16in_nt",
        kernelName2="flydsl_mxmoe_g2_a4w4_16x256x256_atomic", us=1.0,
    )  # fmt: skip
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])
    problem = MoeProblem(100, top_k, experts, 7168, intermediate, activation_quant="mxfp4", **RCEIL)
    with installed(profile, flydsl=True) as sim:
        chosen = AITER.configs(problem, "cpu")[0]
        assert chosen["pipeline"] == "vendor"
        assert f"ROCm/aiter pull requests 3470, 3788, 3832, MI355X: {us} us a layer" in chosen.source
        assert sim.aiter._version.__version__ in chosen.source


def test_the_default_names_aiters_own_row_where_that_is_the_figure_there_is(monkeypatch):
    """A shape of which the shipped table knows figures of other kernels only."""
    first, second = "flydsl_moe1_afp4_wfp4_bf16_t32x128x256", "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic"
    own = config.row(128, 7168, 512, 257, 9, block_m=32, kernelName1=first, kernelName2=second, us=143.25)
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])
    problem = MoeProblem(100, 9, 257, 7168, 512, activation_quant="mxfp4", **RCEIL)
    with installed("v0.1.18", flydsl=True):
        chosen = AITER.configs(problem, "cpu")[0]
        assert (chosen["pipeline"], chosen["block_m"]) == ("two_stage", 0)
        assert (
            "tuned_fmoe.csv line 2; aiter's own row, which it chooses itself: 143.25 us for both products"
            in chosen.source
        )
    other = dataclasses.replace(problem, experts=256)
    with installed("v0.1.18", flydsl=True):
        assert "no row for the shape: no time recorded" in AITER.configs(other, "cpu")[0].source


@pytest.mark.parametrize(
    ("profile", "flydsl"), [("v0.1.15", True), ("v0.1.16", False), ("v0.1.16", True), ("HEAD", True)]
)
def test_the_default_names_aiters_own_row_only_where_aiter_runs_it(profile, flydsl, monkeypatch):
    """From v0.1.16 on FlyDSL's kernels run in the place of a row of CK's: its time is not theirs."""
    names_of_row = {f"kernelName{n}": names.ck_name_for(n, 64) for n in (1, 2)}
    own = config.row(64, 256, 256, 6, 3, block_m=64, us=77.5, **names_of_row)
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])
    rule = HALF_UP if profile == "v0.1.15" else RCEIL
    with installed(profile, flydsl=flydsl) as sim:
        source = AITER.configs(odd_case().problem(activation_quant="mxfp4", **rule), "cpu")[0].source
        check(**rule)
        if flydsl and profile != "v0.1.15":
            assert "aiter's own choice, which is not its row (tuned_fmoe.csv line 2): no time recorded" in source
            assert any(name.startswith("flydsl_moe1") for name in sim.calls)
        else:
            assert "tuned_fmoe.csv line 2; aiter's own row, which it chooses itself: 77.5 us" in source


def native_row(monkeypatch):
    """aiter's own table names the newer pipeline's kernels for the odd case."""
    names_of_row = {f"kernelName{n}": f"flydsl_mxmoe_g{n}_a4w4_32x256x256" for n in (1, 2)}
    own = config.row(64, 256, 256, 6, 3, block_m=32, us=1.0, **names_of_row)
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])


@pytest.mark.parametrize(
    ("profile", "flydsl", "told"),
    [
        ("v0.1.18", False, "native kernels need FlyDSL, .*: install the flydsl that it names, or leave config unset"),
        ("HEAD", False, "native kernels need FlyDSL"),
        ("v0.1.13", True, "flydsl_mxmoe_g1_a4w4_32x256x256 is not registered in this aiter: correct the row, or leave"),
        ("v0.1.17", True, "is not registered in this aiter"),
    ],
)
def test_aiter_own_fused_moe_is_refused_where_it_cannot_launch_its_row(profile, flydsl, told, monkeypatch):
    """Its newer kernels without flydsl, or on a release that does not know them: the default goes around them."""
    native_row(monkeypatch)
    rule = HALF_UP if profile == "v0.1.13" else RCEIL
    with installed(profile, flydsl=flydsl) as sim:
        with pytest.raises(ValueError, match=f"its fused_moe would fail .*{told}"):
            call(odd_case(), prepared(), config="vendor", **rule)
        check(**rule)
        assert "fused_moe" not in sim.calls


@pytest.mark.parametrize("switch", [kernels.NATIVE_FP4_VARIABLE, kernels.STAGE2_FP8_VARIABLE])
def test_aiter_own_fused_moe_is_refused_where_a_switch_lets_it_round_slots(switch, monkeypatch):
    """Fewer bits than were asked for, and no row of the table says so."""
    native_row(monkeypatch)
    with installed("HEAD", flydsl=True) as sim:
        problem = odd_case().problem(activation_quant="mxfp4", **RCEIL)
        for value, pipeline in (("0", "vendor"), ("1", "two_stage")):
            monkeypatch.setenv(switch, value)
            assert AITER.configs(problem, "cpu")[0]["pipeline"] == pipeline
        with pytest.raises(
            ValueError, match=rf"may round every slot's result .*{switch}=1 .*: unset {switch}, or leave"
        ):
            call(odd_case(), prepared(), config="vendor", **RCEIL)
        check(**RCEIL)
        assert "fused_moe" not in sim.calls


def test_aiter_stage_2_that_sums_slots_is_refused_where_a_switch_lets_it_round_them(monkeypatch):
    given = row(32, None, "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_reduce")
    with installed("HEAD", flydsl=True):
        check(config=given, **TRITON)
        monkeypatch.setenv(kernels.STAGE2_FP8_VARIABLE, "1")
        check(config=row(32), **TRITON)  # atomic: not concerned
        with pytest.raises(
            NotImplementedError, match=r"may round every slot's result .*: unset AITER_FLYDSL_STAGE2_FP8"
        ):
            call(odd_case(), prepared(), config=given, **TRITON)


def test_aiter_own_fused_moe_without_the_flydsl_of_its_row_is_refused(monkeypatch):
    """From v0.1.18 on it hands the name of a FlyDSL kernel to its assembly; earlier ones drop the row."""
    first, second = "flydsl_moe1_afp4_wfp4_bf16_t32x128x256", "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic"
    own = config.row(64, 256, 256, 6, 3, block_m=32, kernelName1=first, kernelName2=second, us=1.0)
    monkeypatch.setattr(config, "vendor_rows", lambda profile: [own])
    for profile in ("v0.1.18", "HEAD"):
        with installed(profile):
            with pytest.raises(
                ValueError, match=rf"would look for {first} among its kernels in assembly: install the flydsl"
            ):
                call(odd_case(), prepared(), config="vendor", **RCEIL)
            check(**RCEIL)  # the default goes around it
    with installed("v0.1.17"):
        check(config="vendor", **RCEIL)


def _write_rows(path, *rows):
    """A table as aiter's tuner writes it."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, config.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("profile", ["v0.1.11", "v0.1.16", "HEAD"])
def test_aiter_own_fused_moe_with_a_wrong_row_of_the_users_is_refused(profile, tmp_path, monkeypatch):
    """The tuned program's pairing, in a file of the user's: fused_moe runs it, and is wrong; the default runs the nearest right row."""
    names_of_row = {"kernelName1": names.ck_name_for(1, 128), "kernelName2": names.ck_name_for(2, 32)}
    path = _write_rows(tmp_path / "mine.csv", config.row(64, 256, 256, 6, 3, block_m=32, us=1.0, **names_of_row))
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(path))
    rule = TRITON if profile == "v0.1.11" else RCEIL
    with installed(profile):
        with pytest.raises(
            ValueError, match=r"its fused_moe would give wrong numbers .*multiplies 128 rows.*: correct the row"
        ):
            call(odd_case(), prepared(), config="vendor", **rule)
        with pytest.warns(tables.RowReplacedWarning, match="multiplies 128 rows"):
            check(**rule)
        monkeypatch.setattr(kernels, "wrong_anyhow", lambda *_: None)
        jax.clear_caches()
        y = call(odd_case(), prepared(), config="vendor", **rule)
        right = expected(activation_quant="mxfp4", **rule)
        assert not relative_error(np.asarray(y, np.float64), right) < 0.1


@pytest.mark.parametrize("profile", ["v0.1.16.post6", "v0.1.18", "HEAD"])
def test_a_row_of_the_users_that_only_aiters_fused_moe_can_run_is_left_to_it(profile, tmp_path, monkeypatch):
    """As it is, by the rule that it rounds by; by another rule kernels of the two-stage calls stand in, and that is told."""
    names_of_row = {f"kernelName{n}": f"flydsl_mxmoe_g{n}_a4w4_16x256x256" for n in (1, 2)}
    path = _write_rows(tmp_path / "mine.csv", config.row(64, 256, 256, 6, 3, block_m=16, us=9.5, **names_of_row))
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(path))
    problem = odd_case().problem(activation_quant="mxfp4", **RCEIL)
    with installed(profile, flydsl=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chosen = AITER.configs(problem, "cpu")[0]
        assert chosen["pipeline"] == "vendor"
        assert "mine.csv line 2; a row that only aiter's fused_moe can run: 9.5 us for both products" in chosen.source
        with pytest.warns(tables.RowReplacedWarning, match="follows a protocol of its own"):
            chosen = AITER.configs(dataclasses.replace(problem, **TRITON), "cpu")[0]
        assert (chosen["pipeline"], chosen["kernel_name1"]) == ("two_stage", names.ck_name_for(1, 32))


def test_aiters_own_choice_is_asked_again_when_its_settings_change(monkeypatch):
    """With the same block_m, other kernels are another plan."""
    with installed("v0.1.17", flydsl=True) as sim:
        for force, flydsl in (("1", True), ("0", False)):
            monkeypatch.setenv("AITER_FLYDSL_FORCE", force)
            sim.module("aiter.fused_moe").get_2stage_cfgs.cache_clear()
            jax.clear_caches()
            sim.calls.clear()
            check(config="own_choice", **TRITON)
            assert any(name.startswith("flydsl") for name in sim.calls) == flydsl


def test_aiter_own_fused_moe_needs_an_expert_for_every_slot():
    case = random_case(tokens=3, experts=2, top_k=3, hidden=64, intermediate=32, dtype="bfloat16")
    with installed("v0.1.16"):
        weights = prepare(case.weights, "aiter")
        with pytest.raises(ValueError, match="2 experts for 3 slots a token"):
            call(case, weights, config="vendor", **RCEIL)
        y = call(case, weights, **RCEIL)
        right = case.expected(activation_quant="mxfp4", **RCEIL)
        assert relative_error(np.asarray(y, np.float64), right) <= TOLERANCE


def metadata(**fields):
    """What `get_2stage_cfgs` might return: CK kernels for block_m 32, unless said otherwise."""

    def stage(name):
        def function():
            raise AssertionError("only looked at")

        function.__name__ = name
        return function

    def bound(function, kernel):
        return functools.partial(stage(function), kernelName=kernel)

    fields = {
        "stage1": ("ck_moe_stage1", names.ck_name_for(1, 32)),
        "stage2": ("ck_moe_stage2_fwd", names.ck_name_for(2, 32)),
        "block_m": 32,
        "ksplit": 0,
        **fields,
    }
    stages = {name: bound(*fields[name]) for name in ("stage1", "stage2")}
    return types.SimpleNamespace(**{**fields, **stages})


REDUCE = "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_reduce"
FULL = release.Release(flydsl=True, flydsl_stages=(1, 2), flydsl_sort_block_m=True, flydsl_t16=True, split_k="choice")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"run_1stage": True}, "a one-stage kernel"),
        ({"fuse_quant": "fp4"}, "quantization inside stage 1, by FlyDSL's own rule: leave config unset"),
        ({"fuse_fp4_quant": True}, "quantization inside stage 1, by FlyDSL's own rule: leave config unset"),
        ({"output_aux": True}, "the auxiliary sort"),
        ({"prequant": False}, "the auxiliary sort"),
        ({"skip_inter_quant": True}, "a bfloat16 second stage"),
        ({"flat": True}, "flat sorting"),
        ({"route_bucket": "x"}, "a route bucket"),
        ({"block_m": 48}, "block_m 48"),
        ({"block_m": 64}, "multiplies 32 rows"),
        ({"stage1": ("asm_stage1", "flydsl_moe1_afp4_wfp4_bf16_t32x64x256")}, "asm_stage1"),
        ({"stage1": ("ck_moe_stage1", float("nan"))}, "names no kernel for stage 1"),
        ({"stage1": ("_flydsl_stage1_wrapper", "flydsl_moe1_afp4_wfp4_bf16_t32x64x256_gui")}, "gate and up rows in turn"),
        ({"stage1": ("_flydsl_stage1_wrapper", "flydsl_moe1_afp8_wfp4_bf16_t32x64x256")}, "fp8 by fp4"),
        ({"stage1": ("_flydsl_stage1_wrapper", "flydsl_moe1_afp4_wfp4_bf16_t16x64x256"), "block_m": 16}, "needs 32 or more"),
        ({"stage1": ("_flydsl_stage1_wrapper", "flydsl_moe1_afp4_wfp4_bf16_t32x64x256_sbm64"), "block_m": 64}, "sorted by 32"),
        ({"fuse_quant": "fp4", "output_aux": True}, "the auxiliary sort"),
        ({"stage2": ("_flydsl_stage2_wrapper", "flydsl_moe1_afp4_wfp4_bf16_t32x64x256")}, "kernel of stage 1"),
        ({"stage2": ("_flydsl_stage2_wrapper", "flydsl_moe2_afp4_wfp4_bf16_t16x128x128_atomic")}, "sorted by 16"),
        ({"stage2": ("_flydsl_stage2_wrapper", "flydsl_moe2_layout_afp4_wfp4_bf16_t32x128x256_atomic")}, "protocol of its own"),
        ({"stage2": ("_flydsl_stage2_wrapper", REDUCE)}, "slots that were skipped"),
        ({"stage1": ("ck_moe_stage1", names.ck_name_for(1, 32).replace("Shuffled", ""))}, "not shuffled"),
    ],
)  # fmt: skip
def test_what_aiter_resolves_is_refused_where_it_would_be_wrong(fields, told):
    assert kernels.unsupported(metadata(), 256, FULL) is None
    sentence = kernels.unsupported(metadata(**fields), 256, FULL)
    assert told in sentence


@pytest.mark.parametrize(
    ("change", "stage2", "told"),
    [
        ({"flydsl": False}, "flydsl_moe2_afp4_wfp4_bf16_t32x128x256_atomic", "needs FlyDSL"),
        ({"flydsl_sort_block_m": False}, "flydsl_moe2_afp4_wfp4_bf16_t16x128x256_atomic_sbm32", "sorted by 16"),
        ({"flydsl_t16": False}, "flydsl_moe2_afp4_wfp4_bf16_t32x128x128_atomic", "tile_k 128"),
    ],
)
def test_what_aiter_resolves_is_judged_by_the_release(change, stage2, told):
    resolved = metadata(stage2=("_flydsl_stage2_wrapper", stage2))
    assert kernels.unsupported(resolved, 256, FULL) is None
    assert told in kernels.unsupported(resolved, 256, dataclasses.replace(FULL, **change))


def test_aiter_split_k_in_the_wrong_order_is_refused():
    resolved = metadata(stage1=("cktile_moe_stage1", ""), stage2=("cktile_moe_stage2", ""), block_m=16, ksplit=2)
    assert kernels.unsupported(resolved, 256, FULL) is None
    assert "in another order" in kernels.unsupported(resolved, 256, dataclasses.replace(FULL, split_k="interleaved"))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"activation": "gelu"}, "has activation 'silu' only, found 'gelu'"),
        ({"has_gate_up_bias": True}, "adds no biases with activation 'silu'"),
        ({"has_down_bias": True}, "adds no biases with activation 'silu'"),
        (
            {"apply_router_weight_on_input": True},
            "multiplies by the router weight after stage 2, and apply_router_weight_on_input=True was asked for",
        ),
        (
            {"deterministic": True},
            "adds in bfloat16 with atomics, in no fixed order, and deterministic=True was asked for",
        ),
        (
            {"dtype": "float32"},
            "takes and gives bfloat16, found float32 to bfloat16: cast x, leave preferred_element_type unset",
        ),
        (
            {"out_dtype": "float32"},
            "takes and gives bfloat16, found bfloat16 to float32: cast x, leave preferred_element_type unset",
        ),
        (
            {"tokens": 2**24},
            "packs the number of a token into 24 bits, found 16777216 tokens: call it on parts of x",
        ),
        ({"top_k": 256}, "takes at most 127 slots a token, found 256"),
        ({"activation_quant": "fp8"}, "cannot quantize activations to 'fp8', only to 'mxfp4'"),
        (
            {"rounding": "nearest_even"},
            "quantizes activations by scale_rule='even', rounding='half_away' or scale_rule='half_up', rounding='nearest_even' with aiter "
            "0.1.13, found scale_rule='even', rounding='nearest_even': pass what it has",
        ),
    ],
)
def test_why_not_aiter(change, sentence):
    with installed("v0.1.13", build=""):
        assert AITER.why_not(PROBLEM, "cpu") is None
        assert AITER.why_not(dataclasses.replace(PROBLEM, tokens=2**24 - 1), "cpu") is None
        assert AITER.why_not(dataclasses.replace(PROBLEM, **change), "cpu") == sentence


def test_why_not_aiter_without_a_rocm_device():
    assert AITER.why_not(None, "cpu") == "needs a ROCm device (gfx950), found cpu"
    assert AITER.why_not(PROBLEM, "cuda") == "needs a ROCm device (gfx950), found cuda"


def test_only_a_simulated_aiter_passes_on_a_cpu():
    with installed("v0.1.13", build="") as sim:
        assert AITER.why_not(PROBLEM, "cpu") is None
        assert AITER.why_not(PROBLEM, "cuda") == "needs a ROCm device (gfx950), found cuda"
        for claim in (False, 1, "yes"):
            sim.aiter.__simulated__ = claim
            assert AITER.why_not(PROBLEM, "cpu") == "needs a ROCm device (gfx950), found cpu"


def test_why_not_aiter_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", None)
    monkeypatch.delitem(sys.modules, "aiter")
    if AITER.missing() is not None:  # or else this environment has one
        assert (
            AITER.missing() == "is not installed: install amd-aiter v0.1.9 or later for this ROCm, see docs/mi355x.md"
        )
        assert AITER.why_not(None, "rocm") == AITER.missing()


def test_why_not_aiter_with_a_torch_for_cpus(monkeypatch):
    with installed("v0.1.13", build="") as sim:
        del sim.aiter.__simulated__
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.version, "cuda", None)
        sentence = AITER.why_not(None, "rocm")
    assert sentence.startswith(f"needs torch built for ROCm, found torch {torch.__version__} built for CPUs")
    assert sentence.endswith("install torch's ROCm wheel")


def test_why_not_aiter_on_another_architecture(monkeypatch):
    with installed("v0.1.13", build="") as sim:
        del sim.aiter.__simulated__
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(device, "arch", lambda platform: "gfx942")
        assert AITER.why_not(None, "rocm") == "needs gfx950 (MI350X, MI355X), found gfx942"


@pytest.mark.parametrize(("dtype", "version"), [("float4_e2m1fn_x2", "2.8"), ("float8_e8m0fnu", "2.7")])
def test_why_not_aiter_with_a_torch_without_float4(monkeypatch, dtype, version):
    with installed("v0.1.13", build=""):
        release.load()
        monkeypatch.delattr(torch, dtype)
        sentence = AITER.why_not(None, "cpu")
    assert sentence.startswith(f"needs torch.{dtype}, which torch {torch.__version__} does not have")
    assert sentence.endswith(f"install torch {version} or later for ROCm")


def _maps(*paths):
    lines = [
        f"7f2a{i:04x}0000-7f2a{i:04x}8000 r-xp 00001000 08:01 {1000 + i}    {path}" for i, path in enumerate(paths)
    ]
    return "\n".join(
        ["7f2a00000000-7f2a00001000 rw-p 00000000 00:00 0 ", *lines, "7ffc0000-7ffd0000 rw-p 0 00:00 0    [stack]"]
    )


SYSTEM, WHEEL = "/opt/rocm-7.0.2/lib/libamdhip64.so.7.0.70002", "/venv/lib/torch libs/libamdhip64.so"


def test_two_hip_runtimes_are_found_in_a_memory_map():
    assert device.hip_runtimes(_maps("/usr/lib/libc.so.6")) == ()
    assert device.hip_runtimes(_maps(SYSTEM, SYSTEM, "/usr/lib/libamdhip64_extra.txt")) == (SYSTEM,)
    assert device.hip_runtimes(_maps(SYSTEM, WHEEL, SYSTEM)) == (SYSTEM, WHEEL)
    assert device.hip_runtime_conflict(_maps(SYSTEM)) is None


def test_why_not_aiter_with_two_hip_runtimes(monkeypatch):
    """Both paths and the remedy; also seen in this process's own map, which has none."""
    assert device.hip_runtimes() == ()
    monkeypatch.setattr(device, "hip_runtimes", lambda maps=None: (SYSTEM, WHEEL))
    with installed("v0.1.13", build=""):
        sentence = AITER.why_not(None, "cpu")
    assert sentence.startswith(f"needs one HIP runtime in the process, found 2: {SYSTEM}, {WHEEL}.")
    assert "LD_LIBRARY_PATH" in sentence


def test_why_not_an_aiter_that_lacks_a_function():
    with installed("v0.1.14", build="") as sim:
        del sim.module("aiter.fused_moe").get_padded_M
        sentence = AITER.why_not(None, "cpu")
    assert sentence.startswith("needs aiter.fused_moe.get_padded_M, which aiter 0.1.14 does not have")
    assert "install a release from v0.1.9 on" in sentence


def test_why_not_an_aiter_whose_parameters_are_others():
    with installed("v0.1.14", build="") as sim:
        sim.module("aiter.fused_moe").get_2stage_cfgs = lambda token, hidden: None
        sentence = AITER.why_not(None, "cpu")
    assert "found (token, hidden) in aiter 0.1.14" in sentence


def test_why_not_an_aiter_that_cannot_be_imported(monkeypatch):
    with installed("v0.1.14", build="") as sim:
        monkeypatch.setitem(sim.tree, "aiter.fused_moe", lambda *_: 1 / 0)
        sentence = AITER.why_not(None, "cpu")
    assert sentence == (
        "cannot import aiter.fused_moe (ZeroDivisionError: division by zero): repair or reinstall amd-aiter, and flydsl in the version "
        "that it names"
    )


def test_presets_are_those_of_aiter():
    with (
        installed("v0.1.13", build=""),
        pytest.raises(ValueError, match=r"config='seed' given.*'seed_dispatch', 'seed_block_m', 'vendor'"),
    ):
        call(odd_case(), prepared(), config="seed", **TRITON)


def test_aiter_is_chosen_for_its_own_weights():
    """Without a name: the layout says it; and no other implementation reads it."""
    case = odd_case()
    arrays = jnp.asarray(case.x), prepared(), jnp.asarray(case.topk_weights), jnp.asarray(case.topk_ids)
    with installed("v0.1.13") as sim:
        mxfp4_moe(*arrays, activation_quant="mxfp4", **TRITON).block_until_ready()
        assert "moe_sorting_fwd" in sim.calls
    with pytest.raises(NotImplementedError, match="aiter  needs a ROCm device"):
        mxfp4_moe(*arrays, activation_quant="mxfp4", **TRITON)
