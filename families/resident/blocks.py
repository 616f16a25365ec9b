"""Blocks of query rows through every layer in one launch, the residual in registers from input to output.

A causal sequence of more than BLOCK rows is two blocks, and the dependency runs one way: the second needs the keys and
values of the first, the first needs nothing. So either one program takes both in turn (IN_TURN: nothing is awaited,
any batch), or two programs share the sequence and the second awaits a flag a layer (batches that leave the device
empty). The second's program stands behind the first's in launch order, so the wait ends however few programs run at a
time. Two programs of 64 rows and four warps fit an SM: one computes while the other waits on its chain of products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflane.families.resident.parts import feed_forward, gelu, normalise  # noqa: F401


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
    x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, group, batch, length, layers, eps,
    FIRST_ROW: tl.constexpr, STORE_KV: tl.constexpr, BEFORE: tl.constexpr, FLAGS: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, HEAD: tl.constexpr, PACK: tl.constexpr, FFN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take ROWS rows (of GROUP sequences) through every layer and write their output."""
    HEADS_WIDTH: tl.constexpr = TILES * HEAD
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
    pair_lane = tl.arange(0, 2 * HEAD)
    pair = column[:, None] * (2 * HEAD) + pair_lane[None, :]
    tall = lane[:, None] * BLOCK_D + column[None, :]
    kv_cell = row[:, None] * HEAD + lane[None, :]

    for layer in range(layers):
        normed = normalise(x, column, eps, WIDTH, BLOCK_D).to(weight_ptr.dtype.element_ty)
        x += tl.load(bias_ptr + HEADS_WIDTH + column)[None, :]
        if BEFORE and FLAGS:
            while tl.atomic_add(flag_ptr, 0, sem="acquire") <= layer:
                pass
            tl.debug_barrier()
        for tile in tl.range(0, TILES, num_stages=STAGES):
            weights = weight_ptr + tile * (4 * BLOCK_D * HEAD)
            q = (tl.dot(normed, tl.load(weights + wide)) + tl.load(bias_ptr + tile * HEAD + lane)[None, :]).to(
                normed.dtype
            )
            # Keys and values in one product: half the waits on a product's end.
            both = tl.dot(normed, tl.load(weights + BLOCK_D * HEAD + pair)).to(normed.dtype)
            k, v = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, HEAD)), (0, 2, 1)))
            kv = kv_ptr + tile * (2 * KV_TILE) + kv_cell
            k_before, v_before = k, v
            if STORE_KV:
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
        if STORE_KV and FLAGS:
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
        kv_ptr += TILES * 2 * KV_TILE
    final = normalise(x, column, eps, WIDTH, BLOCK_D)
    final = final * tl.load(bias_ptr + column)[None, :] + tl.load(bias_ptr + BLOCK_D + column)[None, :]
    final = tl.where(valid[:, None], final, 0.0)
    tl.store(out_ptr + token[:, None] * WIDTH + column[None, :], final.to(out_ptr.dtype.element_ty), mask=io_mask)
    if BEFORE and FLAGS:
        # The only reader leaves the flag as the next call must find it.
        tl.atomic_xchg(flag_ptr, 0, sem="relaxed")


@triton.jit
def blocks_kernel(
    x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, batch, length, layers, programs, eps,
    WIDTH: tl.constexpr, TILES: tl.constexpr, HEAD: tl.constexpr, PACK: tl.constexpr, FFN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """MODE "one": a block a program. "turns": both blocks of every programs-th sequence. "flags": a block a program,
    the second half of the programs awaiting the first."""
    program = tl.program_id(0)
    kv_slot: tl.constexpr = TILES * 2 * ROWS * HEAD
    if MODE == "one":
        _block(
            x_ptr, mask_ptr, out_ptr, kv_ptr, flag_ptr, weight_ptr, bias_ptr, program, batch, length, layers, eps,
            0, False, False, False,
            WIDTH, TILES, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
        )  # fmt: skip
    elif MODE == "turns":
        kv = kv_ptr + program.to(tl.int64) * layers * kv_slot
        for sequence in range(program, batch, programs):
            tl.debug_barrier()
            _block(
                x_ptr, mask_ptr, out_ptr, kv, flag_ptr, weight_ptr, bias_ptr, sequence, batch, length, layers, eps,
                0, True, False, False,
                WIDTH, TILES, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
            )  # fmt: skip
            tl.debug_barrier()
            _block(
                x_ptr, mask_ptr, out_ptr, kv, flag_ptr, weight_ptr, bias_ptr, sequence, batch, length, layers, eps,
                ROWS, False, True, False,
                WIDTH, TILES, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
            )  # fmt: skip
    else:
        sequence = program % batch
        kv = kv_ptr + sequence.to(tl.int64) * layers * kv_slot
        if program < batch:
            _block(
                x_ptr, mask_ptr, out_ptr, kv, flag_ptr + sequence, weight_ptr, bias_ptr, sequence, batch, length,
                layers, eps, 0, True, False, True,
                WIDTH, TILES, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
            )  # fmt: skip
        else:
            _block(
                x_ptr, mask_ptr, out_ptr, kv, flag_ptr + sequence, weight_ptr, bias_ptr, sequence, batch, length,
                layers, eps, ROWS, False, True, True,
                WIDTH, TILES, HEAD, PACK, FFN, CAUSAL, HAS_MASK, ROWS, GROUP, BLOCK_D, BLOCK_F, STAGES,
            )  # fmt: skip
