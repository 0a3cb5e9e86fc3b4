"""What the bridge's tests share."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")

import plans

from jax_mxfp4_moe.implementations import torch_call


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
    """Builds a plan; see `plans.build`."""
    return plans.build


@pytest.fixture
def python():
    """Runs a program in a fresh interpreter; see `plans.run_python`."""
    return functools.partial(plans.run_python, JAX_PLATFORMS="cpu")
