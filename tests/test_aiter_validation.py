"""`bench --validate --implementation aiter` runs end to end on a simulated aiter, says that it is one, and finds what is wrong."""

import contextlib
import dataclasses
import re
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
import aiter_sim
from typer.testing import CliRunner

from jax_mxfp4_moe import aiter_validation, bench, device, doctor, workloads
from jax_mxfp4_moe.aiter_validation import SIMULATED
from jax_mxfp4_moe.cli import app
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, torch_call
from jax_mxfp4_moe.implementations.aiter import inject, release, tables
from jax_mxfp4_moe.tuning import table

NAME = "r257i256_m128"
pytestmark = pytest.mark.skipif(device.platforms() != ("cpu",), reason="a simulation runs on a CPU")


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(table.USER_TABLES_VARIABLE, raising=False)
    monkeypatch.delenv(tables.CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


def small(workload, tokens):
    """A workload in a size that compiles and runs in a moment; of tokens of its own, since jitted calls remember the aiter they met."""
    problem = dataclasses.replace(workload.problem, tokens=tokens, experts=11, hidden=256, intermediate=256)
    return dataclasses.replace(workload, problem=problem)


@pytest.fixture
def tiny(monkeypatch, request):
    monkeypatch.setattr(aiter_validation, "scaled", lambda workload: small(workload, request.param))


@pytest.fixture
def one_rule(monkeypatch):
    """An aiter without the Triton quantizer: half of the time."""
    load = release.load
    monkeypatch.setattr(release, "load", lambda: dataclasses.replace(load(), triton_quant=None))


@contextlib.contextmanager
def installed(profile, flydsl=False):
    """A simulation that was imported: only then may it pass for a device."""
    with aiter_sim.installed(profile, flydsl=flydsl) as sim:
        assert sim.aiter.__simulated__
        yield sim


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "--validate", *arguments], env={"COLUMNS": "400"})


def rows_of(text):
    """Cells of the report's table of rows, without the head."""
    part = text.split("## Rows\n")[1].split("\n## ")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part[2:]]


@pytest.mark.skipif(torch_call.why_not("eager") is not None, reason=str(torch_call.why_not("eager")))
class TestSimulatedAiter:
    @pytest.mark.parametrize("tiny", [3], indirect=True)
    def test_aiter_report_is_stamped_and_untimed(self, tiny, one_rule, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["jax_mxfp4_moe", "bench", "--validate", NAME])
        with installed("v0.1.16", flydsl=True) as sim:
            done = invoke("--implementation", "aiter", NAME, "--report", str(tmp_path / "report.md"))
            operations = set(sim.calls)
        assert done.exit_code == 0, done.output
        assert {"moe_sorting_fwd", "ck_moe_stage1_fwd", "ck_moe_stage2_fwd"} <= operations
        text = (tmp_path / "report.md").read_text()
        assert text.splitlines()[0].endswith(SIMULATED)
        assert "nothing was timed" in text
        rows = rows_of(text)
        assert [row[0] for row in rows] == [SIMULATED] * len(rows)
        assert {row[4] for row in rows} == {"ok"}
        assert {row[7] for row in rows} == {"-"}  # no time
        assert f"{len(rows)} of {len(rows)} rows right" in text
        labels = ", ".join(row[2] for row in rows).split(", ")
        assert {"default", *tables.SEEDS, "own_choice", "aiter fused_moe"} <= set(labels)
        checked = [row for row in rows if row[2] != "aiter fused_moe"]
        assert all(0 < float(row[5]) < float(row[6]) for row in checked)
        assert "- aiter: 0.1.16\n" in text
        assert f"- command: `python -m jax_mxfp4_moe bench --validate {NAME}`" in text
        assert (
            "seed_dispatch M128 E257 I256: block_m 32, CK1 256x128x128x128_1x4, FlyDSL2 t16x128x128_atomic: refused: "
            in text
        )

    @pytest.mark.parametrize("tiny", [4], indirect=True)
    def test_a_wrong_aiter_answer_is_found(self, tiny, one_rule, tmp_path, monkeypatch):
        monkeypatch.setattr(
            aiter_validation, "choices", lambda *_: [aiter_validation.Choice(("twice",), "own_choice", "mxfp4", "test")]
        )
        made = bench.candidate
        monkeypatch.setattr(
            bench, "candidate", lambda *given: dataclasses.replace(c := made(*given), run=lambda: c.run() * 2)
        )
        with installed("v0.1.11"):
            done = invoke("--implementation", "aiter", NAME)
        assert done.exit_code == 1
        first, fused_moe = rows_of((tmp_path / "aiter_validation.md").read_text())
        assert (first[2], first[4], first[5]) == ("twice", "WRONG", "1.0e+00")
        assert fused_moe[4] == "ok"
        assert "1 of 2 rows right; wrote aiter_validation.md" in done.output

    @pytest.mark.parametrize("tiny", [5], indirect=True)
    def test_an_aiter_row_that_raises_is_reported_with_its_reason(self, tiny, one_rule, tmp_path, monkeypatch):
        def fail(*arguments):
            raise ValueError("it is | ill\nand tired")

        monkeypatch.setattr(inject, "resolve", fail)
        monkeypatch.setattr(aiter_validation, "fused_moe_call", fail)
        with installed("v0.1.16"):
            assert invoke("--implementation", "aiter", NAME).exit_code == 1
        rows = rows_of((tmp_path / "aiter_validation.md").read_text())
        assert {row[2]: row[4] for row in rows}["vendor"] == "refused"
        assert {row[4] for row in rows if row[2] != "vendor"} == {"FAILED"}
        assert all("ValueError: it is / ill and tired" in row[8] for row in rows)

    def test_fused_moe_from_torch_gives_aiters_answer(self):
        """The call that is timed beside ours computes the layer."""
        workload = small(workloads.get(NAME), 3)
        problem, case = dataclasses.replace(workload.problem, rounding="half_away"), workload.case()
        with installed("v0.1.11"):
            y = aiter_validation.fused_moe_call(problem, case)()
        assert bench.expected(problem, case).error(np.asarray(y.float())) < 2e-2


@pytest.mark.parametrize(("profile", "flydsl"), [("v0.1.9", False), ("v0.1.13.post1", True), ("v0.1.17", True)])
def test_every_row_of_aiters_tables_is_among_the_choices(profile, flydsl):
    with installed(profile, flydsl):
        found_release = release.load()
        for name in workloads.TUNED_WORKLOADS:
            rule = dict(zip(("scale_rule", "rounding"), next(iter(found_release.activation_rules)), strict=True))
            problem = dataclasses.replace(workloads.get(name).problem, **rule)
            with (
                pytest.warns(tables.RowReplacedWarning)
                if (name, profile) != ("r257i256_m16", "v0.1.17")
                else contextlib.nullcontext()
            ):
                found = aiter_validation.choices(problem, "cpu", found_release)
            labels = [label for choice in found for label in choice.labels]
            assert {"default", *tables.SEEDS, "vendor", "own_choice"} <= set(labels)
            keys = [c.config if isinstance(c.config, str) else c.config.items for c in found]
            assert len(keys) == len(set(keys))
            shipped = [
                r for r in tables.default_rows() if r.key == tables.blank(problem).key and r.pipeline != "vendor"
            ]
            right = [r for r in shipped if tables.verdict(r, found_release, release.flydsl_registry()) is None]
            assert {r.table for r in right} <= set(labels)
            for choice in found:
                if not isinstance(choice.config, str):
                    assert choice.activation_quant == (None if choice.config["ksplit"] > 1 else "mxfp4")


def test_what_is_timed_on_a_device_has_a_time():
    """A report of a real aiter has times, and no stamp."""
    real = release.Release("0.1.17", hip_quant="fused")
    results = [aiter_validation.Result("w", "default", "rule", "ok", 1e-3, 2e-2, 12.34, "config")]
    text = aiter_validation.report(results, real)
    assert SIMULATED not in text
    assert rows_of(text) == [["w", "default", "rule", "ok", "1.0e-03", "2e-02", "12.3", "config"]]
    assert re.search(r"- date: \d{4}-\d\d-\d\d", text)
    assert f"- device: {doctor.machine()}" in text


def test_a_refusal_of_aiters_fused_moe_is_no_fault():
    results = [aiter_validation.Result("w", name, "rule", status) for name, status in (("a", "ok"), ("b", "refused"))]
    assert not any(result.failed for result in results)
    assert aiter_validation.summary(results) == "1 of 1 rows right"
    assert aiter_validation.summary([*results, dataclasses.replace(results[0], status="WRONG")]) == "1 of 2 rows right"


def test_scaled_problems_are_of_the_same_kind():
    for name in workloads.TUNED_WORKLOADS:
        small = aiter_validation.scaled(workloads.get(name))
        assert small.problem.top_k == 9 < small.problem.experts
        assert small.problem.activation_quant == "mxfp4"
        assert 3 * small.problem.experts * small.problem.hidden * small.problem.intermediate < 2**23
        small.case()


def test_without_an_aiter_nothing_is_validated(tmp_path):
    done = invoke("--implementation", "aiter")
    assert done.exit_code == 1
    assert f"aiter {IMPLEMENTATIONS['aiter'].why_not(None, 'cpu')}." in done.output
    assert "docs/mi355x.md" in done.output
    assert not list(tmp_path.glob("*.md"))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--implementation", "xla"),
        ("--implementation", "aiter", "--csv", "x.csv"),
        ("--implementation", "aiter", "--bridge", "eager"),
    ],
)
def test_wrong_use_of_aiter_validation(arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert "--validate takes --implementation aiter, NAMES, --repeats and --report" in " ".join(done.output.split())
