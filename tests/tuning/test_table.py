"""Tables choose configs in the written order, and the tuner writes only what is right and faster."""

import csv
import dataclasses
import os

import jax
import numpy as np
import pytest

from jax_mxfp4_moe import mxfp4_moe, testing, workloads
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import search, table
from jax_mxfp4_moe.workloads import Workload

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
        for row in csv.DictReader(path.open(newline=""))
    ]


@pytest.mark.parametrize(("path", "row"), shipped_rows())
def test_shipped_rows_are_of_named_workloads_and_existing_configs(path, row, monkeypatch):
    monkeypatch.delenv(table.USER_TABLES_VARIABLE, raising=False)
    problem = workloads.get(row["workload"]).problem
    implementation = IMPLEMENTATIONS[path.stem]
    assert tuple(row[column] for column in table.KEY_COLUMNS) == table.key_of(problem)
    assert float(row["us"]) < float(row["us_default"])
    assert row["jaxlib"]
    assert row["machine"]
    if path.parent.name == "cpu":
        chosen = table.lookup(implementation, problem, "cpu", None)
        assert chosen.source.endswith(f"row token={problem.tokens}")
        untuned, *others = implementation.configs(problem, "cpu")
        assert chosen.items in [config.items for config in others]
        assert chosen.items != untuned.items


def test_shipped_tables_are_sorted():
    for path in table.TABLES.glob("*/*.csv"):
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


def test_what_cannot_run_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", PROBLEM))
    monkeypatch.setattr(XLA, "why_not", lambda problem, platform: "is ill", raising=False)
    assert search.run(["tiny"], "xla", tmp_path) == 1
    assert "tiny  cannot be measured: xla is ill" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def row(tokens, tile_rows, **more):
    key = table.key_of(dataclasses.replace(PROBLEM, tokens=tokens))
    return key, {**dict(zip(table.KEY_COLUMNS, key, strict=True)), "config_tile_rows": str(tile_rows), **more}


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
