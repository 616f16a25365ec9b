"""Run the lean forward chunk by chunk, with the residual stream in the output's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooflane.families.chunked.attend import attend_chunk
from rooflane.families.chunked.spec import chunk_plan
from rooflane.families.lean.device_ops import choose_ops
from rooflane.families.lean.lean import packed_weights
from rooflane.families.runtime.call_checks import check_call, operand_dtype
from rooflane.shapes import Shape


def build(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None, budget_gib: float
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`, scratch within `budget_gib`."""
    if isinstance(budget_gib, bool) or not isinstance(budget_gib, (int, float)) or not budget_gib > 0:
        raise ValueError(f"chunked: budget_gib is {budget_gib!r}; it must be a number above 0")
    device = torch.device(device)
    dtype = operand_dtype(operands, shape, device.type)
    weights = packed_weights(model, dtype)
    ops = choose_ops(shape, device)
    eps = model.layers[0].norm1.eps
    sequences, rows, _ = chunk_plan(shape, budget_gib * 2**30, dtype.itemsize)

    def linear(value: Tensor, name: str) -> Tensor:
        return functional.linear(value, weights.tensors[f"{name}.weight"], weights.tensors[f"{name}.bias"])

    def norm(value: Tensor, update: Tensor | None, name: str, out_dtype: torch.dtype, keep: bool, mask=None):
        weight, bias = weights.tensors[f"{name}.weight"], weights.tensors[f"{name}.bias"]
        return ops.add_norm(value, update, weight, bias, eps=eps, out_dtype=out_dtype, residual=keep, mask=mask)

    def blocks(tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, rows):
            yield slice(start, min(start + rows, tokens))

    def run_chunk(x: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Write the chunk's output `[b, S, D]` into `out`; all tensors here are token rows `[b S, D]`."""
        count, length, width = x.shape
        tokens = count * length
        out_rows = out.view(tokens, width)
        residual = out_rows if out.dtype == torch.float32 else torch.empty(tokens, width, device=x.device)
        source = x.reshape(tokens, width)
        qkv = torch.empty(tokens, 3 * width, dtype=dtype, device=x.device)
        for layer in range(shape.num_layers):
            for block in blocks(tokens):
                normed = norm(source[block], None, f"{layer}.norm1", dtype, False)[1]
                qkv[block] = linear(normed, f"{layer}.qkv")
            context = attend_chunk(qkv.view(count, length, -1), mask, shape.num_heads, shape.causal, ops)
            context = context.view(tokens, width)
            for block in blocks(tokens):
                attended = linear(context[block], f"{layer}.out")
                kept, normed = norm(source[block], attended, f"{layer}.norm2", dtype, True)
                update = linear(ops.gelu(linear(normed, f"{layer}.ffn_in")), f"{layer}.ffn_out")
                torch.add(kept, update, out=residual[block])
            source = residual
        if model.final_norm is None:
            if residual is not out_rows:
                out_rows.copy_(residual)
            if mask is not None:
                out.masked_fill_(~mask[:, :, None], 0)
            return
        for block in blocks(tokens):
            row_mask = None if mask is None else mask.reshape(1, tokens)[:, block]
            final = norm(residual[block][None], None, "norm", out.dtype, False, row_mask)[1]
            out_rows[block] = final[0]

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, shape)
        weights.refresh()
        with torch.no_grad():
            x = x.contiguous()
            out = torch.empty_like(x)
            for start in range(0, shape.batch_size, sequences):
                part = slice(start, start + sequences)
                run_chunk(x[part], None if mask is None else mask[part], out[part])
        return out

    return forward
