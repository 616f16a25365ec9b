"""Pieces the resident kernels share: layer norm, softmax, GELU, the feed-forward half of a layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise(x, column, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (x - mean) / sqrt(variance + eps) over the first WIDTH columns; padded columns hold 0 in x and stay 0."""
    mean = tl.sum(x, axis=1) / WIDTH
    centred = x - mean[:, None]
    if WIDTH != BLOCK_D:
        centred = tl.where((column < WIDTH)[None, :], centred, 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    return centred * tl.rsqrt(variance + eps)[:, None]


@triton.jit
def softmax(scores, AXIS: tl.constexpr):
    """Return exp2(scores - top) and its sums along AXIS; a row with no visible key gives zeros and the sum 1."""
    top = tl.max(scores, axis=AXIS, keep_dims=True)
    probs = tl.math.exp2(scores - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(probs, axis=AXIS)
    return probs, tl.where(total == 0.0, 1.0, total)


@triton.jit
def gelu(x):
    """Return x Phi(x), Phi by a polynomial in x^2 that leaves [0, 1] beyond 3.7 and is cut there.

    Within 1.1e-4 max(1, |x|) of the exact erf form, less than half a half-precision step; 10 instructions an element
    where erf takes 25.
    """
    square = x * x
    slope = 4.312710527333037e-08
    slope = slope * square - 2.5485443956321907e-06
    slope = slope * square + 6.521377349530807e-05
    slope = slope * square - 9.6730077911058e-04
    slope = slope * square + 9.455236241824544e-03
    slope = slope * square - 6.595716082397797e-02
    slope = slope * square + 3.988047686733097e-01
    return x * tl.minimum(tl.maximum(0.5 + x * slope, 0.0), 1.0)


@triton.jit
def feed_forward(
    x, normed, weight_ptr, bias_ptr,
    BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, FFN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return x + gelu(normed W1 + b1) W2, BLOCK_F hidden columns at a time; the output bias is added by the caller."""
    column = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_F)
    for start in tl.range(0, FFN, BLOCK_F, num_stages=STAGES):
        hidden_column = start + lane
        w1 = tl.load(weight_ptr + column[:, None] * FFN + hidden_column[None, :])
        hidden = tl.dot(normed, w1) + tl.load(bias_ptr + hidden_column)[None, :]
        w2 = tl.load(weight_ptr + BLOCK_D * FFN + hidden_column[:, None] * BLOCK_D + column[None, :])
        x = tl.dot(gelu(hidden).to(normed.dtype), w2, x)
    return x
