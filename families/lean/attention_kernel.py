"""Causal or full self-attention over packed QKV, any mask or bias: `ctx = softmax(q k^T / sqrt(d) + bias) v`.

Ladder
- this kernel: reads the packed GEMM's output and writes the output GEMM's input, so the eager forward's four strided
  copies a layer are not needed. Scores never leave the SM. When the sequence is a valid prefix, whole key tiles run
  without a predicate, and only the diagonal and the last tile test positions.
- eager: seven passes over `[B, H, S, S]` scores in device memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_extent_kernel(mask_ptr, extent_ptr, length, BLOCK: tl.constexpr):
    """Store per sequence: one past its last valid token, negated when an invalid token stands before that."""
    sequence = tl.program_id(0)
    count = 0
    last = 0
    for start in range(0, length, BLOCK):
        position = start + tl.arange(0, BLOCK)
        valid = tl.load(mask_ptr + sequence.to(tl.int64) * length + position, mask=position < length, other=0) != 0
        count += tl.sum(valid.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(valid, position + 1, 0), axis=0))
    tl.store(extent_ptr + sequence, tl.where(count == last, last, -last))


@triton.jit
def _accumulate_tile(
    q, k_ptrs, v_ptrs, key, limit, row, length, mask_ptr, token, bias_ptr, bias_query, bias_key, top, total, context,
    SCALE_LOG2: tl.constexpr, CAUSAL: tl.constexpr, PREDICATE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS_BIAS: tl.constexpr, EVEN_D: tl.constexpr, COLUMNS_BELOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold one key tile into the running maximum, sum and context of the online softmax."""
    column = tl.arange(0, BLOCK_D)
    if PREDICATE:
        inside = key < limit
        k = tl.load(k_ptrs, mask=inside[None, :] & (column < COLUMNS_BELOW)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=inside[:, None] & (column < COLUMNS_BELOW)[None, :], other=0.0)
    elif EVEN_D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(column < COLUMNS_BELOW)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=(column < COLUMNS_BELOW)[None, :], other=0.0)
    scores = tl.dot(q, k)
    if HAS_BIAS:
        present = (row < length)[:, None]
        if PREDICATE:
            present = present & inside[None, :]
        bias_ptrs = bias_ptr + row.to(tl.int64)[:, None] * bias_query + key.to(tl.int64)[None, :] * bias_key
        bias = tl.load(bias_ptrs, mask=present, other=0)
        if ADDS_BIAS:
            scores = scores * (SCALE_LOG2 * 0.6931471805599453) + bias.to(tl.float32)
        else:
            scores = tl.where(bias != 0, scores, float("-inf"))
    if PREDICATE:
        visible = inside
        if HAS_MASK:
            visible = visible & (tl.load(mask_ptr + token + key, mask=inside, other=0) != 0)
        allowed = visible[None, :]
        if CAUSAL:
            allowed = allowed & (key[None, :] <= row[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen no key yet keeps a maximum of -inf; 0 in its place keeps inf - inf out of the exponent.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    if ADDS_BIAS:
        # The difference comes first: a bias of the least finite number would become -inf in the product.
        probs = tl.math.exp2((scores - anchor[:, None]) * 1.4426950408889634)
        decay = tl.math.exp2((top - anchor) * 1.4426950408889634)
    else:
        anchor = anchor * SCALE_LOG2
        probs = tl.math.exp2(scores * SCALE_LOG2 - anchor[:, None])
        decay = tl.math.exp2(top * SCALE_LOG2 - anchor)
    total = total * decay + tl.sum(probs, axis=1)
    context = context * decay[:, None]
    context = tl.dot(probs.to(v.dtype), v, context)
    return new_top, total, context


@triton.jit
def attention_kernel(
    qkv_ptr, mask_ptr, extent_ptr, bias_ptr, out_ptr, length, bias_batch, bias_head, bias_query, bias_key,
    SCALE_LOG2: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Late query blocks see the most keys under a causal mask: start them first so that the last wave is short.
    blocks = tl.cdiv(length, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % NUM_HEADS
    sequence = tl.program_id(0) // blocks // NUM_HEADS
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    EVEN_D: tl.constexpr = HEAD_DIM == BLOCK_D
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    token = sequence.to(tl.int64) * length
    q_base = qkv_ptr + token * (3 * WIDTH) + head * HEAD_DIM
    out_ptrs = out_ptr + (token + row)[:, None] * WIDTH + head * HEAD_DIM + column[None, :]
    row_ok = (row < length)[:, None] & (column < HEAD_DIM)[None, :]

    extent = length
    prefix = True
    if HAS_MASK:
        signed = tl.load(extent_ptr + sequence)
        prefix = signed >= 0
        extent = tl.abs(signed)

    if HAS_BIAS:
        bias_ptr += sequence.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    context = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Rows at or past the extent are padding: their output is zeroed at the end of the forward, so nothing is due.
    if first < extent:
        stop = extent
        whole = extent // BLOCK_N * BLOCK_N
        if CAUSAL:
            stop = tl.minimum(extent, first + BLOCK_M)
            whole = first // BLOCK_N * BLOCK_N
        whole = tl.where(prefix, whole, 0)
        q = tl.load(q_base + row.to(tl.int64)[:, None] * (3 * WIDTH) + column[None, :], mask=row_ok, other=0.0)
        lane = tl.arange(0, BLOCK_N)
        k_ptrs = q_base + WIDTH + lane[None, :] * (3 * WIDTH) + column[:, None]
        v_ptrs = q_base + 2 * WIDTH + lane[:, None] * (3 * WIDTH) + column[None, :]
        for start in range(0, whole, BLOCK_N):
            top, total, context = _accumulate_tile(
                q, k_ptrs, v_ptrs, start + lane, stop, row, length, mask_ptr, token, bias_ptr, bias_query, bias_key,
                top, total, context, SCALE_LOG2, CAUSAL, False, HAS_MASK, HAS_BIAS, ADDS_BIAS, EVEN_D, HEAD_DIM,
                BLOCK_D,
            )  # fmt: skip
            k_ptrs += BLOCK_N * 3 * WIDTH
            v_ptrs += BLOCK_N * 3 * WIDTH
        for start in range(whole, stop, BLOCK_N):
            top, total, context = _accumulate_tile(
                q, k_ptrs, v_ptrs, start + lane, stop, row, length, mask_ptr, token, bias_ptr, bias_query, bias_key,
                top, total, context, SCALE_LOG2, CAUSAL, True, HAS_MASK, HAS_BIAS, ADDS_BIAS, EVEN_D, HEAD_DIM,
                BLOCK_D,
            )  # fmt: skip
            k_ptrs += BLOCK_N * 3 * WIDTH
            v_ptrs += BLOCK_N * 3 * WIDTH
    # A row that sees no key: 0 instead of 0 / 0 keeps NaN out of its later keys and values.
    context = context / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptrs, context.to(out_ptr.dtype.element_ty), mask=row_ok)
