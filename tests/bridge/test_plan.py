"""Plans, the choice of a bridge, registration, and the binary itself."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.torch_call import BridgeFallbackWarning, BufferSpec, Plan, call, why_not

VECTOR = (BufferSpec((4,), "float32"),)


def double(inputs, outputs, workspace):
    torch.mul(inputs[0], 2, out=outputs[0])


# Plans


def test_t37_plans_are_interned_by_key_and_traces_are_reused():
    traces = []

    def through(x):
        traces.append(None)
        return call(Plan("interned", ("key", 1), lambda *buffers: double(*buffers), VECTOR, VECTOR), x)[0]

    assert Plan("interned", ("key", 1), double, VECTOR, VECTOR) is Plan("interned", ("key", 1), double, VECTOR, VECTOR)
    assert Plan("interned", ("key", 1), double, VECTOR, VECTOR) is not Plan("other", ("key", 1), double, VECTOR, VECTOR)
    jitted = jax.jit(through)
    before = torch_call.counters()["instantiated"]
    for _ in range(3):
        jitted(jnp.ones(4))
    for _ in range(3):  # a new function with an equal plan: traced again, compiled from the cache or anew, never wrong
        np.testing.assert_array_equal(jax.jit(lambda x: through(x))(jnp.ones(4)), [2] * 4)
    assert len(traces) == 4
    assert torch_call.counters()["instantiated"] <= before + 4


def test_the_digest_depends_on_the_key_alone_and_is_the_same_in_every_process(python):
    here = Plan("digest", ("a", 1, 2.5), double, VECTOR, VECTOR).id
    program = (
        "from jax_mxfp4_moe.implementations.torch_call import Plan\n"
        "print(Plan('digest', ('a', 1, 2.5), None, (), ()).id)"
    )
    assert int(python(program, PYTHONHASHSEED="7").stdout) == here
    assert Plan("digest", ("a", 1, 2.0), double, VECTOR, VECTOR).id != here


def test_t4_a_digest_collision_is_an_error(monkeypatch):
    keep = Plan("collision", 1, double, VECTOR, VECTOR)
    monkeypatch.setattr(torch_call, "_digest", lambda name, key: keep.id)
    with pytest.raises(ValueError, match=r"same 64-bit digest as 'collision' with key 1. Change either key"):
        Plan("collision", 2, double, VECTOR, VECTOR)


def test_a_key_must_determine_the_plan_and_have_a_stable_repr():
    keep = Plan("facts", 1, double, VECTOR, VECTOR)
    with pytest.raises(ValueError, match=r"exists with other buffers or settings.*Put what differs into the key"):
        Plan("facts", 1, double, VECTOR, VECTOR, 256)
    with pytest.raises(ValueError, match="contains a memory address, expected the same text in every process"):
        Plan("facts", double, double, VECTOR, VECTOR)
    with pytest.raises(TypeError, match="unhashable"):
        Plan("facts", [1], double, VECTOR, VECTOR)
    assert keep.id


def test_an_evicted_plan_lives_as_long_as_its_executable(monkeypatch):
    monkeypatch.setattr(torch_call, "MAX_PLANS", 2)

    def build():
        return Plan("evicted", 0, lambda *buffers: double(*buffers), VECTOR, VECTOR)

    jitted = jax.jit(lambda x: call(build(), x)[0])
    jitted(jnp.ones(4))
    alive = weakref.ref(build())
    for key in range(3):
        Plan("evicting", key, double, VECTOR, VECTOR)
    gc.collect()
    assert alive() is None
    assert len(torch_call._recent) == 2
    np.testing.assert_array_equal(jitted(jnp.ones(4)), [2] * 4)  # the executable still holds the C++ side
    np.testing.assert_array_equal(jax.jit(lambda x: call(build(), x)[0])(jnp.ones(4)), [2] * 4)  # and so does a new one
    np.testing.assert_array_equal(jitted(jnp.ones(4)), [2] * 4)


def test_a_plan_dies_with_its_executable():
    class Resource:
        pass

    resource = Resource()
    died = weakref.ref(resource)

    def run(inputs, outputs, workspace, resource=resource):
        double(inputs, outputs, workspace)

    plan = Plan("dies", 0, run, VECTOR, VECTOR)
    call(plan, jnp.ones(4))[0].block_until_ready()
    del resource, run, plan
    torch_call._recent.clear()
    jax.clear_caches()
    gc.collect()
    call(Plan("next", 0, double, VECTOR, VECTOR), jnp.ones(4))[0].block_until_ready()  # drops what waited for the lock
    gc.collect()
    assert died() is None


# The operands and the choice


def test_wrong_operands_are_refused_while_tracing():
    plan = Plan("operands", 0, double, VECTOR, VECTOR)
    for operands, shown in [
        ((), r"\(\)"),
        ((jnp.ones(5),), r"\(float32\[5\]\)"),
        ((jnp.arange(4),), r"\(int32\[4\]\)"),
    ]:
        with pytest.raises(ValueError, match=rf"operands was given {shown}, expected \(float32\[4\]\). Build the plan"):
            jax.jit(lambda *operands: call(plan, *operands))(*operands)


def test_unknown_bridge(monkeypatch):
    plan = Plan("unknown", 0, double, VECTOR, VECTOR)
    with pytest.raises(ValueError, match="bridge='fast', expected one of graph, eager, callback"):
        call(plan, jnp.ones(4), bridge="fast")
    with pytest.raises(ValueError, match="bridge='fast', expected one of"):
        why_not("fast")
    monkeypatch.setenv(torch_call.ENVIRONMENT_VARIABLE, "quick")
    with pytest.raises(ValueError, match="JAX_MXFP4_MOE_BRIDGE='quick', expected one of"):
        call(plan, jnp.ones(4))


def test_graph_needs_a_capturable_plan():
    plan = Plan("not_capturable", 0, double, VECTOR, VECTOR)
    with pytest.raises(
        NotImplementedError, match=r"capturable=False\), expected a capturable plan. Use bridge='eager'"
    ):
        call(plan, jnp.ones(4), bridge="graph")


def targets(function, *arguments):
    return set(re.findall(r"jax_mxfp4_moe_\w+|\w*callback\w*", jax.jit(function).lower(*arguments).as_text()))


def test_the_choice_is_made_while_tracing(monkeypatch):
    plan = Plan("choice", 0, double, VECTOR, VECTOR, capturable=True)
    x = jnp.ones(4)
    assert "jax_mxfp4_moe_eager" in targets(lambda x: call(plan, x), x)  # the default on a cpu
    assert "jax_mxfp4_moe_graph" in targets(lambda x: call(plan, x, bridge="graph"), x)
    monkeypatch.setenv(torch_call.ENVIRONMENT_VARIABLE, "graph")
    assert "jax_mxfp4_moe_graph" in targets(lambda x: call(plan, x), x)
    assert "jax_mxfp4_moe_eager" in targets(lambda x: call(plan, x, bridge="eager"), x)  # the argument counts first
    monkeypatch.setenv(torch_call.ENVIRONMENT_VARIABLE, "callback")
    assert not {"jax_mxfp4_moe_graph", "jax_mxfp4_moe_eager"} & targets(lambda x: call(plan, x), x)


# Registration


def test_t2_targets_are_registered_for_every_platform():
    state = torch_call.bridge_state()
    assert state["why_not"] is None
    assert why_not("eager") is None
    assert why_not("graph") is None
    assert state["registered_platforms"] == ("cpu", "CUDA", "ROCM")
    for platform in state["registered_platforms"]:  # the same name and pointer again is accepted
        handlers = torch_call._load().module.handlers(platform)
        for bridge, target in torch_call.TARGETS.items():
            jax.ffi.register_ffi_target(target, handlers[bridge], platform=platform)


def test_t2_an_unknown_platform_is_named():
    with pytest.raises(ValueError, match="no handlers for platform 'tpu': expected cpu, CUDA or ROCM"):
        torch_call._load().module.handlers("tpu")


def test_t3_first_use_from_two_threads_registers_once(monkeypatch):
    loaded = torch_call._load()
    count = []
    monkeypatch.setattr(torch_call, "_register", lambda module: count.append(module) or loaded)
    torch_call._load_once.cache_clear()
    threads = [threading.Thread(target=torch_call._load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [loaded.module]


def test_t3_registration_before_the_backend_exists(python):
    done = python(
        "import jax\n"
        "from jax._src import xla_bridge\n"
        "from jax_mxfp4_moe.implementations import torch_call as t\n"
        "assert not xla_bridge._backends\n"  # importing starts nothing
        "assert t.why_not('graph') is None and xla_bridge._backends\n"
        "spec = (t.BufferSpec((2,), 'float32'),)\n"
        "print(jax.jit(lambda x: t.call(t.Plan('p', 0, lambda i, o, w: o[0].fill_(3), spec, spec), x))(jax.numpy.ones(2)))"
    )
    assert done.returncode == 0, done.stderr
    assert "[3., 3.]" in done.stdout


@pytest.mark.parametrize(
    ("version", "runtime", "reason"),
    [
        ("0.9.2", (0, 2), "the bridge needs jaxlib 0.10, found 0.9.2"),
        ("0.10.2", (0, 2), "the extension was built for XLA FFI API 0.3, but jaxlib 0.10.2 has 0.2"),
        ("2.0.0", (0, 9), None),
        ("0.11.0.dev20260101", None, None),
    ],
)
def test_t1_a_jaxlib_that_is_too_old_is_refused_before_registering(monkeypatch, version, runtime, reason):
    loaded = torch_call._load()
    monkeypatch.setattr(torch_call, "jaxlib", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch_call, "_runtime_ffi_version", lambda: runtime)
    registered = []
    monkeypatch.setattr(torch_call, "_register", lambda module: registered.append(module) or loaded)
    found = torch_call._load_once.__wrapped__().reason
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)
    assert bool(registered) == (reason is None)


@pytest.fixture
def broken(monkeypatch):
    """An extension that cannot be used."""
    reason = "the compiled extension jax_mxfp4_moe._bridge cannot be loaded (no such file)"
    monkeypatch.setattr(torch_call, "_load", lambda: torch_call._Loaded(None, reason))
    monkeypatch.setattr(torch_call, "_warned", False)
    return reason


def test_t2_without_the_extension_calls_fall_back_with_one_warning(broken):
    plan = Plan("fallback", 0, double, VECTOR, VECTOR)
    with pytest.warns(BridgeFallbackWarning, match=re.escape(broken)) as caught:
        results = [call(plan, jnp.ones(4))[0] for _ in range(3)]
    np.testing.assert_array_equal(results, [[2] * 4] * 3)
    assert len([w for w in caught if w.category is BridgeFallbackWarning]) == 1
    assert "pure_callback" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert why_not("eager") == why_not("graph") == broken
    assert why_not("callback") is None
    assert torch_call.bridge_state()["why_not"] == broken


def test_t2_without_the_extension_an_explicit_bridge_is_an_error(broken, monkeypatch):
    plan = Plan("fallback", 0, double, VECTOR, VECTOR)
    with pytest.raises(ImportError, match=r"bridge='eager' was asked for, but .* use bridge='callback'"):
        call(plan, jnp.ones(4), bridge="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for: no warning
        np.testing.assert_array_equal(call(plan, jnp.ones(4), bridge="callback")[0], [2] * 4)


# The binary


def test_t46_the_binary_links_no_gpu_runtime_and_no_torch():
    readelf = shutil.which("readelf") or shutil.which("objdump")
    if readelf is None:
        pytest.skip("needs readelf or objdump")
    option = "-d" if readelf.endswith("readelf") else "-p"
    extension = torch_call.bridge_state()["extension"]
    text = subprocess.run([readelf, option, extension], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*?([\w+.-]+\.so[\w.]*)", text)
    assert any(name.startswith("libc.so") for name in needed)
    assert not [name for name in needed if re.search(r"cuda|cudart|hip|roc|torch|c10|nvrtc", name)], needed


def test_t46_device_types_follow_the_platform():
    module = torch_call._load().module
    assert [module.handlers(platform)["device_type"] for platform in ("cpu", "CUDA", "ROCM")] == [1, 2, 10]


@pytest.mark.parametrize(
    ("platform", "cuda", "hip", "expected"),
    [
        ("ROCM", "13.0", None, "the buffers are on ROCM, but torch .* was built for CUDA"),
        ("CUDA", None, "7.1", "the buffers are on CUDA, but torch .* was built for ROCM"),
        ("CUDA", None, None, "built for cpu"),
        ("ROCM", None, "7.1", "XLA runs on device 3, but torch sees 2 devices"),
        ("CUDA", "13.0", None, "XLA runs on device 3, but torch sees 2 devices"),
    ],
)
def test_t46_torch_must_be_built_for_the_platform_of_the_buffers(monkeypatch, platform, cuda, hip, expected):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=expected):
        torch_call._check_torch_gpu(3, platform)
    if "sees" in expected:
        torch_call._check_torch_gpu(1, platform)


def test_t32_a_hundred_thousand_calls_leave_nothing_behind(plan):
    """Memory, file descriptors, plans and references are where they were after the first few thousand calls."""

    def touch(inputs, outputs, workspace):
        torch.add(inputs[0], 1, out=outputs[0])

    built = plan(touch, [((8,), "float32")], [((8,), "float32")], workspace_bytes=512)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 5_000, lambda i, x: call(built, x, bridge="eager")[0], x))

    def state():
        gc.collect()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        files = len(list(pathlib.Path("/proc/self/fd").iterdir()))
        return pages * os.sysconf("SC_PAGE_SIZE"), files, torch_call.bridge_state()["plans"], sys.getrefcount(touch)

    x = jnp.zeros(8)
    for _ in range(2):
        x = loop(x).block_until_ready()
    memory, *rest = state()
    for _ in range(20):
        x = loop(x).block_until_ready()
    np.testing.assert_array_equal(x, np.full(8, 22 * 5_000))
    after, *rest_after = state()
    assert built.calls == 22 * 5_000
    assert rest_after == rest
    assert after - memory < 2 << 20, f"{after - memory} bytes for 100,000 calls"
