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

from jax_mxfp4_moe import aiter_validation, bench, device, doctor, testing, workloads
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
        assert {row[8] for row in rows} == {"-"}  # no time
        labels = ", ".join(row[2] for row in rows).split(", ")
        assert {"default", *tables.SEEDS, "own_choice", "aiter fused_moe"} <= set(labels)
        checked = [row for row in rows if row[2] != "aiter fused_moe"]
        assert f"{len(checked)} of {len(checked)} rows right" in text
        assert all(0 < float(row[5]) < float(row[6]) for row in checked)
        assert all(0 < float(row[7]) < aiter_validation.TOKEN_TOLERANCE for row in checked)
        assert {row[9] for row in checked} == {"eager"}
        assert "not run yet" not in text
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
        assert "0 of 1 rows right; wrote aiter_validation.md" in done.output

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
        assert all("ValueError: it is / ill and tired" in row[10] for row in rows)

    def test_fused_moe_from_torch_gives_aiters_answer(self):
        """The call that is timed beside ours computes the layer."""
        workload = small(workloads.get(NAME), 3)
        problem, case = dataclasses.replace(workload.problem, rounding="half_away"), workload.case()
        with installed("v0.1.11"):
            y = aiter_validation.fused_moe_call(problem, case)()
        assert bench.expected(problem, case).error(np.asarray(y.float())) < 2e-2

    def test_the_aiter_report_is_written_after_each_workload(self, tmp_path, monkeypatch):
        """A fault of the device, which ends the process, loses only the workload that it happened in."""
        done = []

        def validate(workload, *_, **__):
            if done:
                raise SystemExit(137)
            done.append(workload.name)
            return [aiter_validation.Result(workload.name, "default", "rule", "ok", 1e-3, 2e-2, 2e-3)]

        monkeypatch.setattr(aiter_validation, "validate", validate)
        with installed("v0.1.16", flydsl=True), pytest.raises(SystemExit):
            aiter_validation.run(["r33i512_m16", NAME, "r33i512_m128"])
        assert [path.name for path in tmp_path.iterdir()] == ["aiter_validation.md"]
        text = (tmp_path / "aiter_validation.md").read_text()
        assert [row[1] for row in rows_of(text)] == ["r33i512_m16"]
        assert f"- result: 1 of 1 rows right\n- not run yet: {NAME}, r33i512_m128\n" in text

    @pytest.mark.filterwarnings("ignore::jax_mxfp4_moe.implementations.aiter.tables.RowReplacedWarning")
    @pytest.mark.parametrize("tiny", [6], indirect=True)
    def test_a_preset_that_raises_does_not_end_aiter_validation(self, tiny, one_rule, monkeypatch):
        preset = IMPLEMENTATIONS["aiter"].preset

        def ill(name, *arguments):
            if name == "seed_dispatch":
                raise NotImplementedError("no kernel")
            return preset(name, *arguments)

        monkeypatch.setattr(IMPLEMENTATIONS["aiter"], "preset", ill)
        monkeypatch.setattr(aiter_validation, "_runs", lambda *_: False)
        monkeypatch.setattr(aiter_validation, "_own", lambda *_: [])
        with installed("v0.1.16") as sim:
            assert sim.aiter.__simulated__
            results = aiter_validation.validate(workloads.get(NAME), "cpu", release.load())
        found = {label: result for result in results for label in result.labels.split(", ")}
        assert found["seed_dispatch"].why == "NotImplementedError: no kernel"
        assert found["seed_dispatch"].failed
        assert (found["seed_block_m"].status, found["own_choice"].status) == ("ok", "ok")


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
    results = [aiter_validation.Result("w", "default", "rule", "ok", 1e-3, 2e-2, 3e-3, 12.34, "eager", "config")]
    text = aiter_validation.report(results, real)
    assert SIMULATED not in text
    assert rows_of(text) == [["w", "default", "rule", "ok", "1.0e-03", "2e-02", "3.0e-03", "12.3", "eager", "config"]]
    assert re.search(r"- date: \d{4}-\d\d-\d\d", text)
    assert f"- device: {doctor.machine()}" in text
    assert "- checked: every token, against float64 on the host; worst token at most 0.1\n" in text


def test_only_checked_aiter_rows_count_as_right():
    """A refusal of fused_moe is no fault, and what was not compared is not right."""
    ok, refused, unchecked = (
        aiter_validation.Result("w", name, "rule", status, error)
        for name, status, error in (("a", "ok", 1e-3), ("b", "refused", None), (aiter_validation.FUSED_MOE, "ok", None))
    )
    assert not any(result.failed for result in (ok, refused, unchecked))
    assert aiter_validation.summary([ok, refused, unchecked]) == "1 of 1 rows right"
    wrong, raised = (dataclasses.replace(ok, status="WRONG"), dataclasses.replace(unchecked, status="FAILED"))
    assert aiter_validation.summary([ok, refused, wrong, raised]) == "1 of 3 rows right"


def test_one_wrong_token_of_an_aiter_row_is_found():
    """The error of all tokens hides it."""
    right = np.random.default_rng(0).standard_normal((512, 64))
    y = right.copy()
    y[300] *= 1.2
    asked = aiter_validation.Result("w", "a", "rule", "ok")
    result = aiter_validation.compared(asked, y, right, 2e-2)
    assert result.status == "WRONG"
    assert result.error < 2e-2
    assert abs(result.worst_token - 0.2) < 1e-9
    assert aiter_validation.compared(asked, right, right, 2e-2).status == "ok"
    y[300] = np.nan
    assert aiter_validation.compared(asked, y, right, 2e-2).worst_token == np.inf


@pytest.mark.parametrize("tiny", [7], indirect=True)
def test_all_tokens_of_an_aiter_row_are_checked(tiny, one_rule, monkeypatch):
    """A sample would miss the last but one."""
    monkeypatch.setattr(testing, "sample_tokens", lambda problem: np.asarray([0, problem.tokens - 1]))
    monkeypatch.setattr(
        aiter_validation, "choices", lambda *_: [aiter_validation.Choice(("one off",), "own_choice", "mxfp4", "test")]
    )
    monkeypatch.setattr(aiter_validation, "_own", lambda *_: [])
    made = bench.Candidate(lambda: wrong, 0, "eager")
    monkeypatch.setattr(bench, "candidate", lambda *_: made)
    with installed("v0.1.11"):
        found = release.load()
        size = small(workloads.get(NAME), 7)
        (rule,) = found.activation_rules
        problem = dataclasses.replace(size.problem, scale_rule=rule[0], rounding=rule[1])
        wrong = testing.reference(problem, size.case())
        wrong[5] = 0
        (result,) = aiter_validation.validate(workloads.get(NAME), "cpu", found)
    assert (result.status, result.worst_token, result.bridge) == ("WRONG", 1.0, "eager")


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
