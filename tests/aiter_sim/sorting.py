"""moe_sorting_fwd, and the two ways to quantize rows and lay their scales out in sorted order."""

from __future__ import annotations

import numpy as np
import torch

from aiter_sim import numerics

TOKEN_BITS = 24


def moe_sorting_fwd(
    topk_ids,
    topk_weights,
    sorted_token_ids,
    sorted_weights,
    sorted_expert_ids,
    num_valid_ids,
    moe_buf,
    num_experts,
    unit_size,
    local_expert_mask=None,
    num_local_tokens=None,
    dispatch_policy=0,
):
    """Fills all six outputs in place. Entries past num_valid_ids[0] keep what they had.

    Like the kernels, it goes through a table [tokens, experts] that holds one slot: of an expert named twice by a token
    one slot is lost, and an id outside of the experts lands in the row of a neighbouring token.
    """
    for tensor, dtype in ((topk_ids, torch.int32), (topk_weights, torch.float32)):
        if tensor.dtype != dtype:
            raise RuntimeError(f"moe_sorting_fwd: expected {dtype}, got {tensor.dtype}")
    if dispatch_policy not in (0, 1, 2):
        raise RuntimeError(f"moe_sorting_fwd: unknown dispatch policy {dispatch_policy}")
    all_tokens, top_k = topk_ids.shape
    tokens = all_tokens if num_local_tokens is None else int(num_local_tokens[0])
    ids = numerics.raw(topk_ids).view(np.int32).reshape(topk_ids.shape)
    weights = numerics.raw(topk_weights).view(np.float32).reshape(topk_ids.shape)

    slots = np.zeros(tokens * num_experts, np.int32)  # slot + 1, or 0
    cells = np.arange(tokens)[:, None] * num_experts + ids[:tokens]
    for slot in range(top_k):
        inside = (cells[:, slot] >= 0) & (cells[:, slot] < slots.size)
        slots[cells[inside, slot]] = slot + 1
    slots = slots.reshape(tokens, num_experts)
    if local_expert_mask is not None:
        slots = slots[:, numerics.raw(local_expert_mask).view(np.int32) != 0]

    out_ids, out_weights, out_experts = (
        tensor.numpy() for tensor in (sorted_token_ids, sorted_weights, sorted_expert_ids)
    )
    position = 0
    for expert in range(slots.shape[1]):
        chosen = np.flatnonzero(slots[:, expert])
        padded = -(-len(chosen) // unit_size) * unit_size
        if not padded:
            continue
        slot = slots[chosen, expert] - 1
        out_ids[position : position + padded] = all_tokens | (top_k << TOKEN_BITS)
        out_weights[position : position + padded] = 0
        out_ids[position : position + len(chosen)] = chosen | (slot << TOKEN_BITS)
        out_weights[position : position + len(chosen)] = weights[chosen, slot]
        out_experts[position // unit_size : (position + padded) // unit_size] = expert
        position += padded
    num_valid_ids.numpy()[:2] = position, tokens
    buffer = numerics.raw(moe_buf)
    buffer[: buffer.size // 16 * 16] = 0  # 16-byte stores


def sorted_rows(sorted_ids, num_valid_ids, token_num, topk):
    """The positions below num_valid_ids[0], the row of x that belongs to each, and whether it has one."""
    ids = sorted_ids.numpy()[: int(num_valid_ids[0])]
    token, slot = ids & ((1 << TOKEN_BITS) - 1), ids >> TOKEN_BITS
    rows = token * topk + slot if topk > 1 else token
    return np.arange(len(ids)), rows, token < token_num


def write_sorted_scales(memory, scales, sorted_ids, num_valid_ids, token_num, topk, padding_rows):
    """Writes scale bytes [rows, columns] to the sorted layout; padding rows get `padding_rows`, or stay as they are if None."""
    positions, rows, real = sorted_rows(sorted_ids, num_valid_ids, token_num, topk)
    columns = scales.shape[1]
    addresses = numerics.scale_address(positions[:, None], np.arange(columns), -(-columns // 8) * 8)
    memory[addresses[real]] = scales[rows[real]]
    if padding_rows is not None:
        memory[addresses[~real]] = padding_rows


def empty_sorted_scales(sorted_ids, columns):
    """The 5-D uint8 buffer of sorted scales."""
    return numerics.poisoned((-(-sorted_ids.shape[0] // 32), -(-columns // 8), 4, 16, 4), torch.uint8)


def fused_triton(x, sorted_ids, num_valid_ids, token_num, topk, block_size=32, scaling_mode="even", *, padded_width):
    """The Triton wrapper. `padded_width`: whether the returned scale has the storage's width or that of the data."""
    rows, n = x.shape
    columns = n // 32
    assert (columns // 2) % 2 == 0
    assert block_size % 32 == 0
    assert scaling_mode == "even"
    codes = torch.empty((rows, n // 2), dtype=torch.uint8)
    scales = empty_sorted_scales(sorted_ids, columns)
    triton_kernel(x, codes, scales, sorted_ids, num_valid_ids, token_num, topk)
    width = -(-columns // 8) * 8 if padded_width else columns
    return codes.view(numerics.FLOAT4), scales.view(numerics.FLOAT8_E8M0).view(-1, width)


def triton_kernel(x, codes, scales, sorted_ids, num_valid_ids, token_num, topk):
    """The Triton kernel's effect on preallocated outputs; it computes padding rows from loads that give 0."""
    packed, scale = numerics.quantize(numerics.floats(x), "even", "half_away")
    numerics.raw(codes)[:] = packed.reshape(-1)
    write_sorted_scales(numerics.raw(scales), scale, sorted_ids, num_valid_ids, token_num, topk, padding_rows=0)


def fused_hip(
    input, sorted_ids, num_valid_ids, token_num, topk, block_size, num_rows=None, group_size=32, *, scale_rule
):
    """The HIP operation; it leaves padding rows of the scale unwritten."""
    assert group_size == 32
    rows = input.shape[0]
    packed, scale = numerics.quantize(numerics.floats(input), scale_rule, "nearest_even")
    out = empty_sorted_scales(sorted_ids, scale.shape[1])
    stage1 = rows == token_num
    write_sorted_scales(
        numerics.raw(out),
        scale,
        sorted_ids,
        num_valid_ids,
        token_num,
        1 if stage1 else rows // token_num,
        padding_rows=None,
    )
    codes = torch.from_numpy(packed).view(numerics.FLOAT4)
    return codes, out.view(numerics.FLOAT8_E8M0).view(-(-sorted_ids.shape[0] // 32) * 32, -1)


def sort_scales(scale, sorted_ids, num_valid_ids, token_num, topk):
    """Lays existing scales [rows, columns] out in sorted order."""
    out = empty_sorted_scales(sorted_ids, scale.shape[-1])
    scale = numerics.raw(scale).reshape(-1, scale.shape[-1])
    write_sorted_scales(numerics.raw(out), scale, sorted_ids, num_valid_ids, token_num, topk, padding_rows=None)
    return out.view(numerics.FLOAT8_E8M0).view(-1, scale.shape[-1])
