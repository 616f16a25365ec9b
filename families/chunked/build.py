"""Run the lean forward chunk by chunk, with the residual stream in the output's memory.

Attention is torch's fastest kernel where the mask allows it, our kernel for other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rooflane.families.chunked import chunk_plan
from rooflane.families.lean.lean import TORCH_OPS, LeanOps, choose_ops, form_of, lean_stack, lean_weights, project
from rooflane.families.runtime.call_checks import DTYPES, check_call, operand_dtype
from rooflane.families.runtime.weights import UNFIT
from rooflane.shapes import Shape

# cuDNN first: 44 against 65 ms for one sequence of 100,000 tokens, 16 heads of 64, causal (H200, November 2026).
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Query rows of a block on the masked CPU path, which keep its [rows, S] mask small.
MASKED_ROWS = 1024
Forward = Callable[[Tensor, Tensor | None], Tensor]


def build(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None, budget_gib: float
) -> Forward:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`, scratch within `budget_gib`."""
    if isinstance(budget_gib, bool) or not isinstance(budget_gib, (int, float)) or not budget_gib > 0:
        raise ValueError(f"chunked: budget_gib is {budget_gib!r}; it must be a number above 0")
    device = torch.device(device)
    ops = choose_ops(shape, form_of(model), device)
    # Built at the first call with weights that do not fit float16.
    wide = cache(lambda: _build(model, shape, DTYPES[shape.dtype], TORCH_OPS, budget_gib, None))
    return _build(model, shape, operand_dtype(operands, shape, device.type), ops, budget_gib, wide)


def _build(
    model: nn.Module, shape: Shape, dtype: torch.dtype, ops: LeanOps, budget_gib: float,
    wide: Callable[[], Forward] | None,
) -> Forward:  # fmt: skip
    weights, stack = lean_weights(model, dtype, ops), lean_stack(model, shape, ops)
    form = stack.form
    sequences, rows, _ = chunk_plan(shape, budget_gib * 2**30, dtype.itemsize, form)
    between = "norm2" if form.norm_first else "norm1"

    def linear(value: Tensor, name: str) -> Tensor:
        return functional.linear(value, weights.tensors[f"{name}.weight"], weights.tensors[f"{name}.bias"])

    def norm(
        value: Tensor, update: Tensor | None, name: str, out_dtype: torch.dtype = dtype, **options: Any
    ) -> tuple[Tensor | None, Tensor]:
        return stack.norm(weights.tensors, name, value, update, out_dtype, **options)

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
        qkv = torch.empty(tokens, 3 * shape.num_heads * form.head_width(shape), dtype=dtype, device=x.device)
        packed = qkv.view(count, length, -1)
        for layer in range(shape.num_layers):
            for block in blocks(tokens):
                given = source[block]
                normed = norm(given, None, f"{layer}.norm1")[1] if form.norm_first else given.to(dtype)
                projected = project(normed, weights.tensors, layer)
                for place, part in enumerate([projected] if isinstance(projected, Tensor) else projected):
                    qkv[block].narrow(1, place * part.shape[1], part.shape[1]).copy_(part)
            if stack.rotary is not None:
                # One sequence at a time, because torch's ops need float32 copies of its q.
                for sequence in packed.split(1):
                    ops.rotate(sequence, *stack.rotary)
            context = attend_chunk(packed, mask, shape.num_heads, shape.causal, ops).view(tokens, -1)
            for block in blocks(tokens):
                attended = linear(context[block], f"{layer}.out")
                kept, normed = norm(source[block], attended, f"{layer}.{between}", residual=True)
                hidden = ops.activate(linear(normed, f"{layer}.ffn_in"), form.activation)
                update = linear(hidden, f"{layer}.ffn_out")
                if form.norm_first or f"{layer}.norm2.weight" not in weights.tensors:
                    torch.add(kept, update, out=residual[block])
                else:
                    residual[block] = norm(kept, update, f"{layer}.norm2", torch.float32)[1]
            source = residual
        if "norm.weight" not in weights.tensors:
            if residual is not out_rows:
                out_rows.copy_(residual)
            if mask is not None:
                out.masked_fill_(~mask[:, :, None], 0)
            return
        for block in blocks(tokens):
            row_mask = None if mask is None else mask.reshape(1, tokens)[:, block]
            final = norm(residual[block][None], None, "norm", out.dtype, mask=row_mask)[1]
            out_rows[block] = final[0]

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, shape)
        if weights.refresh() == UNFIT and wide is not None:
            return wide()(x, mask)
        with torch.no_grad():
            # A mask of other strides may stay a view under reshape, and the kernels read it row behind row.
            x, mask = x.contiguous(), mask if mask is None else mask.contiguous()
            out = torch.empty_like(x)
            for start in range(0, shape.batch_size, sequences):
                part = slice(start, start + sequences)
                run_chunk(x[part], None if mask is None else mask[part], out[part])
        return out

    return forward


def attend_chunk(qkv: Tensor, mask: Tensor | None, num_heads: int, causal: bool, ops: LeanOps) -> Tensor:
    """Return the context `[b, S, H d]` of `qkv [b, S, 3 H d]`; rows past the last valid token are finite, not 0.

    A sequence whose valid tokens are a prefix is attended at its own length without a mask. Reading the lengths
    synchronises once per call, which takes microseconds. Such sequences take milliseconds.
    """
    batch, length, packed = qkv.shape
    width = packed // 3
    if mask is None:
        return _prefix(qkv, num_heads, causal)
    if qkv.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "chunked reads the lengths in a mask on the host, so a call with a mask cannot be captured into a CUDA "
            "graph; capture a call without a mask, or build another family"
        )
    last = (mask * torch.arange(1, length + 1, device=mask.device)).amax(1)
    extents = torch.stack([last, mask.sum(1)]).tolist()
    if all(end == count == length for end, count in zip(*extents, strict=True)):
        return _prefix(qkv, num_heads, causal)
    out = torch.zeros(batch, length, width, dtype=qkv.dtype, device=qkv.device)
    for index, (end, count) in enumerate(zip(*extents, strict=True)):
        if end == 0:
            continue
        one = qkv[index : index + 1, :end]
        if end == count:
            out[index, :end] = _prefix(one, num_heads, causal)[0]
        else:
            one_mask = mask[index : index + 1, :end].contiguous()
            one = one.contiguous()
            if ops is TORCH_OPS and end > MASKED_ROWS:
                out[index, :end] = _masked_rows(one, one_mask, num_heads, causal)[0]
            else:
                out[index, :end] = ops.attention(one, one_mask, ops.mask_extent(one_mask), num_heads, causal)[0]
    return out


def _prefix(qkv: Tensor, num_heads: int, causal: bool) -> Tensor:
    """Attend sequences that are valid throughout."""
    batch, length, packed = qkv.shape
    q, k, v = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if qkv.device.type == "cuda" and qkv.dtype != torch.float32:
        with sdpa_kernel(BACKENDS, set_priority=True):
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return context.transpose(1, 2).reshape(batch, length, packed // 3)


def _masked_rows(qkv: Tensor, mask: Tensor, num_heads: int, causal: bool) -> Tensor:
    """Attend block by block of query rows, each with its own `[rows, S]` mask."""
    batch, length, packed = qkv.shape
    q, k, v = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    out = torch.empty_like(q)
    position = torch.arange(length, device=qkv.device)
    for start in range(0, length, MASKED_ROWS):
        block = slice(start, min(start + MASKED_ROWS, length))
        visible = mask[:, None, None, :]
        if causal:
            visible = visible & (position[None, :] <= position[block, None])
        context = functional.scaled_dot_product_attention(q[:, :, block], k, v, attn_mask=visible)
        out[:, :, block] = torch.where(visible.any(-1, keepdim=True), context, 0.0)
    return out.transpose(1, 2).reshape(batch, length, packed // 3)
