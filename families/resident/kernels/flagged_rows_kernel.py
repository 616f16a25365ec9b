"""Thin blocks of query rows through every layer in one launch, many programs a sequence: for small causal batches.

Keys and values pass through a scratch of each layer in device memory, announced by a flag a block and layer. A program
awaits programs before it alone, so the launch order ends every wait however few of them run at a time. A program has
too few rows to hide anything behind: weights are loaded a phase before they are used, across the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflane.families.resident.triton_steps import gelu, normalise, softmax


@triton.jit
def _least_written(flag_ptr, other, block, layers):
    """Return how many layers' keys all blocks before this one have written."""
    before = other < block
    flags = tl.atomic_add(flag_ptr + other, 0, mask=before, sem="acquire")
    return tl.min(tl.where(before, flags, layers), axis=0)


@triton.jit
def flagged_rows_kernel(
    x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, length, layers, tokens, eps,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, FFN: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one causal sequence, all heads side by side, the feed-forward in one tile.

    `flag_ptr` holds, for each sequence, one flag a block (layers whose keys are written) and a count of programs done;
    the last one done clears them for the next call.
    """
    HEADS_WIDTH: tl.constexpr = NUM_HEADS * HEAD
    TILE: tl.constexpr = BLOCK_D * HEAD
    BLOCKS: tl.constexpr = BLOCK_S // ROWS
    LAYER_WEIGHTS: tl.constexpr = BLOCK_D * (4 * HEADS_WIDTH + 2 * FFN)
    LAYER_BIASES: tl.constexpr = HEADS_WIDTH + 2 * BLOCK_D + FFN
    blocks = tl.cdiv(length, ROWS)
    sequence = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    flag_ptr += sequence * (2 * BLOCKS)
    other = tl.arange(0, BLOCKS)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    wide = tl.arange(0, HEADS_WIDTH)
    pair = tl.arange(0, 2 * HEADS_WIDTH)
    hidden_column = tl.arange(0, FFN)
    key = tl.arange(0, BLOCK_S)
    lane = tl.arange(0, HEAD)
    head = tl.arange(0, NUM_HEADS)
    first_token = sequence.to(tl.int64) * length
    token = first_token + row
    row_mask = (row < length)[:, None]
    io = token[:, None] * WIDTH + column[None, :]
    io_mask = row_mask & (column < WIDTH)[None, :]
    q_weight = column[:, None] * HEAD + (wide // HEAD * (4 * TILE) + wide % HEAD)[None, :]
    kv_columns = pair // (2 * HEAD) * (4 * TILE) + TILE + pair % (2 * HEAD)
    kv_weight = column[:, None] * (2 * HEAD) + kv_columns[None, :]
    out_weight = (wide // HEAD * (4 * TILE) + 3 * TILE + wide % HEAD * BLOCK_D)[:, None] + column[None, :]
    in_weight = 4 * BLOCK_D * HEADS_WIDTH + column[:, None] * FFN + hidden_column[None, :]
    back_weight = 4 * BLOCK_D * HEADS_WIDTH + BLOCK_D * FFN + hidden_column[:, None] * BLOCK_D + column[None, :]
    kv_cell = token[:, None] * (2 * HEADS_WIDTH) + pair[None, :]
    # Later blocks may be writing their keys: what is not awaited is not read.
    written_to = tl.minimum(length, (block + 1) * ROWS)
    read = key < written_to
    key_cell = (first_token + key)[None, :, None] * (2 * HEADS_WIDTH) + head[:, None, None] * (2 * HEAD)
    key_cell += lane[None, None, :]
    visible = read
    if HAS_MASK:
        visible = tl.load(mask_ptr + first_token + key, mask=read, other=0) != 0
    allowed = (visible[None, :] & (key[None, :] <= row[:, None]))[None, :, :]

    w_q = tl.load(weight_ptr + q_weight)
    w_kv = tl.load(weight_ptr + kv_weight)
    x = tl.load(x_ptr + io, mask=io_mask, other=0.0).to(tl.float32)
    for layer in range(layers):
        bias_q = tl.load(bias_ptr + wide)
        bias_out = tl.load(bias_ptr + HEADS_WIDTH + column)
        operand = normalise(x, column, eps, WIDTH, BLOCK_D).to(w_q.dtype)
        both = tl.dot(operand, w_kv).to(w_q.dtype)
        tl.store(kv_ptr + kv_cell, both, mask=row_mask)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr + block, layer + 1, sem="release")
        w_out = tl.load(weight_ptr + out_weight)
        w_in = tl.load(weight_ptr + in_weight)
        bias_in = tl.load(bias_ptr + HEADS_WIDTH + 2 * BLOCK_D + hidden_column)
        bias_back = tl.load(bias_ptr + HEADS_WIDTH + BLOCK_D + column)
        q = (tl.dot(operand, w_q) + bias_q[None, :]).to(w_q.dtype)
        q = tl.permute(tl.reshape(q, (ROWS, NUM_HEADS, HEAD)), (1, 0, 2))
        x += bias_out[None, :]
        while _least_written(flag_ptr, other, block, layers) <= layer:
            pass
        tl.debug_barrier()
        k = tl.load(kv_ptr + key_cell, mask=read[None, :, None], other=0.0, cache_modifier=".cg")
        v = tl.load(kv_ptr + key_cell + HEAD, mask=read[None, :, None], other=0.0, cache_modifier=".cg")
        probs, total = softmax(tl.where(allowed, tl.dot(q, tl.permute(k, (0, 2, 1))), float("-inf")), 2)
        context = tl.dot(probs.to(w_q.dtype), v) * (1.0 / total)[:, :, None]
        context = tl.reshape(tl.permute(context.to(w_q.dtype), (1, 0, 2)), (ROWS, HEADS_WIDTH))
        w_back = tl.load(weight_ptr + back_weight)
        x = tl.dot(context, w_out, x)
        weight_ptr += LAYER_WEIGHTS * (layer + 1 < layers).to(tl.int32)
        w_q = tl.load(weight_ptr + q_weight)
        w_kv = tl.load(weight_ptr + kv_weight)
        operand = normalise(x, column, eps, WIDTH, BLOCK_D).to(w_q.dtype)
        x += bias_back[None, :]
        hidden = gelu(tl.dot(operand, w_in) + bias_in[None, :]).to(w_q.dtype)
        x = tl.dot(hidden, w_back, x)
        bias_ptr += LAYER_BIASES
        kv_ptr += tokens * (2 * HEADS_WIDTH)
    final = normalise(x, column, eps, WIDTH, BLOCK_D)
    final = final * tl.load(bias_ptr + column)[None, :] + tl.load(bias_ptr + BLOCK_D + column)[None, :]
    if HAS_MASK:
        final = tl.where(tl.load(mask_ptr + token[:, None], mask=row_mask, other=0) != 0, final, 0.0)
    tl.store(out_ptr + io, final.to(out_ptr.dtype.element_ty), mask=io_mask)
    done = tl.atomic_add(flag_ptr + BLOCKS, 1, sem="acq_rel")
    if done == blocks - 1:
        tl.store(flag_ptr + tl.arange(0, 2 * BLOCKS), tl.zeros([2 * BLOCKS], tl.int32))
