import importlib.util
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_mxfp4_moe import mxfp4_moe

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=900, cwd=EXAMPLES.parent
    )


def test_the_example_of_the_readme():
    """As it stands there, and what its comments say of the result."""
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    assert "mxfp4_moe(" in code or "(mxfp4_moe)" in code
    shown = {}
    exec(compile(code, "README.md", "exec"), shown)
    shape, dtype = re.search(r"y = .*# \[([\d, ]+)\] (\w+)$", code, re.MULTILINE).groups()
    y = shown["y"]
    assert y.shape == tuple(map(int, shape.split(",")))
    assert str(y.dtype) == dtype
    assert np.isfinite(np.asarray(y, np.float32)).all()
    assert (np.asarray(y, np.float32) != 0).any(axis=-1).all()


def test_one_layer():
    example = run("one_layer.py")
    assert example.returncode == 0, example.stderr
    assert "y (16, 256) float32" in example.stdout
    packed, plain = (
        int(n.replace(",", ""))
        for n in re.findall(r"([\d,]+) bytes|instead of ([\d,]+)", example.stdout)
        for n in n
        if n
    )
    assert packed / plain == 4.25 / 32


def test_flax_layer():
    example = run("flax_layer.py")
    assert example.returncode == 0, example.stderr
    assert example.stdout.strip().endswith("equal: True")


def test_lora_adapters():
    """The loss on held-out text falls, and no bit of what is frozen changes; either would be status 1."""
    example = run("lora_adapters.py", "--short")
    assert example.returncode == 0, example.stderr
    results = dict(re.findall(r"^RESULT (\S+) (\S+)$", example.stdout, re.MULTILINE))
    assert float(results["bits_per_byte_after"]) < float(results["bits_per_byte_before"]) - 0.05
    assert results["packed_bytes_unchanged"] == "True"
    # Two layers of three adapters of rank 8: 128 x 128 twice, 128 x 8 at the router.
    assert int(results["adapter_parameters"]) == 2 * 8 * (2 * (128 + 128) + (128 + 8))


@pytest.fixture(scope="module")
def demo():
    """The module of the demo."""
    spec = importlib.util.spec_from_file_location("tiny_moe_lm", EXAMPLES / "tiny_moe_lm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tiny_moe_lm_measures_every_way_and_fails_with_the_reason(demo, quickly_compiled, monkeypatch, capsys):
    """The whole of it, to status 0, is `make demo`. Here a model that has learnt nothing answers, and what takes time is left out."""
    measured = []

    def bits_per_byte(model, windows):
        layer = model.blocks[0].moe
        measured.append(
            (type(layer).__name__, *(getattr(layer, n, None) for n in ("implementation", "activation_quant")))
        )
        return 8.0

    def sample(model, prompt, count, seed):
        layer = model.blocks[0].moe
        x, ids = jnp.ones((1, demo.HIDDEN)), jnp.zeros((1, 1), jnp.int32)
        y = mxfp4_moe(x, layer.weights, jnp.ones((1, 1)), ids, implementation=layer.implementation)
        return bytes(int(jnp.isfinite(y).all()) * [97, 98])

    monkeypatch.setattr(demo, "LAYERS", 1)
    monkeypatch.setattr(demo, "train", lambda learnt, steps, seed: demo.LanguageModel(nnx.Rngs(seed)))
    monkeypatch.setattr(demo, "bits_per_byte", bits_per_byte)
    monkeypatch.setattr(demo, "sample", sample)
    monkeypatch.setattr(
        demo, "time_layer", lambda layer, names, tokens, seed, seconds: dict.fromkeys(["ragged_dot", *names], 1.5)
    )
    monkeypatch.setattr(sys, "argv", ["tiny_moe_lm.py", "--smoke"])
    assert demo.main() == 1
    shown = capsys.readouterr()
    assert measured[:2] == [("FloatMoe", None, None)] * 2
    assert measured[2:] == [("Mxfp4Moe", n, quant) for n in ("xla", "torch") for quant in (None, "mxfp4")]
    results = dict(re.findall(r"^RESULT (\S+) (\S+)$", shown.out, re.MULTILINE))
    assert results["bridge"] == "compiled"
    assert int(results["bridge_calls"]) > 0
    # Codes, and one scale byte for 32 of them, instead of 4 bytes each.
    assert int(results["expert_bytes_mxfp4"]) / int(results["expert_bytes_float32"]) == pytest.approx(17 / 128)
    assert results["us_torch_1_tokens"] == "1.5"
    assert re.search(r"goes on writing \(torch, through the bridge\)", shown.out)
    assert re.search(r"^.*ab$", shown.out, re.MULTILINE)
    assert shown.err.splitlines() == [
        "FAILED bits per byte: 8.0000 found, expected at most 2.5",
        "FAILED cost of zeroing the routed experts: 0.0000 found, expected at least 0.2",
    ]


def test_tiny_moe_lm_demands_a_small_cost(demo):
    """Each of what the demo demands, missed alone."""
    good = {"float": 2.0, "without_experts": 3.0, "weights_xla": 2.001, "activations_xla": 2.01}
    for key, bad, name in (
        ("float", 2.6, "bits per byte"),
        ("without_experts", 2.1, "cost of zeroing the routed experts"),
        ("weights_xla", 2.1, "cost of MXFP4 weights (xla)"),
        ("activations_xla", 2.1, "cost of MXFP4 activations (xla)"),
    ):
        for bits, missed in ((good, []), ({**good, key: bad}, [name])):
            cost = {k: v / 2.0 - 1 for k, v in bits.items()}
            assert [what for what, *_, met in demo.demands(bits, cost, ["xla"]) if not met] == missed
