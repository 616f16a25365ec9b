"""Sequences through every layer in one launch, the fp32 residual in registers from input to output.

Whole: a program holds all rows of a sequence, or of several short ones.
Halves: two programs of 64 rows and four warps share a causal sequence, for batches that leave the device half empty.
The second half waits for the first one's keys and values, a flag a layer. The first half waits for nothing and comes
first in launch order, so the wait ends however few programs run at a time.

Folded into the packed weights (pack.py): LayerNorm's scale and shift, the softmax scale and log2(e), and the value
bias. The key bias adds the same number to every score of a row, which softmax cancels, so it is dropped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflane.families.resident.triton_steps import feed_forward, normalise

# Columns of a tile up to which its keys and values fit the registers as one product.
FUSED_HEAD = tl.constexpr(64)


@triton.jit
def _attend(q, k, v, k_before, v_before, allowed, visible_before, BEFORE: tl.constexpr):
    """Return softmax(q k') v over this block's keys and, with BEFORE, those of the block before; q holds the scale."""
    scores = tl.where(allowed, tl.dot(q, tl.trans(k)), float("-inf"))
    top = tl.max(scores, axis=1)
    if BEFORE:
        scores_before = tl.dot(q, tl.trans(k_before)) + visible_before[None, :]
        top = tl.maximum(top, tl.max(scores_before, axis=1))
    top = tl.where(top == float("-inf"), 0.0, top)[:, None]
    probs = tl.math.exp2(scores - top)
    total = tl.sum(probs, axis=1)
    context = tl.dot(probs.to(q.dtype), v)
    if BEFORE:
        probs = tl.math.exp2(scores_before - top)
        total += tl.sum(probs, axis=1)
        context = tl.dot(probs.to(q.dtype), v_before, context)
    return context * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def _block(
    x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, group, batch, length, layers, tiles, eps,
    FIRST_ROW: tl.constexpr, FIRST: tl.constexpr, BEFORE: tl.constexpr,
    WIDTH: tl.constexpr, HEADS_WIDTH: tl.constexpr, HEAD: tl.constexpr, PACK: tl.constexpr, FFN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take ROWS rows (of GROUP sequences) through every layer and write their output; FIRST hands keys to BEFORE."""
    SEQUENCE_ROWS: tl.constexpr = ROWS // GROUP
    KV_TILE: tl.constexpr = ROWS * HEAD
    row = tl.arange(0, ROWS)
    position = FIRST_ROW + row % SEQUENCE_ROWS
    sequence = group * GROUP + row // SEQUENCE_ROWS
    column = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, HEAD)
    token = sequence.to(tl.int64) * length + position
    inside = (position < length) & (sequence < batch)
    io_mask = inside[:, None] & (column < WIDTH)[None, :]
    valid = inside
    if HAS_MASK:
        valid = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    visible_before = tl.zeros([ROWS], tl.float32)
    if BEFORE and HAS_MASK:
        visible_before = tl.where(tl.load(mask_ptr + token - ROWS) != 0, 0.0, float("-inf"))
    x = tl.load(x_ptr + token[:, None] * WIDTH + column[None, :], mask=io_mask, other=0.0).to(tl.float32)
    allowed = valid[None, :]
    if GROUP > 1:
        allowed = allowed & (row[None, :] // SEQUENCE_ROWS == row[:, None] // SEQUENCE_ROWS)
    if CAUSAL:
        allowed = allowed & (row[None, :] <= row[:, None])
    wide = column[:, None] * HEAD + lane[None, :]
    half = column[:, None] * (2 * HEAD) + lane[None, :]
    pair = column[:, None] * (2 * HEAD) + tl.arange(0, 2 * HEAD)[None, :]
    tall = lane[:, None] * BLOCK_D + column[None, :]
    kv_cell = row[:, None] * HEAD + lane[None, :]

    for layer in range(layers):
        normed = normalise(x, column, eps, WIDTH, BLOCK_D).to(weight_ptr.dtype.element_ty)
        x += tl.load(bias_ptr + HEADS_WIDTH + column)[None, :]
        if BEFORE:
            while tl.atomic_add(flag_ptr, 0, sem="acquire") <= layer:
                pass
            tl.debug_barrier()
        # The count is no constant: where a loop of one step dissolves, Triton 3.6 pipelines the loop over layers in its
        # place, and on Hopper that went wrong. The widest head is alone and has no room for a pipeline; there the loop
        # of the feed-forward, two steps at least, keeps the layers' from being the innermost.
        for tile in tl.range(0, tiles if HEAD <= FUSED_HEAD else 1, num_stages=STAGES):
            weights = weight_ptr + tile * (4 * BLOCK_D * HEAD)
            q = tl.dot(normed, tl.load(weights + wide)) + tl.load(bias_ptr + tile * HEAD + lane)[None, :]
            q = q.to(normed.dtype)
            if HEAD <= FUSED_HEAD:
                # Keys and values in one product: one wait on a product's end less.
                both = tl.dot(normed, tl.load(weights + BLOCK_D * HEAD + pair)).to(normed.dtype)
                k, v = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, HEAD)), (0, 2, 1)))
            else:
                k = tl.dot(normed, tl.load(weights + BLOCK_D * HEAD + half)).to(normed.dtype)
                v = tl.dot(normed, tl.load(weights + BLOCK_D * HEAD + HEAD + half)).to(normed.dtype)
            kv = kv_ptr + tile * (2 * KV_TILE) + kv_cell
            k_before, v_before = k, v
            if FIRST:
                tl.store(kv, k)
                tl.store(kv + KV_TILE, v)
            if BEFORE:
                k_before = tl.load(kv, cache_modifier=".cg")
                v_before = tl.load(kv + KV_TILE, cache_modifier=".cg")
            if PACK == 1:
                context = _attend(q, k, v, k_before, v_before, allowed, visible_before, BEFORE)
            else:
                # Heads narrower than a tile share its products: each sees q with the other heads' columns zeroed.
                context = tl.zeros([ROWS, HEAD], tl.float32)
                for sub in tl.static_range(PACK):
                    own = (lane // (HEAD // PACK) == sub)[None, :]
                    part = _attend(
                        tl.where(own, q, 0.0).to(q.dtype), k, v, k_before, v_before, allowed, visible_before, BEFORE
                    )
                    context = tl.where(own, part, context)
            x = tl.dot(context.to(normed.dtype), tl.load(weights + 3 * BLOCK_D * HEAD + tall), x)
        if FIRST:
            tl.debug_barrier()
            tl.atomic_xchg(flag_ptr, layer + 1, sem="release")
        normed = normalise(x, column, eps, WIDTH, BLOCK_D).to(weight_ptr.dtype.element_ty)
        x += tl.load(bias_ptr + HEADS_WIDTH + BLOCK_D + column)[None, :]
        x = feed_forward(
            x, normed, weight_ptr + 4 * BLOCK_D * HEADS_WIDTH, bias_ptr + HEADS_WIDTH + 2 * BLOCK_D,
            BLOCK_D, BLOCK_F, FFN, STAGES,
        )  # fmt: skip
        weight_ptr += BLOCK_D * (4 * HEADS_WIDTH + 2 * FFN)
        bias_ptr += HEADS_WIDTH + 2 * BLOCK_D + FFN
        kv_ptr += 2 * ROWS * HEADS_WIDTH
    final = normalise(x, column, eps, WIDTH, BLOCK_D)
    final = final * tl.load(bias_ptr + column)[None, :] + tl.load(bias_ptr + BLOCK_D + column)[None, :]
    final = tl.where(valid[:, None], final, 0.0)
    tl.store(out_ptr + token[:, None] * WIDTH + column[None, :], final.to(out_ptr.dtype.element_ty), mask=io_mask)
    if BEFORE:
        # The only reader leaves the flag as the next call must find it.
        tl.atomic_xchg(flag_ptr, 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles"])
def blocks_kernel(
    x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, batch, length, layers, tiles, eps,
    WIDTH: tl.constexpr, HEADS_WIDTH: tl.constexpr, HEAD: tl.constexpr, PACK: tl.constexpr, FFN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One program: GROUP whole sequences; or, in HALVES, 64 rows: the programs past `batch` hold the second halves."""
    program = tl.program_id(0)
    if not HALVES:
        _block(
            x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, program, batch, length, layers, tiles,
            eps, 0, False, False,
            WIDTH, HEADS_WIDTH, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
        )  # fmt: skip
    else:
        sequence = program % batch
        kv_ptr += sequence.to(tl.int64) * layers * (2 * ROWS * HEADS_WIDTH)
        flag_ptr += sequence
        if program < batch:
            _block(
                x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, sequence, batch, length, layers,
                tiles, eps, 0, True, False,
                WIDTH, HEADS_WIDTH, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
            )  # fmt: skip
        else:
            _block(
                x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, sequence, batch, length, layers,
                tiles, eps, ROWS, False, True,
                WIDTH, HEADS_WIDTH, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
            )  # fmt: skip
