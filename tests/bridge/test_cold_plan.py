"""A plan that was never warmed for a device is refused there, before Python runs: the stream may be recording.

XLA runs INITIALIZE before EXECUTE, so no JAX program gets there. `fake_runtime.cc` calls the handlers of the GPU platforms as a runtime
that leaves the stage out would.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import shutil
import subprocess

import jax
import pytest
import torch

from jax_mxfp4_moe.implementations import torch_call

INSTANTIATE, INITIALIZE, EXECUTE = 0, 2, 3
FAILED_PRECONDITION, INVALID_ARGUMENT = 9, 3


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("runtime") / "fake_runtime.so"
    source = pathlib.Path(__file__).with_name("fake_runtime.cc")
    command = [
        compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{jax.ffi.include_dir()}",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def address(capsule):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(capsule, None))


class Executable:
    """One custom call of `plan` on `platform`, as a runtime holds it."""

    def __init__(self, runtime, platform, plan):
        self.handlers = torch_call._load().module.handlers(platform)
        self.runtime, self.plan, self.state = runtime, plan, ctypes.c_void_p()
        assert self.run("eager", "instantiate", INSTANTIATE, 0) == ""
        assert self.state

    def run(self, target, name, stage, ordinal):
        """What the stage answers: an error code and a sentence, or nothing."""
        message = ctypes.create_string_buffer(4096)
        self.runtime.call_handler(
            address(self.handlers[target][name]), stage, ctypes.c_longlong(self.plan.id), self.plan.name.encode(), ordinal,
            ctypes.byref(self.state), message, ctypes.c_size_t(len(message)),
        )  # fmt: skip
        return message.value.decode()

    def close(self):
        self.runtime.delete_state(address(self.handlers["type"]["type_info"]), self.state)


@pytest.mark.parametrize("platform", ["CUDA", "ROCM"])
def test_a_cold_plan_is_refused_where_it_could_be_recorded(plan, runtime, monkeypatch, platform):
    warmed, ran = [], []
    monkeypatch.setattr(torch_call, "_check_torch_gpu", lambda ordinal, platform: None)
    built = plan(lambda *buffers: ran.append(buffers), [((4,), "float32")], [((4,), "float32")], warm=warmed.append)
    torch_call._make_native(built)
    executable = Executable(runtime, platform, built)
    execute = functools.partial(executable.run, name="execute", stage=EXECUTE)
    initialize = functools.partial(executable.run, "eager", "initialize", INITIALIZE)

    for target in ("graph", "eager"):
        refusal = execute(target, ordinal=1)
        assert refusal.startswith(
            f"{FAILED_PRECONDITION}: jax_mxfp4_moe: plan '<lambda>': the runtime did not run INITIALIZE"
        )
        assert "on device 1, expected a plan that is warm there: the stream may be recording" in refusal
        assert "bridge='callback'" in refusal
    assert (warmed, ran, built.calls) == ([], [], 0)

    assert initialize(1) == ""
    assert initialize(1) == ""
    assert warmed == [torch.device("cuda", 1)]
    # Warm on device 1: there the next check answers, of buffers that this runtime does not have. Device 0 is as cold as before.
    assert execute("graph", ordinal=1).startswith(f"{INVALID_ARGUMENT}: ")
    assert "given 0 inputs, expected 1" in execute("graph", ordinal=1)
    assert "INITIALIZE before EXECUTE on device 0" in execute("graph", ordinal=0)
    for ordinal in (-1, 128):
        assert f"device ordinal {ordinal}, expected 0 to 127" in execute("graph", ordinal=ordinal)
        assert f"device ordinal {ordinal}, expected 0 to 127" in initialize(ordinal)
    assert (ran, built.calls) == ([], 0)
    executable.close()


def test_a_plan_that_cannot_be_warmed_stays_cold(plan, runtime, monkeypatch):
    """A torch that was built for something else: INITIALIZE says so, and no EXECUTE follows from it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    built = plan(lambda *buffers: None, [((4,), "float32")], [((4,), "float32")])
    torch_call._make_native(built)
    executable = Executable(runtime, "CUDA", built)
    for _ in range(2):
        failure = executable.run("eager", "initialize", INITIALIZE, 0)
        assert "preparing for a device failed" in failure
        assert "the buffers are on CUDA, but torch" in failure
        assert "INITIALIZE before EXECUTE on device 0" in executable.run("graph", "execute", EXECUTE, 0)
    executable.close()
