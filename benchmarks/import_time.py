"""Milliseconds that `import jax_mxfp4_moe` takes beyond `import jax`: the median of several fresh interpreters.

Run: python benchmarks/import_time.py [runs]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

LIMIT_MS = 50.0

CODE = """
import time
import jax, jax.numpy
start, cpu_start = time.perf_counter(), time.process_time()
import jax_mxfp4_moe
print((time.perf_counter() - start) * 1e3, (time.process_time() - cpu_start) * 1e3)
"""


def milliseconds() -> tuple[float, float]:
    """One interpreter's figures: on the clock, and on the CPU, which other work on the machine disturbs less."""
    # With bytecode, as installed: compiling the sources would be most of the figure.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    milliseconds()  # writes the bytecode
    walls, cpus = zip(*(milliseconds() for _ in range(runs)), strict=True)
    median = statistics.median(walls)
    print(f"RESULT import_ms {median:.1f}")
    print(f"RESULT import_cpu_ms {statistics.median(cpus):.1f}")
    met = "met" if median <= LIMIT_MS else "NOT met"
    print(f"{runs} runs, {min(walls):.1f} to {max(walls):.1f} ms; limit {LIMIT_MS:.0f} ms: {met}")
    return int(median > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
