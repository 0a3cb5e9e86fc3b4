"""Workloads, the float64 reference, and the benchmark's rows: what is wrong or not what it says must not be timed."""

import csv
import dataclasses

import jax
import numpy as np
import oracle
import pytest
from cases import far_from_ties

from jax_mxfp4_moe import bench, stage1, testing, workloads
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, torch_call
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.workloads import Workload

TINY = Workload("tiny", MoeProblem(3, 3, 5, 64, 32), 1)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)
    return TINY


def of_tokens(tokens):
    """TINY in a size of its own: jitted calls remember the implementation and the bridge that a size was traced with."""
    return dataclasses.replace(TINY, problem=dataclasses.replace(TINY.problem, tokens=tokens))


def row(rows, name):
    return next(row for row in rows if row.implementation == name)


# --- workloads -------------------------------------------------------------------------------------------------------


def test_names_say_the_shape():
    for name in workloads.TUNED_WORKLOADS:
        workload, problem = workloads.get(name), workloads.get(name).problem
        assert name == f"r{problem.experts}i{problem.intermediate}_m{problem.tokens}"
        assert (problem.hidden, problem.top_k, workload.shared_experts) == (7168, 9, 1)
        assert (problem.dtype, problem.activation_quant) == ("bfloat16", "mxfp4")
    assert len(workloads.TUNED_WORKLOADS) == 7
    assert all(workload.name == name for name, workload in workloads.WORKLOADS.items())


def test_shared_experts_are_in_every_row_with_weight_one():
    for name in workloads.CPU_WORKLOADS:
        workload = workloads.get(name)
        problem, case = workload.problem, workload.case()
        ids, weights = np.asarray(case.topk_ids), np.asarray(case.topk_weights)
        assert ids.shape == (problem.tokens, problem.top_k)
        assert all(len(set(token)) == problem.top_k for token in ids.tolist())
        for shared in range(problem.experts - workload.shared_experts, problem.experts):
            assert ((ids == shared) & (weights == 1)).any(axis=1).all()


def test_unknown_name_lists_all():
    with pytest.raises(ValueError, match=r"workload 'r1' given; expected one of cpu_.*r257i256_m16.*oss_m1"):
        workloads.get("r1")


# --- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation_quant", [None, "mxfp4", "fp8"])
@pytest.mark.parametrize("on_input", [False, True])
def test_reference_is_the_oracle(activation_quant, on_input):
    options = {"activation_quant": activation_quant, "apply_router_weight_on_input": on_input}
    static = activation_quant == "fp8" and on_input
    if static:
        options["activation_scale"] = (4 / 448, 4 / 448)

    def make(seed):
        problem = MoeProblem(
            6, 2, 4, 64, 32, "float32", "float32", activation_quant=activation_quant,
            has_gate_up_bias=True, has_down_bias=True, apply_router_weight_on_input=on_input, has_activation_scale=static,
        )  # fmt: skip
        return _Both(problem, testing.random_case(problem, seed))

    both = far_from_ties(make, **options) if activation_quant == "mxfp4" else make(0)
    expected = both.expected(**options)
    np.testing.assert_allclose(testing.reference(both.problem, both.case), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        testing.reference(both.problem, both.case, [4, 1]), expected[[4, 1]], rtol=1e-6, atol=1e-6
    )


@dataclasses.dataclass
class _Both:
    """One problem for the oracle and for the reference."""

    problem: MoeProblem
    case: testing.Case

    def expected(self, **options):
        weights = self.case.weights
        return oracle.moe(
            np.asarray(self.case.x),
            oracle.dequantize(np.asarray(weights.gate_up.codes), np.asarray(weights.gate_up.scales)),
            oracle.dequantize(np.asarray(weights.down.codes), np.asarray(weights.down.scales)),
            self.case.topk_weights,
            self.case.topk_ids,
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
            **options,
        )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "silu_clamped", "silu_post_clamped"])
def test_reference_knows_every_activation(activation):
    alpha = {"swiglu_oai": 1.702}.get(activation)
    limit = None if activation in ("silu", "gelu", "gelu_tanh") else 0.5
    problem = MoeProblem(1, 1, 1, 32, 32, activation=activation, activation_alpha=alpha, activation_limit=limit)
    gate, up = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    np.testing.assert_allclose(
        testing._activated(problem, gate, up), stage1.activate(gate, up, problem), rtol=2e-6, atol=1e-6
    )


def test_sample_is_all_that_is_affordable():
    problem = MoeProblem(100, 2, 10, 64, 32)
    expert = 3 * 64 * 32
    assert testing.sample_tokens(problem).tolist() == list(range(100))
    assert len(testing.sample_tokens(problem, weights=10 * expert)) == 100
    assert testing.sample_tokens(problem, weights=10 * expert - 1).tolist() == [0, 33, 66, 99]  # with 8 experts at most
    assert len(testing.sample_tokens(problem, flops=7 * 2 * 2 * expert)) == 7
    assert len(testing.sample_tokens(problem, weights=1)) == 1


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_of_tiny():
    return bench.measure(TINY, ["xla"], repeats=3)


def test_rows_of_a_workload(rows_of_tiny):
    rows = rows_of_tiny
    xla = row(rows, "xla")
    assert [r.implementation for r in rows] == ["xla", *bench.BASELINES]
    assert all(r.status == "ok" and r.us > 0 and r.repeats == 3 and r.checked == 3 for r in rows)
    assert xla.config.startswith("tile_rows=")
    assert xla.source == "default"
    assert xla.bridge == "-"
    hit = len(np.unique(np.asarray(TINY.case().topk_ids)))
    assert xla.experts_hit == hit
    needed = hit * (3 * 64 * 32) * (4 + 8 / 32) / 8
    assert xla.gb_per_s == pytest.approx(needed / (xla.us * 1e-6) / 1e9)


def test_config_and_source_are_those_of_the_table(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "cpu"
    folder.mkdir()
    key = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a"
    (folder / "xla.csv").write_text(f"{key},config_tile_rows\n3,64,32,5,3,silu,bfloat16,bfloat16,8\n")
    monkeypatch.setenv("JAX_MXFP4_MOE_TABLES", str(tmp_path))
    xla = row(bench.measure(tiny, ["xla"], repeats=1, baselines=False), "xla")
    assert (xla.config, xla.source) == ("tile_rows=8", "cpu/xla.csv, row token=3")


def test_wrong_answer_is_not_timed(tiny, monkeypatch, capsys):
    class Wrong(type(IMPLEMENTATIONS["xla"])):
        def run(self, *arguments, **options):
            return super().run(*arguments, **options) * 2

    monkeypatch.setitem(IMPLEMENTATIONS, "xla", Wrong())
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", of_tokens(41))
    monkeypatch.setattr(bench, "BASELINE_BYTES", 0)
    assert bench.run(["tiny"], ["xla"], repeats=1) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny") and " xla " in line)
    assert "WRONG" in line
    assert "error 1.0e+00, tolerance 6e-03" in line
    assert line.split()[3] == "-"


@pytest.mark.skipif(IMPLEMENTATIONS["torch"].missing() is not None, reason=str(IMPLEMENTATIONS["torch"].missing()))
class TestBridge:
    """A row says how torch was reached, and a fallback is not taken for the bridge."""

    @pytest.fixture
    def broken(self, monkeypatch):
        monkeypatch.delenv(torch_call.ENVIRONMENT_VARIABLE, raising=False)
        monkeypatch.setattr(torch_call, "_warned", True)
        monkeypatch.setattr(torch_call, "why_not", lambda bridge: None if bridge == "callback" else "it is broken")
        return of_tokens(47)

    def test_callback_asked_for_is_timed(self, tiny):
        torch = row(bench.measure(tiny, ["torch"], bridge="callback", repeats=1, baselines=False), "torch")
        assert (torch.status, torch.bridge) == ("ok", "callback")

    def test_bridge_is_read_from_the_program(self, tiny):
        if (reason := torch_call.why_not("eager")) is not None:
            pytest.skip(reason)
        torch = row(bench.measure(tiny, ["torch"], bridge="eager", repeats=1, baselines=False), "torch")
        assert (torch.status, torch.bridge) == ("ok", "eager")

    def test_fallback_fails_where_torch_was_asked_for(self, broken):
        torch = row(bench.measure(broken, ["torch"], repeats=1, baselines=False), "torch")
        assert torch.failed
        assert torch.us is None
        assert "fell back to bridge 'callback': it is broken" in torch.why

    def test_fallback_is_skipped_elsewhere(self, broken):
        torch = row(bench.measure(broken, repeats=1, baselines=False), "torch")
        assert torch.status == "skipped"
        assert torch.us is None
        assert not torch.failed

    def test_bridge_that_cannot_carry_the_plan(self, tiny):
        torch = row(bench.measure(tiny, ["torch"], bridge="graph", repeats=1, baselines=False), "torch")
        assert torch.failed
        assert torch.us is None
        assert "graph" in torch.why


def test_baseline_is_left_out_where_it_is_too_large(tiny, monkeypatch):
    monkeypatch.setattr(bench, "BASELINE_BYTES", 5 * 3 * 64 * 32 * 4 - 1)
    rows = bench.measure(tiny, ["xla"], repeats=1)
    for name in bench.BASELINES:
        assert row(rows, name).status == "skipped"
        assert "dequantized weights would take" in row(rows, name).why
    assert not any(r.failed for r in rows)


def test_baseline_does_not_quantize_activations():
    quantized = dataclasses.replace(TINY, problem=dataclasses.replace(TINY.problem, activation_quant="mxfp4"))
    rows = bench.measure(quantized, ["xla"], repeats=1)
    assert all(r.status == "ok" for r in rows)
    assert row(rows, "ragged_dot").error < testing.tolerance(TINY.problem)


def test_bar_is_the_time_over_the_best_other():
    def made(name, us):
        return bench.Row("w", name, "ok", us=us)

    assert bench.bar([made("xla", 3.0), made("torch", 4.0), made("ragged_dot", 6.0)]) == 0.75
    assert bench.bar([made("torch", 4.0)]) is None
    assert bench.bar([made("xla", 3.0), made("torch", None)]) is None


def test_csv(tiny, rows_of_tiny, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(bench, "measure", lambda *arguments, **options: rows_of_tiny)
    assert bench.run(["tiny"], ["xla"], repeats=1, path=path) == 0
    rows = list(csv.DictReader(path.open()))
    assert [r["implementation"] for r in rows] == ["xla", *bench.BASELINES]
    assert rows[0]["jax"] == jax.__version__
    assert rows[0]["machine"]
    assert float(rows[0]["us"]) > 0
    assert f"RESULT tiny_xla_over_best_other {float(rows[0]['us']) / min(float(r['us']) for r in rows[1:]):.3f}" in (
        capsys.readouterr().out
    )


def test_rounds_are_interleaved():
    order = []
    times = testing.interleaved_us({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert order == [*"ab", *"ba", *"ab", *"ba"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert testing.interleaved_us({}) == {}
