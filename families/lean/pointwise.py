"""Launch the pointwise kernels on `[T, D]` views of contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rooflane.families.lean.pointwise_kernel import add_norm_kernel, gelu_kernel
from rooflane.families.runtime.launch import BoundKernel

# Elements of one program: 8 KB of fp32 fit in the registers of 4 warps and give 16-byte accesses per thread.
TILE_ELEMENTS = 2048
# (largest padded width, warps): a wider row needs more threads.
WARPS = [(1024, 4), (4096, 8), (16384, 16)]


def add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float, out_dtype: torch.dtype,
    residual: bool, mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return `(r, LayerNorm(r))` for `r = x + update`, all `[B, S, D]`; r in float32, or None without `residual`.

    `mask [B, S]` bool zeroes the normalised rows of invalid tokens.
    """
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    kept = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual else None
    if x.numel():
        grid, tokens, constants, warps = _add_norm_sizes(x, update, kept, mask)
        add_norm_kernel[(grid,)](x, update, weight, bias, mask, kept, out, tokens, eps, **constants, num_warps=warps)
    return kept, out


def bind_add_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None, out: Tensor, eps: float
) -> Callable[[int, int | None, int], None]:
    """Return a launch `(stream, mask pointer, output pointer)` of `LayerNorm(x + update)` for these fixed inputs."""
    grid, tokens, constants, warps = _add_norm_sizes(x, update, None, mask)
    kernel = BoundKernel(
        add_norm_kernel, grid, (x, update, weight, bias, mask, None, out, tokens, eps), constants, warps, stages=1
    )
    inputs = (x.data_ptr(), update.data_ptr(), weight.data_ptr(), bias.data_ptr())

    def launch(stream: int, mask_pointer: int | None, out_pointer: int) -> None:
        kernel(stream, *inputs, mask_pointer, None, out_pointer, tokens, eps)

    return launch


def _add_norm_sizes(
    x: Tensor, update: Tensor | None, kept: Tensor | None, mask: Tensor | None
) -> tuple[int, int, dict[str, Any], int]:
    width = x.shape[-1]
    tokens = x.numel() // width
    block_w = triton.next_power_of_2(width)
    block_t = max(1, TILE_ELEMENTS // block_w)
    constants = {
        "WIDTH": width,
        "HAS_UPDATE": update is not None,
        "STORE_RESIDUAL": kept is not None,
        "HAS_MASK": mask is not None,
        "BLOCK_T": block_t,
        "BLOCK_W": block_w,
    }
    warps = next(warps for limit, warps in WARPS if block_w <= limit)
    return triton.cdiv(tokens, block_t), tokens, constants, warps


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU of a contiguous tensor, in its own dtype."""
    out = torch.empty_like(x)
    if x.numel():
        gelu_kernel[(triton.cdiv(x.numel(), TILE_ELEMENTS),)](x, out, x.numel(), BLOCK=TILE_ELEMENTS, num_warps=4)
    return out
