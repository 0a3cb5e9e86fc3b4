"""The command line: what each command calls, and its exit status."""

import json
import subprocess
import sys

import pytest
from test_doctor import ROOT, run, without

from jax_mxfp4_moe import bench, workloads
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import search

pytest.importorskip("typer")
from typer.testing import CliRunner

from jax_mxfp4_moe.cli import app

TINY = workloads.Workload("tiny", MoeProblem(2, 1, 2, 32, 32))


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400", "JAX_MXFP4_MOE_TABLES": ""})


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)


def test_doctor():
    done = invoke("doctor", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output)["implementations"]["xla"]["cpu"] is None
    assert "| `xla` | yes | yes | yes | yes |" in invoke("doctor", "--support").output
    assert "| v0.1.9 |" in invoke("doctor", "--aiter-releases").output


def test_bench(tiny, tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(bench, "BASELINE_BYTES", 0)
    done = invoke("bench", "tiny", "--implementation", "xla", "--repeats", "2", "--csv", str(path))
    assert done.exit_code == 0, done.output
    assert [line.split()[1:3] for line in done.output.splitlines() if line.startswith("tiny")] == [
        ["xla", "ok"],
        *([name, "skipped"] for name in bench.BASELINES),
    ]
    assert path.read_text().count("\n") == 4


def test_bench_passes_its_options_and_status_on(tiny, monkeypatch):
    seen = {}

    def fake(names, implementations, **options):
        seen.update(options, names=names, implementations=implementations)
        return 1

    monkeypatch.setattr(bench, "run", fake)
    done = invoke("bench", "tiny", "--implementation", "torch", "--implementation", "xla", "--bridge", "eager")
    assert done.exit_code == 1
    assert seen == {
        "names": ["tiny"], "implementations": ["torch", "xla"], "bridge": "eager", "repeats": None, "path": None,
    }  # fmt: skip


def test_tune(tiny, tmp_path):
    done = invoke("tune", "tiny", "--out", str(tmp_path), "--repeats", "2")
    assert done.exit_code == 0, done.output
    assert "tile_rows=1" in done.output
    assert (tmp_path / "cpu" / "xla.csv").is_file()


def test_tune_passes_its_status_on(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "run", lambda *arguments, **options: 1)
    assert invoke("tune", "tiny", "--out", str(tmp_path)).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("bench", "nope"), "workload 'nope' given; expected one of cpu_"),
        (
            ("bench", "--implementation", "nope"),
            "implementation 'nope' given; expected one of aiter, triton, torch, xla",
        ),
        (("bench", "--bridge", "nope"), "bridge 'nope' given; expected one of graph, eager, callback"),
        (("bench", "--repeats", "0"), "--repeats"),
        (("tune", "nope", "--out", "."), "workload 'nope' given"),
        (("tune", "tiny"), "--out"),
        (("nope",), "nope"),
    ],
)
def test_wrong_use_is_status_2(tiny, arguments, told):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())


@pytest.mark.parametrize("module", ["jax_mxfp4_moe", "jax_mxfp4_moe.bench"])
def test_modules_run(module):
    arguments = ["bench"] if module == "jax_mxfp4_moe" else []
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, "nope"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "workload 'nope' given" in " ".join(done.stderr.split())


def test_without_typer_the_other_commands_name_the_extra():
    done = run(without("typer") + "from jax_mxfp4_moe.__main__ import main\nsys.exit(main(['bench', 'cpu_odd_m33']))")
    assert done.returncode == 2
    assert "pip install 'jax_mxfp4_moe[cli]'" in done.stderr
