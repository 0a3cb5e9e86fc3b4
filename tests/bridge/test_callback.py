"""The fallback through `jax.pure_callback` against the compiled bridge."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan, call


def specs(*arrays):
    return tuple(BufferSpec(array.shape, str(array.dtype)) for array in arrays)


def test_t39_bit_equal_to_the_compiled_bridge_with_the_same_dtypes():
    seen = []

    def run(inputs, outputs, workspace):
        x, weights, ids = inputs
        seen.append(tuple(tensor.dtype for tensor in inputs))
        torch.matmul(x.float(), weights.float(), out=outputs[0])
        outputs[1].copy_((x * 3).sum(0))
        outputs[2].copy_(ids + 1)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((16, 4)), jnp.float16)
    ids = jnp.arange(8, dtype=jnp.int32)
    outputs = (BufferSpec((8, 4), "float32"), BufferSpec((16,), "bfloat16"), BufferSpec((8,), "int32"))
    plan = Plan("equal", 0, run, specs(x, weights, ids), outputs)
    compiled, fallback = (call(plan, x, weights, ids, bridge=bridge) for bridge in ("eager", "callback"))
    for a, b in zip(compiled, fallback, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    assert set(seen) == {(torch.bfloat16, torch.float16, torch.int32)}


def test_t40_the_callback_body_calls_no_jax():
    for function in (torch_call._run_on_host, torch_call._tensor, torch_call.BufferSpec.numpy_dtype.fget):
        assert not {"jax", "jnp", "jaxlib"} & set(function.__code__.co_names), function


def test_t40_inputs_that_do_not_match_are_refused():
    plan = Plan("check", 0, None, (BufferSpec((4,), "float32"),), ())
    with pytest.raises(ValueError, match=r"the callback was given float32\[5\], expected float32\[4\]"):
        torch_call._run_on_host(plan, np.zeros(5, np.float32))


def test_t41_bfloat16_e8m0_and_float4_bytes():
    def run(inputs, outputs, workspace):
        for given, out in zip(inputs, outputs, strict=True):
            out.view(torch.uint8).copy_(given.view(torch.uint8))

    raw = jnp.arange(256, dtype=jnp.uint8).reshape(4, 64)
    operands = (
        jax.lax.bitcast_convert_type(raw.reshape(4, 32, 2), jnp.bfloat16),
        jax.lax.bitcast_convert_type(raw, jnp.float8_e8m0fnu),
        jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(raw, jnp.float4_e2m1fn), jnp.uint8),
    )
    plan = Plan("carriers", 0, run, specs(*operands), specs(*operands))
    for result in call(plan, *operands, bridge="callback"):
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8).reshape(4, 64), raw)


def test_t37_the_callback_is_one_object_for_each_plan():
    def run(inputs, outputs, workspace):
        outputs[0].copy_(inputs[0])

    x = jnp.ones(4)
    plan = Plan("one", 0, run, specs(x), specs(x))
    assert plan._on_host is Plan("one", 0, run, specs(x), specs(x))._on_host
    jitted = jax.jit(lambda x: call(plan, x, bridge="callback")[0])
    jitted(x)
    jitted(x)
    assert jitted._cache_size() == 1


def test_t9_reading_a_read_only_input_gives_no_warning(recwarn):
    def run(inputs, outputs, workspace):
        outputs[0].copy_(inputs[0])

    x = jnp.arange(4.0)
    np.testing.assert_array_equal(call(Plan("quiet", 0, run, specs(x), specs(x)), x, bridge="callback")[0], x)
    assert not [str(w.message) for w in recwarn if "writ" in str(w.message)]
