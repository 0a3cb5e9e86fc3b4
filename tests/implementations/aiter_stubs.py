"""Stand-ins for what aiter imports and a CPU does not have; `aiter_questions` installs those that it is told to, by name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from unittest import mock


def triton_driver(arch: str) -> None:
    """An active Triton driver, which releases from v0.1.14 on ask for its target while they are imported."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active = mock.MagicMock()
    active.get_current_target.return_value = GPUTarget("hip", arch, 64)
    active.get_current_device.return_value = 0
    driver.set_active(active)


def flydsl(version: str) -> None:
    """A package flydsl of this version all of whose names exist and do nothing."""

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, fullname, path=None, target=None):
            if fullname.split(".")[0] == "flydsl":
                return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            return None

        def create_module(self, spec):
            module = _Anything(spec.name)
            module.__version__ = version
            return module

        def exec_module(self, module):
            if module.__name__ == "flydsl.runtime.device":
                module.get_rocm_arch = lambda *args, **kwargs: "gfx950"
            if module.__name__ == "flydsl.utils.smem_allocator":
                module.SMEM_CAPACITY_MAP = {"gfx950": 163840}

    sys.meta_path.insert(0, Finder())
    plain = importlib.metadata.version
    importlib.metadata.version = lambda name: version if name == "flydsl" else plain(name)


class _Anything(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)
