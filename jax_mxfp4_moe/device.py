"""Platform and architecture. Nobody else asks."""

from __future__ import annotations

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
