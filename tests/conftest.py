"""Settings shared by all tests."""

import os
import sys

import hypothesis
import jax
import pytest

sys.path.insert(0, os.path.dirname(__file__))  # `import oracle` from every folder of tests

# A first call compiles, so that a deadline would measure XLA; derandomized, so that a red run is red again.
hypothesis.settings.register_profile("project", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module")
def quickly_compiled():
    """For modules that test wiring: XLA optimizes less and compiles in half the time. What it rounds is tested elsewhere."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
