"""Runs compiled gfx950 kernels on a CPU, with the simulator whose folder GFX950SIM names (or ../shared/gfx950sim).

Numbers and addresses of the compiled code are checked, and that no access leaves its buffer; speed, races and missing
waits are not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib
import re
import sys
import types
from typing import Any

import numpy as np
import pytest

FOLDER = pathlib.Path(
    os.environ.get("GFX950SIM") or pathlib.Path(__file__).resolve().parents[3] / "shared" / "gfx950sim"
)


@functools.cache
def simulator() -> Any:
    """The simulator's module; skips the test, with the reason, where it or what it needs is not there."""
    if not (FOLDER / "g950.py").is_file():
        pytest.skip(f"no gfx950 simulator in {FOLDER}: set GFX950SIM to its folder")
    pytest.importorskip("triton")
    sys.path.append(str(FOLDER))
    return importlib.import_module("g950")


@dataclasses.dataclass
class Launcher:
    """A `launch` for `TritonSteps` that compiles each kernel for gfx950 and runs it; tensors are changed in place.

    `seed` shuffles work-groups and interleaves waves. `edit` is (kernel, pattern, replacement) for its compiled text.
    `instructions` counts what ran, by mnemonic.
    """

    seed: int | None = None
    edit: tuple[str, str, str] | None = None
    instructions: dict[str, int] = dataclasses.field(default_factory=dict)
    kernels: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        values = dict(zip(kernel.arg_names, args, strict=False))
        compiled, values = simulator().cross_compile(kernel, values, constants, **options)
        if self.edit is not None and self.edit[0] == kernel.__name__:
            text, count = re.subn(*self.edit[1:], compiled.asm["amdgcn"])
            assert count, f"{self.edit[1]} is not in the text of {kernel.__name__}"
            asm = {**compiled.asm, "amdgcn": text}
            compiled = types.SimpleNamespace(asm=asm, metadata=compiled.metadata, src=compiled.src)
        stats = simulator().run(compiled, values, grid, seed=self.seed)
        self.kernels.append(kernel.__name__)
        for name, count in stats.instructions.items():
            self.instructions[name] = self.instructions.get(name, 0) + count


def tensor(a: Any) -> Any:
    """A NumPy or JAX array as a torch tensor of its own memory."""
    import torch

    a = np.asarray(a)
    if str(a.dtype) == "bfloat16":
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(a.copy())


def steps(
    case: Any,
    activation_quant: str | None,
    launcher: Launcher,
    *,
    product: str = "bits",
    changes: dict | None = None,
    **options: Any,
) -> Any:
    """The triton implementation's steps on a `cases.Case`, from poisoned buffers; `changes` are those of the default for `product`."""
    import torch

    from jax_mxfp4_moe.implementations.base import Config
    from jax_mxfp4_moe.implementations.triton import pipeline
    from jax_mxfp4_moe.implementations.triton.implementation import default_config

    problem = case.problem(activation_quant, **options)
    config = Config.of({**dict(default_config(problem, product).items), **(changes or {})})
    facts = pipeline.Facts(problem, config)
    buffers = {}
    for name, spec in facts.buffers().items():
        memory = torch.full((max(16, spec.nbytes),), 0x7F, dtype=torch.uint8)
        buffers[name] = memory[: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
    stacks = (case.weights.gate_up, case.weights.down)
    floats = (case.gate_up_bias, case.down_bias, options.get("activation_scale"))
    floats = [np.asarray(a, np.float32) for a in floats if a is not None]
    inputs = [case.x, *(part for stack in stacks for part in (stack.codes, stack.scales)), *floats]
    operands = pipeline.tensors_of(problem, [tensor(a) for a in (*inputs, case.topk_weights, case.topk_ids)])
    y = torch.full((problem.tokens, problem.hidden), float("nan"), dtype=getattr(torch, problem.out_dtype))
    return pipeline.TritonSteps(facts, operands, buffers, y, False, launcher)
