"""Launch the pointwise kernels on `[T, D]` views of contiguous tensors."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooflane.families.pointwise.kernel import add_norm_kernel, gelu_kernel

# Elements of one program: 8 KB of fp32 keeps it in registers at 4 warps and gives 16-byte accesses per thread.
TILE_ELEMENTS = 2048
# (largest padded width, warps): a wider row needs more threads to hold it.
WARPS = [(1024, 4), (4096, 8), (16384, 16)]
MAX_WIDTH = WARPS[-1][0]


def add_norm(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    residual: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return `(r, LayerNorm(r))` for `r = x + update`, all `[B, S, D]`; r in float32, or None without `residual`.

    `mask [B, S]` bool zeroes the normalised rows of invalid tokens.
    """
    width = x.shape[-1]
    tokens = x.numel() // max(width, 1)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    kept = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual else None
    if tokens:
        block_w = triton.next_power_of_2(width)
        block_t = max(1, TILE_ELEMENTS // block_w)
        warps = next(warps for limit, warps in WARPS if block_w <= limit)
        add_norm_kernel[(triton.cdiv(tokens, block_t),)](
            x,
            update,
            weight,
            bias,
            None if mask is None else mask.view(torch.uint8),
            kept,
            out,
            tokens,
            eps,
            WIDTH=width,
            HAS_UPDATE=update is not None,
            STORE_RESIDUAL=residual,
            HAS_MASK=mask is not None,
            BLOCK_T=block_t,
            BLOCK_W=block_w,
            num_warps=warps,
        )
    return kept, out


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU of a contiguous tensor, in its own dtype."""
    out = torch.empty_like(x)
    if x.numel():
        gelu_kernel[(triton.cdiv(x.numel(), TILE_ELEMENTS),)](x, out, x.numel(), BLOCK=TILE_ELEMENTS, num_warps=4)
    return out
