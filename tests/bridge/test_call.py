"""What reaches the callable, what comes back, and what is restored. T numbers: the list of cases in bridge/README.md."""

from __future__ import annotations

import sys
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, call, carve, workspace_slots

# An error inside an asynchronous execution reaches block_until_ready as a ValueError with the same text.
ERRORS = (jax.errors.JaxRuntimeError, ValueError)

DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "uint8",
    "int8",
    "int32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "bool",
]


def double(inputs, outputs, workspace):
    torch.mul(inputs[0], 2, out=outputs[0])


def copy(inputs, outputs, workspace):
    outputs[0].copy_(inputs[0])


def f32(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


# Data


def test_t5_every_buffer_reaches_torch_without_a_copy(plan, route):
    seen = {}

    def look(inputs, outputs, workspace):
        for tensor in inputs:
            seen[tensor.data_ptr()] = (tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.stride())
        seen["out"] = outputs[0].data_ptr()

    shapes = [((3, 4), "bfloat16"), ((), "float32"), ((2, 0, 5), "int32"), ((1, 7, 1), "uint8")]
    operands = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    (result,) = call(plan(look, shapes, [((2, 2), "float32")]), *operands)
    result.block_until_ready()
    assert result.unsafe_buffer_pointer() == seen["out"]
    for operand, (shape, dtype) in zip(operands, shapes, strict=True):
        if operand.size:
            found = seen[operand.unsafe_buffer_pointer()]
            assert found == (shape, getattr(torch, dtype), "cpu", torch.empty(shape).stride())


@pytest.mark.parametrize("dtype", DTYPES)
def test_t6_dtypes_arrive_as_themselves(plan, bridge, dtype):
    seen = []

    def look(inputs, outputs, workspace):
        seen.append(inputs[0].dtype)
        outputs[0].view(torch.uint8).copy_(inputs[0].view(torch.uint8))

    raw = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, (4, 8), np.uint8)
    x = raw.view(BufferSpec((), dtype).numpy_dtype)
    (y,) = call(plan(look, [(x.shape, dtype)], [(x.shape, dtype)]), x, bridge=bridge)
    np.testing.assert_array_equal(np.asarray(y).view(np.uint8), raw)
    assert y.dtype == x.dtype
    assert set(seen) == {getattr(torch, dtype)}


def test_t6_int64(plan, bridge):
    with jax.enable_x64(True):
        x = jnp.arange(5, dtype=jnp.int64) << 40
        (y,) = call(plan(double, [((5,), "int64")], [((5,), "int64")]), x, bridge=bridge)
        np.testing.assert_array_equal(y, x * 2)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4", "complex64", "float64", "float8_e4m3b11fnuz"])
def test_t6_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype '{dtype}', expected one of bfloat16"):
        BufferSpec((2, 2), dtype)


def test_t7_float4_travels_as_bytes_and_stays_inside_its_buffer(plan, bridge):
    codes = jnp.asarray(np.arange(256, dtype=np.uint8).reshape(4, 64))
    typed = jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(4, 128)

    @jax.jit
    def through(typed):
        packed = jax.lax.bitcast_convert_type(typed.reshape(4, 64, 2), jnp.uint8)
        return call(plan(copy, [((4, 64), "uint8")], [((4, 64), "uint8")]), packed, bridge=bridge)[0]

    np.testing.assert_array_equal(through(typed), codes)
    with pytest.raises(ValueError, match=r"was given \(float4_e2m1fn\[4,128\]\), expected \(uint8\[4,64\]\)"):
        call(plan(copy, [((4, 64), "uint8")], [((4, 64), "uint8")]), typed, bridge=bridge)
    with pytest.raises(ValueError, match="Bitcast it to uint8"):
        BufferSpec((4, 128), "float4_e2m1fn")


def test_t7_a_frame_that_does_not_match_the_plan_is_refused_before_python(plan):
    built = plan(double, [((4,), "float32")], [((4,), "float32")])
    call(built, jnp.zeros(4))
    before = torch_call.counters()["calls"]

    def raw(shapes, *operands):
        custom_call = jax.ffi.ffi_call("jax_mxfp4_moe_eager", shapes)
        jax.block_until_ready(custom_call(*operands, plan=np.int64(built.id), plan_name="raw"))

    out = jax.ShapeDtypeStruct((4,), jnp.float32)
    float4 = jnp.zeros(4, jnp.float4_e2m1fn)
    for shapes, operands, message in [
        ([out], [float4], r"input 0 is F4E2M1FN\[4\], expected F32\[4\]"),
        ([out], [jnp.zeros((2, 2))], r"input 0 is F32\[2,2\], expected F32\[4\]"),
        ([out], [jnp.zeros(5)], r"input 0 is F32\[5\], expected F32\[4\]"),
        ([out], [jnp.zeros(4)] * 2, "given 2 inputs, expected 1"),
        ([out, out], [jnp.zeros(4)], "given 2 results, expected 1"),
        ([jax.ShapeDtypeStruct((4,), jnp.int32)], [jnp.zeros(4)], r"result 0 is S32\[4\], expected F32\[4\]"),
    ]:
        with pytest.raises(ERRORS, match=message):
            raw(shapes, *operands)
    assert torch_call.counters()["calls"] == before


def test_t4_wrong_attributes_are_refused(plan):
    built = plan(double, [((4,), "float32")], [((4,), "float32")])
    call(built, jnp.zeros(4))
    custom_call = jax.ffi.ffi_call("jax_mxfp4_moe_eager", [jax.ShapeDtypeStruct((4,), jnp.float32)])
    for attributes, message in [
        ({"plan": np.int64(built.id)}, "expected 2 but got 1"),
        ({"plan": np.int32(1), "plan_name": "raw"}, "Wrong scalar data type"),
        ({"id": np.int64(built.id), "plan_name": "raw"}, "Attribute name mismatch|plan"),
        ({"plan": np.int64(12345), "plan_name": "raw"}, r"calls plan 'raw' \(id 12345\), which this process has not"),
    ]:
        with pytest.raises(ERRORS, match=message):
            jax.block_until_ready(custom_call(jnp.zeros(4), **attributes))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[1:3, 1:5],
        lambda x: x[::2, ::-1],
        lambda x: jnp.broadcast_to(x[:1], (5, 8)),
        lambda x: x[None, :, None],
        lambda x: x.reshape(-1)[3:],
        lambda x: jnp.moveaxis(x.reshape(2, 2, 8), 2, 0),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_t8_layouts_of_the_producer_do_not_matter(plan, bridge, view, jit):
    x = f32(4, 8)
    shape = jax.eval_shape(view, x).shape
    built = plan(double, [(shape, "float32")], [(shape, "float32")])

    def through(x):
        return call(built, view(x), bridge=bridge)[0]

    np.testing.assert_array_equal((jax.jit(through) if jit else through)(x), np.asarray(view(x)) * 2)


def test_t8_numpy_producer_with_odd_offset(plan, bridge):
    x = np.arange(33, dtype=np.float32)[1:]
    (y,) = call(plan(double, [((32,), "float32")], [((32,), "float32")]), x, bridge=bridge)
    np.testing.assert_array_equal(y, x * 2)


def test_t9_inputs_are_unchanged_and_may_be_read_only(plan, bridge):
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    source.flags.writeable = False
    x = jnp.asarray(source)
    (y,) = call(plan(double, [((3, 4), "float32")], [((3, 4), "float32")]), x, bridge=bridge)
    np.testing.assert_array_equal(y, source * 2)
    np.testing.assert_array_equal(x, source)


def test_t10_donation(plan, bridge):
    built = plan(double, [((64,), "float32")], [((64,), "float32")])
    through = jax.jit(lambda x: call(built, x + 1, bridge=bridge)[0], donate_argnums=0)
    x = jnp.arange(64.0)
    for _ in range(3):
        x = through(x)
    np.testing.assert_array_equal(x, ((np.arange(64.0) + 1) * 2 + 1) * 4 + 2)


def test_t11_order_with_slow_producers_and_consumers(plan, bridge):
    built = plan(double, [((128, 128), "float32")], [((128, 128), "float32")])

    @jax.jit
    def step(x):
        (y,) = call(built, (x @ x) * 1e-3, bridge=bridge)
        return y @ y * 1e-3

    @jax.jit
    def expected(x):
        y = ((x @ x) * 1e-3) * 2
        return y @ y * 1e-3

    x = f32(128, 128)
    wanted = np.asarray(expected(x))
    results = [step(x) for _ in range(60)]  # in flight together, so buffers are reused
    for result in results:
        np.testing.assert_array_equal(result, wanted)


# Workspace


def test_carve_takes_each_buffer_from_its_own_bytes():
    """Also of a workspace that lies inside of another buffer, of odd length, and with an empty buffer between."""
    specs = [
        BufferSpec(*spec)
        for spec in (((3, 5), "float32"), ((0, 4), "int32"), ((2, 3, 4), "bfloat16"), ((7,), "uint8"), ((), "int64"))
    ]
    slots, size = workspace_slots(specs)
    memory = torch.arange(512 + size + 3).to(torch.uint8)
    for (offset, spec), tensor in zip(slots, carve(memory[512:], slots), strict=True):
        assert tuple(tensor.shape) == spec.shape
        assert tensor.dtype == getattr(torch, spec.dtype)
        assert tensor.is_contiguous()
        raw = memory[512 + offset : 512 + offset + spec.nbytes]
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), raw)
        if spec.nbytes:
            assert tensor.data_ptr() == raw.data_ptr()


def test_t29_workspace_is_the_asked_size_and_carves_without_overlap(plan, bridge):
    slots, size = workspace_slots(
        [BufferSpec((5,), "float32"), BufferSpec((3, 3), "bfloat16"), BufferSpec((), "int32")]
    )
    assert [offset for offset, _ in slots] == [0, 256, 512]
    assert size == 768
    seen = {}

    def use(inputs, outputs, workspace):
        workspace.fill_(0xAB)
        a, b, c = carve(workspace, slots)
        seen["size"] = workspace.numel()
        a.copy_(inputs[0])
        b.fill_(1.5)
        c.fill_(7)
        seen["canaries"] = {
            int(byte) for begin, end in ((20, 256), (274, 512), (516, 768)) for byte in workspace[begin:end].unique()
        }
        torch.mul(a, c, out=outputs[0])

    x = f32(5)
    results = call(plan(use, [((5,), "float32")], [((5,), "float32")], size), x, bridge=bridge)
    assert len(results) == 1
    assert seen == {"size": 768, "canaries": {0xAB}}
    np.testing.assert_array_equal(results[0], np.asarray(x) * 7)


def test_t29_workspace_of_another_size_is_refused(plan):
    built = plan(double, [((4,), "float32")], [((4,), "float32")], 512)
    call(built, jnp.zeros(4))
    shapes = [jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.uint8)]
    with pytest.raises(ERRORS, match=r"result 1 is U8\[256\], expected U8\[512\]"):
        jax.ffi.ffi_call("jax_mxfp4_moe_eager", shapes)(jnp.zeros(4), plan=np.int64(built.id), plan_name="raw")


# Errors and what is restored


def test_t14_an_exception_carries_its_traceback_and_the_next_call_works(plan, bridge):
    wrong = threading.Event()

    def sometimes(inputs, outputs, workspace):
        kept_by_the_frame = inputs[0][1:]
        if wrong.is_set():
            try:
                raise KeyError("the cause")
            except KeyError as error:
                raise ValueError(f"bad rows: {kept_by_the_frame.shape[0]}") from error
        torch.mul(inputs[0], 2, out=outputs[0])

    x = f32(4)
    through = jax.jit(lambda x: call(plan_of(), x, bridge=bridge)[0])
    built = plan(sometimes, [((4,), "float32")], [((4,), "float32")])

    def plan_of():
        return built

    np.testing.assert_array_equal(through(x), np.asarray(x) * 2)
    wrong.set()
    with pytest.raises(ERRORS) as caught:
        through(x).block_until_ready()
    text = str(caught.value)
    assert "ValueError: bad rows: 3" in text
    assert "Traceback (most recent call last)" in text
    assert "in sometimes" in text
    assert "test_call.py" in text
    if bridge != "callback":  # the whole chain, and the plan's name
        assert "KeyError: 'the cause'" in text
        assert "plan 'sometimes'" in text
        assert "INTERNAL" in text
    wrong.clear()
    np.testing.assert_array_equal(through(x), np.asarray(x) * 2)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_t14_t35_grad_mode_is_off_inside_and_restored(plan, bridge, fails, enabled):
    seen = []

    def look(inputs, outputs, workspace):
        seen.append(torch.is_grad_enabled())
        if fails:
            raise RuntimeError("on purpose")

    built = plan(look, [((2,), "float32")], [((2,), "float32")])
    with torch.set_grad_enabled(enabled):
        try:
            jax.block_until_ready(call(built, jnp.zeros(2), bridge=bridge))
        except (*ERRORS, RuntimeError):
            assert fails
        assert torch.is_grad_enabled() is enabled
    assert set(seen) == {False}


def test_t35_grad_mode_without_the_symbols_of_libc10(plan, monkeypatch):
    """Another torch may not export them: then its Python functions do the same."""
    monkeypatch.setattr(torch_call, "_grad_mode_addresses", lambda: (0, 0))
    torch_call._bind_torch(route="default")
    try:
        seen = []
        built = plan(lambda *_: seen.append(torch.is_grad_enabled()), [((2,), "float32")], [((2,), "float32")])
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                jax.block_until_ready(call(built, jnp.zeros(2)))
                assert torch.is_grad_enabled() is enabled
        assert seen == [False, False]
    finally:
        monkeypatch.undo()
        torch_call._bind_torch(route="default")


def test_t35_autograd_elsewhere_is_not_disturbed(plan, bridge):
    weight = torch.ones(3, requires_grad=True)

    def use(inputs, outputs, workspace):
        product = weight * inputs[0]
        assert not product.requires_grad
        outputs[0].copy_(product)

    built = plan(use, [((3,), "float32")], [((3,), "float32")])
    loss = (weight * 2).sum()
    call(built, jnp.ones(3), bridge=bridge)[0].block_until_ready()
    loss.backward()
    assert weight.grad.tolist() == [2, 2, 2]


def test_rule_9_torch_sees_subnormals_and_xla_keeps_its_mode(plan, bridge):
    tiny = np.float32(1e-40)
    seen = []

    def use(inputs, outputs, workspace):
        seen.append(float(inputs[0].sum()))
        torch.mul(inputs[0], 0.5, out=outputs[0])

    x = np.full(64, tiny)
    built = plan(use, [((64,), "float32")], [((64,), "float32")])
    plain = jax.jit(lambda x: x * 0.5)
    before = np.asarray(plain(x))
    (y,) = call(built, x, bridge=bridge)
    np.testing.assert_array_equal(bits(y), bits(x * np.float32(0.5)))
    assert seen[0] > 0
    np.testing.assert_array_equal(bits(plain(x)), bits(before))
    jitted = jax.jit(lambda x: call(built, x, bridge=bridge)[0] * 0.5)(x)
    np.testing.assert_array_equal(bits(jitted), bits(plain(np.asarray(y))))
    assert torch.set_flush_denormal(False)
    assert np.float32(1e-40) * np.float32(1) != 0


# Retained views


@pytest.mark.parametrize("which", ["input 1", "output 0", "the workspace", "input 0, output 0"])
@pytest.mark.parametrize("derived", [False, True])
def test_t33_a_kept_view_fails_the_call_and_names_the_buffer(plan, route, which, derived):
    kept = []

    def keep(inputs, outputs, workspace):
        views = {"input 1": inputs[1], "input 0": inputs[0], "output 0": outputs[0], "the workspace": workspace}
        kept.extend(views[name][1:] if derived else views[name] for name in which.split(", "))

    built = plan(keep, [((4,), "float32")] * 2, [((4,), "float32")], 256)
    before = torch_call.counters()["retained_views"]
    with pytest.raises(ERRORS, match=f"kept a view of {which}. "):
        jax.block_until_ready(call(built, jnp.zeros(4), jnp.ones(4)))
    assert torch_call.counters()["retained_views"] == before + 1
    del built
    torch_call._recent.clear()
    assert kept[0].shape[0] in (3, 4, 255, 256)  # the struct behind the view is still there
    kept.clear()  # and its deleter runs after call, plan and executable


def test_t33_keeping_the_lists_or_a_copy_is_fine(plan, route):
    kept = []

    def keep(inputs, outputs, workspace):
        kept.extend([inputs, outputs, inputs[0].clone()])
        torch.mul(inputs[0], 2, out=outputs[0])

    x = f32(4)
    (y,) = call(plan(keep, [((4,), "float32")], [((4,), "float32")]), x)
    np.testing.assert_array_equal(y, np.asarray(x) * 2)
    assert kept[0] == []
    assert kept[1] == []
    np.testing.assert_array_equal(kept[2].numpy(), x)


def test_t32_references_stay_flat(plan, route):
    built = plan(double, [((4,), "float32")] * 3, [((4,), "float32")])
    through = jax.jit(lambda x: call(built, x, x, x)[0])
    x = f32(4)
    through(x).block_until_ready()
    before = [sys.getrefcount(item) for item in (double, None, torch.float32, built)]
    for _ in range(500):
        through(x).block_until_ready()
    after = [sys.getrefcount(item) for item in (double, None, torch.float32, built)]
    assert all(abs(b - a) < 100 for a, b in zip(before, after, strict=True))


# Transformations and threads


def test_jit_scan_while_and_cond(plan, bridge):
    built = plan(double, [((4,), "float32")], [((4,), "float32")])

    def through(x):
        return call(built, x, bridge=bridge)[0]

    @jax.jit
    def nested(x):
        x, ys = jax.lax.scan(lambda x, _: (through(x), through(x + 1)), x, length=3)
        x = jax.lax.cond(x[0] > 0, through, lambda x: x, x)
        return jax.lax.fori_loop(0, 2, lambda _, x: through(x), x), ys

    x = jnp.arange(1.0, 5.0)
    y, ys = nested(x)
    np.testing.assert_array_equal(y, np.asarray(x) * 2**6)
    np.testing.assert_array_equal(ys, [np.asarray(x * 2**step + 1) * 2 for step in range(3)])


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 0), (0, 0)])
def test_t42_vmap_runs_slice_by_slice(plan, bridge, in_axes):
    def add(inputs, outputs, workspace):
        torch.add(inputs[0], inputs[1], out=outputs[0])

    built = plan(add, [((4,), "float32")] * 2, [((4,), "float32")])
    x, y = f32(4, 4), f32(4, 4)[::-1]
    x, y = (x if in_axes[0] is not None else x[0]), (y if in_axes[1] is not None else y[0])
    found = jax.vmap(lambda x, y: call(built, x, y, bridge=bridge)[0], in_axes)(x, y)
    np.testing.assert_array_equal(found, jax.vmap(jnp.add, in_axes)(x, y))


def test_t42_int64_needs_x64(plan, bridge):
    built = plan(copy, [((4,), "int64")], [((4,), "int64")])
    with pytest.raises(ValueError, match=r"int64 buffer, expected none while jax_enable_x64 is off\. Use int32"):
        call(built, jnp.zeros(4, jnp.int32), bridge=bridge)


def test_grad_says_what_to_do(plan):
    built = plan(double, [((4,), "float32")], [((4,), "float32")])
    with pytest.raises(ValueError, match=r"custom_jvp|custom_vjp"):
        jax.grad(lambda x: call(built, x)[0].sum())(jnp.ones(4))


def test_eval_shape_and_lowering_call_nothing(plan, bridge):
    def fail(inputs, outputs, workspace):
        raise AssertionError("ran")

    built = plan(fail, [((4,), "float32")], [((2, 2), "bfloat16")], 256)
    through = jax.jit(lambda x: call(built, x, bridge=bridge))
    (shape,) = jax.eval_shape(through, jax.ShapeDtypeStruct((4,), jnp.float32))
    assert shape.shape == (2, 2)
    assert shape.dtype == ml_dtypes.bfloat16
    through.lower(jnp.zeros(4)).compile()


def test_t40_two_threads(plan, bridge):
    built = plan(double, [((32,), "float32")], [((32,), "float32")], 256)
    through = jax.jit(lambda x: call(built, x, bridge=bridge)[0])
    failures = []

    def work(seed):
        x = jnp.full(32, float(seed))
        for _ in range(100):
            if not (np.asarray(through(x)) == 2 * seed).all():
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "deadlock"
    assert not failures


def test_t37_repeated_eager_calls_do_not_compile_again(plan):
    built = plan(double, [((4,), "float32")], [((4,), "float32")])
    x = jnp.ones(4)
    call(built, x)
    before = torch_call.counters()["instantiated"]
    for _ in range(3):
        call(built, x)[0].block_until_ready()
    assert torch_call.counters()["instantiated"] == before
    # XLA's cpu runtime has no INITIALIZE. Should it get one, then the plan must still be prepared once only.
    assert built.calls == 4


def test_warm_runs_once_and_before_the_first_call(plan, bridge):
    seen = []

    def use(inputs, outputs, workspace):
        seen.append("run")

    built = plan(
        use,
        [((2,), "float32")],
        [((2,), "float32")],
        warm=lambda device: seen.append((device, torch.is_grad_enabled())),
    )
    for _ in range(2):
        jax.block_until_ready(call(built, jnp.zeros(2), bridge=bridge))
    assert seen == [(torch.device("cpu"), False), "run", "run"]


def test_a_failing_warm_is_an_error_and_is_tried_again(plan):
    failing = threading.Event()
    failing.set()

    def warm(device):
        if failing.is_set():
            raise RuntimeError("cannot warm")

    built = plan(double, [((2,), "float32")], [((2,), "float32")], warm=warm)
    with pytest.raises(ERRORS, match="preparing for a device failed\nRuntimeError: cannot warm"):
        jax.block_until_ready(call(built, jnp.ones(2)))
    failing.clear()
    np.testing.assert_array_equal(call(built, jnp.ones(2))[0], [2, 2])


def test_t9_a_callable_that_writes_to_an_input_is_caught_in_debug_mode(plan, monkeypatch):
    def spoil(inputs, outputs, workspace):
        outputs[0].copy_(inputs[0])
        inputs[1].add_(1)

    specs = [((4,), "float32")] * 2, [((4,), "float32")]
    monkeypatch.setenv(torch_call.DEBUG_VARIABLE, "1")
    with pytest.raises(ERRORS, match="wrote to input 1"):
        jax.block_until_ready(call(plan(spoil, *specs), jnp.zeros(4), jnp.ones(4)))
    (y,) = call(plan(double, [((4,), "float32")], [((4,), "float32")]), jnp.ones(4))
    np.testing.assert_array_equal(y, 2 * np.ones(4))
