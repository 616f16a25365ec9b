"""The reference forward for shapes whose scores do not fit in memory: the same ops over batch and query blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflane.baseline.reference import BaselineTransformer, BaselineTransformerBlock

# Two copies of the scores are alive, and one more in fp32 for half dtypes: 12 bytes cover every dtype.
SCORE_BYTES = 12
# A row of a block holds its q, k, v, context, residual, norm and feed-forward values: about 8 widths.
ROW_WIDTHS = 8


def chunked_reference(
    model: BaselineTransformer, x: Tensor, valid_token_mask: Tensor | None = None, *, budget_bytes: int = 4 << 30
) -> Tensor:
    """Return the reference output `[B, S, D]` with about `budget_bytes` of scratch memory at most.

    Batch blocks are independent. Within one, each layer first projects all keys and values, then attends one block of
    query rows after another. A causal block reads only the keys it sees, because the others have probability 0.
    """
    batch, length, width = x.shape
    attention = model.layers[0].attention
    ffn_dim = model.layers[0].ffn_in.out_features
    score_row = SCORE_BYTES * attention.num_heads * length
    token = x.element_size() * (ROW_WIDTHS * width + 2 * ffn_dim)
    batch_block = max(1, min(batch, budget_bytes // (length * (score_row + token))))
    rows = max(1, min(length, budget_bytes // (batch_block * (score_row + token))))
    out = torch.empty_like(x)
    for start in range(0, batch, batch_block):
        part = slice(start, start + batch_block)
        mask = None if valid_token_mask is None else valid_token_mask[part]
        hidden = x[part]
        for layer in model.layers:
            hidden = _layer(layer, hidden, mask, model.config.causal, rows)
        hidden = model.final_norm(hidden)
        if mask is not None:
            hidden = hidden.masked_fill(~mask[:, :, None], 0)
        out[part] = hidden
    return out


def _layer(layer: BaselineTransformerBlock, x: Tensor, mask: Tensor | None, causal: bool, rows: int) -> Tensor:
    attention = layer.attention
    batch, length, _ = x.shape
    heads = (batch, attention.num_heads, length, attention.head_dim)
    k, v = x.new_empty(heads), x.new_empty(heads)
    for start in range(0, length, rows):
        block = slice(start, start + rows)
        normed = layer.norm1(x[:, block])
        k[:, :, block] = attention.split_heads(attention.k_proj(normed))
        v[:, :, block] = attention.split_heads(attention.v_proj(normed))
    out = torch.empty_like(x)
    for start in range(0, length, rows):
        block = slice(start, min(start + rows, length))
        hidden = x[:, block]
        q = attention.split_heads(attention.q_proj(layer.norm1(hidden)))
        seen = block.stop if causal else length
        context = _attend_rows(layer, q, k[:, :, :seen], v[:, :, :seen], mask, causal, start)
        update = attention.out_proj(attention.merge_heads(context))
        if mask is not None:
            update = update.masked_fill(~mask[:, block, None], 0)
        hidden = hidden + update
        hidden = hidden + layer.ffn_out(torch.nn.functional.gelu(layer.ffn_in(layer.norm2(hidden))))
        if mask is not None:
            hidden = hidden.masked_fill(~mask[:, block, None], 0)
        out[:, block] = hidden
    return out


def _attend_rows(
    layer: BaselineTransformerBlock, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, start: int
) -> Tensor:
    """Attend the query rows from `start` on to the given keys. In-place fills keep at most two copies of the scores."""
    scores = torch.matmul(q, k.transpose(-2, -1)).mul_(layer.attention.scale)
    rows, keys = scores.shape[-2:]
    if causal:
        # Only the square on the diagonal holds future keys: the keys before `start` are visible to every row.
        future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(diagonal=1)
        scores[..., start:].masked_fill_(future, float("-inf"))
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None, :keys], float("-inf"))
    probs = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
    del scores
    return torch.matmul(probs.to(q.dtype), v)
