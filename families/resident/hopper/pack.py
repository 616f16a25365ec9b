"""Pack a model's weights as the tiles a Hopper kernel streams, in the order it uses them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rooflane.families.resident.fold import FoldedLayer, fold_layer
from rooflane.families.resident.hopper.plan import HopperPlan, RowblockPlan, WarpgroupPlan
from rooflane.families.resident.hopper.rowwarp_plan import RowwarpPlan

CORE = 8  # rows, and elements of a row, of a core matrix
# An operand, flat in the order of its tile, and the bias of its columns if it has one.
Tile = tuple[Tensor, Tensor | None]


def pack_hopper(model: nn.Module, plan: HopperPlan, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `tiles` (uint8) and `floats` (float32): biases where they are not in the tiles; final scale and shift."""
    layers = [fold_layer(layer) for layer in model.layers]
    norm = torch.cat([model.final_norm.weight, model.final_norm.bias]).float()
    if not isinstance(plan, WarpgroupPlan):
        tiles = []
        for operand, bias in (tile for layer in layers for tile in _rowblock_tiles(layer, plan)):
            floats = operand.new_zeros(plan.bias_floats) if bias is None else bias
            tiles += [operand.to(operand_dtype).view(torch.uint8), floats.float().view(torch.uint8)]
        return {"tiles": torch.cat(tiles), "floats": norm}
    # One half of every product's columns behind the other, each as its warpgroups stream it.
    width = plan.shape.d_model
    operands = [operand for layer in layers for operand in _products(layer, plan)]
    halves = [_core_matrices(operand[start : start + width // 2]) for start in (0, width // 2) for operand in operands]
    biases = [bias.float() for layer in layers for bias in _biases(layer, plan)]
    return {"tiles": torch.cat(halves).to(operand_dtype).view(torch.uint8), "floats": torch.cat([*biases, norm])}


def _products(layer: FoldedLayer, plan: WarpgroupPlan) -> Iterator[Tensor]:
    """Yield `[width, width]` operands: keys, values, queries, output projection, the feed-forward's in turn."""
    yield from (layer.k, layer.v, layer.q, layer.out)
    ffn_in, _, ffn_out = _pad_hidden(layer, plan.ffn)
    for start in range(0, plan.ffn, plan.shape.d_model):
        yield ffn_in[start : start + plan.shape.d_model]
        yield ffn_out[:, start : start + plan.shape.d_model]


def _biases(layer: FoldedLayer, plan: WarpgroupPlan) -> tuple[Tensor, ...]:
    """Return the biases of queries, output projection, and the feed-forward's second and first product."""
    return layer.q_bias, layer.out_bias, layer.ffn_out_bias, _pad_hidden(layer, plan.ffn)[1]


def _rowblock_tiles(layer: FoldedLayer, plan: RowblockPlan | RowwarpPlan) -> Iterator[Tile]:
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
