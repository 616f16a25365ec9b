"""The two ends of a fused forward: the input becomes a residual stream, and the stream's last norm the output."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_kernel(
    x_ptr, mask_ptr, stream_ptr, inverse_ptr, moments_ptr, kept_mask_ptr, tokens, elements,
    WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """stream = (x - mean) inverse as two float16; moments = its sum and sum of squares.

    A LayerNorm does not see the mean nor the inverse, a power of two that brings the largest element of a row below
    16: float16 ends at 65504, and layers add to the stream.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_W)
    offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    live = token < tokens
    inside = live[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / WIDTH
    x = tl.where(inside, x - mean[:, None], 0.0)
    largest = tl.max(tl.abs(x), axis=1)
    # The exponent of [8, 16) is 130; the factor 2^(130 - exponent) is exact.
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    inverse = ((257 - tl.maximum(exponent, 130)) << 23).to(tl.float32, bitcast=True)
    x = x * inverse[:, None]
    high = x.to(tl.float16)
    tl.store(stream_ptr + offset, high, mask=inside)
    tl.store(stream_ptr + elements + offset, (x - high.to(tl.float32)).to(tl.float16), mask=inside)
    tl.store(inverse_ptr + token, inverse, mask=live)
    tl.store(moments_ptr + 2 * token, tl.sum(x, axis=1), mask=live)
    tl.store(moments_ptr + 2 * token + 1, tl.sum(x * x, axis=1), mask=live)
    if HAS_MASK:
        tl.store(kept_mask_ptr + token, tl.load(mask_ptr + token, mask=live), mask=live)


@triton.jit
def finish_kernel(
    stream_ptr, inverse_ptr, weight_ptr, bias_ptr, mask_ptr, out_ptr, tokens, elements, eps,
    WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out = LayerNorm of the stream; rows of invalid tokens are 0 when a mask is given."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_W)
    offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    live = token < tokens
    inside = live[:, None] & (column < WIDTH)[None, :]
    x = tl.load(stream_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(stream_ptr + elements + offset, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(inverse_ptr + token, mask=live, other=1.0)
    mean = tl.sum(x, axis=1) / WIDTH
    x = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps * inverse * inverse)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0)
    out = x * scale[:, None] * weight[None, :] + bias[None, :]
    if HAS_MASK:
        valid = tl.load(mask_ptr + token, mask=live, other=0) != 0
        out = tl.where(valid[:, None], out, 0.0)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)
