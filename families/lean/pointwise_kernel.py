"""The ops between the GEMMs, one pass each: residual add + LayerNorm, and exact GELU.

Ladder
- these kernels: one read and one write of each tensor; a layer has three of them.
- eager: 15 operations a layer (adds, norms, GELU, mask inversions, copies and fills), each its own pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x_ptr, update_ptr, weight_ptr, bias_ptr, mask_ptr, residual_ptr, out_ptr, tokens, eps,
    WIDTH: tl.constexpr, HAS_UPDATE: tl.constexpr, STORE_RESIDUAL: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """r = x + update; residual = r; out = LayerNorm(r), rows of invalid tokens 0 when a mask is given."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_W)
    offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x += tl.load(update_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if STORE_RESIDUAL:
        tl.store(residual_ptr + offset, x, mask=inside)
    mean = tl.sum(x, axis=1) / WIDTH
    centred = tl.where((column < WIDTH)[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    scale = tl.rsqrt(variance + eps)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    out = centred * scale[:, None] * weight[None, :] + bias[None, :]
    if HAS_MASK:
        valid = tl.load(mask_ptr + token, mask=token < tokens, other=0) != 0
        out = tl.where(valid[:, None], out, 0.0)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_kernel(x_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    """out = x Phi(x) with the exact erf, computed in float32."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < elements, other=0.0).to(tl.float32)
    out = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask=index < elements)
