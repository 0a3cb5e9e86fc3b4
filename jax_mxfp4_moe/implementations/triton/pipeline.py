"""The five steps as launches on torch tensors, and the buffers between them. Imports triton; `implementation.py` does not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from jax_mxfp4_moe.implementations.base import Config, Operands, Pipeline
from jax_mxfp4_moe.implementations.torch_call import BufferSpec, carve
from jax_mxfp4_moe.implementations.triton import decode, layout, product, quantize, route, stage1, stage2
from jax_mxfp4_moe.mxfp4 import BLOCK
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.quantize import SCALE_RULE_CARRY

FEW_ROWS = 1 << (route.SHIFT.value - 1)
"""Up to here every slot is compared with all; beyond, which would fit the keys but take longer, the ids are counted in chunks first."""
LIST_ROWS = 512
"""Up to here one program counts rows and lists tiles beside those that rank; beyond, one more launch lists."""
MAX_SPLIT_PROGRAMS = 4096
NARROW_BYTES = 64 << 20
"""Above this many bytes of float32 rows, about the cache of an H200, stage 2 rounds them to bfloat16 where y is that."""


class Packed(NamedTuple):
    """MXFP4 values on the torch side: codes [..., n // 2] and scales [..., n // 32], uint8."""

    codes: Any
    scales: Any


class TritonWeights(NamedTuple):
    """`MoeWeights` on the torch side."""

    gate_up: Packed
    down: Packed
    gate_up_bias: Any
    down_bias: Any
    activation_scale: Any = None


class Planes(NamedTuple):
    """Rows in operand form (see `quantize.py`): planes [rows, PLANES, n], and float32 factors, one for each row or one for all."""

    planes: Any
    row_scales: Any


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is static in the launches of one problem under one config."""

    problem: MoeProblem
    config: Config
    shuffled: bool = False
    """Whether the weights are in the layout of `layout.py`."""

    @functools.cached_property
    def mode(self) -> int:
        """How operands are made, of those in `decode`."""
        product, quant = self.config["product"], self.problem.activation_quant
        if product == "scaled" and quant != "mxfp4":
            raise ValueError(
                f"triton: product='scaled' in the config given with activation_quant={quant!r}; expected "
                "activation_quant='mxfp4', whose values such a product multiplies. Choose product='bits'."
            )
        if (product == "e4m3" or self.specializes) and quant is None and self.problem.dtype != "bfloat16":
            raise ValueError(
                f"triton: a float8 product in the config given for x of {self.problem.dtype}; expected bfloat16 or quantized "
                "activations, which it holds exactly. Choose product='bits' and specialize=0."
            )
        if self.shuffled:
            return decode.SHUFFLED.value if product == "e4m3" or self.specializes else decode.WIDE.value
        return {"bits": decode.BITS, "e4m3": decode.E4M3, "scaled": decode.SCALED}[product].value

    @functools.cached_property
    def specializes(self) -> bool:
        """Whether the products run in `hopper.py`."""
        return self.shuffled and self.config["specialize"] > 0

    @functools.cached_property
    def expands(self) -> bool:
        """Whether weights are decoded beforehand, into the workspace."""
        if self.specializes:
            return False
        return self.mode == decode.WIDE.value or (self.shuffled and bool(self.config["expand"]))

    @functools.cached_property
    def tile_rows(self) -> int:
        """Rows of one expert in a tile."""
        return self.config["specialize" if self.specializes else "tile_rows"]

    @functools.cached_property
    def planes(self) -> int:
        """Rows of operands that stand for one row."""
        if self.problem.activation_quant is not None:
            return 1
        if self.mode >= decode.E4M3.value:
            return 2
        return {"bfloat16": 1, "float16": 2, "float32": 3}[self.problem.dtype]

    @functools.cached_property
    def quant(self) -> int:
        """What rows are rounded to, of those in `quantize`; 0 leaves them as they are."""
        if self.problem.activation_quant == "fp8":
            return quantize.STATIC_FP8.value if self.problem.has_activation_scale else quantize.FP8.value
        return quantize.MXFP4.value if self.problem.activation_quant == "mxfp4" else 0

    @functools.cached_property
    def row_scales(self) -> int:
        """Factors that products multiply rows by: 0 none, 1 one for each row, 2 one for all."""
        if self.quant == quantize.STATIC_FP8.value:
            return 2
        has = self.quant == quantize.FP8.value or decode.E4M3.value <= self.mode <= decode.EXPANDED.value
        return int(has)

    @functools.cached_property
    def width(self) -> int:
        """A power of two above the number of experts, and no fewer than the threads that scan it."""
        return max(128, 1 << self.problem.experts.bit_length())

    @functools.cached_property
    def tiles(self) -> int:
        """Most tiles that any routing can have."""
        rows, experts = self.problem.rows, self.problem.experts
        return min(rows, rows // self.tile_rows + min(experts, rows))

    @functools.cached_property
    def chunks(self) -> int:
        """Chunks of slots that are counted; 0 if one launch does it all."""
        rows = self.problem.rows
        return 0 if rows <= FEW_ROWS else -(-rows // route.CHUNK.value)

    def padded(self, n: int) -> int:
        """Elements of an operand row of n: whole groups in the shuffled layout."""
        return layout.padded(n) if self.shuffled else n

    def buffers(self) -> dict[str, BufferSpec]:
        """Everything between x and y, by name."""
        return self._buffers

    @functools.cached_property
    def _buffers(self) -> dict[str, BufferSpec]:
        p, tiles = self.problem, self.tiles
        planes = "float8_e4m3fn" if self.mode >= decode.E4M3.value else "bfloat16"

        def rows(name: str, count: int, n: int) -> dict[str, BufferSpec]:
            values, scales = BufferSpec((count, self.planes, self.padded(n)), planes), BufferSpec((count,), "float32")
            if self.mode == decode.SCALED.value:
                values, scales = BufferSpec((count, n // 2), "uint8"), BufferSpec((count, n // BLOCK), "uint8")
            return {f"{name}_planes": values, f"{name}_scales": scales}

        # Where what the slots add to y does not fit the cache, the kernels for Hopper write it in y's own type: half the bytes.
        many = 4 * p.rows * p.hidden > NARROW_BYTES
        narrow = many and p.out_dtype == "bfloat16" and self.mode not in (decode.BITS.value, decode.SCALED.value)
        wide = {}
        if self.expands:
            up = (p.experts, 2 * p.intermediate, self.padded(p.hidden))
            down = (p.experts, p.hidden, self.padded(p.intermediate))
            wide = {"gate_up": BufferSpec(up, planes), "down": BufferSpec(down, planes)}
        return {
            **wide,
            "order": BufferSpec((p.rows,), "int32"),
            "offsets": BufferSpec((p.experts + 1,), "int32"),
            "tile_expert": BufferSpec((tiles,), "int32"),
            "tile_row": BufferSpec((tiles,), "int32"),
            "tile_count": BufferSpec((1,), "int32"),
            "counts": BufferSpec((max(1, self.chunks), self.width), "int32"),
            **rows("x", p.tokens, p.hidden),
            "h": BufferSpec((p.rows, p.intermediate), p.dtype),
            **rows("h", p.rows, p.intermediate),
            "rows": BufferSpec((p.rows, p.hidden), "bfloat16" if narrow else "float32"),
        }

    def splitting(self, n: int) -> dict[str, Any]:
        """Arguments of `quantize.split_row` for rows of n elements."""
        if (known := self._splittings.get(n)) is not None:
            return known
        blocks = self.padded(n) // BLOCK
        self._splittings[n] = {
            "K": n,
            "PADDED": self.padded(n),
            "PLANES": self.planes,
            "BLOCKS": min(256, 1 << (blocks - 1).bit_length()),
            "MODE": self.mode,
            "QUANT": self.quant,
            "CARRY": SCALE_RULE_CARRY[self.problem.scale_rule],
            "HALF_AWAY": self.problem.rounding == "half_away",
            "num_warps": 8 if blocks > 64 else 4 if blocks > 8 else 1,
        }
        return self._splittings[n]

    @functools.cached_property
    def _splittings(self) -> dict[int, dict[str, Any]]:
        return {}


Launch = Callable[..., None]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Runs a kernel on the current stream."""
    kernel[grid](*args, **constants)


class Compiled:
    """The kernels of one plan on one device, in the order of their launches.

    A later call launches them without Triton's look-up by types and alignments, which takes longer than most of them run.
    """

    def __init__(self) -> None:
        self._kernels: list[tuple[Any, tuple[Any, ...]]] = []
        self.launches = 0

    def compile(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Compiles a kernel and loads it onto the device, so that launches may be captured."""
        compiled = kernel.warmup(*args, grid=grid, **constants)
        if hasattr(compiled, "_init_handles"):
            compiled._init_handles()
        self._kernels.append((compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])))

    def launcher(self) -> Launch:
        """A `launch` for one call."""
        kernels = iter(self._kernels)

        def launch_next(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            compiled, rest = next(kernels)
            compiled[(*grid, 1, 1)[:3]](*args, *rest)

        return launch_next


@dataclasses.dataclass(frozen=True)
class TritonSteps:
    """The five steps on torch tensors. `buffers` are those of `Facts`, `y` is the output, `operands` those of the call."""

    facts: Facts
    operands: Operands
    buffers: dict[str, Any]
    y: Any
    ptx: bool
    launch: Launch = launch
    overlap: bool = False
    """Whether launches wait for each other in the kernels (`overlap.py`)."""

    def _first_launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """The first launch of a call, after all that is on the stream."""
        self.launch(kernel, grid, *args, PDL=self.overlap, **constants)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self.overlap:
            constants["launch_pdl"] = True
        self.launch(kernel, grid, *args, PDL=self.overlap, **constants)

    def route(self, topk_ids: Any) -> None:
        """Step 1, and step 2 in the same launch; results are in `buffers`."""
        f, b, p = self.facts, self.buffers, self.facts.problem
        static = self.operands.weights.activation_scale if p.has_activation_scale else None
        x_scales = b["x_scales"] if static is None else static[0]
        rows = (self.operands.x, b["x_planes"], x_scales)
        lists = tuple(b[name] for name in ("offsets", "tile_expert", "tile_row", "tile_count"))
        sizes = {"EXPERTS": p.experts, "WIDTH": f.width}
        tile = {**sizes, "TILE": f.tile_rows}
        splitting = f.splitting(p.hidden)
        ranks = -(-p.rows // route.RANK.value)
        if not f.chunks:
            lists_too = p.rows <= LIST_ROWS
            first = 1 if lists_too else (p.experts + route.RANK.value) // route.RANK.value
            scan = min(256, max(32, 1 << (p.rows - 1).bit_length()))
            constants = {**tile, "SCAN": scan, "LIST": lists_too, **splitting, "num_warps": 8}
            grid = (first + ranks + p.tokens,)
            args = (topk_ids, b["order"], *lists, *rows, p.rows, p.tokens, ranks)
            self._first_launch(route.route_few, grid, *args, **constants)
            if not lists_too:
                self._launch(route.list_few, (1,), *lists, **tile)
            return
        constants = {**sizes, **splitting}
        grid = (f.chunks + p.tokens,)
        args = (topk_ids, b["counts"], *rows, p.rows, p.tokens, f.chunks)
        self._first_launch(route.count_chunks, grid, *args, **constants)
        self._launch(route.add_chunks, (1,), b["counts"], *lists, f.chunks, **tile)
        self._launch(route.place, (ranks,), topk_ids, b["order"], b["counts"], b["offsets"], p.rows, **sizes)

    def quantize(self, x: Any, scale: Any = None) -> Planes:
        """Steps 2 and 4: rows in operand form, rounded to what the problem asks for. `scale` is the static one of "fp8", or None."""
        f, b, p = self.facts, self.buffers, self.facts.problem
        if x is self.operands.x:
            return Planes(b["x_planes"], b["x_scales"] if scale is None else scale)  # by `route`
        count = b["offsets"][p.experts :]
        grid = (min(p.rows, MAX_SPLIT_PROGRAMS),)
        scales = b["h_scales"] if scale is None else scale
        args = (x, b["h_planes"], scales, count, p.rows)
        self._launch(quantize.split_rows, grid, *args, **f.splitting(p.intermediate))
        return Planes(b["h_planes"], scales)

    def stage1(self, x: Planes, gate_up: Packed, bias: Any, topk_weights: Any, routing: None) -> Any:
        """Step 3; h [rows, F] in sorted order."""
        f, p, config = self.facts, self.facts.problem, self.facts.config
        if f.specializes:
            self._specialized(x, gate_up, bias, topk_weights, self.buffers["h"], p.hidden, p.intermediate, gated=True)
            return self.buffers["h"]
        block = config["block_f"]
        gate_up = self._expanded("gate_up", gate_up, 2 * p.intermediate, p.hidden)
        self._launch(
            stage1.stage1, (f.tiles * -(-p.intermediate // block),),
            *x, *gate_up, bias, topk_weights, *self._lists(), self.buffers["h"],
            F=p.intermediate, TOP_K=p.top_k, HAS_BIAS=bias is not None, WEIGHTED=p.apply_router_weight_on_input,
            ACTIVATION=stage1.ACTIVATIONS[p.activation], ALPHA=p.activation_alpha or 0.0, LIMIT=p.activation_limit or 0.0,
            BLOCK_F=block, **self._product(p.hidden, "1"),
        )  # fmt: skip
        return self.buffers["h"]

    def stage2(self, h: Planes, down: Packed, bias: Any, topk_weights: Any, routing: None) -> Any:
        """Step 5; y [tokens, D]."""
        f, p, rows = self.facts, self.facts.problem, self.buffers["rows"]
        if f.specializes:
            self._specialized(h, down, bias, topk_weights, rows, p.intermediate, p.hidden, gated=False)
        else:
            self._stage2(h, down, bias, topk_weights, rows)
        width = min(1024, 1 << (p.hidden - 1).bit_length())
        self._launch(
            stage2.combine, (p.tokens, -(-p.hidden // width)), rows, self.operands.topk_ids, self.y,
            D=p.hidden, TOP_K=p.top_k, EXPERTS=p.experts, BLOCK=width, num_warps=4,
        )  # fmt: skip
        return self.y

    def _specialized(
        self, rows: Planes, stack: Packed, bias: Any, topk_weights: Any, out: Any, n: int, width: int, *, gated: bool
    ) -> None:
        """Either product, by the kernel for Hopper."""
        from jax_mxfp4_moe.implementations.triton import hopper

        f, p = self.facts, self.facts.problem
        columns = -(-width // (hopper.HALF.value if gated else 2 * hopper.HALF.value))
        self._launch(
            hopper.hopper_product, (min(_multiprocessors(out.device), f.tiles * columns),),
            *rows, *stack, bias, topk_weights, *self._lists(), out,
            K=f.padded(n), WIDTH=width, TOP_K=p.top_k, PLANES=f.planes, GATED=gated, HAS_BIAS=bias is not None,
            WEIGHTED=p.apply_router_weight_on_input == gated, ROW_SCALES=f.row_scales,
            ACTIVATION=stage1.ACTIVATIONS[p.activation], ALPHA=p.activation_alpha or 0.0, LIMIT=p.activation_limit or 0.0,
            TILE=f.tile_rows, GROUP=f.config["group"],
            STACK=hopper.stack(f.planes, f.tile_rows), STAGES=hopper.stages(f.planes, f.tile_rows), num_warps=4,
        )  # fmt: skip

    def _stage2(self, h: Planes, down: Packed, bias: Any, topk_weights: Any, rows: Any) -> None:
        """Rows of the down product, by the portable kernels."""
        f, p, config = self.facts, self.facts.problem, self.facts.config
        block, constant = config["block_d"], self._product(p.intermediate, "2")
        down = self._expanded("down", down, p.hidden, p.intermediate)
        args = (*h, *down, bias, topk_weights, *self._lists(), rows)
        constants = {
            "D": p.hidden,
            "HAS_BIAS": bias is not None,
            "WEIGHTED": not p.apply_router_weight_on_input,
            "BLOCK_D": block,
        }
        columns = -(-p.hidden // block)
        # No bias: with one in its pipelined loop that kernel gave wrong numbers on an H200 (Triton 3.6), and right ones in the interpreter.
        one_step = bias is None and constant["K"] <= constant["BLOCK_K"] and p.hidden % block == 0
        if f.mode == constant["MODE"] == decode.SHUFFLED.value and config["span"] > 1 and one_step:
            del constant["GROUP"]
            grid = (f.tiles * -(-columns // config["span"]),)
            del constants["HAS_BIAS"]
            self._launch(stage2.stage2_spans, grid, *h, *down, *args[5:], SPAN=config["span"], **constants, **constant)
        else:
            self._launch(stage2.stage2, (f.tiles * columns,), *args, **constants, **constant)

    def _expanded(self, name: str, stack: Packed, rows: int, n: int) -> Packed:
        """A stack decoded into the workspace, if the config asks for it."""
        f = self.facts
        if not f.expands:
            return stack
        k, wide = f.padded(n), self.buffers[name]
        grid = (k // layout.GROUP, -(-rows // 64), f.problem.experts)
        constants = {"N": rows, "K": k, "ROWS": 64, "WIDE": f.mode == decode.WIDE.value}
        args = (stack.codes.view(torch.int32), stack.scales, self.buffers["offsets"], wide.view(torch.int32))
        self._launch(product.expand, grid, *args, **constants)
        return Packed(wide, stack.scales)

    def _lists(self) -> tuple[Any, ...]:
        return tuple(self.buffers[n] for n in ("order", "offsets", "tile_expert", "tile_row", "tile_count"))

    def _product(self, n: int, stage: str) -> dict[str, Any]:
        """Arguments that `product.multiply` and its callers take."""
        f, config = self.facts, self.facts.config
        n = f.padded(n)
        least = 128 if f.shuffled or f.mode == decode.SCALED.value else 64
        block_k = min(config[f"block_k{stage}"], max(least, 1 << (n - 1).bit_length()))
        return {
            "K": n,
            "PLANES": f.planes,
            "STACK": 4 if f.planes == 3 else f.planes,
            "TILE": config["tile_rows"],
            "BLOCK_K": block_k,
            "GROUP": config["group"],
            "MODE": decode.EXPANDED.value if f.expands and f.mode == decode.SHUFFLED.value else f.mode,
            "ROW_SCALES": f.row_scales,
            "PTX": self.ptx,
            "STAGES": config[f"stages{stage}"],
            "num_warps": config[f"warps{stage}"],
        }


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Those of a GPU; those of an H200 where kernels are only compiled."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_ptx() -> bool:
    """Whether kernels may hold PTX here: only where they are compiled for CUDA."""
    return torch.version.cuda is not None and torch.cuda.is_available()


@functools.cache
def has_overlap(device: torch.device) -> bool:
    """Whether launches on a device can wait for each other in the kernels: NVIDIA, from sm_90 on."""
    return has_ptx() and torch.cuda.get_device_capability(device) >= (9, 0)


def tensors_of(problem: MoeProblem, inputs: Sequence[Any]) -> Operands:
    """The call's tensors, in the order of `Operands`' leaves, by name."""
    left = iter(inputs)
    x = next(left)
    gate_up, down = (Packed(next(left), next(left)) for _ in range(2))
    gate_up_bias = next(left) if problem.has_gate_up_bias else None
    down_bias = next(left) if problem.has_down_bias else None
    scale = next(left)[:2] if problem.has_activation_scale else None  # `warm` brings longer ones
    topk_weights, topk_ids = left
    return Operands(x, TritonWeights(gate_up, down, gate_up_bias, down_bias, scale), topk_weights, topk_ids)  # type: ignore[arg-type]


ALIGNMENT = 16
"""What kernels are compiled for. XLA's buffers have it; a call with another one takes Triton's own way, which `hopper.py` has not."""


def run(
    facts: Facts,
    slots: Any,
    pipeline: Pipeline,
    compiled: dict[int, Compiled],
    inputs: list,
    outputs: list,
    workspace: torch.Tensor,
) -> None:
    """What the bridge calls. `compiled` holds what `warm` made, by device."""
    buffers = dict(zip(facts.buffers(), carve(workspace, slots), strict=True))
    operands = tensors_of(facts.problem, inputs)
    aligned = all(t.data_ptr() % ALIGNMENT == 0 for t in (*inputs, *outputs, workspace))
    ready = compiled.get(workspace.device.index) if aligned else None
    codes = (inputs[1], inputs[3])  # in the order of `tensors_of`
    if not aligned and facts.specializes and any(t.data_ptr() % ALIGNMENT for t in codes):
        raise ValueError(
            f"triton: prepared weights at an address that is no multiple of {ALIGNMENT} given; expected one, as JAX's own arrays have, "
            "since the kernel for Hopper copies that many bytes at once. Copy them with jnp.copy, or pass config={'specialize': 0}."
        )
    how = launch if ready is None else ready.launcher()
    steps = TritonSteps(facts, operands, buffers, outputs[0], has_ptx(), how, has_overlap(workspace.device))
    pipeline(steps, operands)


def warm(
    facts: Facts,
    inputs: Sequence[BufferSpec],
    pipeline: Pipeline,
    compiled: dict[int, Compiled],
    device: torch.device,
) -> None:
    """Compiles every kernel of a call for `device`, on tensors of a few bytes."""

    def tiny(spec: BufferSpec) -> torch.Tensor:
        return torch.empty(16, dtype=getattr(torch, spec.dtype), device=device)

    buffers = {name: tiny(spec) for name, spec in facts.buffers().items()}
    # `TritonSteps` passes the end of this one as a pointer, whose alignment then depends on the number of experts.
    buffers["offsets"] = torch.empty(facts.problem.experts + 1, dtype=torch.int32, device=device)
    operands = tensors_of(facts.problem, [tiny(spec) for spec in inputs])
    y = tiny(BufferSpec((), facts.problem.out_dtype))
    kernels = Compiled()
    pipeline(TritonSteps(facts, operands, buffers, y, has_ptx(), kernels.compile, has_overlap(device)), operands)
    compiled[device.index] = kernels
