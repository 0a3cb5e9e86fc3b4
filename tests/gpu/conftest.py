"""Tests that need a GPU: `make test-gpu` builds the extension with the machine's own python3 and runs them there."""

from __future__ import annotations

import functools
import pathlib

import jax
import plans
import pytest


def gpus() -> list:
    """The GPUs that both JAX and torch see."""
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        return []
    import torch

    return devices[: torch.cuda.device_count()]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than ten seconds on a GPU; leave out with -m 'not slow'")


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
    """Builds a plan; see `plans.build`."""
    return plans.build


@pytest.fixture
def python():
    """Runs a program in a fresh interpreter; see `plans.run_python`."""
    return functools.partial(plans.run_python, XLA_PYTHON_CLIENT_MEM_FRACTION="0.2")
