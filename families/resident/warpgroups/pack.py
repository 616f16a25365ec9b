"""Pack a model's weights as the tiles the warpgroup kernel streams, in the order it uses them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rooflane.families.resident.fold import FoldedLayer, fold_layer
from rooflane.families.resident.warpgroups.plan import STEP, WarpgroupPlan

CORE = 8  # rows, and elements of a row, of a core matrix


def pack_warpgroups(model: nn.Module, plan: WarpgroupPlan, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `tiles` (uint8: operands, then a float32 bias each) and `final_norm` (float32 scale, then shift)."""
    tiles = [tile for layer in model.layers for tile in _layer_tiles(fold_layer(layer), plan, operand_dtype)]
    norm = model.final_norm
    return {"tiles": torch.cat(tiles), "final_norm": torch.cat([norm.weight, norm.bias]).float()}


def _layer_tiles(layer: FoldedLayer, plan: WarpgroupPlan, dtype: torch.dtype) -> list[Tensor]:
    """Return a layer's tiles: all keys, all values; queries and output projection in turn; both halves of the FFN."""
    q, k, v, q_bias = (_pad_heads(part, plan) for part in (layer.q, layer.k, layer.v, layer.q_bias))
    out = _pad_heads(layer.out.t(), plan).t()
    hidden = plan.ffn - layer.ffn_in.shape[0]
    ffn_in, ffn_out = pad(layer.ffn_in, (0, 0, 0, hidden)), pad(layer.ffn_out, (0, hidden))
    ffn_in_bias = pad(layer.ffn_in_bias, (0, hidden))

    def tile(operand: Tensor, bias: Tensor | None = None) -> Tensor:
        floats = operand.new_zeros(0) if bias is None else bias
        floats = pad(floats, (0, plan.bias_floats - floats.shape[0])).float()
        return torch.cat([_core_matrices(operand).to(dtype).view(torch.uint8), floats.view(torch.uint8)])

    tiles = [tile(part) for side in (k, v) for part in side.split(STEP)]
    wide = max(STEP, plan.head)
    for start in range(0, q.shape[0], wide):
        steps = [slice(first, first + STEP) for first in range(start, start + wide, STEP)]
        tiles += [tile(q[step], q_bias[step]) for step in steps]
        tiles += [tile(out[:, step], layer.out_bias if step.start == 0 else None) for step in steps]
    for start in range(0, plan.ffn, STEP):
        step = slice(start, start + STEP)
        tiles.append(tile(ffn_in[step], ffn_in_bias[step]))
        tiles.append(tile(ffn_out[:, step], layer.ffn_out_bias if start == 0 else None))
    return tiles


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
