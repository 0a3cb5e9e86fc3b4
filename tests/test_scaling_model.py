"""The limits of benchmarks/scaling_model.py, and that the choice of a dispatch follows it."""

import importlib.util
import json
import pathlib
import sys

import pytest

from jax_mxfp4_moe.parallel import all_to_all_from_tokens

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "scaling_model.py"


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("scaling_model", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_one_gpu_has_no_communication(model):
    found = [model.predict(form, 1, 4096) for form in model.FORMS]
    assert all(p.communication == p.link_bytes == p.share == 0 and p.total == p.experts for p in found)
    assert len({p.experts for p in found}) == 1
    # 4096 x 9 rows of 88 MFLOP at 756 TFLOP/s: the products bound it, 4.29 ms.
    assert found[0].experts == pytest.approx(4096 * 9 * 6 * 7168 * 2048 / 756e12)
    assert found[0].load.max_over_mean == 1


def test_weights_are_divided(model):
    """Where every expert is hit: by n on a tensor axis, and but for the shared expert's copies on an expert axis."""
    layer = model.Layer()
    whole = 257 * layer.expert_bytes
    for gpus in (1, 2, 8, 64):
        assert model.predict("tp", gpus, 8192).weight_bytes == pytest.approx(whole / gpus)
        expected = (256 / gpus + 1) * layer.expert_bytes
        assert model.predict("ep-replicated", gpus, 8192).weight_bytes == pytest.approx(expected)
    # One token hits 8 experts, and with decode's few tokens the weights of those are what a layer costs.
    one = model.predict("tp", 1, 1)
    assert one.weight_bytes == 9 * layer.expert_bytes
    assert one.experts == pytest.approx(one.weight_bytes / 4218e9, rel=1e-2)


def test_bytes_on_links(model):
    layer, hardware = model.Layer(), model.Hardware(latency=0)
    y = 1024 * 7168 * 4
    assert model.all_reduce(layer, hardware, 2, 1024)[1] == y
    assert model.all_reduce(layer, hardware, 8, 1024)[1] == 2 * 7 / 8 * y
    # Within a node 64 GPUs send no more than 8; between nodes each sends its eighth.
    assert model.all_reduce(layer, hardware, 64, 1024)[1] == 2 * 7 / 8 * y + 2 * 7 / 8 * y / 8
    assert model.ranks_of_a_token(layer, 1) == 1
    assert 1.9 < model.ranks_of_a_token(layer, 2) < 2
    assert model.ranks_of_a_token(layer, 256) == pytest.approx(8)
    for gpus in (2, 8, 64):
        # A token goes to no more than 8 ranks, once there in bfloat16 and once back in float32.
        most = 1024 / gpus * min(8, gpus - 1) * (6 * 7168 + 64)
        assert 0.2 * most < model.exchange(layer, hardware, gpus, 1024)[1] <= most
    # Twice the tokens, twice the bytes and the time, but for latency.
    for form in model.FORMS:
        one, two = (model.predict(form, 8, tokens, hardware=hardware) for tokens in (65536, 131072))
        assert two.link_bytes == 2 * one.link_bytes
        assert two.communication == pytest.approx(2 * one.communication)
    slow = model.Hardware(latency=1.0)
    assert model.all_reduce(layer, slow, 4, 16)[0] == pytest.approx(1, rel=1e-3)
    assert model.exchange(layer, slow, 4, 16)[0] == pytest.approx(5, rel=1e-3)


def test_imbalance(model):
    """More tokens level it, more ranks and unequal experts do not; tokens that are drawn one by one and as sums agree."""
    layer = model.Layer()

    def ratio(tokens, ranks, skew=0.0):
        return model.random_load(layer, tokens, ranks, skew).max_over_mean

    assert ratio(16, 8) > ratio(512, 8) > ratio(65536, 8) > 1
    assert ratio(128, 2) < ratio(128, 8) < ratio(128, 64)
    assert ratio(2**20, 64) < 1.02
    assert ratio(65536, 8, 1.0) > 1.15 > ratio(65536, 8)
    drawn, summed = ratio(2048, 32) - 1, ratio(4096, 32) - 1
    assert summed * 2**0.5 == pytest.approx(drawn, rel=0.3)
    assert model.random_load(layer, 4096, 8).hit == 32
    assert model.random_load(layer, 1, 256).hit == 1
    even, uneven = (model.predict("ep-all_to_all", 8, 65536, skew=skew) for skew in (0.0, 1.0))
    assert uneven.experts > 1.1 * even.experts


def test_the_choice_of_a_dispatch_lies_within_the_prediction(model):
    """Between where tokens must be divided and gathered for it, and where they lie as each form wants them."""
    for ranks in (2, 4, 8):
        least, most = (model.threshold(ranks, divided=divided) for divided in (True, False))
        assert least <= all_to_all_from_tokens(ranks) <= (most or 2**20)


def test_overhead_is_read_from_the_results(model, tmp_path):
    overhead = model.Overhead.measured()
    assert len(overhead.rows) >= 3
    assert all(1 <= factor < 10 for factor in overhead.factors)
    table = tmp_path / "results.md"
    table.write_text(
        "| case | activations | us | over bound |\n|---|---|---|---|\n| r257i256m257 | bf16 | 1 | 2.0 |\n| r33i512m33 | bf16 | 1 | 4.0 |\n"
        "| r33i512m3300 | bf16 | 1 | 1.5 |\n| ossm1 | bf16 | 1 | 9 |\n| r33i512m33 | mxfp4 | 1 | 7 |\n\n| case | over bound |\n|---|---|\n"
    )
    overhead = model.Overhead.measured(table)
    assert (overhead(9), overhead(90), overhead(900), overhead(1e6)) == (3.0, 2.25, 1.5, 1.5)
    assert model.predict("tp", 1, 16, overhead=overhead).experts == 3 * model.predict("tp", 1, 16).experts
    with pytest.raises(ValueError, match="no case rEiFmM with activations 'fp8' found"):
        model.Overhead.measured(table, "fp8")


def test_the_page_has_the_tables_that_the_script_prints(model):
    """Those that depend on no measurement."""
    lines = (PATH.parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8").splitlines()
    for table in (model.threshold_table([2, 4, 8, 16, 32, 64]), model.imbalance_table([2, 4, 8, 16, 32, 64])):
        start = lines.index(table[0])
        assert lines[start : start + len(table)] == table


def test_comparison_with_measurements(model):
    """Rows as benchmarks/parallel.py writes them; one is measured at twice the prediction."""
    at = {"form": "ep-replicated", "devices": 4, "tokens": 128}
    us = 2e6 * model.predict(*at.values()).total
    lines = [
        json.dumps({"devices": "4 x GPU", "versions": {}, "command": ""}),
        json.dumps({**at, "error": 1.0, "wrong": "error above"}),
        json.dumps({**at, "error": 1e-3, "layer_us": us, "compute_us": us, "communication": 0.25}),
    ]
    table = model.comparison_table(lines)
    assert len(table) == 5
    assert "| -50% | 25% |" in table[2]
    assert table[-1] == "median absolute error 50%"
    with pytest.raises(ValueError, match="no timed row found"):
        model.comparison_table(lines[:2])
