"""Compiles FlyDSL's stage 2 from a source checkout of aiter for gfx950, and executes it on the CPU with the simulator of that device.

`python tests/implementations/real_flydsl.py FOLDER --tile 16x128x128` prints the error against float64. It needs flydsl, and the simulator
(see `gfx950`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import pathlib
import shutil
import sys
import tempfile
import types
from typing import Any

import gfx950
import ml_dtypes
import numpy as np
import torch
from aiter_sim import numerics, sorting

TOKENS, TOP_K, EXPERTS, HIDDEN = 40, 2, 4, 256
KERNELS = "aiter.ops.flydsl.kernels"
COMPUTE_UNITS = 5  # of the device that persistent kernels are told of


class _Mark(ast.NodeTransformer):
    """Marks each `if` as one of Python's own, for a flydsl newer than the code."""

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        node.test = ast.Call(ast.Name("const_expr", ast.Load()), [node.test], [])
        return node


def compile_function(source: pathlib.Path, folder: pathlib.Path, *, marked: bool) -> Any:
    """`compile_mixed_moe_gemm2` of the checkout, without the rest of aiter."""
    shutil.copytree(source / "aiter" / "ops" / "flydsl", folder / "flydsl")
    if marked:
        path = folder / "flydsl" / "kernels" / "mixed_moe_gemm_2stage.py"
        tree = ast.parse(path.read_text())
        body = [_Mark().visit(n) if getattr(n, "name", "") == "compile_mixed_moe_gemm2" else n for n in tree.body]
        body = [n for n in body if not (isinstance(n, ast.ImportFrom) and n.module == "__future__")]
        tree.body = [*ast.parse("from flydsl.expr import const_expr").body, *body]
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    flydsl = folder / "flydsl"
    for name in ("aiter", "aiter.jit", "aiter.jit.utils", "aiter.jit.utils.chip_info", "aiter.ops"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, path in (("aiter.ops.flydsl", flydsl), (KERNELS, flydsl / "kernels")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    sys.modules["aiter.jit.utils.chip_info"].get_cu_num = lambda: COMPUTE_UNITS  # type: ignore[attr-defined]
    return importlib.import_module(f"{KERNELS}.mixed_moe_gemm_2stage").compile_mixed_moe_gemm2


def assembly(compiled: Any, arguments: list[Any], folder: pathlib.Path, *, pointers: bool) -> str:
    """The text that FlyDSL's compiler makes of a kernel; its last step, the linker, may be missing."""
    import flydsl.compiler as compiler
    import flydsl.expr as expr
    from flydsl._mlir import ir
    from flydsl._mlir.passmanager import PassManager
    from flydsl.compiler import jit_function

    values = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
    values[0] = values[0].view(torch.bfloat16)
    if pointers:
        addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else None for v in values]
        pairs = zip(values, addresses, strict=True)
        values = [v if at is None else compiler.from_c_void_p(expr.Uint8, at) for v, at in pairs]
    try:
        compiled(*values, expr.Stream(0))
    except Exception:
        if not list(folder.rglob("*reconcile_unrealized_casts.mlir")):
            raise
    (stage,) = folder.rglob("*reconcile_unrealized_casts.mlir")
    make_context = getattr(jit_function, "_create_mlir_context", None)
    with make_context() if make_context else contextlib.nullcontext(ir.Context()) as context, context:
        module = ir.Module.parse(stage.read_text(), context=context)
        PassManager.parse("builtin.module(gpu-module-to-binary{format=isa})", context=context).run(module.operation)
        return jit_function._extract_isa_text(module.operation.get_asm(enable_debug_info=False))


def problem(inter: int, block_m: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The kernel's ten tensors, result first, and the right answer in float64."""
    rng = np.random.default_rng(0)
    length = TOKENS * TOP_K + EXPERTS * block_m - TOP_K
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    # Longer than aiter's: the kernel reads entries of its last tile that lie behind them, and makes no use of these.
    order = [torch.full((length + 256,), -1, dtype=torch.int32), torch.zeros(length + 256)]
    order += [torch.full((n,), -1, dtype=torch.int32) for n in (-(-length // block_m) + 256, 2)]
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    sorting.moe_sorting_fwd(torch.from_numpy(ids), torch.from_numpy(weights), *order, y, EXPERTS, block_m)
    positions, sorted_weights, experts, valid = (tensor.numpy() for tensor in order)

    def stack(rows: int) -> tuple[np.ndarray, np.ndarray]:
        codes = rng.integers(0, 256, (rows, inter // 2), dtype=np.uint8)
        return codes, rng.integers(118, 130, (rows, inter // 32), dtype=np.uint8)

    (h, h_scales), (down, down_scales) = stack(TOKENS * TOP_K), stack(EXPERTS * HIDDEN)
    columns, blocks = np.arange(inter // 32), -(-(inter // 32) // 8) * 8
    at = numerics.shuffled_offset(np.arange(HIDDEN)[:, None], np.arange(inter // 2), inter // 2)
    shuffled = np.zeros((EXPERTS, HIDDEN * inter // 2), np.uint8)
    shuffled[:, at] = down.reshape(EXPERTS, HIDDEN, -1)
    down_laid, h_laid = (np.full(n * blocks, 127, np.uint8) for n in (len(down), -(-len(positions) // 32) * 32))
    down_laid[numerics.scale_address(np.arange(len(down))[:, None], columns, blocks)] = down_scales
    real = np.flatnonzero((positions[: valid[0]] & 0xFFFFFF) < TOKENS)
    rows = (positions[real] & 0xFFFFFF) * TOP_K + (positions[real] >> 24)
    h_laid[numerics.scale_address(real[:, None], columns, blocks)] = h_scales[rows]

    products = numerics.dequantize(down, down_scales).astype(np.float64).reshape(EXPERTS, HIDDEN, inter)
    slots = numerics.dequantize(h, h_scales).astype(np.float64).reshape(TOKENS, TOP_K, inter)
    right = np.einsum("ts,tsi,tshi->th", weights, slots, products[ids])
    bits = y.view(torch.uint16).numpy().copy()
    tensors = [
        bits,
        h,
        shuffled,
        h_laid,
        down_laid,
        positions,
        experts,
        sorted_weights,
        valid,
        np.zeros(16, np.float32),
    ]
    return tensors, right


def main(*given: str) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--tile", default="16x128x128")
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--sorted-by", type=int, default=32)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--marked", action="store_true", help="for aiter before v0.1.14")
    parser.add_argument(
        "--lax", action="store_true", help="writes behind LDS vanish, as on the device, and are no error"
    )
    asked = parser.parse_args(given)
    tile_m, tile_n, tile_k = map(int, asked.tile.split("x"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        settings = {
            "COMPILE_ONLY": "1",
            "ARCH": "gfx950",
            "FLYDSL_GPU_ARCH": "gfx950",
            "FLYDSL_DUMP_IR": "1",
            "FLYDSL_DUMP_DIR": temporary,
        }
        os.environ |= settings | {"FLYDSL_RUNTIME_ENABLE_CACHE": "0"}
        make = compile_function(asked.source, folder, marked=asked.marked)
        compiled = make(
            model_dim=HIDDEN, inter_dim=asked.intermediate, experts=EXPERTS, topk=TOP_K, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k,
            doweight_stage2=True, a_dtype="fp4", b_dtype="fp4", out_dtype="bf16", accumulate=True,
            persist_m=-1 if asked.persistent else 1, sort_block_m=asked.sorted_by,
        )  # fmt: skip
        tensors, right = problem(asked.intermediate, asked.sorted_by)
        tiles = -(-(TOKENS * TOP_K + EXPERTS * asked.sorted_by - TOP_K) // asked.sorted_by) * asked.sorted_by // tile_m
        arguments = [*tensors, TOKENS, HIDDEN, asked.intermediate, tiles]
        files = (folder / "flydsl" / "kernels").glob("mixed_moe_gemm_2stage*.py")
        by_pointers = any("fx.Pointer" in path.read_text() for path in files)
        asm = assembly(compiled, arguments, folder, pointers=by_pointers)

    from triton._C.libtriton import amd
    from triton.backends.amd import compiler as triton_compiler

    with tempfile.NamedTemporaryFile() as unlinked, tempfile.NamedTemporaryFile() as linked:
        pathlib.Path(unlinked.name).write_bytes(triton_compiler.assemble_amdgcn(asm, "gfx950", ""))
        amd.link_hsaco(unlinked.name, linked.name)
        kernel = gfx950.simulator().Kernel(asm, pathlib.Path(linked.name).read_bytes())
    grid = (HIDDEN // tile_n, COMPUTE_UNITS if asked.persistent else tiles)
    kernel.run(arguments, grid, 4, strict_lds=not asked.lax)
    y = tensors[0].view(ml_dtypes.bfloat16).astype(np.float64)
    print(f"{asked.source} {' '.join(given[1:])}: error {np.linalg.norm(y - right) / np.linalg.norm(right):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
