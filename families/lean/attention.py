"""Launch the attention kernel on packed QKV."""

from __future__ import annotations

import math
import sys

import torch
import triton
from torch import Tensor

from rooflane.families.lean.attention_config import AttentionConfig, attention_config, padded_head_dim
from rooflane.families.lean.attention_kernel import attention_kernel, mask_extent_kernel


def shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory one block may take; on a CPU the kernel is interpreted and has no limit."""
    if device.type == "cpu":
        return sys.maxsize
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def mask_extent(mask: Tensor, out: Tensor | None = None) -> Tensor:
    """Return int32 `[B]` for a mask `[B, S]`: the valid extent of each sequence, negative when it has holes.

    Nothing is read back from the device, so a graph may capture it. The extents are written to `out` where it is given.
    """
    batch, length = mask.shape
    extent = torch.empty(batch, dtype=torch.int32, device=mask.device) if out is None else out
    block = min(1024, max(16, triton.next_power_of_2(length)))
    mask_extent_kernel[(batch,)](mask, extent, length, BLOCK=block, num_warps=1)
    return extent


def attention(
    qkv: Tensor, mask: Tensor | None, extent: Tensor | None, num_heads: int, causal: bool,
    bias: Tensor | None = None, config: AttentionConfig | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the context `[B, S, H d]` of `qkv [B, S, 3 H d]` (contiguous, half precision; q, k, v side by side).

    `mask [B, S]` bool hides keys; `extent` is `mask_extent(mask)`. `bias` has 4 dimensions, any strides, and
    broadcasts to `[B, H, S, S]`: bool hides keys, floating is added to the scaled scores. Rows past a sequence's
    extent and rows that see no key come back as 0. The context is written to `out` (contiguous) where it is given.
    """
    batch, length, packed = qkv.shape
    width = packed // 3
    head_dim = width // num_heads
    if not qkv.is_contiguous() or (mask is not None and not mask.is_contiguous()):
        raise ValueError("attention: qkv and mask must be contiguous")
    if out is None:
        out = torch.empty(batch, length, width, dtype=qkv.dtype, device=qkv.device)
    if out.numel() == 0:
        return out
    config = config or attention_config(head_dim, length, shared_memory_bytes(qkv.device), biased=bias is not None)
    # Broadcast dimensions have stride 0. Without a bias the strides are no parameters of the compiled kernel.
    strides = (None,) * 4 if bias is None else bias.expand(batch, num_heads, length, length).stride()
    attention_kernel[(triton.cdiv(length, config.block_m) * batch * num_heads,)](
        qkv,
        mask,
        extent,
        bias,
        out,
        length,
        *strides,
        # A compile-time constant, because torch.compile would pass a run-time float in float64.
        SCALE_LOG2=head_dim**-0.5 * math.log2(math.e),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        HAS_MASK=mask is not None,
        HAS_BIAS=bias is not None,
        ADDS_BIAS=bias is not None and bias.dtype != torch.bool,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
