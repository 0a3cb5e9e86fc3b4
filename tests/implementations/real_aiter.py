"""Runs the Python part of a real aiter on a CPU, in a process of its own with small stubs for what needs ROCm.

`python tests/implementations/real_aiter.py FOLDER...` prints what `check` finds for source checkouts of aiter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import aiter_questions
import aiter_sim
import ml_dtypes
import numpy as np
import torch
from aiter_sim import config, sorting, stages

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
WHEEL = "amd-aiter==0.1.7.post2.dev18"
# Of aiter's requirements only pandas, and what it needs, is imported on this way; torch, triton and NumPy are this environment's.
NEEDED = ("pandas", "python-dateutil", "six", "tzdata")

ROCMINFO = """\
*******
Agent 2
*******
  Name:                    gfx950
  Marketing Name:          AMD Instinct MI355X
  Device Type:             GPU
  Compute Unit:            256
"""
ENUMS = '''\
import enum


class _Enum(enum.Enum):
    def __int__(self):
        return self.value


class ActivationType(_Enum):
    """Members:"""

    No, Silu, Gelu, Swiglu, Situv2 = -1, 0, 1, 2, 3


class QuantType(_Enum):
    """Members:"""

    No, per_Tensor, per_Token, per_1x32, per_1x128, per_128x128, per_256x128, per_1024x128 = range(8)


class MlaVersion(_Enum):
    """Members:"""

    V3, V32, V4 = range(3)


class MxScaleRoundMode(_Enum):
    """Members:"""

    RoundDown, RoundUp, Even, Ceil = range(4)


class MxDtype(_Enum):
    """Members:"""

    FP4_E2M1, FP8_E4M3, FP8_E4M3_FNUZ = range(3)


kDefaultMxScaleRoundMode = 1
'''


class UnavailableError(Exception):
    """The wheel cannot be had here; the text says why."""


def wheel() -> pathlib.Path:
    """A folder with the wheel and what it needs, installed once for all processes.

    Raises:
      UnavailableError: the package index cannot be reached, or does not have it.
    """
    folder = ROOT / "build" / WHEEL.replace("==", "-")
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            # Kernels for GPUs and the sources of Composable Kernel, most of the size, are not needed here.
            done = subprocess.run([*pip, "--target", str(new), WHEEL, *NEEDED], capture_output=True, text=True)
            if done.returncode:
                raise UnavailableError(f"pip cannot install {WHEEL}: {done.stderr.strip().splitlines()[-1:]}")
            for part in ("hsa", "3rdparty"):
                shutil.rmtree(new / "aiter_meta" / part, ignore_errors=True)
            new.rename(folder)
    return folder


@contextlib.contextmanager
def stubs() -> Iterator[pathlib.Path]:
    """A folder with hipconfig and rocminfo for PATH, and the compiled enum modules that aiter would build at import."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        for name, text in (("hipconfig", "6.4.43482"), ("rocminfo", ROCMINFO)):
            (path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
            (path / name).chmod(0o755)
        for name in ("module_aiter_enum", "module_aiter_core"):
            (path / f"{name}.py").write_text(ENUMS)
        yield path


def ask(folder: pathlib.Path, inputs: dict[str, Any], **environment: str) -> dict[str, Any]:
    """The answers of `aiter_questions` by the aiter in `folder`, in a fresh interpreter."""
    with stubs() as path:
        (path / "inputs").write_bytes(pickle.dumps(inputs))
        python_path = os.pathsep.join(map(str, (folder, ROOT, HERE)))
        python_path += os.pathsep + str(wheel()) if folder != wheel() else ""
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AITER_")},
            "PYTHONPATH": python_path,
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            "GPU_ARCHS": "gfx950",
            "CU_NUM": "256",
            "AITER_JIT_DIR": str(path),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        program = [sys.executable, str(HERE / "aiter_questions.py"), str(path / "inputs"), str(path / "answers")]
        done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
        if not (path / "answers").exists():
            raise RuntimeError(f"{folder}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return pickle.loads((path / "answers").read_bytes())


# --- the questions, and what the simulation answers ------------------------------------------------------------------

SEVEN = (
    (16, 257, 256),
    (128, 257, 256),
    (512, 257, 256),
    (16, 33, 512),
    (128, 33, 512),
    (512, 33, 512),
    (512, 33, 2048),
)
AMAX = (
    0,
    2.0**-126,
    0.5,
    0.75,
    1,
    1.4375,
    1.5,
    1.5078125,
    1.75,
    2,
    3,
    3.015625,
    3.5,
    4,
    5,
    6,
    6.03125,
    6.96875,
    7,
    8,
    448,
)


def questions(folder: pathlib.Path, *, triton: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Inputs for `aiter_questions` and the environment to ask in; writes a table of rows into `folder`.

    The rows of the table differ in the number of experts, so that one file holds one of every kind.
    """
    rng = np.random.default_rng(0)
    blocks = np.zeros((len(AMAX), 32), np.float32)
    blocks[:, 5] = np.asarray(AMAX, ml_dtypes.bfloat16)
    wide = rng.normal(size=(64, 32)) * 2.0 ** rng.integers(-30, 30, (64, 1))
    ties = np.tile([0.25, -0.25, 0.75, 1.25, -1.25, 1.75, 2.5, -3.5, 5, 6, -0.0, 0, 1, 2, 3, 4], 2)[None]
    x = (
        np.concatenate([blocks, ties, np.zeros((2, 32)), wide.astype(ml_dtypes.bfloat16)])
        .astype(np.float32)
        .reshape(-1, 64)
    )

    ck = {
        "kernelName1": stages.ck_name(1, "256x64x128x128_1x4"),
        "kernelName2": stages.ck_name(2, "256x64x128x128_1x4"),
    }
    fly1, fly2 = "flydsl_moe1_afp4_wfp4_bf16_t64x128x256", "flydsl_moe2_afp4_wfp4_bf16_t64x128x256_atomic"
    kinds = {
        "ck": ck,
        "split_k": {"kernelName1": "placeholder", "kernelName2": "placeholder", "ksplit": 2},
        "split_k_ck": {**ck, "ksplit": 2},
        "ck_flydsl": {**ck, "kernelName2": fly2},
        "flydsl": {"kernelName1": fly1, "kernelName2": fly2},
        "flydsl_ck": {**ck, "kernelName1": fly1},
        "flydsl_fused": {"kernelName1": f"{fly1}_fp4", "kernelName2": fly2},
        "unknown": {"kernelName1": "placeholder", "kernelName2": "placeholder"},
        "empty": {"kernelName1": "", "kernelName2": ""},
        "empty_split_k": {"kernelName1": "", "kernelName2": "", "ksplit": 2},
        "odd_block": {"kernelName1": "placeholder", "kernelName2": "placeholder", "block_m": 48},
        "tagged": {**ck, "_tag": "mine"},
        "tagged_fallback": {**ck, "_tag": "flydsl_fallback"},
        "other_cu": {**ck, "cu_num": 304},
        "tier": {**ck, "token": 32768},
    }
    shapes = {
        f"{m} tokens, {e} experts, {i}": {"tokens": m, "experts": e, "intermediate": i, "hidden": 7168, "top_k": 9}
        for m, e, i in SEVEN
    }
    shapes |= {
        f"small {m} {i}": {"tokens": m, "experts": 8, "intermediate": i, "hidden": 512, "top_k": 2}
        for m in (1, 3, 40)
        for i in (256, 512)
    }
    lines = [",".join((*config.COLUMNS, "gfx", "_tag"))]
    for experts, (name, values) in enumerate(kinds.items(), start=50):
        shapes[name] = {"tokens": 16, "experts": experts, "intermediate": 512, "hidden": 7168, "top_k": 9}
        if name == "tier":
            shapes[name]["tokens"] = 200000
        row = config.row(16, 7168, 512, experts, 9) | {"block_m": 64, "us": 1.0, "gfx": "gfx950", "_tag": "", **values}
        lines.append(",".join(str(row[column]) for column in (*config.COLUMNS, "gfx", "_tag")))
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    inputs = {
        "x": x,
        "weights": rng.integers(0, 256, (2, 48, 96), dtype=np.uint8),
        "scales": rng.integers(0, 256, (512, 16), dtype=np.uint8),
        "shapes": shapes,
        "release": True,
        "injected": injected_cases(),
    }
    if triton:
        inputs["triton"] = {stage: _sorted_case(rng, stage) for stage in (1, 2)}
    return inputs, {"AITER_CONFIG_FMOE": str(path), "XDG_CACHE_HOME": str(folder / "cache")}


def injected_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Problems and the rows that this package is to bring into aiter's table."""
    fields = {
        "tokens": 100,
        "top_k": 9,
        "experts": 33,
        "hidden": 7168,
        "intermediate": 512,
        "activation_quant": "mxfp4",
    }

    def config_of(block_m, tile, **changes):
        names = {"kernel_name1": stages.ck_name(1, tile), "kernel_name2": stages.ck_name(2, tile)}
        return {"block_m": block_m, "ksplit": 0, **names, "dispatch_policy": 2, "pipeline": "two_stage", **changes}

    split = {"ksplit": 2, "kernel_name1": "placeholder", "kernel_name2": "placeholder"}
    return [
        (fields, config_of(64, "256x64x128x128_1x4")),
        (fields, config_of(128, "256x128x128x128_1x4")),
        (fields, config_of(32, "256x128x128x128_1x4")),  # a tile of 128 rows on blocks of 32: to be refused
        (fields | {"tokens": 16, "activation_quant": None}, config_of(16, "256x32x128x128_1x4", **split)),
        (fields, config_of(0, "", kernel_name1="", kernel_name2="")),  # aiter's own choice
    ]


def _sorted_case(rng: np.random.Generator, stage: int) -> dict[str, Any]:
    """Rows to quantize and a sorting of them by aiter's formula."""
    tokens, top_k, experts, block_m, length = 11, 3, 5, 32, 11 * 3 + 5 * 32 - 3
    ids = torch.from_numpy(np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32))
    outputs = [torch.full((n,), -1, dtype=torch.int32) for n in (length, -(-length // block_m), 2)]
    sorting.moe_sorting_fwd(
        *(ids, torch.ones(tokens, top_k), outputs[0], torch.zeros(length), *outputs[1:]),
        *(torch.zeros(tokens, 256, dtype=torch.bfloat16), experts, block_m),
    )
    rows = tokens if stage == 1 else tokens * top_k
    x = rng.normal(size=(rows, 512)) * 2.0 ** rng.integers(-9, 9, (rows, 16)).repeat(32, axis=1)
    x[0, :32] = 0
    x[1, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return {
        "x": x,
        "sorted_ids": outputs[0].numpy(),
        "num_valid_ids": outputs[2].numpy(),
        "tokens": tokens,
        "top_k": 1 if stage == 1 else top_k,
    }


def simulated(profile: str, inputs: dict[str, Any], *, flydsl: bool, **environment: str) -> dict[str, Any]:
    """The answers of the simulation."""
    with mock.patch.dict(os.environ, {**environment, "CU_NUM": "256"}), aiter_sim.installed(profile, flydsl=flydsl):
        return aiter_questions.answers(inputs)


def differences(real: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Where the simulation's answers are not the real ones. Compiled operations hide their parameters, and are left out."""
    out = []
    for name, answer in real.items():
        other = found[name]
        pairs = answer.items() if isinstance(answer, dict) and isinstance(other, dict) else [("", answer)]
        for key, value in pairs:
            mine = other.get(key) if key != "" else other
            if isinstance(value, np.ndarray):
                same = value.shape == mine.shape and np.array_equal(value, mine)
                value, mine = (f"{np.argwhere(value != mine)[:3].tolist()}", "") if not same else ("", "")
            if value != mine and value != ("args", "kwargs") and (name, key) not in _DIFFERENT:
                out.append(f"{name} {key}: " + "; ".join(_parts(value, mine)))
    return out


def _parts(real: Any, mine: Any) -> Iterator[str]:
    """The innermost parts that differ."""
    if isinstance(real, tuple) and isinstance(mine, tuple) and len(real) == len(mine):
        for one, other in zip(real, mine, strict=True):
            if one != other:
                yield from _parts(one, other)
    else:
        yield f"{real} real, {mine} simulated"


_DIFFERENT = {("release", "simulated"), ("release", "version")}


def main(*arguments: str) -> None:
    """Prints the differences for source checkouts.

    Each argument is PROFILE=FOLDER, with +flydsl after the profile for a stand-in of that package, +triton to run aiter's fused
    quantizer in Triton's interpreter as well, and +file to leave AITER_CONFIG_FMOE to this package.
    """
    for argument in arguments:
        (profile, *parts), folder = argument.split("=")[0].split("+"), argument.split("=")[1]
        inputs = {"stubs": {"triton_driver": "gfx950"}}
        if "flydsl" in parts:
            inputs["stubs"]["flydsl"] = aiter_sim.PROFILES[profile].flydsl_version
        with tempfile.TemporaryDirectory() as temporary:
            more, environment = questions(pathlib.Path(temporary), triton="triton" in parts)
            if "file" in parts:
                more["shapes"] = {}
                del environment["AITER_CONFIG_FMOE"]
            interpret = {"TRITON_INTERPRET": "1"} if "triton" in parts else {}
            real = ask(pathlib.Path(folder), inputs | more, **environment, **interpret)
            found = differences(real, simulated(profile, more, flydsl="flydsl" in parts, **environment))
        compared = sum(len(answer) if isinstance(answer, dict) else 1 for answer in real.values())
        print(f"{argument}: {compared} answers, {len(found)} differences", *found, sep="\n   ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
