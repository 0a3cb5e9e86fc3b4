"""Plans and fresh interpreters, for the bridge's tests on a CPU and on GPUs."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys

from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan

ROOT = pathlib.Path(__file__).parents[1]
_keys = itertools.count()


def build(run, inputs, outputs, workspace_bytes=0, **kwargs):
    """A capturable plan with a key of its own, from `run` and pairs of (shape, dtype)."""
    kwargs.setdefault("capturable", True)
    specs = [tuple(BufferSpec(*spec) for spec in side) for side in (inputs, outputs)]
    return Plan(run.__name__, ("test", next(_keys)), run, *specs, workspace_bytes, **kwargs)


def run_python(program: str, *arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program in a fresh interpreter, under a watchdog; returns the finished process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=timeout
    )
