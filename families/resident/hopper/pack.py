"""Pack a model's weights as the tiles a Hopper kernel streams, in the order it uses them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rooflane.families.resident.fold import FoldedLayer, fold_layer
from rooflane.families.resident.hopper.plan import STEP, HopperPlan, RowblockPlan, WarpgroupPlan

CORE = 8  # rows, and elements of a row, of a core matrix
# An operand, flat in the order of its tile, and the bias of its columns if it has one.
Tile = tuple[Tensor, Tensor | None]


def pack_hopper(model: nn.Module, plan: HopperPlan, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `tiles` (uint8: operands, then a float32 bias each) and `final_norm` (float32 scale, then shift)."""
    layer_tiles = _warpgroup_tiles if isinstance(plan, WarpgroupPlan) else _rowblock_tiles
    tiles = []
    for layer in model.layers:
        for operand, bias in layer_tiles(fold_layer(layer), plan):
            floats = operand.new_zeros(0) if bias is None else bias
            floats = pad(floats, (0, plan.bias_floats - floats.shape[0])).float()
            tiles += [operand.to(operand_dtype).view(torch.uint8), floats.view(torch.uint8)]
    norm = model.final_norm
    return {"tiles": torch.cat(tiles), "final_norm": torch.cat([norm.weight, norm.bias]).float()}


def _warpgroup_tiles(layer: FoldedLayer, plan: WarpgroupPlan) -> Iterator[Tile]:
    """Yield all keys, all values; queries and output projection in turn; both halves of the feed-forward in turn."""
    q, k, v, q_bias = (_pad_heads(part, plan) for part in (layer.q, layer.k, layer.v, layer.q_bias))
    out = _pad_heads(layer.out.t(), plan).t()
    ffn_in, ffn_in_bias, ffn_out = _pad_hidden(layer, plan.ffn)
    for side in (k, v):
        yield from ((_core_matrices(part), None) for part in side.split(STEP))
    wide = max(STEP, plan.head)
    for start in range(0, q.shape[0], wide):
        steps = [slice(first, first + STEP) for first in range(start, start + wide, STEP)]
        yield from ((_core_matrices(q[step]), q_bias[step]) for step in steps)
        yield from ((_core_matrices(out[:, step]), None if step.start else layer.out_bias) for step in steps)
    for start in range(0, plan.ffn, STEP):
        step = slice(start, start + STEP)
        yield _core_matrices(ffn_in[step]), ffn_in_bias[step]
        yield _core_matrices(ffn_out[:, step]), None if start else layer.ffn_out_bias


def _rowblock_tiles(layer: FoldedLayer, plan: RowblockPlan) -> Iterator[Tile]:
    """Yield keys, values, queries, output projection; both halves of the feed-forward in turn."""
    yield _fragments(layer.k), None
    yield _fragments(layer.v), None
    yield _fragments(layer.q), layer.q_bias
    yield _fragments(layer.out), layer.out_bias
    ffn_in, ffn_in_bias, ffn_out = _pad_hidden(layer, plan.ffn)
    for start in range(0, plan.ffn, plan.shape.d_model):
        step = slice(start, start + plan.shape.d_model)
        yield _fragments(ffn_in[step]), ffn_in_bias[step]
        yield _fragments(ffn_out[:, step]), None if start else layer.ffn_out_bias


def _pad_hidden(layer: FoldedLayer, ffn: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the feed-forward's weights and first bias with zeros behind the hidden columns."""
    more = ffn - layer.ffn_in.shape[0]
    return pad(layer.ffn_in, (0, 0, 0, more)), pad(layer.ffn_in_bias, (0, more)), pad(layer.ffn_out, (0, more))


def _pad_heads(tensor: Tensor, plan: WarpgroupPlan) -> Tensor:
    """Return `[num_heads * head_dim, ...]` with zeros behind each head and behind the last."""
    heads, width = plan.shape.num_heads, plan.shape.head_dim
    split = tensor.reshape(heads, width, -1)
    padded = pad(split, (0, 0, 0, plan.head - width, 0, plan.heads - heads))
    return padded.reshape(plan.heads * plan.head, *tensor.shape[1:])


def _core_matrices(operand: Tensor) -> Tensor:
    """Return `[N, K]` flat as 8 x 8 core matrices, those of eight columns of K one behind the other along N."""
    rows, columns = operand.shape
    return operand.reshape(rows // CORE, CORE, columns // CORE, CORE).permute(2, 0, 1, 3).reshape(-1)


def _fragments(operand: Tensor) -> Tensor:
    """Return `[N, K]` flat as a warp's lanes hold it: for 16 columns of N and 16 of K, 8 elements a lane, in a row.

    PTX ISA, mma.m16n8k16, matrix B: lane 4g + t holds column g at rows 2t, 2t + 1, 2t + 8, 2t + 9; two columns' worth.
    """
    n, k = operand.shape
    split = operand.reshape(n // 16, 2, 8, k // 16, 2, 4, 2)  # [slice, n8, g, step, half, t, pair]
    return split.permute(0, 3, 2, 5, 1, 4, 6).reshape(-1)
