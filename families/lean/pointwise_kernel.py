"""The ops between the GEMMs, one pass each: residual add + norm, the activation, and rotary positions.

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
    WIDTH: tl.constexpr, HAS_UPDATE: tl.constexpr, STORE_RESIDUAL: tl.constexpr, STORE_NORMED: tl.constexpr,
    HAS_MASK: tl.constexpr, RMS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """r = x + update; out = norm(r); residual = r or, with STORE_NORMED, out in float32.

    The norm is LayerNorm or, with RMS, RMSNorm. Rows of invalid tokens are 0 in out when a mask is given.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_W)
    offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x += tl.load(update_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if STORE_RESIDUAL:
        tl.store(residual_ptr + offset, x, mask=inside)
    if RMS:
        centred = x
    else:
        mean = tl.sum(x, axis=1) / WIDTH
        centred = tl.where((column < WIDTH)[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    scale = tl.rsqrt(variance + eps)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    out = centred * scale[:, None] * weight[None, :] + bias[None, :]
    if STORE_NORMED:
        tl.store(residual_ptr + offset, out, mask=inside)
    if HAS_MASK:
        valid = tl.load(mask_ptr + token, mask=token < tokens, other=0) != 0
        out = tl.where(valid[:, None], out, 0.0)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_kernel(x_ptr, out_ptr, elements, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out = x f(x), computed in float32: f is the normal distribution for GELU, else a sigmoid or a step."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < elements, other=0.0).to(tl.float32)
    if KIND == "gelu":
        out = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y; the factor is 2 sqrt(2 / pi).
        out = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        out = x * tl.sigmoid(1.702 * x)
    elif KIND == "silu":
        out = x * tl.sigmoid(x)
    else:
        # A NaN is kept, which a maximum with 0 would drop.
        out = tl.where(x < 0.0, 0.0, x)
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask=index < elements)


@triton.jit
def rotate_kernel(
    qkv_ptr, cosine_ptr, sine_ptr, tokens, length,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Turn the pairs (i, i + HALF) of every head of q and k in place by the angles of the row's position."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # q and k have 2 WIDTH elements a row, so WIDTH pairs.
    pair = tl.arange(0, BLOCK_W)
    inside = (token < tokens)[:, None] & (pair < WIDTH)[None, :]
    first = qkv_ptr + token.to(tl.int64)[:, None] * (3 * WIDTH) + (pair // HALF * (2 * HALF) + pair % HALF)[None, :]
    angle = (token % length)[:, None] * HALF + (pair % HALF)[None, :]
    cosine = tl.load(cosine_ptr + angle, mask=inside, other=0.0)
    sine = tl.load(sine_ptr + angle, mask=inside, other=0.0)
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (a * cosine - b * sine).to(qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(first + HALF, (b * cosine + a * sine).to(qkv_ptr.dtype.element_ty), mask=inside)
