"""`triton`: the pipeline as Triton kernels on XLA's buffers, through the bridge. NVIDIA from sm_80 on and AMD.

No count is read on the host and nothing is allocated, so that XLA may record a call into a command buffer: grids are upper
bounds from the static shapes, and programs without work leave after reading a count.
"""

from __future__ import annotations

import functools
import importlib.util
import math

import jax

from jax_mxfp4_moe import device
from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.implementations.base import Config, Implementation, Operands, Pipeline
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, Plan
from jax_mxfp4_moe.implementations.triton import layout
from jax_mxfp4_moe.mxfp4 import PACKED, Mxfp4Array
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.weights import MoeWeights

MIN_CAPABILITY = 80
E4M3_ARCHS = ("sm_90",)
"""Where products of E4M3 values were measured."""
SCALED_ARCHS = ("gfx950",)
"""Those with matrix instructions that take MXFP4 scales along."""
PRODUCTS = {"bits": None, "e4m3": E4M3_ARCHS, "scaled": SCALED_ARCHS}
"""Values of `product`, and where each runs; None: everywhere."""
HOPPER_TILES = (64, 128)
"""Rows in a tile of the kernel for Hopper."""
MAX_EXPERTS = 4096
EXPAND_ROWS = 256
"""Rows of an average expert from which prepared weights are decoded once for all, into the workspace."""
WIDE_ROWS = 512
"""Rows of an average expert from which bfloat16 activations are multiplied as bfloat16 with packed weights."""
SPECIALIZE_ROWS = 64
"""Rows of an average expert from which the kernel for Hopper runs: on an H200 it is slower at 35, and faster at 128 and above."""


class TritonImplementation(Implementation):
    """Triton kernels.

    Config:
      product: "bits" (bfloat16 products; prepared weights are decoded beforehand), "e4m3" (float8 products of exactly converted
        weights; sm_90, by default for x in bfloat16), or "scaled" (products of MXFP4 with MXFP4 by instructions that take the
        scales along; gfx950, for "mxfp4" activations and packed weights, and two warps at least, since Triton makes bfloat16
        products of it for one).
      tile_rows: rows of one expert in a tile.   group: row tiles that share a column tile in turn.
      block_f, block_k1, warps1, stages1: columns of h and elements of D in a step of stage 1, warps and load stages.
      block_d, block_k2, warps2, stages2: the same for stage 2.
      span: column tiles that a program of stage 2 goes over, where one step holds all of F.
      expand: 1 to decode prepared weights once, into a workspace of a byte a weight.
      specialize: rows in a tile, 64 or 128, of the kernel for Hopper (`hopper.py`), which prepared weights then take, whatever `product`
        and `expand` say; 0 for none.
    """

    name = "triton"
    layouts = (PACKED, layout.TAG)
    extra = "triton"
    switches = ("expand", "specialize")

    def missing(self) -> str | None:
        """Needs triton and torch."""
        if importlib.util.find_spec("triton") is None:
            return "is not installed: pip install 'jax_mxfp4_moe[triton]'"
        if importlib.util.find_spec("torch") is None:
            return "needs torch, which is not installed: pip install 'jax_mxfp4_moe[triton]'"
        return None

    def why_not(self, problem: MoeProblem | None, platform: str) -> str | None:
        """Needs a GPU that triton compiles for, torch built for that, and triton."""
        if platform not in ("cuda", "rocm"):
            return f"runs on cuda and rocm, found {platform}"
        if importlib.util.find_spec("torch") is not None:
            import torch

            built_for = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
            if built_for != platform:
                return f"needs torch built for {platform}, found torch {torch.__version__} built for {built_for}"
        if (missing := self.missing()) is not None:
            return missing
        if platform == "cuda" and int(device.arch(platform).removeprefix("sm_")) < MIN_CAPABILITY:
            return f"needs compute capability 8.0 or later, found {device.arch(platform)}"
        if problem is None:
            return None
        if problem.experts > MAX_EXPERTS:
            return f"sorts by at most {MAX_EXPERTS} experts, found {problem.experts}"
        hidden, intermediate = problem.hidden, problem.intermediate
        if max(2 * intermediate * layout.padded(hidden), hidden * layout.padded(intermediate)) >= 2**31:
            return "counts the weights of one expert in 32 bits, and this one has more"
        return None

    def prepare(self, weights: MoeWeights) -> MoeWeights:
        """Brings weights to "triton:e4m3" where this machine has float8 products and every row's scales fit, else leaves them packed.

        Such weights run on that architecture only. Not to be traced: it looks at the scales. Law: `unprepare(prepare(w))` is w.
        """
        if not _has_float8(device.platforms(weights.gate_up.codes)[0]):
            return weights
        both = (weights.gate_up, weights.down)
        if not all(bool(layout.fits(a)) for a in both):
            return weights
        return _with_stacks(weights, *map(layout.shuffle, both))

    def unprepare(self, weights: MoeWeights) -> MoeWeights:
        """The inverse of `prepare`."""
        if weights.layout == PACKED:
            return weights
        return _with_stacks(weights, layout.unshuffle(weights.gate_up), layout.unshuffle(weights.down))

    def configs(self, problem: MoeProblem, platform: str) -> list[Config]:
        """First by the rows of an average expert: narrow tiles while weights are what is waited for, wide ones after that.

        Then that one with some other values, for tuning.
        """
        quant, average = problem.activation_quant, _average_rows(problem)
        if quant == "mxfp4" and _has_scaled(platform):
            return [default_config(problem, "scaled"), default_config(problem, "bits")]
        if (
            not _has_float8(platform) or problem.dtype != "bfloat16"
        ):  # float8 sums keep 13 bits: enough for bfloat16 only
            return _with_neighbours(default_config(problem, "bits"), ())
        many = quant is None and average >= WIDE_ROWS  # two float8 products cost more than a bfloat16 one
        default = default_config(problem, "bits" if many else "e4m3")
        if not _has_gluon():
            return _with_neighbours(default, ())
        if average < SPECIALIZE_ROWS:
            return _with_neighbours(default, (64,))
        tile = 128 if average >= EXPAND_ROWS or problem.intermediate >= 1024 else 64
        group = 8 if average >= WIDE_ROWS else 2
        return _with_neighbours(Config.of({**dict(default.items), "specialize": tile, "group": group}), (64, 128))

    def run(
        self,
        operands: Operands,
        problem: MoeProblem,
        config: Config,
        *,
        platform: str,
        pipeline: Pipeline,
        bridge: str | None,
    ) -> jax.Array:
        """Puts one custom call into the caller's computation, which launches the kernels."""
        from jax_mxfp4_moe.implementations.triton import pipeline as launches

        leaves, structure = jax.tree.flatten(operands)
        shuffled = operands.weights.layout == layout.TAG
        check(config, platform, shuffled)
        facts = launches.Facts(problem, config, shuffled)
        slots, workspace_bytes = torch_call.workspace_slots(tuple(facts.buffers().values()))
        compiled: dict = {}
        inputs = tuple(BufferSpec(leaf.shape, str(leaf.dtype)) for leaf in leaves)
        plan = Plan(
            name=f"triton {problem}",
            key=("triton", problem, config.items, str(structure), tuple(str(leaf.dtype) for leaf in leaves)),
            run=functools.partial(launches.run, facts, slots, pipeline, compiled),
            inputs=inputs,
            outputs=(BufferSpec((problem.tokens, problem.hidden), problem.out_dtype),),
            workspace_bytes=workspace_bytes,
            capturable=True,
            warm=functools.partial(launches.warm, facts, inputs, pipeline, compiled),
        )
        return torch_call.call(plan, *leaves, bridge=bridge)[0]


def check(config: Config, platform: str, shuffled: bool) -> None:
    """Raises ValueError for what the kernels cannot do on this architecture; shuffled: whether weights are in the layout of `layout.py`."""
    arch = device.arch(platform)
    if shuffled and arch not in E4M3_ARCHS:
        raise ValueError(
            f"triton: weights in layout {layout.TAG!r} given on {arch}; expected packed ones there, since that layout is for "
            f"{', '.join(E4M3_ARCHS)}. Call prepare(weights, 'triton') on the packed weights on this machine."
        )
    groups = shuffled and config["product"] == "e4m3" and not (config["expand"] or config["specialize"])
    block_k, warps = 128 if groups or config["product"] == "scaled" else 64, 32 if platform == "cuda" else 16
    least = {"tile_rows": 4, "block_f": 8, "block_d": 16, "block_k1": block_k, "block_k2": block_k}
    for name, low in least.items():
        if config[name] < low or config[name] & (config[name] - 1):
            raise _wrong(config, name, f"a power of two of at least {low}")
    for name in ("warps1", "warps2"):
        if config[name] > warps or config[name] & (config[name] - 1):
            raise _wrong(config, name, f"a power of two of at most {warps}")
    if config["product"] not in PRODUCTS:
        raise _wrong(config, "product", f"one of {', '.join(map(repr, PRODUCTS))}")
    archs = PRODUCTS[config["product"]]
    if archs is not None and arch not in archs:
        raise _wrong(config, "product", f"'bits' on {arch}, since this product is for {', '.join(archs)}")
    if config["expand"] not in (0, 1):
        raise _wrong(config, "expand", "0 or 1")
    if config["specialize"] not in (0, *HOPPER_TILES):
        raise _wrong(config, "specialize", f"0 or one of {', '.join(map(str, HOPPER_TILES))}")
    if shuffled and config["specialize"] and not _has_gluon():
        raise _wrong(
            config, "specialize", "0, since the triton that is installed lacks the Gluon that this kernel needs"
        )


def _wrong(config: Config, name: str, expected: str) -> ValueError:
    return ValueError(
        f"triton: {name}={config[name]!r} in the config given ({config.source}); expected {expected}. Change it, or leave config unset."
    )


def _has_float8(platform: str) -> bool:
    return platform == "cuda" and device.arch(platform) in E4M3_ARCHS


def _has_scaled(platform: str) -> bool:
    return platform == "rocm" and device.arch(platform) in SCALED_ARCHS


@functools.cache
def _has_gluon() -> bool:
    """Whether this triton has what `hopper.py` is written in."""
    try:
        from jax_mxfp4_moe.implementations.triton import hopper  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _average_rows(problem: MoeProblem) -> float:
    return problem.rows / max(1, min(problem.experts, problem.rows))


def _with_neighbours(first: Config, tiles: tuple[int, ...]) -> list[Config]:
    """`first`, then what differs from it in one respect; tiles: those of the kernel for Hopper to try."""
    values = dict(first.items)
    if values["specialize"]:
        other = [{"specialize": tile, "group": group} for tile in tiles for group in (2, 8)]
    else:
        rows, f, d = values["tile_rows"], values["block_f"], values["block_d"]
        other = [{"tile_rows": 2 * rows}, {"tile_rows": rows // 2}, {"block_f": 96 - f}, {"block_d": 192 - d}]
        other += [
            {"block_k1": 256 if values["block_k1"] == 128 else 128},
            {"span": values["span"] // 2},
            {"span": 2 * values["span"]},
        ]
        other += [{f"warps{i}": 12 - values[f"warps{i}"]} for i in (1, 2)] + [{"specialize": tile} for tile in tiles]
        other = [changes for changes in other if min(changes.values()) > 0]
    return list(dict.fromkeys([first, *(Config.of({**values, **changes}) for changes in other)]))


def _with_stacks(weights: MoeWeights, gate_up: Mxfp4Array, down: Mxfp4Array) -> MoeWeights:
    return weights.replace(gate_up=gate_up, down=down)


def default_config(problem: MoeProblem, product: str) -> Config:
    """A sane config for `problem`, from its shape alone; the numbers are from sweeps on an H200, those of "scaled" from none."""
    average = _average_rows(problem)
    planes = 1 if problem.activation_quant is not None or (product == "bits" and problem.dtype == "bfloat16") else 2
    expand = average >= EXPAND_ROWS
    most = 128 // planes if expand else 64 // planes if product == "e4m3" else 64
    fewest = (32 if average >= 12 and product == "e4m3" else 16) // planes
    tile_rows = min(most, max(fewest, 1 << (math.ceil(average * 0.9) - 1).bit_length()))
    columns = tile_rows * planes
    wide = columns >= 128 or (columns >= 64 and average > 64)
    values = {
        "product": product,
        "tile_rows": tile_rows,
        "group": 8 if average > 2 * tile_rows else 1,
        "block_f": 64 if problem.intermediate > 32 else 32,
        "block_k1": 256 if (columns >= 64 or average >= 24) and product == "e4m3" else 128,
        "warps1": 8 if wide else 4,
        "stages1": 3 if columns >= 32 else 4,
        "block_d": 128 if problem.hidden > 64 else 64,
        "block_k2": 128,
        "warps2": 8 if columns >= 128 else 4,
        "stages2": 3,
        "span": 1,
        "expand": int(expand),
        "specialize": 0,
    }
    if problem.intermediate <= 512 and not expand:  # one step of stage 2 holds all of F
        values |= {"block_k2": 256 if problem.intermediate <= 256 else 512, "block_d": 64, "span": 8}
        whole = 128 if problem.hidden % 128 == 0 else 64
        if columns == 32 and planes == 1 and problem.intermediate <= 256:
            values["block_d"] = whole
        if columns == 64 and product == "e4m3" and not wide:
            values["block_f"] = 32  # more programs, so that multiprocessors have nearly as many
        if wide:
            values |= {"block_d": whole, "span": 4, "warps2": 8}
    elif problem.rows <= 16:  # too few tiles to fill the chip: halve them
        values |= {"block_f": 32, "block_k1": 256, "block_d": 64, "block_k2": 256}
    if expand and product == "e4m3":
        values |= {"block_k1": 256, "block_k2": 256, "stages1": 3, "stages2": 3}
    elif expand and problem.dtype == "bfloat16":
        values |= {"block_f": 128, "block_k1": 64, "stages1": 3, "block_d": 256, "block_k2": 64, "stages2": 3}
    if product == "scaled":  # rows and weights take half a byte an element, so that longer steps fit
        block_k = 128 if columns >= 64 else 256
        values |= {"block_k1": block_k, "block_k2": block_k, "span": 1, "expand": 0}
        if expand:
            values |= {"block_f": 64, "block_d": 128}
    return Config.of(values)
