"""What one layer should cost on n GPUs: bytes, products and links, in a few lines of arithmetic. A prediction; `parallel.py` measures.

    python benchmarks/scaling_model.py [--gpus 1 2 4 8 16 32 64] [--tokens 16 128 1024 4096 16384] [--skew 0] [--latency-us 10]

The layer is DeepSeek-R1's, as in `parallel.py`. Time of a layer = experts + communication, without overlap:

  experts         max(bytes / memory bandwidth, products / rate) of the GPU that has most to do, times what a measured layer on one GPU
                  takes over that bound (`Overhead`);
  communication   bytes on the busiest link / its bandwidth + a latency for each collective.

What each term counts is written where it is computed. docs/scaling.md has the results and what is assumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re

import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results" / "triton_h200.md"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One GPU and its links. Bandwidths in bytes a second, of one direction where there are two.

    Attributes:
      memory: measured on one H200: a device copy, read + write.
      bfloat16, float8: measured there: 8192 x 8192 x 8192 products, flops a second.
      nvlink: NVIDIA's H200 data sheet: NVLink 4, 900 GB/s in both directions together.
      node: GPUs that NVLink joins: 8 in an HGX H200.
      network: NVIDIA's DGX BasePOD reference architecture: a DGX H200 has eight single-port ConnectX-7 of up to 400 Gb/s, one for each GPU.
      latency: seconds of one collective beyond its bytes. Assumed, not measured.
    """

    memory: float = 4218e9
    bfloat16: float = 756e12
    float8: float = 1365e12
    nvlink: float = 450e9
    node: int = 8
    network: float = 50e9
    latency: float = 10e-6


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of one layer: DeepSeek-R1's unless told otherwise. Shared experts have the width of routed ones."""

    experts: int = 256
    shared: int = 1
    hidden: int = 7168
    intermediate: int = 2048
    top_k: int = 8

    @property
    def expert_bytes(self) -> float:
        """One expert in MXFP4: 17 bytes for 32 weights."""
        return 3 * self.hidden * self.intermediate * 17 / 32

    @property
    def row_flops(self) -> float:
        """One token through one expert."""
        return 6 * self.hidden * self.intermediate


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Measured time of a layer on one GPU over its bound, by rows an expert; between two measurements it follows the logarithm."""

    rows: tuple[float, ...] = (1.0,)
    factors: tuple[float, ...] = (1.0,)

    def __call__(self, rows: float) -> float:
        """The factor at that many rows an expert."""
        return float(np.interp(math.log(max(rows, 1e-9)), np.log(self.rows), self.factors))

    @classmethod
    def measured(cls, path: pathlib.Path = RESULTS, activations: str = "bf16") -> Overhead:
        """Of the rows `| rEiFmM | activations | ... |` of the first table with a column "over bound", one case a row."""
        found: dict[float, list[float]] = {}
        columns: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
            if not cells:
                columns = columns if found else []
                if found:
                    break
            elif "over bound" in cells and "activations" in cells:
                columns = cells
            elif columns and (case := re.fullmatch(r"r(\d+)i\d+_?m(\d+)", cells[0])):
                row = dict(zip(columns, cells, strict=False))
                if row["activations"] == activations:
                    found.setdefault(int(case[2]) * 9 / int(case[1]), []).append(float(row["over bound"]))
        if not found:
            raise ValueError(
                f"{path}: no case rEiFmM with activations {activations!r} found; expected a table with the columns case, activations and "
                "over bound. Give --overhead 1.5."
            )
        rows = sorted(found)
        return cls(tuple(rows), tuple(float(np.mean(found[r])) for r in rows))


@dataclasses.dataclass(frozen=True)
class Load:
    """Of random routing, the mean of several draws.

    Attributes:
      max_over_mean: rows of the busiest expert rank over the mean of all ranks.
      hit: routed experts that own a row, on the rank that has most of them.
    """

    max_over_mean: float
    hit: float


@functools.cache
def random_choices(experts: int, top_k: int, tokens: int, skew: float, seed: int) -> np.ndarray:
    """[tokens, experts] bool: who chooses whom."""
    rng = np.random.default_rng(seed)
    keys = rng.gumbel(size=(tokens, experts)).astype(np.float32) + skew * rng.normal(size=experts).astype(np.float32)
    chosen = np.zeros((tokens, experts), bool)
    np.put_along_axis(chosen, np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k], True, axis=1)
    return chosen


@functools.cache
def random_load(layer: Layer, tokens: int, ranks: int, skew: float = 0.0, draws: int = 8) -> Load:
    """Load of `ranks` equal runs of experts when every token chooses `top_k` different ones.

    Args:
      layer: its experts and top_k.
      tokens: in all.
      ranks: of the expert axis.
      skew: how unequal experts are: an expert's popularity is exp(skew * z), z a standard normal number; 0: all the same.
      draws: of popularities and choices; beyond 2048 tokens sums are drawn as normal numbers.
    """
    ratios, hits = [], []
    drawn = min(tokens, 2048)
    for seed in range(draws):
        rng = np.random.default_rng(draws + seed)
        chosen = random_choices(layer.experts, layer.top_k, drawn, skew, seed)
        by_rank = chosen.reshape(drawn, ranks, -1).sum(-1, dtype=np.int64)
        rows = by_rank.sum(0).astype(float)
        if tokens > drawn:
            # The mean that the draw shows is itself a draw, whose noise would not shrink with more tokens: with skew 0 it is known.
            mean = np.full(ranks, layer.top_k / ranks) if skew == 0 else rows / drawn
            rows = mean * tokens + rng.normal(size=ranks) * np.sqrt(by_rank.var(0) * tokens)
        ratios.append(rows.max() / (layer.top_k * tokens / ranks))
        hits.append(chosen.any(0).reshape(ranks, -1).sum(-1).max())
    return Load(float(np.mean(ratios)), float(np.mean(hits)))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of the parts of a layer, and what they are made of, on the busiest GPU."""

    experts: float
    communication: float
    weight_bytes: float
    link_bytes: float
    load: Load

    @property
    def total(self) -> float:
        """The layer."""
        return self.experts + self.communication

    @property
    def share(self) -> float:
        """Communication's share of the layer."""
        return self.communication / self.total if self.total else 0.0


FORMS = ("ep-replicated", "ep-all_to_all", "tp")


def predict(
    form: str, gpus: int, tokens: int, *, layer: Layer = Layer(), hardware: Hardware = Hardware(), overhead: Overhead = Overhead(),
    skew: float = 0.0, float8: bool = False, divided: bool = False,
) -> Prediction:  # fmt: skip
    """One layer on `gpus` GPUs and `tokens` tokens in all, in one of the forms of `parallel.py`.

    Tokens lie where the form wants them: on all GPUs, or `tokens / gpus` on each. With `divided` they are divided in any case, and a form
    that wants them on all GPUs gathers x first.
    """
    by_expert = form != "tp"
    load = random_load(layer, tokens, gpus if by_expert else 1, skew)
    hit = load.hit + layer.shared
    rows = layer.top_k * tokens
    weight_bytes = hit * layer.expert_bytes
    if by_expert:
        # The busiest rank's routed rows; of the shared expert's, each rank takes a run of the tokens.
        rows = rows / gpus * load.max_over_mean + layer.shared * tokens / gpus
    else:
        rows = rows + layer.shared * tokens
        weight_bytes /= gpus
    columns = layer.intermediate / (1 if by_expert else gpus)
    # Rows of x are read once and y is written, in float32; h is written and read. In all forms a rank's y has a row for every token:
    # "all_to_all" keeps room for the worst case.
    activation_bytes = min(rows, tokens) * layer.hidden * 2 + tokens * layer.hidden * 4 + rows * columns * 4
    flops = rows * layer.row_flops * columns / layer.intermediate
    rate = hardware.float8 if float8 else hardware.bfloat16
    bound = max((weight_bytes + activation_bytes) / hardware.memory, flops / rate)
    experts = bound * overhead(rows / hit)
    if gpus == 1:
        return Prediction(experts, 0.0, weight_bytes, 0.0, load)
    if form == "ep-all_to_all":
        seconds, link_bytes = exchange(layer, hardware, gpus, tokens)
    else:
        seconds, link_bytes = all_reduce(layer, hardware, gpus, tokens)
        if divided:
            more = all_gather(layer, hardware, gpus, tokens)
            seconds, link_bytes = seconds + more[0], link_bytes + more[1]
    return Prediction(experts, seconds, weight_bytes, link_bytes, load)


def all_reduce(layer: Layer, hardware: Hardware, gpus: int, tokens: int) -> tuple[float, float]:
    """Seconds, and bytes out of each GPU, of the sum of y [tokens, D] float32 over all of them.

    Within a node reduce-scatter and all-gather, (n - 1) / n of the array each; between nodes the same of each GPU's share.
    """
    size = 4.0 * tokens * layer.hidden
    inside, nodes = min(gpus, hardware.node), max(1, math.ceil(gpus / hardware.node))
    near = 2 * (inside - 1) / inside * size
    far = 2 * (nodes - 1) / nodes * size / inside
    return near / hardware.nvlink + far / hardware.network + hardware.latency, near + far


def all_gather(layer: Layer, hardware: Hardware, gpus: int, tokens: int) -> tuple[float, float]:
    """The same of x [tokens, D] bfloat16, of which each GPU has a part."""
    size = 2.0 * tokens * layer.hidden
    inside, nodes = min(gpus, hardware.node), max(1, math.ceil(gpus / hardware.node))
    near, far = (inside - 1) / inside * size, (nodes - 1) / nodes * size / inside
    return near / hardware.nvlink + far / hardware.network + hardware.latency, near + far


def exchange(layer: Layer, hardware: Hardware, gpus: int, tokens: int) -> tuple[float, float]:
    """Seconds, and bytes out of each GPU, of the two ways of "all_to_all".

    A token goes once to every other rank with one of its experts, as bfloat16, and comes back from there as float32. Both links work at
    once. Five collectives: counts, x, router weights, ids and y. Before and after, rows are gathered, received into arrays with room for
    the worst case (filled first), and added up: all in memory.
    """
    own = tokens / gpus
    ranks = ranks_of_a_token(layer, gpus)
    inside = min(gpus, hardware.node)
    row = 6.0 * layer.hidden + 8 * layer.top_k
    near = own * ranks * (inside - 1) / gpus * row
    far = own * ranks * (gpus - inside) / gpus * row
    sent, most = own * ranks, own * min(layer.top_k + layer.shared, gpus)
    memory = layer.hidden * (sent * 2 * 2 + tokens * 2 + most * 4 + sent * 4 + own * 4)
    seconds = max(near / hardware.nvlink, far / hardware.network) + memory / hardware.memory + 5 * hardware.latency
    return seconds, near + far


def ranks_of_a_token(layer: Layer, gpus: int) -> float:
    """Mean number of ranks that hold one of a token's routed experts, all experts being equally likely."""
    elsewhere = layer.experts - layer.experts // gpus
    return gpus * (1 - math.comb(elsewhere, layer.top_k) / math.comb(layer.experts, layer.top_k))


def threshold(gpus: int, *, divided: bool, layer: Layer = Layer(), hardware: Hardware = Hardware()) -> int | None:
    """The least power of two of tokens in all from which "all_to_all" is the faster form; None if it is not up to 2^20.

    The experts take the same time in both.
    """
    for tokens in (2**power for power in range(4, 21)):
        seconds = all_reduce(layer, hardware, gpus, tokens)[0]
        if divided:
            seconds += all_gather(layer, hardware, gpus, tokens)[0]
        if exchange(layer, hardware, gpus, tokens)[0] < seconds:
            return tokens
    return None


def layer_table(tokens: list[int], gpus: list[int], form: str, **options: object) -> list[str]:
    """Microseconds of a layer and communication's share of them, by tokens a GPU; a star where "all_to_all" is the faster form."""

    def cell(per_gpu: int, count: int) -> str:
        forms = FORMS[:2] if form == "ep" and count > 1 else ("tp",)
        found = {name: predict(name, count, per_gpu * count, **options) for name in forms}  # type: ignore[arg-type]
        best = min(found, key=lambda name: found[name].total)
        star = "*" if best == FORMS[1] else ""
        return f"{found[best].total * 1e6:.0f}, {found[best].share:.0%}{star}"

    rows = [[str(n), *(cell(n, count) for count in gpus)] for n in tokens]
    return _table(["tokens a GPU", *(_gpus(n) for n in gpus)], rows)


def decode_table(gpus: list[int], tokens: int = 128, **options: object) -> list[str]:
    """How many times faster than one GPU, at `tokens` in all on every GPU."""

    def seconds(form: str, count: int) -> float:
        return predict(form, count, tokens, **options).total  # type: ignore[arg-type]

    alone = seconds("tp", 1)
    rows = [[form, *(f"{alone / seconds(form, n):.1f}" for n in gpus)] for form in ("ep-replicated", "tp")]
    return _table([f"{tokens} tokens in all", *(_gpus(n) for n in gpus)], rows)


def threshold_table(gpus: list[int]) -> list[str]:
    """Where tokens lie as each form wants them / where they are divided in any case."""

    def cell(count: int, latency: float) -> str:
        hardware = Hardware(latency=latency)
        found = (threshold(count, divided=divided, hardware=hardware) for divided in (False, True))
        return " / ".join("never" if tokens is None else str(tokens) for tokens in found)

    rows = [[f"{us} us", *(cell(n, us / 1e6) for n in gpus)] for us in (5, 10, 20)]
    return _table(["latency", *(_gpus(n) for n in gpus)], rows)


def imbalance_table(gpus: list[int]) -> list[str]:
    """Rows of the busiest expert rank over the mean: equal experts / experts of unequal popularity (skew 1)."""

    def cell(tokens: int, ranks: int) -> str:
        return " / ".join(f"{random_load(Layer(), tokens, ranks, skew).max_over_mean:.2f}" for skew in (0.0, 1.0))

    rows = [[str(n), *(cell(n, ranks) for ranks in gpus)] for n in (16, 128, 1024, 16384, 262144)]
    return _table(["tokens in all", *(_gpus(n) for n in gpus)], rows)


def comparison_table(lines: list[str], **options: object) -> list[str]:
    """Of the JSON lines that `parallel.py` writes: what was measured, what is predicted, and the error of the prediction."""
    rows, errors = [], []
    for measured in map(json.loads, filter(str.strip, lines)):
        if "layer_us" not in measured:  # the header, or a row that was wrong and not timed
            continue
        form, gpus, tokens, us = (measured[key] for key in ("form", "devices", "tokens", "layer_us"))
        found = predict(form, gpus, tokens, **options)  # type: ignore[arg-type]
        errors.append(found.total * 1e6 / us - 1)
        shares = f"{measured['communication']:.0%}", f"{found.share:.0%}"
        rows.append(
            [form, str(gpus), str(tokens), f"{us:.0f}", f"{found.total * 1e6:.0f}", f"{errors[-1]:+.0%}", *shares]
        )
    if not rows:
        raise ValueError(
            "no timed row found; expected the file that `python benchmarks/parallel.py --out FILE` writes."
        )
    head = ["form", "GPUs", "tokens in all", "measured us", "predicted us", "error", "communication", "predicted"]
    return [*_table(head, rows), "", f"median absolute error {np.median(np.abs(errors)):.0%}"]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 1024, 4096, 16384], help="for each GPU")
    parser.add_argument("--activation-quant", choices=["mxfp4"], help="weights only if left out")
    parser.add_argument("--skew", type=float, default=0.0, help="of the experts' popularity; see random_load")
    parser.add_argument("--latency-us", type=float, default=Hardware.latency * 1e6)
    parser.add_argument("--overhead", type=float, help=f"over the bound on one GPU; that of {RESULTS.name} if left out")
    parser.add_argument(
        "--compare", type=pathlib.Path, metavar="FILE", help="with what parallel.py has measured, instead"
    )
    options = parser.parse_args()
    if options.overhead is None:
        overhead = Overhead.measured(activations=options.activation_quant or "bf16")
    else:
        overhead = Overhead(factors=(options.overhead,))
    common = {
        "hardware": Hardware(latency=options.latency_us / 1e6), "overhead": overhead, "skew": options.skew,
        "float8": options.activation_quant is not None,
    }  # fmt: skip
    if options.compare is not None:
        print(*comparison_table(options.compare.read_text(encoding="utf-8").splitlines(), **common), sep="\n")
        return
    several = [n for n in options.gpus if n > 1]
    for title, lines in {
        "Experts divided: us a layer, share of communication": layer_table(
            options.tokens, options.gpus, "ep", **common
        ),
        "Columns divided": layer_table(options.tokens, options.gpus, "tp", **common),
        "Times faster than one GPU": decode_table(several, **common),
        "Tokens in all from which all_to_all is faster": threshold_table(several),
        "Rows of the busiest rank over the mean": imbalance_table(several),
    }.items():
        print(title, "", *lines, "", sep="\n")


if __name__ == "__main__":
    main()
