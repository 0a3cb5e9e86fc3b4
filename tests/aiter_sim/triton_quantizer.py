"""The fused Triton quantizer: its wrapper and the kernel that callers launch themselves."""

from __future__ import annotations

import inspect
import types

import numpy as np

from aiter_sim import numerics, sorting
from aiter_sim.functions import function


def fill_triton_wrapper(sim, module):
    def fused(**arguments):
        sim.calls.append("fused_dynamic_mxfp4_quant_moe_sort (Triton)")
        return sorting.fused_triton(**arguments, padded_width=sim.profile.triton_padded_width)

    parameters = 'x, sorted_ids, num_valid_ids, token_num, topk, block_size=32, scaling_mode="even"'
    module.fused_dynamic_mxfp4_quant_moe_sort = function("fused_dynamic_mxfp4_quant_moe_sort", parameters, fused)
    kernel = f"aiter.ops.triton._triton_kernels.{sim.profile.triton_package}fused_mxfp4_quant"
    module._fused_dynamic_mxfp4_quant_moe_sort_kernel = sim.module(kernel)._fused_dynamic_mxfp4_quant_moe_sort_kernel


class TritonKernel:
    """Stands for the jitted kernel: `kernel[grid](...)`. Anything but the one right way to call it is an error here."""

    def __init__(self, sim) -> None:
        self.sim = sim
        names = "x_ptr x_fp4_ptr sorted_ids_ptr num_valid_ids_ptr blockscale_e8m0_sorted_ptr Mx Nx scaleNx stride_x_m stride_x_n "
        names += "stride_x_fp4_m stride_x_fp4_n stride_o3 stride_o2 stride_o1 stride_o0 stride_o4 token_num "
        names += "M_i N_i " if sim.profile.triton_kernel_has_rows else "N_i "
        names += "MXFP4_QUANT_BLOCK_SIZE BLOCK_SIZE_Mx BLOCK_SIZE_M BLOCK_SIZE_N TOPK"
        self.arg_names = names.split()
        self.signature = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in self.arg_names]
        )

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            for option in ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim"):
                kwargs.pop(option, None)
            self.run(grid, types.SimpleNamespace(**self.signature.bind(*args, **kwargs).arguments))

        return launch

    def run(self, grid, a):
        self.sim.calls.append("_fused_dynamic_mxfp4_quant_moe_sort_kernel")
        rows, n = a.x_ptr.shape
        columns, length = n // 32, a.sorted_ids_ptr.shape[0]
        scales = a.blockscale_e8m0_sorted_ptr
        expected = {
            "Mx": rows,
            "Nx": n,
            "scaleNx": columns,
            "N_i": columns,
            **({"M_i": rows} if self.sim.profile.triton_kernel_has_rows else {}),
            "MXFP4_QUANT_BLOCK_SIZE": 32,
            "BLOCK_SIZE_M": 16,
            "BLOCK_SIZE_N": 4,
        }
        strides = np.array((-(-columns // 8) * 256, 256, 64, 4, 1))
        given = (a.stride_o3, a.stride_o2, a.stride_o1, a.stride_o0, a.stride_o4)
        wrong = {name: getattr(a, name) for name, value in expected.items() if getattr(a, name) != value}
        if wrong or tuple(given) != tuple(strides) or (a.stride_x_fp4_m, a.stride_x_fp4_n) != (n // 2, 1):
            raise RuntimeError(
                f"aiter_sim: the Triton kernel was launched with {wrong or given}; expected {expected} and {strides}"
            )
        programs = -(-rows // a.BLOCK_SIZE_Mx) * columns + -(-length // 32) * -(-columns // 8)
        if a.BLOCK_SIZE_Mx & (a.BLOCK_SIZE_Mx - 1) or tuple(grid)[:1] != (programs,):
            raise RuntimeError(f"aiter_sim: the Triton kernel was launched on grid {grid}; expected ({programs},)")
        if numerics.raw(scales).size < -(-length // 32) * strides[0]:
            raise RuntimeError(f"aiter_sim: the sorted scales have {numerics.raw(scales).size} bytes")
        sorting.triton_kernel(
            a.x_ptr, a.x_fp4_ptr, scales, a.sorted_ids_ptr, a.num_valid_ids_ptr, int(a.token_num), int(a.TOPK)
        )


def fill_triton_kernel(sim, module):
    module._fused_dynamic_mxfp4_quant_moe_sort_kernel = TritonKernel(sim)
