"""Makes Triton's interpreter round as GPUs do, and faster. Import it before any kernel is defined; it sets TRITON_INTERPRET.

The interpreter keeps bfloat16 and float8 values as integers; some versions cut a float32 off where hardware rounds to nearest even, and
multiply the integers of bfloat16 operands. Both are replaced by torch's conversions. Some versions have no scaled product.
"""

import dataclasses
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import oracle
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float16: (torch.float16, np.float16),
    tl.float32: (torch.float32, np.float32),
}
_plain_convert = interpreter._convert_float
_plain_dot = interpreter.InterpreterBuilder.create_dot


def _convert_float(data, source, target, rounding):
    if source not in _TYPES or target not in _TYPES:
        return _plain_convert(data, source, target, rounding)
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.dtype.itemsize}").reshape(-1))
    values = bits.view(_TYPES[source][0]).float()
    if target == tl.float8e4nv:
        values = values.clamp(-448, 448)  # as the conversion instruction does
    out = values.to(_TYPES[target][0])
    width = {4: torch.int32, 2: torch.int16, 1: torch.int8}[out.element_size()]
    return out.view(width).numpy().view(_TYPES[target][1]).reshape(data.shape)


def _create_dot(self, a, b, d, *rest):
    wide = [
        interpreter.TensorHandle(_convert_float(v.data, v.dtype.scalar, tl.float32, None), tl.float32)
        if v.dtype.scalar in (tl.bfloat16, tl.float8e4nv)
        else v
        for v in (a, b)
    ]
    return _plain_dot(self, *wide, d, *rest)


def _create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_k_pack, b_k_pack, acc):
    assert {str(a_format), str(b_format)} == {"ScaleDotElemTypeTY.E2M1"}, (a_format, b_format)
    assert a_k_pack, "packed along K"
    assert b_k_pack, "packed along K"
    left, right = oracle.dequantize(a.data, a_scale.data), oracle.dequantize(b.data.T, b_scale.data)
    return interpreter.TensorHandle((left @ right.T + acc.data).astype(np.float32), tl.float32)


_patched = set()


def _call(self, *args, **kwargs):
    # Every call of a device function would patch the language again, although the launch has.
    if self.fn.__module__ not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_dot_scaled = _create_dot_scaled
interpreter.InterpretedFunction.__call__ = _call
# Every integer operation would be done twice, the second time in 64 bits to look for an overflow.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
