"""The bridge on a GPU. T numbers: the list of cases in bridge/README.md.

Programs that need XLA flags of their own, or a first call that is already inside a capture, run in a fresh interpreter.
"""

from __future__ import annotations

import gc
import importlib.util
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.torch_call import call

N = (64, 256)
F32 = [(N, "float32")]
ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def double(inputs, outputs, workspace):
    torch.mul(inputs[0], 2, out=outputs[0])


def f32(seed=0, shape=N):
    return jax.random.normal(jax.random.key(seed), shape)


# Data


@pytest.mark.parametrize("bridge", ["eager", "graph"])
def test_t5_buffers_arrive_without_a_copy_on_the_device(plan, bridge):
    seen = []

    def look(inputs, outputs, workspace):
        seen.append([(t.data_ptr(), t.device, t.dtype, tuple(t.shape)) for t in (*inputs, *outputs)])
        torch.add(inputs[0], inputs[1].float().sum(), out=outputs[0])

    x, y = f32(), jnp.ones((3, 5), jnp.bfloat16)
    (z,) = call(plan(look, [*F32, ((3, 5), "bfloat16")], F32), x, y, bridge=bridge)
    np.testing.assert_array_equal(z, x + 15)
    (a, b, c) = seen[0]
    assert a == (x.unsafe_buffer_pointer(), torch.device("cuda", 0), torch.float32, N)
    assert b[1:] == (torch.device("cuda", 0), torch.bfloat16, (3, 5))
    assert c[0] == z.unsafe_buffer_pointer()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "uint8", "int8", "int32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bool"]
)
def test_t6_dtypes_arrive_as_themselves(plan, dtype):
    seen = []

    def copy(inputs, outputs, workspace):
        seen.append(inputs[0].dtype)
        outputs[0].view(torch.uint8).copy_(inputs[0].view(torch.uint8))

    raw = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, (4, 8), np.uint8)
    x = raw.view(torch_call.BufferSpec((), dtype).numpy_dtype)
    (y,) = call(plan(copy, [(x.shape, dtype)], [(x.shape, dtype)]), jnp.asarray(x), bridge="eager")
    np.testing.assert_array_equal(np.asarray(y).view(np.uint8), raw)
    assert seen == [getattr(torch, dtype)]


def test_t7_t29_nothing_is_written_outside_of_a_buffer_and_the_workspace_has_its_size(plan):
    """Canaries: the neighbours that XLA places around the results keep their values."""
    sizes = []

    def fill(inputs, outputs, workspace):
        sizes.append((workspace.numel(), workspace.data_ptr() % 256))
        workspace.fill_(0xAB)
        outputs[0].fill_(7)

    built = plan(fill, [((5,), "uint8")], [((5,), "uint8")], workspace_bytes=1000)

    @jax.jit
    def f(x):
        before = x * 3
        (y,) = call(built, x)
        return before, y, before + y

    x = jnp.arange(5, dtype=jnp.uint8)
    before, y, after = f(x)
    np.testing.assert_array_equal(before, x * 3)
    np.testing.assert_array_equal(y, np.full(5, 7))
    np.testing.assert_array_equal(after, x * 3 + 7)
    assert set(sizes) == {(1000, 0)}


def test_t8_transposed_and_sliced_producers(plan):
    built = plan(double, F32, F32)
    x = f32(shape=(N[1], N[0]))
    np.testing.assert_array_equal(jax.jit(lambda x: call(built, x.T)[0])(x), 2 * x.T)
    wide = f32(shape=(2 * N[0], N[1]))
    np.testing.assert_array_equal(jax.jit(lambda x: call(built, x[::2])[0])(wide), 2 * wide[::2])
    np.testing.assert_array_equal(
        jax.jit(lambda x: call(built, x)[0], donate_argnums=0)(jnp.array(wide[: N[0]])), 2 * wide[: N[0]]
    )


# Order and streams


@pytest.mark.parametrize("bridge", ["eager", "graph"])
def test_t11_slow_producers_and_consumers_stay_in_order(plan, bridge):
    built = plan(double, F32, F32)
    big = jax.random.normal(jax.random.key(1), (4096, 4096))

    @jax.jit
    def f(x, big):
        slow = (big @ big @ big)[: N[0], : N[1]] * 0
        (y,) = call(built, x + slow, bridge=bridge)
        return (y @ y.T).sum(), y

    x = f32()
    want = f(x, big)
    for _ in range(50):
        total, y = f(x, big)
        np.testing.assert_array_equal(y, 2 * x)
        assert total == want[0]


def test_t12_everything_runs_on_xlas_stream(plan):
    """The profiler sees the stream of every kernel: XLA's and torch's are on one, which is not the null stream."""
    built = plan(double, F32, F32)
    f = jax.jit(lambda x: jnp.tanh(call(built, jnp.sin(x) @ x.T @ x, bridge="eager")[0]) + 1)
    x = f32()
    f(x).block_until_ready()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        f(x).block_until_ready()
        torch.cuda.synchronize()
    kernels = [e for e in profile.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    assert len(kernels) >= 3, [e.name() for e in kernels]
    assert len({e.device_resource_id() for e in kernels}) == 1, [(e.name(), e.device_resource_id()) for e in kernels]
    assert kernels[0].device_resource_id() != 7  # CUPTI's number of the null stream
    assert not [e.name() for e in kernels if "memcpy" in e.name().lower()]  # T45


def test_t13_the_call_returns_while_its_kernel_runs(plan):
    def slow(inputs, outputs, workspace):
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        torch.mul(inputs[0], 2, out=outputs[0])

    f = jax.jit(lambda x: call(plan(slow, F32, F32), x, bridge="eager")[0])
    x = f32()
    f(x).block_until_ready()
    start = time.perf_counter()
    y = f(x)
    returned = time.perf_counter() - start
    y.block_until_ready()
    finished = time.perf_counter() - start
    assert finished > 0.2, finished
    assert returned < finished / 4, (returned, finished)


@pytest.mark.parametrize("bridge", ["eager", "graph"])
def test_t14_device_and_stream_are_put_back(plan, bridge):
    side = torch.cuda.Stream()

    def fail(inputs, outputs, workspace):
        assert torch.cuda.current_stream() != side
        with torch.cuda.stream(torch.cuda.Stream()):
            raise RuntimeError("on purpose")

    good, bad = plan(double, F32, F32), plan(fail, F32, F32)
    x = f32()
    for context in (torch.cuda.stream(side), torch.cuda.stream(torch.cuda.default_stream())):
        with context:
            before = torch.cuda.current_stream(), torch.cuda.current_device()
            np.testing.assert_array_equal(call(good, x, bridge=bridge)[0], 2 * x)
            assert (torch.cuda.current_stream(), torch.cuda.current_device()) == before
            with pytest.raises(ERRORS, match="on purpose"):
                call(bad, x, bridge="eager")[0].block_until_ready()
            assert (torch.cuda.current_stream(), torch.cuda.current_device()) == before
            np.testing.assert_array_equal(call(good, x, bridge=bridge)[0], 2 * x)


# Command buffers. XLA records from five commands up by default; chains here are longer.


def chain(built, bridge, length=8):
    def f(x):
        for _ in range(length):
            (x,) = call(built, x * 0.5, bridge=bridge)
        return x

    return jax.jit(f)


def test_t20_t21_a_recorded_program_equals_the_eager_one_and_runs_no_python(plan):
    built = plan(double, F32, F32)
    x = f32()
    recorded, eager = chain(built, "graph"), chain(built, "eager")
    want = eager(x)
    for _ in range(30):  # each new set of addresses is recorded once, and results alternate between a few
        result = recorded(x).block_until_ready()
    calls = built.calls
    for _ in range(100):
        result = recorded(x).block_until_ready()
    np.testing.assert_array_equal(result, want)
    assert built.calls == calls, "Python ran in a replay"


@pytest.mark.parametrize("sets", [2, 16, 20])
def test_t22_alternating_addresses(plan, sets):
    built = plan(double, F32, F32)
    f = chain(built, "graph")
    operands = [f32(seed) for seed in range(sets)]
    for turn in range(4):
        for x in operands:
            np.testing.assert_array_equal(f(x), x)
        if turn == 2:
            jax.jit(lambda x: x + 1)(operands[0]).block_until_ready()  # a new executable evicts command buffers


@pytest.mark.parametrize("bridge", ["eager", "graph"])
def test_t23_loops_and_conditions(plan, bridge):
    built = plan(double, F32, F32)

    def step(x):
        return call(built, x * 0.5, bridge=bridge)[0] + 1

    x = f32()
    np.testing.assert_allclose(jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda i, x: step(x), x))(x), x + 7, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), x[0, 0]), x, length=5))(x)[0], x + 5, rtol=1e-6
    )
    np.testing.assert_allclose(
        jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, step(c[1])), (0, x)))(x)[1],
        x + 4,
        rtol=1e-6,
    )
    both = jax.jit(lambda p, x: jax.lax.cond(p, step, lambda x: step(step(x)), x))
    np.testing.assert_allclose(both(True, x), x + 1, rtol=1e-6)
    np.testing.assert_allclose(both(False, x), x + 2, rtol=1e-6)


FIRST_CALL = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, torch
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan, call
warmed, captured = [], []
def warm(device):
    warmed.append(torch.cuda.is_current_stream_capturing())
def run(inputs, outputs, workspace):
    captured.append(torch.cuda.is_current_stream_capturing())
    torch.mul(inputs[0], 2, out=outputs[0])
s = BufferSpec((64, 256), "float32")
plan = Plan("first", ("first",), run, (s,), (s,), capturable=True, warm=warm)
"""


def test_t24_a_process_that_records_from_its_first_call_on(python):
    """With a minimum graph size of one command a lone op is recorded, and the plan was warmed before, outside of a capture.

    jaxlib 0.11.2 runs a program twice before it records it; others may record at once.
    """
    done = python(
        FIRST_CALL
        + textwrap.dedent(
            """
            x = jnp.arange(64 * 256.0).reshape(64, 256)
            f = jax.jit(lambda x: call(plan, x, bridge="graph")[0])
            for _ in range(8):
                np.testing.assert_array_equal(f(x), 2 * x)
            assert warmed == [False], warmed
            assert captured[-1] and len(captured) < 8, captured
            """
        ),
        XLA_FLAGS="--xla_gpu_graph_min_graph_size=1",
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_t25_garbage_collection_while_recording(plan):
    stop = threading.Event()

    def litter():
        while not stop.is_set():
            torch.empty(1 << 20, device="cuda")
            gc.collect()
            time.sleep(0.001)

    thread = threading.Thread(target=litter)
    thread.start()
    try:
        for turn in range(4):
            x = f32(turn)
            np.testing.assert_array_equal(chain(plan(double, F32, F32), "graph")(x), x)
    finally:
        stop.set()
        thread.join()


def test_t26_t27_a_capturable_plan_allocates_nothing(plan):
    built = plan(double, F32, F32)
    x = f32()
    for bridge in ("eager", "graph"):
        f = chain(built, bridge)
        f(x).block_until_ready()
        before = torch.cuda.memory_stats()
        for _ in range(20):
            f(x + 0).block_until_ready()
        after = torch.cuda.memory_stats()
        for key in ("allocation.all.allocated", "allocation.all.freed", "segment.all.allocated"):
            assert after.get(key, 0) == before.get(key, 0), (bridge, key)


def test_t28_the_profiler_changes_nothing(plan):
    f = chain(plan(double, F32, F32), "graph")
    x = f32()
    want = np.asarray(f(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        np.testing.assert_array_equal(f(x), want)
    np.testing.assert_array_equal(f(x), want)


TRITON = """
import triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

@triton.jit
def scale(x, y, rows, cols, factor, R: tl.constexpr, C: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [R, C])
    target = tl.make_tensor_descriptor(y, [rows, cols], [cols, 1], [R, C])
    r = tl.program_id(0) * R
    for c in range(0, cols, C):
        target.store([r, c], source.load([r, c]) * factor)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Triton reads a kernel's source from its file."""
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("kernels") / "bridge_test_kernels.py"
    path.write_text(TRITON)
    spec = importlib.util.spec_from_file_location("bridge_test_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_triton_scratch_comes_from_the_workspace(plan, kernels):
    """A kernel with tensor descriptors made on the device needs global scratch: it is the workspace's, in captures too."""

    def launch(x, y):
        kernels.scale[(N[0] // 16,)](x, y, *N, 3.0, R=16, C=64)

    def run(inputs, outputs, workspace):
        torch_call.run_with_triton(workspace, launch, inputs[0], outputs[0])

    def warm(device):
        scratch = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        torch_call.run_with_triton(scratch, launch, torch.zeros(N, device=device), torch.zeros(N, device=device))

    built = plan(run, F32, F32, workspace_bytes=1 << 20, warm=warm)
    x = f32()
    for bridge in ("eager", "graph"):
        f = jax.jit(lambda x, bridge=bridge: [call(built, x + i, bridge=bridge)[0] for i in range(6)])
        for _ in range(8):
            for i, y in enumerate(f(x)):
                np.testing.assert_allclose(y, 3 * (x + i), rtol=1e-6)
    small = plan(run, F32, F32, workspace_bytes=64, warm=warm)
    with pytest.raises(ERRORS, match="workspace"):
        call(small, x, bridge="eager")[0].block_until_ready()


def test_t24_autotuning_is_refused_inside_a_call(plan, kernels):
    def launch(x, y):
        kernels.double[lambda meta: (x.numel() // meta["BLOCK"],)](x, y, x.numel())

    def run(inputs, outputs, workspace):
        torch_call.run_with_triton(None, launch, inputs[0], outputs[0])

    x = f32()
    with pytest.raises(ERRORS, match="autotune inside a call"):
        call(plan(run, F32, F32), x, bridge="eager")[0].block_until_ready()
    tuned = plan(
        run, F32, F32, warm=lambda device: launch(torch.zeros(N, device=device), torch.zeros(N, device=device))
    )
    np.testing.assert_array_equal(call(tuned, x, bridge="eager")[0], 2 * x)


# Memory, processes, devices


@pytest.mark.parametrize("first", ["torch", "jax"])
def test_t30_t31_import_order_and_default_preallocation(python, first):
    second = {"torch": "jax", "jax": "torch"}[first]
    done = python(
        f"import {first}, {second}\n"
        + textwrap.dedent(
            """
            import numpy as np, jax.numpy as jnp
            from jax_mxfp4_moe import mxfp4_moe, testing
            from jax_mxfp4_moe.problem import MoeProblem
            case = testing.random_case(MoeProblem(16, 4, 8, 256, 128))
            a, b = (np.asarray(jax.jit(lambda *c: mxfp4_moe(*c, implementation=i))(*case), np.float32) for i in ("xla", "torch"))
            assert testing.relative_error(b, a) < 6e-3
            """
        ),
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.75",
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_cpu_calls_on_a_machine_with_a_gpu(plan):
    """Field case 29: the same plan on cpu and GPU operands, interleaved."""
    built = plan(double, F32, F32)
    f = jax.jit(lambda x: call(built, x, bridge="eager")[0])
    on_gpu = f32()
    on_cpu = jax.device_put(on_gpu, jax.devices("cpu")[0])
    for _ in range(5):
        for x in (on_gpu, on_cpu):
            y = f(x)
            assert y.devices() == x.devices()
            np.testing.assert_array_equal(y, 2 * np.asarray(x))


@pytest.mark.gpus(2)
def test_t15_everything_on_the_second_device(plan):
    seen = []

    def look(inputs, outputs, workspace):
        seen.append((inputs[0].device.index, torch.cuda.current_device(), torch.empty(1, device="cuda").device.index))
        torch.mul(inputs[0], 2, out=outputs[0])

    x = jax.device_put(f32(), jax.devices("gpu")[1])
    y = call(plan(look, F32, F32), x, bridge="eager")[0]
    assert y.devices() == x.devices()
    np.testing.assert_array_equal(y, 2 * np.asarray(x))
    assert seen == [(1, 1, 1)]
    assert torch.cuda.current_device() == 0


@pytest.mark.gpus(2)
@pytest.mark.parametrize("bridge", ["eager", "graph"])
def test_t16_shard_map(plan, bridge):
    built = plan(double, F32, F32)
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("gpu")[:2])
    spec = jax.sharding.PartitionSpec("d")

    @jax.jit
    def f(x):
        def local(x):
            for _ in range(4):
                (x,) = call(built, x * 0.5, bridge=bridge)
            return x + jax.lax.psum(x.sum() * 0, "d")

        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    x = jax.device_put(f32(shape=(2 * N[0], N[1])), jax.sharding.NamedSharding(mesh, spec))
    for _ in range(20):
        np.testing.assert_array_equal(f(x), np.asarray(x))


@pytest.mark.gpus(2)
def test_t17_two_threads_on_two_devices(plan):
    built = plan(double, F32, F32)
    f = chain(built, "graph", 4)
    failures = []

    def work(device):
        try:
            x = jax.device_put(f32(device.id), device)
            want = np.asarray(x)
            for _ in range(200):
                np.testing.assert_array_equal(f(x), want)
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in jax.devices("gpu")[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.gpus(2)
@pytest.mark.parametrize("visible", ["1", "1,0"])
def test_t16_visible_devices(python, visible):
    done = python(
        FIRST_CALL
        + textwrap.dedent(
            """
            for device in jax.devices("gpu"):
                x = jax.device_put(jnp.arange(64 * 256.0).reshape(64, 256), device)
                y = jax.jit(lambda x: call(plan, x, bridge="eager")[0])(x)
                assert y.devices() == {device}
                np.testing.assert_array_equal(y, 2 * np.asarray(x))
            """
        ),
        CUDA_VISIBLE_DEVICES=visible,
    )
    assert done.returncode == 0, done.stderr[-3000:]


DEADLOCK = """
import threading, time
import jax, jax.numpy as jnp, numpy as np, torch
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan, call
def run(inputs, outputs, workspace):
    torch.mul(inputs[0], 2, out=outputs[0])
s = BufferSpec((64, 256), "float32")
plan = Plan("psum", ("psum",), run, (s,), (s,), capturable=True)
mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("gpu")[:2])
spec = jax.sharding.PartitionSpec("d")
def local(x):
    for _ in range(4):
        x = jax.lax.psum(x, "d") * 0.5
        (x,) = call(plan, x * 0.5, bridge=BRIDGE)
    return jax.lax.psum(x, "d")
f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=False))
x = jax.device_put(jnp.ones((128, 256)), jax.sharding.NamedSharding(mesh, spec))
stop = False
def busy():
    while not stop:
        sum(range(10000))
threads = [threading.Thread(target=busy) for _ in range(2)]
for t in threads: t.start()
for i in range(300):
    y = f(x)
np.testing.assert_array_equal(y, 2 * np.ones((64, 256)))
stop = True
for t in threads: t.join()
"""


@pytest.mark.gpus(2)
@pytest.mark.parametrize("bridge", ["eager", "graph"])
def test_t34_collectives_around_the_op_while_python_is_busy(python, bridge):
    done = python(DEADLOCK.replace("BRIDGE", repr(bridge)), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
