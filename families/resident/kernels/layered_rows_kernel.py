"""Thin blocks of query rows, a launch a layer and one more: for small batches that attend both ways.

Query, key and value rows pass through a scratch in device memory; the launch boundary is the exchange, so nothing is
awaited. Causal batches take flagged_rows.py instead: one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflane.families.resident.triton_steps import feed_forward, normalise, softmax


@triton.jit
def _project(
    x, qkv_ptr, weight_ptr, bias_ptr, token, row_mask, column, eps,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS_A_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write q, k and v of the normalised rows."""
    HEADS_WIDTH: tl.constexpr = NUM_HEADS * HEAD
    PACKED: tl.constexpr = 3 * HEADS_WIDTH
    TILE: tl.constexpr = BLOCK_D * HEAD
    step_column = tl.arange(0, HEADS_A_STEP * HEAD)
    operand = normalise(x, column, eps, WIDTH, BLOCK_D).to(weight_ptr.dtype.element_ty)
    for head in tl.range(0, NUM_HEADS, HEADS_A_STEP, num_stages=STAGES):
        for part in tl.static_range(3):
            # A tile's query columns lie alone, its key and value columns side by side.
            stride, start = (HEAD, 0) if part == 0 else (2 * HEAD, TILE + (part - 1) * HEAD)
            in_columns = (head + step_column // HEAD) * (4 * TILE) + start + step_column % HEAD
            w = tl.load(weight_ptr + column[:, None] * stride + in_columns[None, :])
            projected = tl.dot(operand, w)
            if part == 0:
                projected += tl.load(bias_ptr + head * HEAD + step_column)[None, :]
            target = token[:, None] * PACKED + part * HEADS_WIDTH + head * HEAD + step_column[None, :]
            tl.store(qkv_ptr + target, projected.to(operand.dtype), mask=row_mask)


@triton.jit
def _finish_layer(
    x, qkv_ptr, weight_ptr, bias_ptr, first_token, token, row_mask, length, allowed, column, eps,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, FFN: tl.constexpr, BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, HEADS_A_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the rows behind one layer: attention from the scratch, then the feed-forward."""
    HEADS_WIDTH: tl.constexpr = NUM_HEADS * HEAD
    PACKED: tl.constexpr = 3 * HEADS_WIDTH
    TILE: tl.constexpr = BLOCK_D * HEAD
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    key = tl.arange(0, BLOCK_S)
    lane = tl.arange(0, HEAD)
    step_column = tl.arange(0, HEADS_A_STEP * HEAD)
    key_token = first_token + key
    x += tl.load(bias_ptr + HEADS_WIDTH + column)[None, :]
    if HEADS_A_STEP == 1:
        # Two-dimensional products: the only ones that become warpgroup instructions on Hopper.
        q_ptrs = qkv_ptr + token[:, None] * PACKED + lane[None, :]
        k_ptrs = qkv_ptr + key_token[None, :] * PACKED + HEADS_WIDTH + lane[:, None]
        v_ptrs = qkv_ptr + key_token[:, None] * PACKED + 2 * HEADS_WIDTH + lane[None, :]
        for head in tl.range(0, NUM_HEADS, num_stages=STAGES):
            q = tl.load(q_ptrs + head * HEAD, mask=row_mask, other=0.0, cache_modifier=".cg")
            k = tl.load(k_ptrs + head * HEAD, mask=(key < length)[None, :], other=0.0, cache_modifier=".cg")
            v = tl.load(v_ptrs + head * HEAD, mask=(key < length)[:, None], other=0.0, cache_modifier=".cg")
            probs, total = softmax(tl.where(allowed, tl.dot(q, k), float("-inf")), 1)
            context = tl.dot(probs.to(dtype), v) / total[:, None]
            w_out = weight_ptr + head * (4 * TILE) + 3 * TILE + lane[:, None] * BLOCK_D + column[None, :]
            x = tl.dot(context.to(dtype), tl.load(w_out), x)
    else:
        # Several heads side by side: fewer dependent steps, for programs too small to be bound by anything else.
        heads = tl.arange(0, HEADS_A_STEP)[:, None, None] * HEAD
        q_ptrs = qkv_ptr + heads + token[None, :, None] * PACKED + lane[None, None, :]
        k_ptrs = qkv_ptr + heads + key_token[None, None, :] * PACKED + HEADS_WIDTH + lane[None, :, None]
        v_ptrs = qkv_ptr + heads + key_token[None, :, None] * PACKED + 2 * HEADS_WIDTH + lane[None, None, :]
        for head in tl.range(0, NUM_HEADS, HEADS_A_STEP, num_stages=STAGES):
            q = tl.load(q_ptrs + head * HEAD, mask=row_mask[None, :, :], other=0.0, cache_modifier=".cg")
            k = tl.load(k_ptrs + head * HEAD, mask=(key < length)[None, None, :], other=0.0, cache_modifier=".cg")
            v = tl.load(v_ptrs + head * HEAD, mask=(key < length)[None, :, None], other=0.0, cache_modifier=".cg")
            probs, total = softmax(tl.where(allowed[None, :, :], tl.dot(q, k), float("-inf")), 2)
            context = tl.dot(probs.to(dtype), v) / total[:, :, None]
            context = tl.reshape(tl.permute(context.to(dtype), (1, 0, 2)), (ROWS, HEADS_A_STEP * HEAD))
            out_rows = (head + step_column // HEAD) * (4 * TILE) + 3 * TILE + step_column % HEAD * BLOCK_D
            x = tl.dot(context, tl.load(weight_ptr + out_rows[:, None] + column[None, :]), x)
    normed = normalise(x, column, eps, WIDTH, BLOCK_D).to(dtype)
    x += tl.load(bias_ptr + HEADS_WIDTH + BLOCK_D + column)[None, :]
    return feed_forward(
        x, normed, weight_ptr + 4 * BLOCK_D * HEADS_WIDTH, bias_ptr + HEADS_WIDTH + 2 * BLOCK_D,
        BLOCK_D, BLOCK_F, FFN, STAGES,
    )  # fmt: skip


@triton.jit
def _write_output(
    x, out_ptr, mask_ptr, bias_ptr, token, row_mask, io, io_mask, column, eps,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write the final norm of the rows, zeros where the mask is false."""
    final = normalise(x, column, eps, WIDTH, BLOCK_D)
    final = final * tl.load(bias_ptr + column)[None, :] + tl.load(bias_ptr + BLOCK_D + column)[None, :]
    if HAS_MASK:
        valid = tl.load(mask_ptr + token[:, None], mask=row_mask, other=0) != 0
        final = tl.where(valid, final, 0.0)
    tl.store(out_ptr + io, final.to(out_ptr.dtype.element_ty), mask=io_mask)


@triton.jit
def _allowed(mask_ptr, first_token, row, length, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return which keys each row may see, [ROWS, BLOCK_S] or [1, BLOCK_S]."""
    key = tl.arange(0, BLOCK_S)
    visible = key < length
    if HAS_MASK:
        visible = tl.load(mask_ptr + first_token + key, mask=visible, other=0) != 0
    allowed = visible[None, :]
    if CAUSAL:
        allowed = allowed & (key[None, :] <= row[:, None])
    return allowed


@triton.jit
def rows_kernel(
    x_ptr, mask_ptr, out_ptr, qkv_in_ptr, qkv_out_ptr, weight_ptr, bias_ptr, length, eps,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, FFN: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    HEADS_A_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one sequence through one layer.

    Launch 0 (FIRST) projects layer 0's q, k and v. Launch l finishes layer l - 1 from the scratch of the launch before
    it, then projects layer l, or (LAST) writes the output. `weight_ptr` and `bias_ptr` point at the layer finished.
    """
    blocks = tl.cdiv(length, ROWS)
    sequence = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    first_token = sequence.to(tl.int64) * length
    token = first_token + row
    row_mask = (row < length)[:, None]
    io = token[:, None] * WIDTH + column[None, :]
    io_mask = row_mask & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + io, mask=io_mask, other=0.0).to(tl.float32)
    if not FIRST:
        allowed = _allowed(mask_ptr, first_token, row, length, CAUSAL, HAS_MASK, BLOCK_S)
        x = _finish_layer(
            x, qkv_in_ptr, weight_ptr, bias_ptr, first_token, token, row_mask, length, allowed, column, eps,
            WIDTH, NUM_HEADS, HEAD, FFN, BLOCK_S, ROWS, BLOCK_D, BLOCK_F, HEADS_A_STEP, STAGES,
        )  # fmt: skip
        weight_ptr += BLOCK_D * (4 * NUM_HEADS * HEAD + 2 * FFN)
        bias_ptr += NUM_HEADS * HEAD + 2 * BLOCK_D + FFN
    if LAST:
        _write_output(
            x, out_ptr, mask_ptr, bias_ptr, token, row_mask, io, io_mask, column, eps, WIDTH, BLOCK_D, HAS_MASK
        )
    else:
        if not FIRST:
            tl.store(out_ptr + io, x, mask=io_mask)
        _project(
            x, qkv_out_ptr, weight_ptr, bias_ptr, token, row_mask, column, eps,
            WIDTH, NUM_HEADS, HEAD, BLOCK_D, HEADS_A_STEP, STAGES,
        )  # fmt: skip
