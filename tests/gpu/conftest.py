"""Tests that need a GPU: `make test-gpu` builds the extension with the machine's own python3 and runs them there."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
_keys = itertools.count()


def gpus() -> list:
    """The GPUs that both JAX and torch see."""
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        return []
    import torch

    return devices[: torch.cuda.device_count()]


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    ours = [item for item in items if here in pathlib.Path(item.fspath).parents]
    count = len(gpus()) if ours else 0
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        wanted = next((mark.args[0] for mark in item.iter_markers("gpus")), 1)
        if count < wanted:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted} GPU(s) that JAX and torch both see, found {count}")
            )


@pytest.fixture
def plan():
    """Builds a capturable plan with a key of its own from `run` and pairs of (shape, dtype)."""
    from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan

    def build(run, inputs, outputs, workspace_bytes=0, **kwargs):
        kwargs.setdefault("capturable", True)
        return Plan(
            run.__name__,
            ("gpu test", next(_keys)),
            run,
            tuple(BufferSpec(*spec) for spec in inputs),
            tuple(BufferSpec(*spec) for spec in outputs),
            workspace_bytes,
            **kwargs,
        )

    return build


@pytest.fixture
def python():
    """Runs a program in a fresh interpreter under a watchdog; returns the finished process."""

    def run(program: str, *arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2", **environment}
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=timeout
        )

    return run
