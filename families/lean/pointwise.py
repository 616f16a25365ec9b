"""Launch the pointwise kernels on `[T, D]` views of contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rooflane.families.lean.pointwise_kernel import activation_kernel, add_norm_kernel, rotate_kernel
from rooflane.families.runtime.launch import BoundKernel

# Elements of one program: 8 KB of fp32 fit in the registers of 4 warps and give 16-byte accesses per thread.
TILE_ELEMENTS = 2048
# (largest padded width, warps): a wider row needs more threads.
WARPS = [(1024, 4), (4096, 8), (16384, 16)]


def add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float, out_dtype: torch.dtype,
    residual: bool, mask: Tensor | None = None, rms: bool = False, post_norm: bool = False,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return what the next sum adds to, and the norm of `r = x + update`, all `[B, S, D]`.

    The first is r in float32, with `post_norm` the norm in float32, or None without `residual`. The norm is LayerNorm,
    or RMSNorm with `rms`. `mask [B, S]` bool zeroes the normalised rows of invalid tokens.
    """
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    kept = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual else None
    if x.numel():
        grid, tokens, constants, warps = _add_norm_sizes(x, update, kept, mask, rms, post_norm)
        add_norm_kernel[(grid,)](x, update, weight, bias, mask, kept, out, tokens, eps, **constants, num_warps=warps)
    return kept, out


def bind_add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, mask: Tensor | None, out: Tensor, eps: float,
    rms: bool,
) -> Callable[[int, int | None, int], None]:  # fmt: skip
    """Return a launch `(stream, mask pointer, output pointer)` of the norm of `x + update` for these fixed inputs."""
    grid, tokens, constants, warps = _add_norm_sizes(x, update, None, mask, rms, False)
    kernel = BoundKernel(
        add_norm_kernel, grid, (x, update, weight, bias, mask, None, out, tokens, eps), constants, warps, stages=1
    )
    pointer = None if update is None else update.data_ptr()
    inputs = (x.data_ptr(), pointer, weight.data_ptr(), bias.data_ptr())

    def launch(stream: int, mask_pointer: int | None, out_pointer: int) -> None:
        kernel(stream, *inputs, mask_pointer, None, out_pointer, tokens, eps)

    return launch


def _add_norm_sizes(
    x: Tensor, update: Tensor | None, kept: Tensor | None, mask: Tensor | None, rms: bool, post_norm: bool
) -> tuple[int, int, dict[str, Any], int]:
    tokens = x.numel() // x.shape[-1]
    grid, tiles, warps = row_sizes(tokens, x.shape[-1])
    constants = tiles | {
        "HAS_UPDATE": update is not None,
        "STORE_RESIDUAL": kept is not None and not post_norm,
        "STORE_NORMED": kept is not None and post_norm,
        "HAS_MASK": mask is not None,
        "RMS": rms,
    }
    return grid, tokens, constants, warps


def row_sizes(tokens: int, width: int) -> tuple[int, dict[str, int], int]:
    """Return the grid, the tile's constants and the warps of a kernel whose programs take whole rows."""
    block_w = triton.next_power_of_2(width)
    block_t = max(1, TILE_ELEMENTS // block_w)
    warps = next(warps for limit, warps in WARPS if block_w <= limit)
    return triton.cdiv(tokens, block_t), {"WIDTH": width, "BLOCK_T": block_t, "BLOCK_W": block_w}, warps


def activate(x: Tensor, kind: str) -> Tensor:
    """Return an activation of `shapes.ACTIVATIONS` of a contiguous tensor, in its own dtype."""
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), TILE_ELEMENTS),)
        activation_kernel[grid](x, out, x.numel(), KIND=kind, BLOCK=TILE_ELEMENTS, num_warps=4)
    return out


def rotate(qkv: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Turn q and k of a contiguous `qkv [B, S, 3 H d]` in place by `cosine` and `sine`, float32 `[S, d / 2]`."""
    batch, length, packed = qkv.shape
    if qkv.numel():
        grid, tiles, warps = row_sizes(batch * length, packed // 3)
        half = cosine.shape[1]
        rotate_kernel[(grid,)](qkv, cosine, sine, batch * length, length, HALF=half, **tiles, num_warps=warps)
