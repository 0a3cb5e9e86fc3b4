"""Rows reach aiter's table on every release, are taken out again, and what aiter makes of them is compared."""

import contextlib
import csv
import dataclasses
import os
import pathlib
import warnings

import pytest

pytest.importorskip("torch")
import aiter_sim
from aiter_sim import config as sim_config

from jax_mxfp4_moe import workloads
from jax_mxfp4_moe.implementations.aiter import inject, names, release, tables
from jax_mxfp4_moe.implementations.aiter.release import FLYDSL_FORCE_VARIABLE, FLYDSL_T16
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import table

CASES = [pytest.param(*case, id=f"{case[0]}{'-flydsl' if case[1] else ''}") for case in aiter_sim.CASES]
PLAIN = {
    "block_m": 64, "ksplit": 0, "kernel_name1": names.ck_name_for(1, 64), "kernel_name2": names.ck_name_for(2, 64),
    "dispatch_policy": 1, "pipeline": "two_stage",
}  # fmt: skip
OWN_CHOICE = {**PLAIN, "block_m": 0, "kernel_name1": "", "kernel_name2": "", "dispatch_policy": 0}
SMALL = MoeProblem(64, 4, 32, 512, 256, activation_quant="mxfp4")
TUNED = {name: dataclasses.replace(workloads.get(name).problem) for name in workloads.TUNED_WORKLOADS}
E257 = TUNED["r257i256_m128"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no variable of aiter's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(table.USER_TABLES_VARIABLE, raising=False)
    for name in [name for name in os.environ if name.startswith("AITER_")]:
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "jax_mxfp4_moe"


@contextlib.contextmanager
def installed(profile, flydsl=False):
    with aiter_sim.installed(profile, flydsl=flydsl) as sim:
        yield sim, release.load()


def config(source="aiter.csv line 2", **changes):
    return Config.of({**PLAIN, **changes}, source)


def resolved(metadata):
    parts = [(stage.func.__name__, stage.keywords.get("kernelName")) for stage in (metadata.stage1, metadata.stage2)]
    return int(metadata.block_m), *parts


def own_answer(problem, found):
    """What aiter resolves when nobody asks for a row."""
    return resolved(inject.resolve(problem, Config.of(OWN_CHOICE), found))


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- every release ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "flydsl"), CASES)
def test_aiter_honours_a_row_given_by_file_and_in_memory(profile, flydsl, cache):
    with installed(profile, flydsl) as (_, found):
        before = None
        for other in (
            {},
            {"block_m": 32, "kernel_name1": names.ck_name_for(1, 32), "kernel_name2": names.ck_name_for(2, 32)},
        ):
            asked = config("argument", **other)
            block_m, first, second = resolved(inject.resolve(SMALL, asked, found))
            assert (block_m, first[1], second[1]) == (asked["block_m"], asked["kernel_name1"], asked["kernel_name2"])
            here = own_answer(SMALL, found)
            assert before in (None, here)  # ours is out of the table again
            before = here
        assert len(files(cache)) == (profile != "wheel")


@pytest.mark.parametrize(("profile", "flydsl"), CASES)
@pytest.mark.parametrize("preset", [None, *tables.SEEDS])
@pytest.mark.filterwarnings("ignore::jax_mxfp4_moe.implementations.aiter.tables.RowReplacedWarning")
def test_aiter_resolves_the_tuned_shapes_to_their_rows(profile, flydsl, preset):
    with installed(profile, flydsl) as (_, found), warnings.catch_warnings():
        warnings.simplefilter("error", inject.RowNotHonouredWarning)
        for problem in TUNED.values():
            row = tables.select(problem, found, preset)
            if row is not None and row.pipeline != "vendor":
                metadata = inject.resolve(problem, row.config(), found)
                assert inject.difference(row, metadata) is None


@pytest.mark.parametrize(("profile", "flydsl"), CASES)
def test_aiters_table_is_the_same_after_a_row_was_asked_for(profile, flydsl):
    """aiter's fused_moe goes on with its own tuning, and other programs in the process do."""
    with installed(profile, flydsl) as (sim, found):
        before = own_answer(E257, found)
        kept = _copy(sim.module("aiter.fused_moe").cfg_2stages)
        inject.resolve(E257, config("argument"), found)
        inject.resolve(SMALL, config("argument"), found)
        assert _copy(sim.module("aiter.fused_moe").cfg_2stages) == kept
        assert own_answer(E257, found) == before


def _copy(loaded):
    return [dict(part) for part in (loaded if isinstance(loaded, tuple) else (loaded,))]


@pytest.mark.parametrize(
    ("profile", "flydsl"), [("v0.1.11", False), ("v0.1.13", True), ("v0.1.19", True), ("HEAD", False)]
)
def test_aiter_has_its_own_row_again_after_reading_our_file(profile, flydsl):
    """The first row asked for is one of a shape that aiter's table has: the file holds ours."""
    with installed(profile, flydsl) as (_, found):
        expected = own_answer(E257, found)
    with installed(profile, flydsl) as (_, found):
        assert resolved(inject.resolve(E257, config("argument"), found))[0] == 64
        assert tables.CONFIG_VARIABLE in os.environ
        assert own_answer(E257, found) == expected


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "flydsl"), [("v0.1.9", False), ("v0.1.19", True)])
def test_the_file_for_aiter_holds_its_own_rows_and_our_defaults(profile, flydsl, cache):
    """v0.1.9 has no rows for the tuned shapes, v0.1.19 has; neither gets the one that is asked for."""
    with installed(profile, flydsl) as (_, found):
        own = {(r.token, r.expert): r for r in tables.own_rows()}
        inject.resolve(E257, config("argument"), found)
        path = pathlib.Path(os.environ[tables.CONFIG_VARIABLE])
        assert files(cache) == [path.name]
        assert path.name.startswith("jax_mxfp4_moe-")
        rows = {(r.token, r.expert): r for r in tables.read(path)}
        assert rows.keys() == {(16, 257), (128, 257), (512, 257)}
        assert PLAIN["kernel_name1"] not in {r.kernel_name1 for r in rows.values()}
        if own:
            names_of = {key: (r.kernel_name1, r.kernel_name2, r.us) for key, r in own.items()}
            assert {key: (r.kernel_name1, r.kernel_name2, r.us) for key, r in rows.items()} == names_of
        else:
            assert all(tables.verdict(r, found) is None for r in rows.values())
            assert own_answer(E257, found)[1][1] == rows[128, 257].kernel_name1
        inject.resolve(SMALL, config("argument"), found)
        assert files(cache) == [path.name]


def test_a_child_process_does_not_inherit_the_row_that_was_asked_for():
    """It inherits the variable, and its fused_moe resolves what it would without us."""
    split = {**PLAIN, "block_m": 16, "ksplit": 2, "kernel_name1": "", "kernel_name2": ""}
    problem = dataclasses.replace(TUNED["r257i256_m16"], activation_quant=None)
    with installed("v0.1.14") as (_, found):
        expected = own_answer(TUNED["r257i256_m16"], found)
    with installed("v0.1.14") as (_, found):
        assert inject.resolve(problem, Config.of(split, "argument"), found).ksplit == 2
        inherited = os.environ[tables.CONFIG_VARIABLE]
    with aiter_sim.installed("v0.1.14"):
        os.environ[tables.CONFIG_VARIABLE] = inherited
        child = release.load()
        assert own_answer(TUNED["r257i256_m16"], child) == expected


def test_aiters_own_rows_come_back_whole(monkeypatch):
    """With every field they had; the entry of another activation, by which newer releases look too, stays as well."""
    fields = {"kernelName1": PLAIN["kernel_name1"], "kernelName2": PLAIN["kernel_name2"], "us": 1.5}
    one_stage = {"block_m": 128, "run_1stage": 1, "xbf16": 1, "flat": 1}
    other = {"block_m": 32, "act_type": "ActivationType.Swiglu"}
    own = [
        sim_config.row(128, 7168, 256, 257, 9, **fields, **one_stage),
        sim_config.row(64, 512, 256, 32, 4, **fields, **other),
    ]
    monkeypatch.setattr(sim_config, "COLUMNS", (*sim_config.COLUMNS, "xbf16", "flat"))
    monkeypatch.setattr(sim_config, "vendor_rows", lambda profile: own)
    with installed("v0.1.17") as (sim, found):
        for problem in (E257, SMALL):
            assert resolved(inject.resolve(problem, config("argument"), found))[0] == 64
        primary, ignoring = sim.module("aiter.fused_moe").cfg_2stages
        _, (_, text_key), (_, any_key) = inject._places(tables.blank(E257), found)
        for entry in (primary[text_key], ignoring[any_key]):
            assert {name: entry[name] for name in one_stage} == one_stage
        _, (_, text_key), (_, any_key) = inject._places(tables.blank(SMALL), found)
        assert text_key not in primary
        assert ignoring[any_key]["block_m"] == 32


def test_two_processes_write_the_same_file_for_aiter(cache):
    for _ in range(2):
        with installed("v0.1.12") as (_, found):
            inject.resolve(SMALL, config("argument"), found)
    assert len(files(cache)) == 1
    with installed("v0.1.12") as (_, found):
        inject.resolve(SMALL, config("argument", dispatch_policy=2), found)
        inject.resolve(E257, config("argument"), found)
    assert len(files(cache)) == 1  # aiter has no column for the policy


def test_rows_of_other_forms_survive_in_the_file_for_aiter(tmp_path, cache):
    own = [
        {**dict.fromkeys(tables.NEEDED_COLUMNS, "1"), "us": "3.5", "xbf16": "1", "_tag": "x"},
        {**dict.fromkeys(tables.NEEDED_COLUMNS, "2"), "us": "4.5"},
    ]
    path = inject.write_table(own, [tables.blank(SMALL, 64)], 304)
    first, *others = csv.DictReader(path.open(newline=""))
    assert (first["token"], first["cu_num"], first["xbf16"], first["_tag"]) == ("64", "304", "0", "")
    assert first["kernelName1"] == names.PLACEHOLDER  # an empty field would be NaN
    assert [(r["token"], r["us"], r["xbf16"], r["_tag"]) for r in others] == [
        ("1", "3.5", "1", "x"),
        ("2", "4.5", "0", ""),
    ]


def test_a_failed_write_leaves_no_file_for_aiter(cache, monkeypatch):
    def fail(*arguments):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with installed("v0.1.12") as (_, found):
        with pytest.warns(
            UserWarning, match=r"no table can be written to .*jax_mxfp4_moe \(no space\); .* Set XDG_CACHE_HOME"
        ):
            metadata = inject.resolve(SMALL, config("argument"), found)
        assert resolved(metadata)[0] == 64
        assert tables.CONFIG_VARIABLE not in os.environ
    assert not [name for name in files(cache) if not name.startswith(".")]


def test_the_users_aiter_file_is_read_and_left_alone(tmp_path, cache):
    """With AITER_CONFIG_FMOE set, that file is aiter's table; rows for other shapes go beside it, in memory."""
    path = tmp_path / "mine.csv"
    columns = [*tables.NEEDED_COLUMNS, "us", "run_1stage"]
    mine = dataclasses.replace(
        tables.blank(E257, 128),
        block_m=128,
        kernel_name1=names.ck_name_for(1, 128),
        kernel_name2=names.ck_name_for(2, 128),
    )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(mine.csv())
    before = path.read_bytes()
    for profile in ("wheel", "v0.1.11", "v0.1.15", "HEAD"):
        with aiter_sim.installed(profile):
            os.environ[tables.CONFIG_VARIABLE] = str(path)
            found = release.load()
            assert tables.select(E257, found).kernel_name1 == mine.kernel_name1
            assert resolved(inject.resolve(E257, tables.select(E257, found).config(), found))[0] == 128
            assert resolved(inject.resolve(SMALL, config("argument"), found))[0] == 64
            assert own_answer(E257, found)[0] == 128
            assert os.environ[tables.CONFIG_VARIABLE] == str(path)
        assert path.read_bytes() == before
    assert files(cache) == []


def _name_two_files(folder, *tokens):
    """Two files of the user with a row each for SMALL's sizes and these tokens; aiter is told of both."""
    paths = [folder / "a.csv", folder / "b.csv"]
    for path, token, block_m in zip(paths, tokens, (64, 128), strict=True):
        kernel_names = {f"kernel_name{stage}": names.ck_name_for(stage, block_m) for stage in (1, 2)}
        fields = dataclasses.replace(
            tables.blank(SMALL, token), block_m=block_m, us=float(block_m), **kernel_names
        ).csv()
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerow(fields)
    os.environ[tables.CONFIG_VARIABLE] = os.pathsep.join(map(str, paths))
    return paths


@pytest.mark.parametrize("profile", ["v0.1.12", "v0.1.17", "HEAD"])
def test_files_that_aiter_would_rewrite_are_kept_from_it(profile, tmp_path):
    with installed(profile) as (sim, found):
        paths = _name_two_files(tmp_path, 64, 64)
        before = [path.read_bytes() for path in paths]
        told = (
            r"AITER_CONFIG_FMOE with 2 files given, where .*a.csv line 2 and .*b.csv line 2 are for one shape; expected files without a "
            r"common shape, .*Merge them into one file"
        )
        for asked in (
            lambda: tables.select(SMALL, found),
            lambda: tables.select(SMALL, found, "own_choice"),
            lambda: inject.resolve(SMALL, config("argument"), found),
            lambda: own_answer(SMALL, found),
        ):
            with pytest.raises(ValueError, match=told):
                asked()
        assert [path.read_bytes() for path in paths] == before
        with pytest.raises(RuntimeError, match="duplicate"):  # what asking would have done
            sim.config_path()
        assert [path.read_bytes() for path in paths] != before


@pytest.mark.parametrize(("profile", "tokens"), [("v0.1.11", (64, 64)), ("v0.1.12", (64, 128)), ("HEAD", (64, 128))])
def test_files_that_aiter_merges_in_peace_are_used(profile, tokens, tmp_path):
    with installed(profile) as (_, found):
        paths = _name_two_files(tmp_path, *tokens)
        before = [path.read_bytes() for path in paths]
        row = tables.select(SMALL, found)
        assert row.table == "a.csv line 2"
        assert resolved(inject.resolve(SMALL, row.config(), found))[0] == 64
        assert own_answer(SMALL, found)[0] == 64
        assert [path.read_bytes() for path in paths] == before


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "flydsl"), CASES)
def test_aiter_that_was_already_used_is_not_given_a_file(profile, flydsl, cache):
    with installed(profile, flydsl) as (sim, found):
        own_answer(E257, found)
        assert sim.module("aiter.fused_moe").cfg_2stages is not None
        assert resolved(inject.resolve(SMALL, config("argument"), found))[0] == 64
        assert tables.CONFIG_VARIABLE not in os.environ
    assert files(cache) == []


@pytest.mark.parametrize(
    ("profile", "places"),
    [("v0.1.11", ["str"]), ("v0.1.14", ["enum", "str", "any"]), ("v0.1.17", ["enum", "str", "any"]), ("v0.1.18", ["enum", "str", "any"])],
)  # fmt: skip
def test_keys_of_aiters_table(profile, places):
    with installed(profile) as (sim, found):
        silu = sim.aiter.ActivationType.Silu
        forms = {"enum": (0, silu), "str": (0, "ActivationType.Silu"), "any": (1, "__ignore__")}
        keys = inject._places(tables.blank(SMALL), found)
        at = 7 if found.key_has_gfx else 6
        assert [(n, key[at]) for n, key in keys] == [forms[name] for name in places]
        assert all(len(key) == found.key_length for _, key in keys)
        assert all(key[:2] == (("gfx950", 256) if found.key_has_gfx else (256, 64)) for _, key in keys)


def test_an_aiter_row_whose_name_is_nan_can_be_replaced(tmp_path):
    """Such a row of the user's makes aiter itself fail."""
    path = tmp_path / "mine.csv"
    fields = {**tables.blank(SMALL, 64).csv(), "block_m": "32", "kernelName1": "", "kernelName2": ""}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerow(fields)
    with installed("v0.1.13"):
        os.environ[tables.CONFIG_VARIABLE] = str(path)
        found = release.load()
        with pytest.raises((TypeError, AttributeError)):
            own_answer(SMALL, found)
    with installed("v0.1.13"):
        os.environ[tables.CONFIG_VARIABLE] = str(path)
        found = release.load()
        with pytest.warns(
            tables.RowReplacedWarning, match="stage 1 has no kernel name, and aiter reads an empty field as NaN"
        ):
            row = tables.select(SMALL, found)
        assert resolved(inject.resolve(SMALL, row.config(), found))[1][1] == names.ck_name_for(1, 32)


# --- what aiter makes of it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["v0.1.16", "v0.1.18", "HEAD"])
def test_newer_aiters_put_flydsl_in_the_place_of_ck_and_are_kept_from_it(profile):
    with installed(profile, True) as (_, found):
        os.environ[FLYDSL_FORCE_VARIABLE] = "1"  # the user's own wish
        with pytest.raises(
            NotImplementedError,
            match=r"was given .* and resolved block_m 32 for 64, stage 1 flydsl_moe1.* Unset AITER_FLYDSL_FORCE\.",
        ):
            inject.resolve(SMALL, config("argument"), found)
        with pytest.warns(inject.RowNotHonouredWarning, match="resolved block_m 32 for 64"):
            inject.resolve(SMALL, config(), found)
        with pytest.raises(NotImplementedError, match="stage 1 _flydsl_stage1_wrapper for cktile_moe_stage1"):
            inject.resolve(
                SMALL, config(ksplit=2, block_m=16, kernel_name1="", kernel_name2=""), found
            )  # another precision
        del os.environ[FLYDSL_FORCE_VARIABLE]
        assert resolved(inject.resolve(SMALL, config("argument"), found))[0] == 64
        assert FLYDSL_FORCE_VARIABLE not in os.environ
        assert own_answer(SMALL, found)[1][0] == "_flydsl_stage1_wrapper"


def test_an_aiter_that_bypasses_its_table_is_told():
    with installed("v0.1.11") as (_, found):
        os.environ["AITER_BYPASS_TUNE_CONFIG"] = "1"
        with pytest.raises(NotImplementedError, match=r"resolved .*Unset AITER_BYPASS_TUNE_CONFIG\."):
            inject.resolve(SMALL, config("aiter.seed_dispatch.csv line 3"), found)
        with pytest.warns(inject.RowNotHonouredWarning):
            inject.resolve(SMALL, config("aiter.csv line 3"), found)


def test_aiters_own_choice_never_changes_the_precision():
    """Its heuristic splits K, with bfloat16 activations, for a few tokens and few columns."""
    problem = dataclasses.replace(SMALL, tokens=1, top_k=1)
    with installed("v0.1.11") as (sim, found):
        blank = tables.blank(problem)
        import torch

        fp4 = sim.aiter.dtypes.fp4x2
        per_1x32, silu = sim.aiter.QuantType.per_1x32, sim.aiter.ActivationType.Silu
        raw = sim.module("aiter.fused_moe").get_2stage_cfgs(
            blank.token, 512, 256, 32, 1, torch.bfloat16, fp4, fp4, per_1x32, True, silu, False,
            0, 0,
        )  # fmt: skip
        assert raw.stage1.func.__name__ == "cktile_moe_stage1"
        assert own_answer(problem, found)[1] == ("ck_moe_stage1", names.ck_name_for(1, 32))
        kept = inject.resolve(
            dataclasses.replace(problem, activation_quant=None), Config.of({**OWN_CHOICE, "ksplit": 2}), found
        )
        assert (kept.stage1.func.__name__, kept.ksplit) == ("cktile_moe_stage1", 2)


def test_a_wrong_aiter_config_is_refused_with_the_nearest_right_one():
    with installed("v0.1.11") as (_, found):
        with pytest.raises(
            ValueError, match=r"multiplies 128 rows .* The nearest that may run: block_m=64 .*256x64x128x128"
        ):
            inject.resolve(SMALL, config("argument", kernel_name1=names.ck_name_for(1, 128)), found)
        for wrong in ({"pipeline": "both"}, {"dispatch_policy": 3}):
            with pytest.raises(ValueError, match="expected 'two_stage' or 'vendor', and 0, 1 or 2"):
                inject.resolve(SMALL, config("argument", **wrong), found)


def test_differences_to_an_aiter_row_are_in_words():
    with installed("v0.1.11") as (_, found):
        metadata = inject.resolve(SMALL, config("argument"), found)
        row = dataclasses.replace(tables.blank(SMALL), **PLAIN)
        assert inject.difference(row, metadata) is None
        told = inject.difference(dataclasses.replace(row, block_m=32, kernel_name2=FLYDSL_T16), metadata)
        assert told == f"block_m 64 for 32, stage 2 {PLAIN['kernel_name2']} for {FLYDSL_T16}"
        told = inject.difference(dataclasses.replace(row, ksplit=2), metadata)
        assert told == "ksplit 0 for 2, stage 1 ck_moe_stage1 for cktile_moe_stage1"
