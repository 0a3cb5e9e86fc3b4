"""Tables choose configs in the written order, and the tuner writes only what is right and faster."""

import csv
import dataclasses
import os
import warnings

import jax
import numpy as np
import pytest

from jax_mxfp4_moe import device, mxfp4_moe, testing, workloads
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import search, table
from jax_mxfp4_moe.workloads import Workload

pytestmark = pytest.mark.filterwarnings("ignore::jax_mxfp4_moe.tuning.table.UntunedWarning")
XLA = IMPLEMENTATIONS["xla"]
PROBLEM = MoeProblem(24, 2, 4, 64, 32)
DEFAULT, OTHER, THIRD = (Config.of({"tile_rows": t}) for t in (32, 8, 1))


def write(folder, *rows, arch="cpu"):
    """A table of (tokens, changes of the key, tile_rows)."""
    path = folder / arch / "xla.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*table.KEY_COLUMNS, "config_tile_rows", "us"])
        for tokens, changes, tile_rows in rows:
            problem = dataclasses.replace(PROBLEM, tokens=tokens, **changes)
            writer.writerow([*table.key_of(problem), tile_rows, "1.0"])
    return path


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """User and shipped folders, both empty."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    monkeypatch.setenv(table.USER_TABLES_VARIABLE, str(user))
    monkeypatch.setattr(table, "TABLES", shipped)
    return user, shipped


def found(config=None, **changes):
    chosen = table.lookup(XLA, dataclasses.replace(PROBLEM, **changes), "cpu", config)
    return chosen["tile_rows"], chosen.source


# --- lookup ----------------------------------------------------------------------------------------------------------


def test_order_of_lookup(folders):
    user, shipped = folders
    default = XLA.configs(PROBLEM, "cpu")[0]["tile_rows"]
    assert found() == (default, "default")
    write(shipped, (32, {}, 5))
    assert found() == (5, "cpu/xla.csv, bucket token=32")
    write(shipped, (32, {}, 5), (24, {}, 6))
    assert found() == (6, "cpu/xla.csv, row token=24")
    write(user, (32, {}, 7))
    assert found() == (6, "cpu/xla.csv, row token=24")  # an exact row before any bucket
    write(user, (32, {}, 7), (24, {}, 9))
    assert found() == (9, "cpu/xla.csv, row token=24")
    assert found({"tile_rows": 11}) == (11, "argument")


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (33, 64)])
def test_token_counts_are_rounded_up_to_a_power_of_two(folders, tokens, bucket):
    write(folders[1], *((1 << i, {}, 100 + (1 << i)) for i in range(8)))
    assert found(tokens=tokens)[0] == 100 + bucket


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 96}, {"intermediate": 64}, {"experts": 5}, {"top_k": 3}, {"activation": "gelu"}, {"dtype": "float32"},
        {"activation_quant": "mxfp4"},
    ],
)  # fmt: skip
def test_a_row_of_another_problem_is_not_used(folders, change):
    write(folders[1], (24, {}, 5))
    assert found()[0] == 5
    assert found(**change)[1] == "default"


def test_tables_of_another_device_are_not_read(folders):
    write(folders[0], (24, {}, 5), arch="sm_90")
    assert found()[1] == "default"


def test_an_edited_table_is_read_again(folders):
    path = write(folders[0], (24, {}, 5))
    assert found()[0] == 5
    write(folders[0], (24, {}, 6))
    os.utime(path, ns=(0, 0))
    assert found()[0] == 6


def test_the_row_is_what_runs(folders, monkeypatch):
    case, seen, run = testing.random_case(PROBLEM), [], type(XLA).run

    def recorded(self, operands, problem, config, **rest):
        seen.append((config["tile_rows"], config.source))
        return run(self, operands, problem, config, **rest)

    monkeypatch.setattr(type(XLA), "run", recorded)
    write(folders[0], (24, {}, 77))
    jax.eval_shape(lambda *arrays: mxfp4_moe(*arrays, implementation="xla"), *case)
    assert seen == [(77, "cpu/xla.csv, row token=24")]


def test_messages(folders):
    with pytest.raises(ValueError, match="config='fast' given; implementation 'xla' has no presets"):
        found("fast")
    with pytest.raises(
        ValueError, match=r"config=\{'tiles': 1\} given; expected parameters of implementation 'xla': tile_rows"
    ):
        found({"tiles": 1})
    path = write(folders[0])
    path.write_text("token,expert\n1,1\n")
    with pytest.raises(
        ValueError, match=r"tuning table .*xla\.csv: columns \['act_type', .*\] are missing; expected token, "
    ):
        found()


class Preset(type(XLA)):
    """`xla` with two presets, whose default config holds a zero."""

    presets = ("fast", "exact")

    def configs(self, problem, platform):
        return [Config.of({"tile_rows": 8, "policy": 0})]

    def preset(self, name, problem, platform):
        return Config.of({"tile_rows": {"fast": 1, "exact": 2}[name], "policy": 0}, f"preset {name}")


def test_a_preset_is_asked_for_by_name(folders):
    assert table.lookup(Preset(), PROBLEM, "cpu", "exact") == Config.of({"tile_rows": 2, "policy": 0}, "preset exact")
    with pytest.raises(ValueError, match=r"config='exacter' given; .*'xla' has the presets 'fast', 'exact'"):
        table.lookup(Preset(), PROBLEM, "cpu", "exacter")


def test_an_implementation_with_presets_reads_its_tables_itself(folders):
    write(folders[0], (24, {}, 5))
    assert table.lookup(Preset(), PROBLEM, "cpu", None).source == "default"
    assert found()[0] == 5


def test_zero_is_a_value_where_it_is_the_default(folders):
    assert table.lookup(Preset(), PROBLEM, "cpu", {"policy": 0, "tile_rows": 3})["policy"] == 0
    for wrong in ({"policy": -1}, {"tile_rows": 0}):
        with pytest.raises(ValueError, match="given; expected an int of at least"):
            table.lookup(Preset(), PROBLEM, "cpu", wrong)


@pytest.mark.parametrize("value", [0, -3, False, True, 0.9, 8.0, "a", "8", None])
def test_a_config_value_of_the_wrong_kind(folders, value):
    """A tile of no rows would never end, and 0.9 would be one."""
    with pytest.raises((TypeError, ValueError)) as caught:
        found({"tile_rows": value})
    for text in ("mxfp4_moe", "config", f"tile_rows={value!r} given", "expected"):
        assert text in str(caught.value)


@pytest.mark.parametrize("config", [[1], [], 8, {8}, [("tile_rows", 8)]])
def test_a_config_that_is_no_mapping(folders, config):
    with pytest.raises(TypeError, match=rf"mxfp4_moe: config.*{type(config).__name__}.* given; expected a mapping"):
        found(config)


@pytest.mark.parametrize("folder", [0, 1], ids=["user", "shipped"])
@pytest.mark.parametrize("value", ["0", "-3", "0.9", "a", "False"])
def test_a_row_with_a_value_of_the_wrong_kind(folders, value, folder):
    """The message names the file, so that the user finds the row."""
    path = write(folders[folder], (24, {}, value), (64, {}, 8))
    with pytest.raises(ValueError, match=r"tuning table .* given; expected") as caught:
        found()
    for text in (str(path), "token=24", f"tile_rows={value}".replace("=a", "='a'").replace("=0.9", "='0.9'")):
        assert text.removesuffix("False") in str(caught.value)
    assert found(tokens=64)[0] == 8  # the other rows of the file are good


def shipped_rows():
    return [
        pytest.param(path, row, id=f"{path.parent.name}-{path.stem}-{row['workload']}")
        for path in sorted(table.TABLES.glob("*/*.csv"))
        if path.name.split(".")[0] != "aiter"  # in aiter's own form: tests/implementations/test_aiter_tables.py
        for row in csv.DictReader(path.open(newline=""))
    ]


@pytest.mark.parametrize(("path", "row"), shipped_rows())
def test_shipped_rows_are_of_named_workloads_and_existing_configs(path, row, monkeypatch):
    monkeypatch.delenv(table.USER_TABLES_VARIABLE, raising=False)
    problem = workloads.get(row["workload"]).problem
    implementation = IMPLEMENTATIONS[path.stem]
    assert tuple(row[column] for column in table.KEY_COLUMNS) == table.key_of(problem)
    assert row["jaxlib"]
    assert row["machine"]
    platform = {"cpu": "cpu"}.get(path.parent.name, "cuda")
    if platform == "cuda" and implementation.missing() is not None:
        pytest.skip(f"{path.stem} {implementation.missing()}")
    monkeypatch.setattr(device, "arch", lambda _: path.parent.name)
    chosen = table.lookup(implementation, problem, platform, None)
    assert chosen.source.endswith(f"row token={problem.tokens}")
    untuned, *others = implementation.configs(problem, platform)
    if float(row["us"]) < float(row["us_default"]):
        assert chosen.items in [config.items for config in others]
    else:  # measured, and as good as any
        assert row["us"] == row["us_default"]
        assert chosen.items == untuned.items


def test_shipped_tables_are_sorted():
    for path in table.TABLES.glob("*/*.csv"):
        if path.name.split(".")[0] == "aiter":
            continue
        rows = list(csv.DictReader(path.open(newline="")))
        keys = [search._order(tuple(row[column] for column in table.KEY_COLUMNS)) for row in rows]
        assert keys == sorted(set(keys))


# --- the tuner -------------------------------------------------------------------------------------------------------


def test_winner_must_beat_the_default_by_more_than_the_noise():
    rng = np.random.default_rng(0)
    base = 100 * rng.lognormal(0, 0.5, 50)  # what all calls of a round share
    noise = lambda: rng.lognormal(0, 0.05, 50)  # noqa: E731
    assert search.winner(DEFAULT, {DEFAULT: base, OTHER: base * 0.8 * noise(), THIRD: base * 0.9 * noise()}) == OTHER
    assert search.winner(DEFAULT, {DEFAULT: base, OTHER: base * 0.99, THIRD: base * 1.5}) is None
    assert search.winner(DEFAULT, {DEFAULT: base, OTHER: base * rng.lognormal(-0.04, 1.0, 50)}) is None
    assert search.winner(DEFAULT, {DEFAULT: base}) is None
    assert search.winner(DEFAULT, {OTHER: base}) is None  # a default that is wrong is a defect, not a reason for a row


class Fake(type(XLA)):
    """`xla`, wrong with tile_rows 8."""

    def run(self, operands, problem, config, **rest):
        y = super().run(operands, problem, config, **rest)
        return y * 2 if config["tile_rows"] == 8 else y

    def configs(self, problem, platform):
        return [DEFAULT, OTHER, THIRD]


def test_a_wrong_config_never_wins(monkeypatch, tmp_path, capsys):
    problem = dataclasses.replace(
        PROBLEM, tokens=23
    )  # its own: jitted calls remember the implementation they were traced with
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", problem))
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", Fake())
    monkeypatch.setattr(
        testing, "interleaved_us", lambda calls, repeats: {label: np.full(9, 1.0 + len(label)) for label in calls}
    )
    assert search.run(["tiny"], "xla", tmp_path) == 1
    shown = capsys.readouterr().out
    assert "tiny  tile_rows=8  WRONG: error 1.0e+00" in shown
    rows = list(csv.DictReader((tmp_path / "cpu" / "xla.csv").open()))
    assert [row["config_tile_rows"] for row in rows] == ["1"]  # the shortest label is the fastest here
    monkeypatch.setenv(table.USER_TABLES_VARIABLE, str(tmp_path))
    assert found(tokens=23) == (1, "cpu/xla.csv, row token=23")
    assert rows[0]["us"] == "12.0"
    assert rows[0]["us_default"] == "13.0"
    assert rows[0]["jax"] == jax.__version__


class Failing(Fake):
    """Gives NaN with tile_rows 8, and does not fit with 1."""

    def run(self, operands, problem, config, **rest):
        if config["tile_rows"] == 1:
            raise MemoryError("out of shared memory")
        y = super().run(operands, problem, config, **rest)
        return y * np.nan if config["tile_rows"] == 8 else y


def test_a_candidate_that_cannot_run_stops_nothing(monkeypatch, tmp_path, capsys):
    problem = dataclasses.replace(PROBLEM, tokens=21)
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", problem))
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", Failing())
    monkeypatch.setattr(testing, "interleaved_us", lambda calls, repeats: {label: np.full(9, 1.0) for label in calls})
    assert search.run(["tiny"], "xla", tmp_path) == 1
    shown = capsys.readouterr().out
    assert "tiny  tile_rows=1  cannot run here: MemoryError: out of shared memory" in shown
    assert "tiny  tile_rows=8  WRONG" in shown
    rows = list(csv.DictReader((tmp_path / "cpu" / "xla.csv").open()))
    assert [row["config_tile_rows"] for row in rows] == [str(DEFAULT["tile_rows"])]


def test_what_cannot_run_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", PROBLEM))
    monkeypatch.setattr(XLA, "why_not", lambda problem, platform: "is ill", raising=False)
    assert search.run(["tiny"], "xla", tmp_path) == 1
    assert "tiny  cannot be measured: xla is ill" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_tables_in_aiters_form_are_not_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", PROBLEM))
    assert search.run(["tiny"], "aiter", tmp_path) == 1
    assert "aiter takes its rows from aiter's own tuner; bench --validate checks" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def row(tokens, tile_rows, **more):
    key = table.key_of(dataclasses.replace(PROBLEM, tokens=tokens))
    return key, {**dict(zip(table.KEY_COLUMNS, key, strict=True)), "config_tile_rows": str(tile_rows), **more}


def test_a_default_that_nothing_beats_has_a_row_too(monkeypatch, tmp_path, capsys):
    """Otherwise lookup would ask for it to be measured, again and again."""
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", dataclasses.replace(PROBLEM, tokens=3)))
    monkeypatch.setattr(testing, "interleaved_us", lambda calls, repeats: {label: np.ones(9) for label in calls})
    key = table.key_of(dataclasses.replace(PROBLEM, tokens=5))
    assert search.run(["tiny"], "xla", tmp_path, keys=[key]) == 0
    assert "default  <- kept" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "cpu" / "xla.csv").open()))
    assert [(row["token"], row["workload"]) for row in rows] == [("3", "tiny"), ("5", ",".join(key))]
    monkeypatch.setenv(table.USER_TABLES_VARIABLE, str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", table.UntunedWarning)
        assert found(tokens=3)[1] == "cpu/xla.csv, row token=3"
        assert found(tokens=5)[1] == "cpu/xla.csv, row token=5"


# --- problems without a row ------------------------------------------------------------------------------------------


@pytest.fixture
def untuned(monkeypatch):
    monkeypatch.setattr(table, "_warned", set())


def test_case_18_one_warning_for_each_key(folders, untuned):
    """It names the key and the command; a second call is silent, another key is not."""
    write(folders[0])  # a table with no row
    problem = MoeProblem(8, 1, 24, 4096, 512)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", table.UntunedWarning)
        for each in (problem, problem, dataclasses.replace(problem, tokens=16)):
            assert table.lookup(XLA, each, "cpu", None) == XLA.configs(each, "cpu")[0]
    texts = [str(w.message) for w in given]
    assert len(texts) == 2
    assert (
        "no table of 'xla' for cpu has a row for token=8, model_dim=4096, inter_dim=512, expert=24, topk=1," in texts[0]
    )
    key = "8,4096,512,24,1,silu,bfloat16,bfloat16"
    assert f"tune --implementation xla --key {key} --out FOLDER" in texts[0]
    assert table.problem_of(key.split(",")) == problem


def test_case_18_strict(folders, untuned):
    """As an error it is given each time, and the layer does not run."""
    write(folders[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", table.UntunedWarning)
        for _ in range(2):
            with pytest.raises(table.UntunedWarning):
                found()


def test_no_warning_without_a_table_or_with_a_row(folders, untuned):
    with warnings.catch_warnings():
        warnings.simplefilter("error", table.UntunedWarning)
        found()  # no table for this machine: its defaults are all there is
        write(folders[0], (24, {}, 8))
        found()
        found(config={"tile_rows": 8}, tokens=48)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("8,64", "2 values given; expected 8: token,model_dim,"),
        ("0,64,32,4,2,silu,bfloat16,bfloat16", "expected positive integers"),
        ("8,64,32,4,2,relu,bfloat16,bfloat16", "activation='relu'"),
        ("8,64,32,4,2,silu,int8,int8", "dtype int8 given; expected float32, bfloat16 or float16"),
        (
            "8,64,32,4,2,silu,bfloat16,int4",
            "q_dtype_a 'int4' given; expected the same as dtype, 'bfloat16', or one of 'mxfp4'",
        ),
    ],
)
def test_keys_of_no_problem(key, text):
    with pytest.raises((ValueError, TypeError)) as error:
        table.problem_of(key.split(","))
    assert text in str(error.value)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "silu_clamped", "silu_post_clamped"])
@pytest.mark.parametrize("quant", [None, "mxfp4", "fp8"])
def test_problem_of_is_the_inverse_of_key_of(activation, quant):
    key = ("8", "64", "32", "4", "2", activation, "float32", quant or "float32")
    assert table.key_of(table.problem_of(key)) == key


def test_merge_replaces_drops_keeps_and_sorts(tmp_path):
    path = tmp_path / "cpu" / "xla.csv"
    search.merge(path, [row(128, 8), row(16, 8), row(2, 1, us="7.0")])
    search.merge(path, [row(16, 32, us="5.0"), (row(128, 8)[0], None), row(1024, 128), row(9, 1)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["token"], r["config_tile_rows"], r["us"]) for r in rows] == [
        ("2", "1", "7.0"), ("9", "1", ""), ("16", "32", "5.0"), ("1024", "128", ""),
    ]  # fmt: skip
    assert list(rows[0]) == [*table.KEY_COLUMNS, "config_tile_rows", "us"]
    assert [p.name for p in path.parent.iterdir()] == ["xla.csv"]


def test_a_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "xla.csv"
    search.merge(path, [row(2, 1)])
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("no space")

    monkeypatch.setattr(csv.DictWriter, "writerows", fail)
    with pytest.raises(OSError, match="no space"):
        search.merge(path, [row(4, 1)])
    assert path.read_bytes() == before
