"""What can run here, and why the rest cannot. Needs no extra."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform as host
import re
from typing import Any

import jax

from jax_mxfp4_moe import device
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, torch_call
from jax_mxfp4_moe.implementations.aiter import kernels as aiter_kernels
from jax_mxfp4_moe.implementations.aiter import known_releases, release
from jax_mxfp4_moe.implementations.aiter import tables as aiter_tables
from jax_mxfp4_moe.tuning import table

PACKAGES = ("jax", "jaxlib", "torch", "triton", "flax", "amd-aiter", "flydsl")
NOT_INSTALLED = "not installed"

VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    torch_call.ENVIRONMENT_VARIABLE,
    table.USER_TABLES_VARIABLE,
    aiter_tables.CONFIG_VARIABLE,
    release.FLYDSL_FORCE_VARIABLE,
    "AITER_BYPASS_TUNE_CONFIG",
    "AITER_KSPLIT",
    aiter_kernels.NATIVE_FP4_VARIABLE,
    aiter_kernels.STAGE2_FP8_VARIABLE,
)
"""Environment variables that decide what runs, and who gets the device's memory where JAX and torch share one."""

SUPPORT_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
SUPPORT_BEGIN, SUPPORT_END = "<!-- support -->", "<!-- /support -->"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, without importing them."""
    return {"python": host.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def machine() -> str:
    """The device that timings are of: a GPU's name, or the CPU's and its cores."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return f"{found[1] if found else host.machine()}, {os.cpu_count()} cores"


def report() -> dict[str, Any]:
    """Everything that `doctor` shows; JSON types only.

    Keys: versions, devices (with the error that JAX gave, if there are none), implementations ({name: {platform: None or a sentence}}),
    hip_runtimes (paths loaded, and None or the sentence on why they conflict), bridge (`torch_call.bridge_state()`, and `bridges`: why each
    cannot be used), tables, aiter (None, or facts about the one installed and what becomes of every row), variables.
    """
    devices: dict[str, Any] = {"platforms": [], "error": None, "names": [], "machine": None}
    bridge: dict[str, Any] = {"why_not": "JAX has no device"}
    try:
        names = [str(d) for d in jax.devices()]
    except RuntimeError as error:  # that is a finding, and the rest can still be told
        devices["error"] = str(error)
    else:
        devices |= {"platforms": list(device.platforms()), "names": names, "machine": machine()}
        bridge = {**torch_call.bridge_state(), "bridges": {b: torch_call.why_not(b) for b in torch_call.BRIDGES}}
    platforms = devices["platforms"]
    archs = {device.arch(platform) for platform in platforms}
    implementations = {n: {p: i.why_not(None, p) for p in platforms} for n, i in IMPLEMENTATIONS.items()}
    usable = any(reason is None for reason in implementations["aiter"].values())
    found = {
        "versions": versions(),
        "devices": devices,
        "implementations": implementations,
        # After the implementations, which load what brings a runtime.
        "hip_runtimes": {"loaded": device.hip_runtimes(), "conflict": device.hip_runtime_conflict()},
        "bridge": bridge,
        "tables": [
            _describe_table(path, archs) for folder in table.folders() for path in sorted(folder.glob("*/*.csv"))
        ],
        "aiter": _describe_aiter() if usable else None,
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    return json.loads(json.dumps(found))


def _describe_aiter() -> dict[str, Any]:
    """The facts about the installed aiter, and what becomes of every row of the tables on it."""
    installed = release.load()
    facts = {name: value for name, value in vars(installed).items() if name != "metadata"}
    return {"facts": facts, "rows": known_releases.verdicts(installed, release.flydsl_registry())}


def _describe_table(path: pathlib.Path, archs: set[str]) -> dict[str, Any]:
    is_aiters = path.name.split(".")[0] == "aiter"
    try:
        rows = aiter_tables.read(path) if is_aiters else table._rows(path, path.stat().st_mtime_ns)
        count, error = len(rows), None
    except ValueError as malformed:
        count, error = 0, str(malformed)
    return {"path": str(path), "rows": count, "used_here": path.parent.name in archs, "error": error}


def healthy(found: dict[str, Any]) -> bool:
    """Whether some implementation can run on the first platform."""
    platforms = found["devices"]["platforms"]
    return bool(platforms) and any(reasons[platforms[0]] is None for reasons in found["implementations"].values())


def text(found: dict[str, Any]) -> str:
    """A report for people."""

    def section(title: str, entries: dict[str, Any]) -> str:
        width = max(map(len, entries), default=0)
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in entries.items())])

    devices, bridge, runtimes, aiter = found["devices"], dict(found["bridge"]), found["hip_runtimes"], found["aiter"]
    bridges = {f"bridge {name}": reason or "usable" for name, reason in bridge.pop("bridges", {}).items()}
    return "\n\n".join(
        [
            section("Versions", found["versions"]),
            section(
                "Devices",
                {"error": devices["error"]}
                if devices["error"]
                else {
                    "platforms": ", ".join(devices["platforms"]),
                    "devices": ", ".join(devices["names"]),
                    "machine": devices["machine"],
                },
            ),
            section(
                "Implementations",
                {
                    f"{name} on {platform}": reason or "usable"
                    for name, reasons in found["implementations"].items()
                    for platform, reason in reasons.items()
                },
            ),
            section(
                "HIP runtimes",
                {"loaded": ", ".join(runtimes["loaded"]) or "none"}
                | ({"CONFLICT": runtimes["conflict"]} if runtimes["conflict"] else {}),
            ),
            section("Bridge", bridges | {name: "-" if value is None else value for name, value in bridge.items()}),
            section("Tuning tables", dict(map(_table_line, found["tables"])) or {"none": ""}),
            *(
                [
                    section("aiter", aiter["facts"]),
                    section(
                        "Rows of aiter, run eagerly; 'graph': recorded too, with bridge='graph' and even + half_away",
                        aiter["rows"],
                    ),
                ]
                if aiter
                else []
            ),
            section(
                "Variables", {name: "unset" if value is None else value for name, value in found["variables"].items()}
            ),
        ]
    )


def _table_line(entry: dict[str, Any]) -> tuple[str, str]:
    rows = entry["error"] or f"{entry['rows']} rows"
    return entry["path"], rows if entry["used_here"] else f"{rows}, not for a device here"


def support_table() -> str:
    """The Markdown table of implementations by platform that README.md shows between its two `support` comments.

    Cells are the sentences of `why_not` on this machine, less the version of torch.
    """
    lines = [f"| | {' | '.join(SUPPORT_PLATFORMS)} |", f"|---|{'---|' * len(SUPPORT_PLATFORMS)}"]
    for name, implementation in IMPLEMENTATIONS.items():
        reasons = (implementation.why_not(None, platform) for platform in SUPPORT_PLATFORMS)
        cells = (re.sub(r"torch \d\S*", "torch", reason) if reason else "yes" for reason in reasons)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(*, as_json: bool = False, support: bool = False, aiter_releases: bool = False) -> int:
    """Prints the report, or a table of the documentation, and returns the exit status: 1 if nothing can run here."""
    if support or aiter_releases:
        print(support_table() if support else known_releases.text())
        return 0
    found = report()
    print(json.dumps(found, indent=2) if as_json else text(found))
    return 0 if healthy(found) else 1
