"""`triton` without a GPU: every kernel under Triton's interpreter, and compiled for GPUs that are not there.

The interpreter replaces the compiler for a whole process, so that interpreted tests run in one process of their own.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_bytes

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, device
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.implementations.triton import decode, layout
from jax_mxfp4_moe.implementations.triton.implementation import default_config
from jax_mxfp4_moe.problem import MoeProblem

HERE = pathlib.Path(__file__).parent
needs_triton = pytest.mark.skipif(
    IMPLEMENTATIONS["triton"].missing() is not None, reason=f"triton {IMPLEMENTATIONS['triton'].missing()}"
)


@needs_triton
def test_kernels_in_the_interpreter():
    """Runs interpreted_kernels.py, whose tests the interpreter must not leave to others."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_kernels.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def _compiled(target, problem, product, **changes):
    from crosscompile import compile_for

    from jax_mxfp4_moe.implementations.torch_call import BufferSpec
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    shuffled = dict(changes).pop("shuffled", False)
    config = Config.of({**dict(default_config(problem, product).items), **changes})
    inputs = [BufferSpec((1,), problem.dtype), *[BufferSpec((1,), "uint8")] * 4]
    floats = problem.has_gate_up_bias + problem.has_down_bias + problem.has_activation_scale
    inputs += [BufferSpec((1,), "float32")] * floats
    inputs += [BufferSpec((1,), "float32"), BufferSpec((1,), "int32")]
    return compile_for(target, Facts(problem, config, shuffled), inputs, ptx=target == "sm_90")


DECODE = MoeProblem(16, 9, 257, 7168, 256, has_gate_up_bias=True, has_down_bias=True)
PREFILL = MoeProblem(4096, 4, 32, 2880, 2880, activation="swiglu_oai", activation_alpha=1.702, activation_limit=7.0)


@needs_triton
@pytest.mark.parametrize("target", ["gfx950", "gfx942"])
@pytest.mark.parametrize(
    "problem",
    [
        DECODE,
        PREFILL,
        MoeProblem(16, 9, 257, 7168, 256, activation_quant="mxfp4"),
        MoeProblem(16, 9, 257, 7168, 256, activation_quant="fp8", has_activation_scale=True),
        MoeProblem(5, 2, 8, 96, 160, "float32"),
    ],
    ids=["decode", "prefill", "quantized", "fp8", "float32"],
)
def test_kernels_compile_for_gfx950_and_gfx942(target, problem):
    """Every kernel: no spills, no scratch, LDS that fits, and the products on matrix instructions."""
    for name, kernel in _compiled(target, problem, "bits").items():
        text = kernel.asm["amdgcn"]
        spills = re.findall(r"\.(?:[vs]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", text)
        assert spills, name
        assert set(spills) == {"0"}, name
        assert kernel.metadata.shared <= (160 if target == "gfx950" else 64) * 1024, name
        assert ("v_mfma" in text) == name.startswith("stage"), name


@needs_triton
@pytest.mark.parametrize(
    "problem",
    [
        MoeProblem(16, 9, 257, 7168, 256, activation_quant="mxfp4"),
        MoeProblem(512, 8, 256, 7168, 2048, activation_quant="mxfp4"),
        dataclasses.replace(PREFILL, activation_quant="mxfp4", has_gate_up_bias=True, has_down_bias=True),
        MoeProblem(5, 2, 8, 96, 160, "float32", activation_quant="mxfp4"),
    ],
    ids=["decode", "middle", "prefill", "float32"],
)
def test_scaled_products_compile_for_gfx950(problem, capfd):
    """MXFP4 by MXFP4 on the instructions that take scales along; no spills, no scratch, LDS that fits, no complaint of the compiler."""
    kernels = _compiled("gfx950", problem, "scaled")
    assert "error" not in capfd.readouterr().err.lower()
    for name, kernel in kernels.items():
        text = kernel.asm["amdgcn"]
        unwanted = re.findall(r"\.(?:[vs]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", text)
        assert set(unwanted) == {"0"}, name
        assert kernel.metadata.shared <= 160 * 1024, name
        products = set(re.findall(r"v_s?mfmac?_\w+", text))
        assert len(products) == name.startswith("stage"), name
        assert all(p.startswith("v_mfma_scale_") and p.endswith("_f8f6f4") for p in products), name


def test_a_scaled_product_is_for_mxfp4_activations():
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    with pytest.raises(
        ValueError, match=r"product='scaled' .* activation_quant='fp8'; expected activation_quant='mxfp4'"
    ):
        Facts(MoeProblem(16, 9, 257, 7168, 256, activation_quant="fp8"), Config.of({"product": "scaled"})).mode  # noqa: B018


@pytest.mark.parametrize(
    ("arch", "activation_quant", "products"),
    [
        ("gfx950", "mxfp4", ["scaled", "bits"]),
        ("gfx950", "fp8", ["bits"]),
        ("gfx950", None, ["bits"]),
        ("gfx942", "mxfp4", ["bits"]),
    ],
)
def test_the_default_product_on_gfx950_and_gfx942(monkeypatch, arch, activation_quant, products):
    monkeypatch.setattr(device, "arch", lambda platform: arch)
    problem = MoeProblem(16, 9, 257, 7168, 256, activation_quant=activation_quant)
    configs = IMPLEMENTATIONS["triton"].configs(problem, "rocm")
    assert list(dict.fromkeys(config["product"] for config in configs)) == products
    assert min(configs[0]["warps1"], configs[0]["warps2"]) >= 2


@needs_triton
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.nvidia") is None,
    reason="no triton with its NVIDIA part",
)
@pytest.mark.parametrize("changes", [{}, {"expand": 1}, {"product": "bits"}], ids=["shuffled", "expanded", "wide"])
def test_float8_kernels_compile_for_sm_90(changes):
    """The layout's kernels multiply by wgmma, and weights reach it from registers without a detour."""
    kernels = _compiled(
        "sm_90",
        DECODE,
        dict(changes).pop("product", "e4m3"),
        shuffled=True,
        **{k: v for k, v in changes.items() if k != "product"},
    )
    for name in ("stage1", "stage2", "stage2_spans"):
        if name in kernels:
            assert "wgmma.mma_async" in kernels[name].asm["ptx"], name


@needs_triton
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.nvidia") is None,
    reason="no triton with its NVIDIA part",
)
@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(PREFILL, has_gate_up_bias=True, has_down_bias=True),
        dataclasses.replace(DECODE, activation_quant="fp8"),
    ],
    ids=["two planes", "one plane"],
)
def test_the_kernel_for_hopper_compiles_for_sm_90(problem):
    """Three groups of warps that share the registers unevenly; products by wgmma, and room for the ring and what else is shared."""
    kernel = _compiled("sm_90", problem, "e4m3", shuffled=True, specialize=128, expand=0)["hopper_product"]
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    assert "mbarrier" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation_quant", [None, "mxfp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 64, 512, 16384])
def test_configs_on_sm_90(monkeypatch, dtype, activation_quant, tokens):
    """Float8 sums keep 13 bits, so that only x in bfloat16 goes through them by default; candidates differ, and each is one."""
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    monkeypatch.setattr(device, "arch", lambda platform: "sm_90")
    problem = MoeProblem(tokens, 8, 32, 2880, 2880, dtype, dtype, activation_quant=activation_quant)
    configs = IMPLEMENTATIONS["triton"].configs(problem, "cuda")
    assert len(set(configs)) == len(configs) > 1
    for config in configs:
        for shuffled in (False, True):
            mode = Facts(problem, config, shuffled).mode
            assert (mode >= decode.E4M3.value) <= (dtype == "bfloat16")


def test_a_float8_product_of_float32_activations_is_refused():
    from jax_mxfp4_moe.implementations.base import Config
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    for changes in ({"product": "e4m3", "specialize": 0}, {"product": "bits", "specialize": 64}):
        with pytest.raises(ValueError, match="float8 product in the config given for x of float32"):
            Facts(MoeProblem(4, 2, 8, 128, 128, "float32"), Config.of(changes), True).mode  # noqa: B018


def random_array(rng, rows, length) -> Mxfp4Array:
    return Mxfp4Array(*map(jnp.asarray, random_bytes(rng, rows, length)))


@pytest.mark.parametrize("length", [32, 96, 128, 160, 416, 512])
def test_the_layout_there_and_back(length):
    a = random_array(np.random.default_rng(length), (3, 64), length)
    assert layout.fits(a)
    shuffled = layout.shuffle(a)
    assert shuffled.shape == a.shape
    assert shuffled.layout == layout.TAG
    jax.tree.map(np.testing.assert_array_equal, layout.unshuffle(shuffled), a)


@pytest.mark.parametrize(("low", "fits"), [(109, True), (108, False)])
def test_the_layout_holds_twelve_binades_a_row(low, fits):
    scales = np.full((1, 32, 4), 120, np.uint8)
    scales[0, 3, 2] = low
    a = Mxfp4Array(jnp.full((1, 32, 64), 0x21, jnp.uint8), jnp.asarray(scales))
    assert bool(layout.fits(a)) == fits
    if fits:
        jax.tree.map(np.testing.assert_array_equal, layout.unshuffle(layout.shuffle(a)), a)


def test_the_layout_does_not_hold_nan():
    scales = jnp.full((1, 32, 4), 255, jnp.uint8)
    assert not layout.fits(Mxfp4Array(jnp.zeros((1, 32, 64), jnp.uint8), scales))


def test_zero_blocks_with_scale_zero_fit_wherever_the_others_are():
    codes = np.full((1, 32, 64), 0x21, np.uint8)
    scales = np.full((1, 32, 4), 120, np.uint8)
    codes[0, 5, :16], scales[0, 5, 0] = 0x80, 0
    a = Mxfp4Array(jnp.asarray(codes), jnp.asarray(scales))
    assert layout.fits(a)
    jax.tree.map(np.testing.assert_array_equal, layout.unshuffle(layout.shuffle(a)), a)


def test_prepare_leaves_weights_packed_where_there_are_no_float8_products():
    rng = np.random.default_rng(0)
    weights = MoeWeights(random_array(rng, (2, 64), 32), random_array(rng, (2, 32), 32))
    if jax.default_backend() == "cpu":
        assert IMPLEMENTATIONS["triton"].prepare(weights) is weights


def test_why_not_on_a_cpu():
    sentence = IMPLEMENTATIONS["triton"].why_not(None, "cpu")
    assert sentence == "runs on cuda and rocm, found cpu"
