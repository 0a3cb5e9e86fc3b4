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
from jax_mxfp4_moe.implementations.base import Config, Operands
from jax_mxfp4_moe.implementations.triton import decode, implementation, layout
from jax_mxfp4_moe.implementations.triton.implementation import check, default_config
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import table

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
    return _recorded(target, problem, product, **changes).kernels


def _recorded(target, problem, product, **changes):
    from crosscompile import record_for

    from jax_mxfp4_moe.implementations.torch_call import BufferSpec
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    shuffled = dict(changes).pop("shuffled", False)
    config = Config.of({**dict(default_config(problem, product).items), **changes})
    inputs = [BufferSpec((1,), problem.dtype), *[BufferSpec((1,), "uint8")] * 4]
    floats = problem.has_gate_up_bias + problem.has_down_bias + problem.has_activation_scale
    inputs += [BufferSpec((1,), "float32")] * floats
    inputs += [BufferSpec((1,), "float32"), BufferSpec((1,), "int32")]
    return record_for(target, Facts(problem, config, shuffled), inputs, ptx=target == "sm_90")


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
    ("problem", "changes"),
    [
        (DECODE, {"shuffled": True}),
        (dataclasses.replace(DECODE, tokens=512), {"shuffled": True, "specialize": 64, "expand": 0}),
        (PREFILL, {"shuffled": True, "expand": 1}),
    ],
    ids=["decode", "specialized", "expanded"],
)
def test_launches_on_sm_90_wait_for_the_one_before(problem, changes):
    """All but the first may come early, and then touch no memory before the wait; the first waits for what is on the stream."""
    record = _recorded("sm_90", problem, "e4m3", **changes)
    first, *others = record.options
    assert not record.options[first].get("launch_pdl")
    assert others
    assert all(record.options[name]["launch_pdl"] for name in others)
    for name, kernel in record.kernels.items():
        text = kernel.asm["ptx"]
        touches = [m.start() for m in re.finditer(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*?global|cp\.async", text)]
        assert text.count("griddepcontrol.wait") == 1, name
        assert text.index("griddepcontrol.wait") < min(touches), name
        assert "griddepcontrol.launch_dependents" not in text, name


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
    kernels = _compiled("sm_90", problem, "e4m3", shuffled=True, specialize=128, expand=0)
    for kernel in (kernels[f"hopper_product of stage{i}"] for i in (1, 2)):
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


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "out_dtype", "shuffled", "dtype"),
    [
        (260, "bfloat16", True, "float32"),  # 64 MiB are 260.06 tokens
        (261, "bfloat16", True, "bfloat16"),
        (261, "float32", True, "float32"),
        (261, "bfloat16", False, "float32"),
    ],
)
def test_rows_are_rounded_early_only_where_they_leave_the_cache(tokens, out_dtype, shuffled, dtype):
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    problem = MoeProblem(tokens, 9, 33, 7168, 2048, out_dtype=out_dtype)
    assert Facts(problem, default_config(problem, "bits"), shuffled).buffers()["rows"].dtype == dtype


def test_a_float8_product_of_float32_activations_is_refused():
    from jax_mxfp4_moe.implementations.triton.pipeline import Facts

    for changes in ({"product": "e4m3", "specialize": 0}, {"product": "bits", "specialize": 64}):
        with pytest.raises(ValueError, match="float8 product in the config given for x of float32"):
            Facts(MoeProblem(4, 2, 8, 128, 128, "float32"), Config.of(changes), True).mode  # noqa: B018


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("activation_quant", [None, "mxfp4", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_config_is_one_that_the_kernels_can_run(monkeypatch, arch, activation_quant, dtype):
    monkeypatch.setattr(device, "arch", lambda platform: arch)
    platform = "cuda" if arch.startswith("sm_") else "rocm"
    for tokens in (1, 24, 512, 16384):
        for intermediate in (32, 256, 2880):
            problem = MoeProblem(tokens, 8, 32, 2880, intermediate, dtype, dtype, activation_quant=activation_quant)
            for config in IMPLEMENTATIONS["triton"].configs(problem, platform):
                for shuffled in {False, arch == "sm_90"}:
                    check(config, platform, shuffled)


@pytest.mark.parametrize(
    ("arch", "shuffled", "changes", "what"),
    [
        ("sm_90", True, {"specialize": 32}, "specialize=32 in the config given .* expected 0 or one of 64, 128"),
        ("sm_90", True, {"specialize": 96}, "specialize=96 in the config given .* expected 0 or one of 64, 128"),
        ("sm_90", False, {"specialize": 256}, "specialize=256 in the config given .* expected 0 or one of 64, 128"),
        ("sm_90", True, {"product": "fp8"}, "product='fp8' in the config given .* expected one of 'bits', 'e4m3', 'scaled'"),
        ("sm_90", False, {"product": "scaled"}, "product='scaled' .* expected 'bits' on sm_90, since this product is for gfx950"),
        ("sm_80", False, {"product": "e4m3"}, "product='e4m3' .* expected 'bits' on sm_80, since this product is for sm_90"),
        ("gfx942", False, {"product": "e4m3"}, "product='e4m3' .* expected 'bits' on gfx942"),
        ("sm_90", False, {"tile_rows": 24}, "tile_rows=24 in the config given .* expected a power of two of at least 4"),
        ("sm_90", False, {"block_k1": 320}, "block_k1=320 in the config given .* expected a power of two of at least 64"),
        ("sm_90", True, {"product": "e4m3", "block_k2": 64}, "block_k2=64 in the config given .* expected a power of two of at least 128"),
        ("sm_90", False, {"block_d": 96}, "block_d=96 in the config given .* expected a power of two of at least 16"),
        ("sm_90", False, {"warps1": 64}, "warps1=64 in the config given .* expected a power of two of at most 32"),
        ("gfx950", False, {"warps2": 32}, "warps2=32 in the config given .* expected a power of two of at most 16"),
        ("sm_90", False, {"expand": 2}, "expand=2 in the config given .* expected 0 or 1"),
        ("gfx950", True, {}, "weights in layout 'triton:e4m3' given on gfx950; expected packed ones there"),
        ("sm_100", True, {}, "weights in layout 'triton:e4m3' given on sm_100; expected packed ones there"),
    ],
)  # fmt: skip
@needs_triton
def test_what_the_kernels_cannot_run_is_refused(monkeypatch, arch, shuffled, changes, what):
    """When the call is traced, so that nothing has run. A tile of 256 would leave three quarters of its rows unwritten."""
    monkeypatch.setattr(device, "arch", lambda platform: arch)
    rng = np.random.default_rng(0)
    weights = MoeWeights(random_array(rng, (2, 64), 128), random_array(rng, (2, 128), 32))
    if shuffled:
        weights = weights.replace(gate_up=layout.shuffle(weights.gate_up), down=layout.shuffle(weights.down))
    problem = MoeProblem(4, 2, 2, 128, 32)
    operands = Operands(*(jnp.zeros(()), weights, jnp.zeros(()), jnp.zeros(())))
    config = Config.of({**dict(default_config(problem, "bits").items), **changes})
    platform = "cuda" if arch.startswith("sm_") else "rocm"
    with pytest.raises(ValueError, match=what):
        IMPLEMENTATIONS["triton"].run(operands, problem, config, platform=platform, pipeline=None, bridge=None)


def test_the_kernel_for_hopper_needs_gluon(monkeypatch):
    monkeypatch.setattr(device, "arch", lambda platform: "sm_90")
    monkeypatch.setattr(implementation, "_has_gluon", lambda: False)
    config = Config.of({**dict(default_config(DECODE, "e4m3").items), "specialize": 64})
    check(config, "cuda", False)  # packed weights do not take it
    with pytest.raises(ValueError, match=r"specialize=64 .* expected 0, since the triton that is installed lacks"):
        check(config, "cuda", True)


@needs_triton
def test_the_kernel_for_hopper_needs_aligned_weights():
    import torch

    from jax_mxfp4_moe.implementations import torch_call
    from jax_mxfp4_moe.implementations.triton import pipeline

    problem = MoeProblem(4, 2, 2, 128, 32)
    config = Config.of({**dict(default_config(problem, "e4m3").items), "specialize": 64})
    facts = pipeline.Facts(problem, config, True)
    slots, size = torch_call.workspace_slots(tuple(facts.buffers().values()))
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    codes, scales = torch.zeros(8208, dtype=torch.uint8), torch.zeros(640, dtype=torch.uint8)
    topk = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    reached = []

    def call(start):
        inputs = [x, codes[:8192], scales, codes[start : start + 8192], scales, *topk]
        workspace = torch.empty(size, dtype=torch.uint8)
        pipeline.run(facts, slots, lambda steps, operands: reached.append(operands), {}, inputs, [x], workspace)

    call(0)
    with pytest.raises(ValueError, match="an address that is no multiple of 16 given"):
        call(8)
    assert len(reached) == 1


@needs_triton
def test_what_is_on_by_default_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(device, "arch", lambda platform: "sm_90")
    problem = MoeProblem(16384, 8, 32, 2880, 2880, activation_quant="mxfp4")
    default = IMPLEMENTATIONS["triton"].configs(problem, "cuda")[0]
    assert default["specialize"] > 0
    assert default["expand"] > 0
    off = {"specialize": 0, "expand": 0}
    chosen = table.lookup(IMPLEMENTATIONS["triton"], problem, "cuda", off)
    assert chosen.items == Config.of({**dict(default.items), **off}).items
    with pytest.raises(ValueError, match="stages1=0 given; expected an int of at least 1"):
        table.lookup(IMPLEMENTATIONS["triton"], problem, "cuda", {"stages1": 0})


@needs_triton
def test_an_expert_whose_down_weights_are_too_many(monkeypatch):
    import torch

    monkeypatch.setattr(device, "arch", lambda platform: "sm_90")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    fits = MoeProblem(1, 1, 1, 2**24 - 128, 32)
    assert IMPLEMENTATIONS["triton"].why_not(fits, "cuda") is None
    sentence = IMPLEMENTATIONS["triton"].why_not(dataclasses.replace(fits, hidden=2**24), "cuda")
    assert sentence == "counts the weights of one expert in 32 bits, and this one has more"


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
