"""What the bridge's tests share."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan

ROOT = pathlib.Path(__file__).parents[2]
_keys = itertools.count()


@pytest.fixture(params=["eager", "graph", "callback"])
def bridge(request):
    """Every way to the callable that can be used here."""
    why_not = torch_call.why_not(request.param)
    if why_not is not None:
        pytest.skip(why_not)
    return request.param


@pytest.fixture(params=["exchange_api", "capsule"])
def route(request):
    """Both ways to make a tensor. Restores the one in use."""
    used = torch_call._bind_torch(route="capsule" if request.param == "capsule" else "default")
    if used != request.param:
        pytest.skip(f"this torch has no DLPack exchange table, found {used}")
    yield request.param
    torch_call._bind_torch(route="default")


@pytest.fixture
def plan():
    """Builds a plan with a key of its own from `run` and pairs of (shape, dtype)."""

    def build(run, inputs, outputs, workspace_bytes=0, **kwargs):
        kwargs.setdefault("capturable", True)
        return Plan(
            run.__name__,
            ("test", next(_keys)),
            run,
            tuple(BufferSpec(*spec) for spec in inputs),
            tuple(BufferSpec(*spec) for spec in outputs),
            workspace_bytes,
            **kwargs,
        )

    return build


@pytest.fixture
def python():
    """Runs a program in a fresh interpreter; returns the finished process."""

    def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=120
        )

    return run
