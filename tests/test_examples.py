import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

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
def smoke():
    """Everything that the demo does, on a model that has learnt nothing."""
    return run("tiny_moe_lm.py", "--smoke")


def test_tiny_moe_lm_does_all_of_it(smoke):
    assert "Traceback" not in smoke.stderr, smoke.stderr
    results = dict(re.findall(r"^RESULT (\S+) (\S+)$", smoke.stdout, re.MULTILINE))
    assert results["bridge"] == "compiled"
    assert int(results["bridge_calls"]) > 0
    # Codes, and one scale byte for 32 of them, instead of 4 bytes each.
    assert int(results["expert_bytes_mxfp4"]) / int(results["expert_bytes_float32"]) == pytest.approx(17 / 128)
    for implementation in ("xla", "torch"):
        assert float(results[f"us_{implementation}_1_tokens"]) > 0
        for what in ("weights", "activations"):
            assert float(results[f"bits_per_byte_{what}_{implementation}"]) == pytest.approx(8, abs=1.5)


def test_tiny_moe_lm_fails_with_the_reason(smoke):
    assert smoke.returncode == 1
    failed = [line for line in smoke.stderr.splitlines() if line.startswith("FAILED")]
    assert re.fullmatch(r"FAILED bits per byte: [\d.]+ found, expected at most 2\.5", failed[0])
    assert re.fullmatch(r"FAILED cost of zeroing the routed experts: [\d.-]+ found, expected at least 0\.2", failed[-1])
