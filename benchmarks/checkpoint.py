"""Load throughput and peak memory: one layer of experts, D = F = 2880 as in gpt-oss, read from the page cache.

The layer is written to a temporary folder first, with as many experts as make up the size. Each load is timed beside a plain read of
the same files into memory, since machines differ and are shared; the peak is that of a fresh process that loads the layer once.

    python benchmarks/checkpoint.py [--gigabytes 2] [--format gpt_oss] [--repeats 7] [--folder /dev/shm]

With `--processes N` nothing is timed. N processes of `jax.distributed` load the layer with `load_sharded`, its experts (or, with `--axis
tensor`, columns of F) divided over them, as on N hosts; each prints its peak as a share of the checkpoint. One that reads everything has 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from jax_mxfp4_moe import MoeWeights, Mxfp4Array, checkpoint, doctor, parallel
from jax_mxfp4_moe.checkpoint import write

HIDDEN = INTERMEDIATE = 2880
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 17 // 32


def write_layer(folder: pathlib.Path, gigabytes: float, format: str, processes: int) -> None:
    """Random codes and scales, an expert at a time; a multiple of `processes` experts."""
    experts = processes * max(round(gigabytes * 1e9 / EXPERT_BYTES / processes), 1)

    def array(rows: int, length: int) -> Mxfp4Array:
        shapes = (experts, rows, length // 2), (experts, rows, length // 32)
        return Mxfp4Array(*(jax.ShapeDtypeStruct(shape, np.uint8) for shape in shapes))

    shapes = MoeWeights(array(2 * INTERMEDIATE, HIDDEN), array(HIDDEN, INTERMEDIATE))

    def fetch(stack: str, leaf: str, expert: int) -> np.ndarray:
        low, high = (0, 256) if leaf == "codes" else (118, 124)
        shape = getattr(getattr(shapes, stack), leaf).shape[1:]
        return np.random.default_rng(expert).integers(low, high, shape, dtype=np.uint8)

    folder.mkdir()
    config = {"quantization_config": write.quantization_config(format)}
    (folder / "config.json").write_text(json.dumps(config))
    write.write_tensors(folder, [write.layer_sources(0, shapes, fetch, format=format)])


def load(folder: pathlib.Path) -> MoeWeights:
    return jax.block_until_ready(checkpoint.load(folder, layer=0))


def read(folder: pathlib.Path) -> int:
    return sum(np.fromfile(file, np.uint8).size for file in folder.glob("*.safetensors"))


def seconds(call, *arguments) -> float:
    start = time.perf_counter()
    result = call(*arguments)
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def resident_bytes(which: str) -> int:
    """VmRSS (now) or VmHWM (the peak); getrusage would count what the parent process had when it started this one."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(which)) * 1024


def measure_peak(folder: pathlib.Path) -> None:
    """In a process of its own: prints what loading added to the resident memory at its peak, and the bytes of the weights."""
    jax.block_until_ready(jax.device_put(np.zeros(1024, np.uint8)))  # JAX's own share, taken before
    before = resident_bytes("VmRSS")
    weights = load(folder)
    peak, after = resident_bytes("VmHWM"), resident_bytes("VmRSS")
    print(json.dumps({"peak": peak - before, "after": after - before, "packed": weights.nbytes}))


def measure_sharded(folder: pathlib.Path, process: int, options: argparse.Namespace) -> None:
    """One of several processes: prints the same for its part of the layer."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(options.coordinator, options.processes, process)
    mesh = jax.make_mesh((options.processes,), (options.axis,), axis_types=(jax.sharding.AxisType.Auto,))
    jax.block_until_ready(jax.device_put(np.zeros(1024, np.uint8), jax.local_devices()[0]))
    before = resident_bytes("VmRSS")
    weights = parallel.load_sharded(folder, mesh, layer=0, **{f"{options.axis}_axis": options.axis})
    jax.block_until_ready(jax.tree.leaves(weights.parts))
    peak, after = resident_bytes("VmHWM"), resident_bytes("VmRSS")
    part = sum(shard.data.nbytes for leaf in jax.tree.leaves(weights.parts) for shard in leaf.addressable_shards)
    print(json.dumps({"process": process, "peak": peak - before, "after": after - before, "part": part}))
    jax.distributed.shutdown()


def run_sharded(folder: pathlib.Path, size: int, options: argparse.Namespace) -> None:
    """Starts the processes and prints what each of them says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable,
        __file__,
        "--peak",
        str(folder),
        "--processes",
        str(options.processes),
        "--axis",
        options.axis,
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    running = [
        subprocess.Popen(
            [*command, "--coordinator", coordinator, "--process", str(i)], stdout=subprocess.PIPE, env=environment
        )
        for i in range(options.processes)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        sys.exit(f"a process failed: exit codes {[process.returncode for process in running]}")
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        shares = {name: found[name] / size for name in ("part", "peak", "after")}
        print(f"process {found['process']}: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
        print(f"RESULT peak_bytes_over_checkpoint_bytes {shares['peak']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--format", choices=write.FORMATS, default="gpt_oss")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; the system's temporary folder if left out")
    parser.add_argument(
        "--processes", type=int, default=1, help="measure sharded loading by this many processes instead"
    )
    parser.add_argument("--axis", choices=["expert", "tensor"], default="expert", help="what they divide")
    for hidden, kind in (("--peak", pathlib.Path), ("--process", int), ("--coordinator", str)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        if options.process is None:
            measure_peak(options.peak)
        else:
            measure_sharded(options.peak, options.process, options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = pathlib.Path(temporary) / "layer"
        written = seconds(write_layer, folder, options.gigabytes, options.format, options.processes)
        size = read(folder)  # and into the page cache
        if options.processes > 1:
            experts = round(size / EXPERT_BYTES)
            print(
                f"{options.format}: {size / 1e9:.2f} GB, {experts} experts, {options.axis} axis over {options.processes} processes"
            )
            run_sharded(folder, size, options)
            return
        times = [(seconds(read, folder), seconds(load, folder)) for _ in range(options.repeats)]
        command = [sys.executable, __file__, "--peak", str(folder)]
        memory = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    reads, loads = np.array(times).T
    versions = ", ".join(f"{name} {version}" for name, version in doctor.versions().items())
    print(f"{versions}, {doctor.machine()}")
    print(
        f"{options.format}: {size / 1e9:.2f} GB, {round(memory['packed'] / EXPERT_BYTES)} experts, written in {written:.1f} s"
    )
    print(
        f"read  {size / 1e9 / np.median(reads):6.2f} GB/s median, {size / 1e9 / reads.min():6.2f} best of {options.repeats}"
    )
    print(
        f"load  {size / 1e9 / np.median(loads):6.2f} GB/s median, {size / 1e9 / loads.min():6.2f} best of {options.repeats}"
    )
    print(f"RESULT load_time_over_read_time {np.median(loads / reads):.2f}")
    print(f"RESULT load_gigabytes_per_second {size / 1e9 / np.median(loads):.2f}")
    print(f"RESULT peak_bytes_over_packed_bytes {memory['peak'] / memory['packed']:.3f}")
    print(f"RESULT kept_bytes_over_packed_bytes {memory['after'] / memory['packed']:.3f}")


if __name__ == "__main__":
    main()
