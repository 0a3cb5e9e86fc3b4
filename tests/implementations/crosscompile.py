"""Compiles the kernels of a problem for a GPU that is not there. Needs triton and torch, and no interpreter mode."""

import dataclasses

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jax_mxfp4_moe import moe
from jax_mxfp4_moe.implementations.triton import pipeline

TARGETS = {
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
_TYPES = {
    torch.int32: "*i32", torch.uint8: "*u8", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


def _gluon_source():
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


@dataclasses.dataclass
class Recorder:
    """A `launch` that compiles for `target`; `kernels` are the results by name, and by stage where one kernel is for both.

    `options` are those of each, in the order of the launches.
    """

    target: GPUTarget
    kernels: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)

    def __call__(self, kernel, grid, *args, **constants):
        options = {k: constants.pop(k) for k in ("num_warps", "num_stages", "launch_pdl") if k in constants}
        names = kernel.arg_names
        values = {**dict(zip(names, args, strict=False)), **constants}
        signature, constexprs, attrs = {}, {}, {}
        for i, name in enumerate(names):
            value = values[name]
            if isinstance(value, torch.Tensor):
                signature[name] = _TYPES[value.dtype]
                attrs[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int) and name not in constants:
                signature[name] = "i32"
            else:
                signature[name], constexprs[(i,)] = "constexpr", value
        source = (_gluon_source() if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
        stage = {True: " of stage1", False: " of stage2"}.get(constants.get("GATED"), "")
        self.kernels[kernel.__name__ + stage] = triton.compile(source, target=self.target, options=options)
        self.options[kernel.__name__ + stage] = options


def compile_for(target, facts, inputs, ptx=False):
    """Kernels by name. inputs: BufferSpecs of the call."""
    return record_for(target, facts, inputs, ptx).kernels


def record_for(target, facts, inputs, ptx=False):
    """The same with their options, as a `Recorder`."""

    def tiny(spec):
        return torch.empty(16, dtype=getattr(torch, spec.dtype))

    record = Recorder(TARGETS[target])
    buffers = {name: tiny(spec) for name, spec in facts.buffers().items()}
    buffers["offsets"] = torch.empty(facts.problem.experts + 1, dtype=torch.int32)
    operands = pipeline.tensors_of(facts.problem, [tiny(spec) for spec in inputs])
    y = torch.empty(16, dtype=getattr(torch, facts.problem.out_dtype))
    steps = pipeline.TritonSteps(facts, operands, buffers, y, ptx, record, overlap=target == "sm_90")
    moe.pipeline(steps, operands)
    return record
