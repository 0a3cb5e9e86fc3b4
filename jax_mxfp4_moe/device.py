"""Platform and architecture. Nobody else asks."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax


def platforms(x: Any = None) -> tuple[str, ...]:
    """The lowering platforms that a call must be ready for, most likely first: "cpu", "cuda", "rocm" or "tpu".

    A concrete `x` says where it lives. A traced one does not, and a machine with an accelerator may still compile for its CPU, so
    both are named then.
    """
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return (_lowering_name(next(iter(x.devices())).platform),)
    default = _lowering_name(jax.default_backend())
    return (default,) if default == "cpu" else (default, "cpu")


def _lowering_name(platform: str) -> str:
    if platform == "gpu":
        version = getattr(jax.devices()[0].client, "platform_version", "")
        return "rocm" if "rocm" in version.lower() else "cuda"
    return platform


def arch(platform: str) -> str:
    """The architecture that tuning tables are filed under: "cpu", "sm_90", "gfx950", or the platform's name."""
    if platform in ("cuda", "rocm"):
        device = jax.devices(platform)[0]
        capability = str(getattr(device, "compute_capability", platform))
        return f"sm_{capability.replace('.', '')}" if platform == "cuda" else capability.split(":")[0]
    return platform


def hip_runtimes(maps: str | None = None) -> tuple[str, ...]:
    """Paths of the HIP runtimes that this process has loaded, in order of address.

    Args:
      maps: text of a Linux memory map; that of this process if None. Empty where the system has none.
    """
    if maps is None:
        own = pathlib.Path("/proc/self/maps")
        maps = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else ""
    found = re.findall(r"^\S+ \S+ \S+ \S+ \S+\s+(/.*/libamdhip64\.so\S*)", maps, re.MULTILINE)
    return tuple(dict.fromkeys(found))


def hip_runtime_conflict(maps: str | None = None) -> str | None:
    """Why JAX and torch cannot share a stream here: each has brought a HIP runtime of its own. None if there is at most one.

    To be asked after both are loaded: before, there is nothing to see.
    """
    found = hip_runtimes(maps)
    if len(found) < 2:
        return None
    return (
        f"needs one HIP runtime in the process, found {len(found)}: {', '.join(found)}. A stream of one means nothing to the others: "
        "install JAX's ROCm plugin and torch for the same ROCm, and let both load the system's libamdhip64.so (remove the copies in the "
        "wheels, or put the system's first in LD_LIBRARY_PATH)"
    )
