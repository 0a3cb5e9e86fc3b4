"""Checks and times `triton` at the torch level, by CUDA-graph replay: whole layers, single kernels, and sweeps of configs.

    PYTHONPATH=. python benchmarks/triton_layer.py plan.json

plan.json: {"layers": [[case, activation_quant, {config changes}], ...], "parts": true to time each kernel too,
            "sweeps": [[case, activation_quant, stage, {parameter: values}, {config changes}, seconds], ...]}
A case is r257i256m16 (experts, one of them shared, intermediate, tokens; hidden 7168, top-9) or ossm16 (32 experts, 2880 x 2880, top-4).

Weights are drawn on the device. Every layer is compared with a float32 evaluation of some tokens before it is timed. `bound` is the larger
of (bytes of the experts that are hit + activations) / 4218 GB/s and flops / 756 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import sys
import time

import torch

from jax_mxfp4_moe import moe
from jax_mxfp4_moe.implementations.base import Config
from jax_mxfp4_moe.implementations.torch import Packed, dequantize
from jax_mxfp4_moe.implementations.torch import quantize as torch_quantize
from jax_mxfp4_moe.implementations.torch_call import BufferSpec
from jax_mxfp4_moe.implementations.triton import pipeline as launches
from jax_mxfp4_moe.implementations.triton.implementation import WIDE_ROWS, default_config
from jax_mxfp4_moe.problem import MoeProblem

PEERS = {  # best peer's microseconds, bfloat16 activations, measured on another day on the same kind of device
    "r257i256m16": 156, "r257i256m128": 363, "r257i256m512": 620, "r33i512m16": 104, "r33i512m128": 190, "r33i512m512": 470,
    "r33i2048m512": 1196, "r33i2048m4096": 5438, "r33i2048m16384": 20306, "ossm1": 49.6, "ossm16": 172, "ossm128": 230,
    "ossm1024": 668, "ossm4096": 1726,
}  # fmt: skip


def overlaps() -> bool:
    """Whether launches overlap: as those of the implementation do, unless OVERLAP=0."""
    return os.environ.get("OVERLAP", "1") == "1" and launches.has_overlap(
        torch.device("cuda", torch.cuda.current_device())
    )


def problem_of(name: str, quant: str | None) -> tuple[MoeProblem, int]:
    """Problem and number of shared experts."""
    head, tokens = name.rsplit("m", 1)
    if head == "oss":
        return MoeProblem(int(tokens), 4, 32, 2880, 2880, activation_quant=quant), 0
    experts, inter = head[1:].split("i")
    return MoeProblem(int(tokens), 9, int(experts), 7168, int(inter), activation_quant=quant), 1


def packed(shape: tuple[int, ...], generator: torch.Generator) -> Packed:
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda", generator=generator)
    centre = 126 - round(math.log2(3 * math.sqrt(shape[-1])))
    noise = torch.randn((*shape[:-1], shape[-1] // 32), device="cuda", generator=generator) * 1.2
    return Packed(codes, (centre + noise.round().clamp(-6, 3)).to(torch.uint8))


def shuffled(a: Packed) -> Packed:
    """`layout.shuffle` in torch; every row fits."""
    experts, rows, half = a.codes.shape
    groups = -(-half // 64)
    base = a.scales.amax(-1)
    d = torch.nn.functional.pad(11 - (base[..., None] - a.scales), (0, 4 * groups - half // 16))
    codes = torch.nn.functional.pad(a.codes, (0, 64 * groups - half))
    codes = codes.view(experts, rows, groups, 4, 4, 4).permute(0, 2, 1, 4, 3, 5)
    shift = torch.tensor([3, 7, 3, 7], dtype=torch.uint8, device=codes.device)
    first, second = codes[..., [0, 0, 1, 1]] >> shift & 1, codes[..., [2, 2, 3, 3]] >> shift & 1
    codes = (codes & 0x77) | first << 7 | second << 3
    d = d.view(experts, rows, groups, 4).permute(0, 2, 1, 3).reshape(experts, -1)
    scales = torch.cat([d, base], 1).view(experts, rows, 4 * groups + 1)
    return Packed(codes.reshape(experts, rows, 64 * groups).contiguous(), scales.contiguous())


@dataclasses.dataclass
class Layer:
    """Tensors of one problem, with several routings so that repeated calls do not find their weights in the cache."""

    problem: MoeProblem
    shared: int
    sets: int

    def __post_init__(self):
        p, g = self.problem, torch.Generator("cuda").manual_seed(0)
        self.x = torch.randn(p.tokens, p.hidden, device="cuda", generator=g).to(getattr(torch, p.dtype))
        self.gate_up = packed((p.experts, 2 * p.intermediate, p.hidden), g)
        self.down = packed((p.experts, p.hidden, p.intermediate), g)
        routed = p.top_k - self.shared
        self.ids, self.weights = [], []
        for _ in range(self.sets):
            scores = torch.rand(p.tokens, p.experts - self.shared, device="cuda", generator=g)
            ids = scores.topk(routed, dim=1).indices.int()
            w = torch.rand(p.tokens, routed, device="cuda", generator=g) + 0.1
            w = w / w.sum(1, keepdim=True)
            if self.shared:
                ids = torch.cat([ids, torch.full_like(ids[:, :1], p.experts - 1)], 1)
                w = torch.cat([w, torch.ones_like(w[:, :1])], 1)
            self.ids.append(ids.contiguous())
            self.weights.append(w.contiguous())
        self.y = torch.empty(p.tokens, p.hidden, device="cuda", dtype=getattr(torch, p.out_dtype))

    def inputs(self, i: int, prepared: bool) -> list[torch.Tensor]:
        """Of a call with routing i."""
        if prepared and not hasattr(self, "prepared"):
            self.prepared = [*shuffled(self.gate_up), *shuffled(self.down)]
        return [self.x, *(self.prepared if prepared else (*self.gate_up, *self.down)), self.weights[i], self.ids[i]]

    def bound_us(self) -> tuple[float, str, int]:
        """The bound, by what, and the experts that are hit."""
        p = self.problem
        hit = sum(len(torch.unique(ids)) for ids in self.ids) / len(self.ids)
        memory = (hit * 3 * p.hidden * p.intermediate * 4.25 / 8 + 4 * p.tokens * p.hidden) / 4218e3
        flops = p.rows * 6 * p.hidden * p.intermediate / 756e6
        return (memory, "mem", round(hit)) if memory > flops else (flops, "flop", round(hit))

    def error(self, sample: int = 6) -> float:
        """Of y against float32, for some tokens of the last call, which used ids[0]."""
        p = self.problem

        def rounded(v):
            return dequantize(torch_quantize(v, p.scale_rule, p.rounding)) if p.activation_quant else v.float()

        tokens = list(range(0, p.tokens, max(1, p.tokens // sample)))[:sample]
        want = torch.zeros(len(tokens), p.hidden, device="cuda")
        for i, t in enumerate(tokens):
            for w, e in zip(self.weights[0][t].tolist(), self.ids[0][t].tolist(), strict=True):
                product = dequantize(Packed(self.gate_up.codes[e], self.gate_up.scales[e])) @ rounded(self.x[t])
                h = torch.nn.functional.silu(product[: p.intermediate]) * product[p.intermediate :]
                h = rounded(h.to(self.x.dtype))
                want[i] += w * (dequantize(Packed(self.down.codes[e], self.down.scales[e])) @ h)
        return float((self.y[tokens].float() - want).norm() / want.norm())


def buffers_of(facts: launches.Facts) -> dict[str, torch.Tensor]:
    def poisoned(spec: BufferSpec) -> torch.Tensor:
        raw = torch.full((max(16, spec.nbytes),), 0x7F, dtype=torch.uint8, device="cuda")
        return raw[: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)

    return {name: poisoned(spec) for name, spec in facts.buffers().items()}


def call(layer: Layer, facts: launches.Facts, buffers: dict, i: int = 0, only: str | set | None = None) -> None:
    def launch(kernel, grid, *args, **constants):
        name = kernel.__name__
        if name == "hopper_product":
            name = "stage1" if constants["GATED"] else "stage2"
        if isinstance(only, set):
            only.add(name)
        elif only is None or name == only or (only == "stage2" and name == "stage2_spans"):
            launches.launch(kernel, grid, *args, **constants)

    operands = launches.tensors_of(layer.problem, layer.inputs(i, facts.shuffled))
    overlap = overlaps() and not isinstance(only, str)  # a kernel by itself would overlap with itself
    moe.pipeline(launches.TritonSteps(facts, operands, buffers, layer.y, True, launch, overlap), operands)


def routed(layer: Layer, buffers: dict, facts: launches.Facts) -> bool:
    """Whether the last call with ids[0] sorted its rows as torch does."""
    p, ids = layer.problem, layer.ids[0].flatten()
    counts = torch.bincount(ids, minlength=p.experts)
    tiles = -(-counts // facts.tile_rows)
    count = int(buffers["tile_count"])
    return (
        torch.equal(buffers["order"].long(), torch.argsort(ids, stable=True))
        and torch.equal(buffers["offsets"][1:].long(), counts.cumsum(0))
        and count == int(tiles.sum())
        and torch.equal(
            buffers["tile_expert"][:count].long(), torch.arange(p.experts, device="cuda").repeat_interleave(tiles)
        )
    )


def replay_us(calls: list) -> float:
    """Median over replays of a graph of `calls`, for one of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls:
            c()
    times = []
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    while len(times) < 15 and (len(times) < 4 or time.perf_counter() - start < 0.5):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def facts_of(problem: MoeProblem, **changes) -> launches.Facts:
    prepared = changes.pop("prepared", True)
    able = problem.dtype == "bfloat16" or problem.activation_quant
    many = problem.activation_quant is None and problem.rows >= WIDE_ROWS * problem.experts
    config = default_config(problem, changes.pop("product", "e4m3" if able and not many else "bits"))
    return launches.Facts(problem, Config.of({**dict(config.items), **changes}), prepared)


def warm(job) -> str | None:
    """Compiles the kernels of one config, or only those whose name starts with `only`."""
    problem, changes, specs, only = job
    facts, device = facts_of(problem, **changes), torch.device("cuda")

    def compile_only(kernel, *args, **constants):
        if kernel.__name__.startswith(only):
            kernel.warmup(*args[1:], grid=args[0], **constants)

    def tiny(spec):
        return torch.empty(16, dtype=getattr(torch, spec.dtype), device=device)

    try:
        buffers = {name: tiny(spec) for name, spec in facts.buffers().items()}
        buffers["offsets"] = torch.empty(problem.experts + 1, dtype=torch.int32, device=device)
        operands = launches.tensors_of(problem, [tiny(spec) for spec in specs])
        y = tiny(BufferSpec((), problem.out_dtype))
        for overlap in {overlaps(), False}:
            moe.pipeline(launches.TritonSteps(facts, operands, buffers, y, True, compile_only, overlap), operands)
    except Exception as error:  # noqa: BLE001 - a config that does not fit
        return f"{changes}: {type(error).__name__}: {str(error)[:300]}"
    return None


def warm_all(jobs: list) -> None:
    """Compiles on all cores; results go to Triton's cache on disk."""
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() - 2)) as pool:
        for failure in pool.map(warm, jobs, chunksize=1):
            if failure:
                print("  compile:", failure)
    print(f"# {len(jobs)} compilations {time.perf_counter() - start:.0f} s", flush=True)


def specs_of(p: MoeProblem) -> list[BufferSpec]:
    return [
        BufferSpec((1,), p.dtype),
        *[BufferSpec((1,), "uint8")] * 4,
        BufferSpec((1,), "float32"),
        BufferSpec((1,), "int32"),
    ]


def time_layer(name: str, quant: str | None, parts: bool, **changes) -> dict:
    problem, shared = problem_of(name, quant)
    sets = 8 if problem.tokens <= 128 else 4 if problem.tokens <= 512 else 1
    layer, facts = Layer(problem, shared, sets), facts_of(problem, **changes)
    buffers = buffers_of(facts)
    layer.y.fill_(float("nan"))
    call(layer, facts, buffers)
    torch.cuda.synchronize()
    error = layer.error() if routed(layer, buffers, facts) else float("nan")
    bound, by, hit = layer.bound_us()
    us = replay_us([lambda i=i: call(layer, facts, buffers, i) for i in range(sets)])
    row = {"case": name, "quant": quant, "hit": hit, "bound": round(bound, 1), "by": by, "us": round(us, 1),
           "over_bound": round(us / bound, 2), "peer": PEERS.get(name), "error": f"{error:.1e}"}  # fmt: skip
    if parts:
        names = ["stage1", "split_rows", "stage2", "stage2_spans", "combine", "expand", "route_few", "list_few"]
        names += ["count_chunks", "place"]  # add_chunks works in place
        used = set()
        call(layer, facts, buffers, 0, used)
        names = [n for n in names if n in used]
        row["parts"] = {
            n: round(replay_us([lambda n=n: call(layer, facts, buffers, 0, n)] * (4 * sets)), 1) for n in names
        }
    row["config"] = str(facts.config)
    return row


def sweep(name: str, quant: str | None, stage: str, space: dict[str, list], base: dict, seconds: float) -> list:
    """Times one stage under every config of `space`; prints the best."""
    problem, shared = problem_of(name, quant)
    layer = Layer(problem, shared, 1)
    results = []
    start = time.perf_counter()
    for values in itertools.product(*space.values()):
        changes = {**base, **dict(zip(space, values, strict=True))}
        if time.perf_counter() - start > seconds:
            print("# sweep cut short")
            break
        facts = facts_of(problem, **changes)
        try:
            buffers = buffers_of(facts)
            call(layer, facts, buffers)
            torch.cuda.synchronize()
            error = layer.error(2)
            us = replay_us([lambda: call(layer, facts, buffers, 0, stage)] * (6 if problem.tokens <= 512 else 2))  # noqa: B023
            results.append((round(us, 1), f"{error:.1e}", changes))
        except Exception as error:  # noqa: BLE001
            results.append((1e9, str(error)[:80], changes))
    results.sort(key=lambda r: r[0])
    print(f"## {name} {quant} {stage} of {len(results)}")
    for r in results[:8]:
        print("  ", *r)
    return results


def main() -> None:
    plan = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    jobs = []
    for name, quant, changes in plan.get("layers", []):
        p = problem_of(name, quant)[0]
        jobs.append((p, changes, specs_of(p), ""))
    for name, quant, stage, space, base, _ in plan.get("sweeps", []):
        p = problem_of(name, quant)[0]
        for values in itertools.product(*space.values()):
            jobs.append((p, {**base, **dict(zip(space, values, strict=True))}, specs_of(p), stage))
    warm_all(jobs)
    for name, quant, changes in plan.get("layers", []):
        try:
            print(json.dumps(time_layer(name, quant, plan.get("parts", True), **changes)), flush=True)
        except Exception as error:  # noqa: BLE001
            print(name, quant, "FAILED", type(error).__name__, str(error)[:400], flush=True)
        torch.cuda.empty_cache()
    for args in plan.get("sweeps", []):
        sweep(*args)
        sys.stdout.flush()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
