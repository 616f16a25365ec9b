"""The whole forward of short, narrow sequences without leaving the SM: `out = final_norm(stack(x))`.

Ladder
- whole: one program per group of sequences; the fp32 residual stays in registers through every layer, one launch.
- rows: one program per block of query rows and one launch a layer; q, k and v pass through a small scratch. More
  programs than sequences, for batches that leave the device empty.
- eager: 132 launches and every intermediate through device memory.

Folded into the packed weights (pack.py): LayerNorm's scale and shift, the softmax scale and log2(e), and the value
bias. The key bias adds the same number to every score of a row, which softmax cancels, so it is dropped.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normalise(x, column, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (x - mean) / sqrt(variance + eps) over the first WIDTH columns; padded columns hold 0 in x and stay 0."""
    mean = tl.sum(x, axis=1) / WIDTH
    centred = x - mean[:, None]
    if WIDTH != BLOCK_D:
        centred = tl.where((column < WIDTH)[None, :], centred, 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    return centred * tl.rsqrt(variance + eps)[:, None]


@triton.jit
def _softmax(scores, AXIS: tl.constexpr):
    """Return exp2(scores - top) and its sums along AXIS; a row with no visible key gives zeros and the sum 1."""
    top = tl.max(scores, axis=AXIS, keep_dims=True)
    probs = tl.math.exp2(scores - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(probs, axis=AXIS)
    return probs, tl.where(total == 0.0, 1.0, total)


@triton.jit
def _gelu(x):
    """Return x Phi(x), Phi by a polynomial in x^2 on [-4.25, 4.25] and constant outside.

    Within 1.4e-5 max(1, |x|) of the exact erf form, a quarter of a half-precision step at 1 at most; 13 instructions an
    element where erf takes 25.
    """
    clamped = tl.minimum(tl.maximum(x, -4.25), 4.25)
    square = clamped * clamped
    slope = 5.5645521064132575e-11
    slope = slope * square - 5.327525996500933e-9
    slope = slope * square + 2.2553559276588364e-7
    slope = slope * square - 5.626309642438669e-6
    slope = slope * square + 9.341759872030715e-5
    slope = slope * square - 1.1085550964465743e-3
    slope = slope * square + 9.815954757877384e-3
    slope = slope * square - 6.63444708220446e-2
    slope = slope * square + 0.3989023315345407
    return x * (0.5 + clamped * slope)


@triton.jit
def _feed_forward(
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
        x = tl.dot(_gelu(hidden).to(normed.dtype), w2, x)
    return x


@triton.jit
def whole_kernel(
    x_ptr, mask_ptr, out_ptr, weight_ptr, bias_ptr, batch, length, layers, eps,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, FFN: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: GROUP sequences of up to BLOCK_S rows each, all layers."""
    ROWS: tl.constexpr = GROUP * BLOCK_S
    HEADS_WIDTH: tl.constexpr = NUM_HEADS * HEAD
    LAYER_WEIGHTS: tl.constexpr = BLOCK_D * (4 * HEADS_WIDTH + 2 * FFN)
    LAYER_BIASES: tl.constexpr = HEADS_WIDTH + 2 * BLOCK_D + FFN
    row = tl.arange(0, ROWS)
    position = row % BLOCK_S
    sequence = tl.program_id(0) * GROUP + row // BLOCK_S
    column = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, HEAD)
    token = sequence.to(tl.int64) * length + position
    inside = (position < length) & (sequence < batch)
    io_mask = inside[:, None] & (column < WIDTH)[None, :]
    valid = inside
    if HAS_MASK:
        valid = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    x = tl.load(x_ptr + token[:, None] * WIDTH + column[None, :], mask=io_mask, other=0.0).to(tl.float32)
    allowed = valid[None, :]
    if GROUP > 1:
        allowed = allowed & (row[None, :] // BLOCK_S == row[:, None] // BLOCK_S)
    if CAUSAL:
        allowed = allowed & (row[None, :] <= row[:, None])

    for _layer in range(layers):
        normed = _normalise(x, column, eps, WIDTH, BLOCK_D).to(weight_ptr.dtype.element_ty)
        x += tl.load(bias_ptr + HEADS_WIDTH + column)[None, :]
        for head in tl.range(0, NUM_HEADS, num_stages=STAGES):
            tile = weight_ptr + head * (4 * BLOCK_D * HEAD)
            wide = column[:, None] * HEAD + lane[None, :]
            q = tl.dot(normed, tl.load(tile + wide)) + tl.load(bias_ptr + head * HEAD + lane)[None, :]
            k = tl.dot(normed, tl.load(tile + BLOCK_D * HEAD + wide))
            v = tl.dot(normed, tl.load(tile + 2 * BLOCK_D * HEAD + wide))
            scores = tl.dot(q.to(normed.dtype), tl.trans(k.to(normed.dtype)))
            probs, total = _softmax(tl.where(allowed, scores, float("-inf")), 1)
            context = tl.dot(probs.to(normed.dtype), v.to(normed.dtype)) / total[:, None]
            w_out = tl.load(tile + 3 * BLOCK_D * HEAD + lane[:, None] * BLOCK_D + column[None, :])
            x = tl.dot(context.to(normed.dtype), w_out, x)
        normed = _normalise(x, column, eps, WIDTH, BLOCK_D).to(weight_ptr.dtype.element_ty)
        x += tl.load(bias_ptr + HEADS_WIDTH + BLOCK_D + column)[None, :]
        x = _feed_forward(
            x, normed, weight_ptr + 4 * BLOCK_D * HEADS_WIDTH, bias_ptr + HEADS_WIDTH + 2 * BLOCK_D,
            BLOCK_D, BLOCK_F, FFN, STAGES,
        )  # fmt: skip
        weight_ptr += LAYER_WEIGHTS
        bias_ptr += LAYER_BIASES
    final = _normalise(x, column, eps, WIDTH, BLOCK_D)
    final = final * tl.load(bias_ptr + column)[None, :] + tl.load(bias_ptr + BLOCK_D + column)[None, :]
    final = tl.where(valid[:, None], final, 0.0)
    tl.store(out_ptr + token[:, None] * WIDTH + column[None, :], final.to(out_ptr.dtype.element_ty), mask=io_mask)


@triton.jit
def rows_kernel(
    x_ptr, mask_ptr, qkv_in_ptr, qkv_out_ptr, out_ptr, weight_ptr, bias_ptr, length, eps,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, FFN: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    HEADS_A_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one sequence through one layer.

    Launch 0 (FIRST) projects layer 0's q, k and v. Launch l finishes layer l - 1 from the scratch of the launch before
    it, then projects layer l, or (LAST) writes the output. `weight_ptr` and `bias_ptr` point at the layer finished.
    """
    HEADS_WIDTH: tl.constexpr = NUM_HEADS * HEAD
    PACKED: tl.constexpr = 3 * HEADS_WIDTH
    TILE: tl.constexpr = BLOCK_D * HEAD
    blocks = tl.cdiv(length, ROWS)
    sequence = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    first_token = sequence.to(tl.int64) * length
    token = first_token + row
    io = token[:, None] * WIDTH + column[None, :]
    io_mask = (row < length)[:, None] & (column < WIDTH)[None, :]
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    lane = tl.arange(0, HEAD)
    step_column = tl.arange(0, HEADS_A_STEP * HEAD)
    x = tl.load(x_ptr + io, mask=io_mask, other=0.0).to(tl.float32)
    if not FIRST:
        key = tl.arange(0, BLOCK_S)
        visible = key < length
        if HAS_MASK:
            visible = tl.load(mask_ptr + first_token + key, mask=visible, other=0) != 0
        allowed = visible[None, :]
        if CAUSAL:
            allowed = allowed & (key[None, :] <= row[:, None])
        x += tl.load(bias_ptr + HEADS_WIDTH + column)[None, :]
        key_token = first_token + key
        if HEADS_A_STEP == 1:
            # Two-dimensional products: the only ones that become warpgroup instructions on Hopper.
            q_ptrs = qkv_in_ptr + token[:, None] * PACKED + lane[None, :]
            k_ptrs = qkv_in_ptr + key_token[None, :] * PACKED + HEADS_WIDTH + lane[:, None]
            v_ptrs = qkv_in_ptr + key_token[:, None] * PACKED + 2 * HEADS_WIDTH + lane[None, :]
            for head in tl.range(0, NUM_HEADS, num_stages=STAGES):
                q = tl.load(q_ptrs + head * HEAD, mask=(row < length)[:, None], other=0.0)
                k = tl.load(k_ptrs + head * HEAD, mask=(key < length)[None, :], other=0.0)
                v = tl.load(v_ptrs + head * HEAD, mask=(key < length)[:, None], other=0.0)
                probs, total = _softmax(tl.where(allowed, tl.dot(q, k), float("-inf")), 1)
                context = tl.dot(probs.to(dtype), v) / total[:, None]
                w_out = weight_ptr + head * (4 * TILE) + 3 * TILE + lane[:, None] * BLOCK_D + column[None, :]
                x = tl.dot(context.to(dtype), tl.load(w_out), x)
        else:
            # Several heads side by side: fewer dependent steps, for programs too small to be bound by anything else.
            heads = tl.arange(0, HEADS_A_STEP)[:, None, None] * HEAD
            q_ptrs = qkv_in_ptr + heads + token[None, :, None] * PACKED + lane[None, None, :]
            k_ptrs = qkv_in_ptr + heads + key_token[None, None, :] * PACKED + HEADS_WIDTH + lane[None, :, None]
            v_ptrs = qkv_in_ptr + heads + key_token[None, :, None] * PACKED + 2 * HEADS_WIDTH + lane[None, None, :]
            for head in tl.range(0, NUM_HEADS, HEADS_A_STEP, num_stages=STAGES):
                q = tl.load(q_ptrs + head * HEAD, mask=(row < length)[None, :, None], other=0.0)
                k = tl.load(k_ptrs + head * HEAD, mask=(key < length)[None, None, :], other=0.0)
                v = tl.load(v_ptrs + head * HEAD, mask=(key < length)[None, :, None], other=0.0)
                probs, total = _softmax(tl.where(allowed[None, :, :], tl.dot(q, k), float("-inf")), 2)
                context = tl.dot(probs.to(dtype), v) / total[:, :, None]
                context = tl.reshape(tl.permute(context.to(dtype), (1, 0, 2)), (ROWS, HEADS_A_STEP * HEAD))
                out_rows = (head + step_column // HEAD) * (4 * TILE) + 3 * TILE + step_column % HEAD * BLOCK_D
                x = tl.dot(context, tl.load(weight_ptr + out_rows[:, None] + column[None, :]), x)
        normed = _normalise(x, column, eps, WIDTH, BLOCK_D).to(dtype)
        x += tl.load(bias_ptr + HEADS_WIDTH + BLOCK_D + column)[None, :]
        x = _feed_forward(
            x, normed, weight_ptr + 4 * BLOCK_D * HEADS_WIDTH, bias_ptr + HEADS_WIDTH + 2 * BLOCK_D,
            BLOCK_D, BLOCK_F, FFN, STAGES,
        )  # fmt: skip
        weight_ptr += BLOCK_D * (4 * HEADS_WIDTH + 2 * FFN)
        bias_ptr += HEADS_WIDTH + 2 * BLOCK_D + FFN
    normed = _normalise(x, column, eps, WIDTH, BLOCK_D)
    if LAST:
        final = normed * tl.load(bias_ptr + column)[None, :] + tl.load(bias_ptr + BLOCK_D + column)[None, :]
        if HAS_MASK:
            valid = tl.load(mask_ptr + token, mask=row < length, other=0) != 0
            final = tl.where(valid[:, None], final, 0.0)
        tl.store(out_ptr + io, final.to(out_ptr.dtype.element_ty), mask=io_mask)
    else:
        if not FIRST:
            tl.store(out_ptr + io, x, mask=io_mask)
        operand = normed.to(dtype)
        for head in tl.range(0, NUM_HEADS, HEADS_A_STEP, num_stages=STAGES):
            in_columns = (head + step_column // HEAD) * (4 * TILE) + step_column % HEAD
            for part in tl.static_range(3):
                w = tl.load(weight_ptr + part * TILE + column[:, None] * HEAD + in_columns[None, :])
                projected = tl.dot(operand, w)
                if part == 0:
                    projected += tl.load(bias_ptr + head * HEAD + step_column)[None, :]
                target = token[:, None] * PACKED + part * HEADS_WIDTH + head * HEAD + step_column[None, :]
                tl.store(qkv_out_ptr + target, projected.to(dtype), mask=(row < length)[:, None])
