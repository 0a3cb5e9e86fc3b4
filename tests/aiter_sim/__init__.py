"""A simulated aiter: the modules of any release on CPU tensors, with the true semantics and the true faults.

    with aiter_sim.installed("v0.1.11", flydsl=True) as sim:
        import aiter
        ...
        sim.calls  # which operations ran

`import aiter` finds the simulation inside the block, and each module is filled when it is first imported, so that what
happens before the import (setting AITER_CONFIG_FMOE, say) counts as it does with the real package. On leaving,
sys.modules and every AITER_ variable are as they were.

The simulation works on bytes in memory, work-group by work-group, as the kernels do: weights that were not shuffled, a
tile of another size than the sorting's, scales in another order, or a dtype that a kernel misreads give wrong numbers and
no error. Speed, races and the order of atomic additions are not simulated. What is not part of the MXFP4 two-stage
pipeline with SiLU raises NotImplementedError.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

from aiter_sim import modules
from aiter_sim.profiles import CASES, PROFILES, Profile

__all__ = ["CASES", "PROFILES", "Profile", "Simulation", "installed"]


class Simulation(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """One simulated installation, which is also the finder and loader of its modules.

    Attributes:
      profile: the release.
      flydsl: whether the package flydsl is there and fits.
      folder: where its files are written.
      calls: the operations that ran, by name, in order.
    """

    def __init__(self, profile: Profile, flydsl: bool, folder: pathlib.Path) -> None:
        if flydsl and not profile.flydsl_stages:
            raise ValueError(f"{profile.name} has no FlyDSL kernels.")
        self.profile, self.flydsl, self.folder = profile, flydsl, folder
        self.calls: list[str] = []
        self.tree = modules.tree(profile, flydsl)

    @property
    def aiter(self) -> Any:
        """The top module."""
        return self.module("aiter")

    def module(self, name: str) -> Any:
        """A module of the tree, imported if it was not."""
        return importlib.import_module(name)

    def config_path(self) -> str:
        """The file of tuned configs, as the release finds it."""
        core = self.module("aiter.jit.core")
        return getattr(core, "AITER_CONFIGS", core).AITER_CONFIG_FMOE_FILE

    def unsupported(self, what: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aiter_sim: {what} is not simulated")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.tree:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self.tree) or fullname == "flydsl"
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=f"aiter_sim {self.profile.name}", is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        fill = self.tree[module.__name__]
        if fill is not None:
            fill(self, module)


def _simulated_names(names: Any) -> list[str]:
    return [name for name in names if name.split(".")[0] in ("aiter", "flydsl")]


@contextlib.contextmanager
def installed(profile: str | Profile, *, flydsl: bool = False) -> Iterator[Simulation]:
    """Makes `import aiter` find this release, with or without flydsl, inside the block."""
    profile = PROFILES[profile] if isinstance(profile, str) else profile
    modules_before = {name: sys.modules.pop(name) for name in _simulated_names(list(sys.modules))}
    environment_before = {name: value for name, value in os.environ.items() if name.startswith("AITER_")}
    with tempfile.TemporaryDirectory(prefix="aiter_sim") as folder:
        simulation = Simulation(profile, flydsl, pathlib.Path(folder))
        sys.meta_path.insert(0, simulation)
        try:
            yield simulation
        finally:
            sys.meta_path.remove(simulation)
            for name in _simulated_names(list(sys.modules)):
                del sys.modules[name]
            sys.modules.update(modules_before)
            for name in [name for name in os.environ if name.startswith("AITER_")]:
                del os.environ[name]
            os.environ.update(environment_before)
