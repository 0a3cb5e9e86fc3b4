"""Named problems, shared by tests, benchmarks and the tuner."""

from __future__ import annotations

import dataclasses

from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.testing import Case, random_case


@dataclasses.dataclass(frozen=True)
class Workload:
    """One named problem.

    Attributes:
      name: what the command line takes.
      problem: its static facts.
      shared_experts: how many of the experts, the last ones, every token uses with weight 1; they count in `problem.top_k`.
      note: what the shape stands for.
    """

    name: str
    problem: MoeProblem
    shared_experts: int = 0
    note: str = ""

    def case(self, seed: int = 0) -> Case:
        """Random arguments of one call, the same for the same seed."""
        return random_case(self.problem, seed, shared_experts=self.shared_experts)


def _all() -> list[Workload]:
    def deepseek(experts: int, intermediate: int, tokens: int, activation_quant: str | None, note: str) -> Workload:
        problem = MoeProblem(tokens, 9, experts, 7168, intermediate, activation_quant=activation_quant)
        return Workload(f"r{experts}i{intermediate}_m{tokens}", problem, 1, note)

    tuned = [
        deepseek(experts, intermediate, tokens, "mxfp4", f"the tuned program's shape: {note}")
        for experts, intermediate, sizes, note in (
            (257, 256, (16, 128, 512), "DeepSeek-R1 over 8 devices by tensor"),
            (33, 512, (16, 128, 512), "over 8 devices by expert, a quarter of the width"),
            (33, 2048, (512,), "over 8 devices by expert"),
        )
        for tokens in sizes
    ]
    prefill = [deepseek(33, 2048, tokens, None, "prefill, weights only") for tokens in (4096, 16384)]
    oss = [
        Workload(f"oss_m{tokens}", MoeProblem(tokens, 4, 32, 2880, 2880), note="the widths of gpt-oss-20b")
        for tokens in (1, 16, 128, 1024, 4096)
    ]
    cpu = [
        Workload("cpu_decode_m1", MoeProblem(1, 4, 32, 512, 512), note="one token"),
        Workload("cpu_decode_m16", MoeProblem(16, 4, 32, 512, 512), note="a small batch, most experts hit by two rows"),
        Workload(
            "cpu_shared_m16", MoeProblem(16, 9, 33, 512, 128, activation_quant="mxfp4"), 1, "the tuned recipe, small"
        ),
        Workload("cpu_odd_m33", MoeProblem(33, 4, 12, 96, 160), note="odd block counts, 3 and 5, as 2880 has 90"),
        Workload("cpu_prefill_m256", MoeProblem(256, 2, 8, 512, 512), note="64 rows an expert"),
        Workload("cpu_demo_m1", MoeProblem(1, 3, 9, 128, 128, "float32", "float32"), 1, "the demo model writes"),
        Workload("cpu_demo_m1024", MoeProblem(1024, 3, 9, 128, 128, "float32", "float32"), 1, "the demo model reads"),
    ]
    return [*cpu, *tuned, *prefill, *oss]


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _all()}

CPU_WORKLOADS: tuple[str, ...] = tuple(name for name in WORKLOADS if name.startswith("cpu_"))
"""Small enough that a CPU runs each in milliseconds."""

TUNED_WORKLOADS: tuple[str, ...] = tuple(n for n, w in WORKLOADS.items() if w.note.startswith("the tuned program's"))
"""The seven shapes that the tuned program was written for."""


def get(name: str) -> Workload:
    """Returns the workload of that name.

    Raises:
      ValueError: there is none; the text lists all names.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} given; expected one of {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]
