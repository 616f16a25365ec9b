"""Pack a model's weights for the resident kernels: one operand buffer and one float32 buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooflane.families.resident.fold import fold_layer
from rooflane.families.resident.layout import Layout


def pack_resident(model: nn.Module, layout: Layout, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `weights` (operands) and `biases` (float32), folded in float64 (fold.py) before the one rounding."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in map(fold_layer, model.layers):
        columns = layer.q.shape[0] // layout.tiles
        # [tiles, columns, D] each; the output projection's rows are a tile's columns already.
        split = [w.view(layout.tiles, columns, -1) for w in (layer.q, layer.k, layer.v)]
        q_tile, k_tile, v_tile = (_pad(w.transpose(1, 2), layout.width, layout.head) for w in split)
        out_tile = _pad(layer.out.t().reshape(layout.tiles, columns, -1), layout.head, layout.width)
        tile = (q_tile, torch.cat([k_tile, v_tile], dim=2), out_tile)  # [width, head], [width, 2 head], [head, width]
        weights.append(torch.cat([part.reshape(layout.tiles, -1) for part in tile], dim=1).reshape(-1))
        weights.append(_pad(layer.ffn_in.t(), layout.width, layout.ffn).reshape(-1))
        weights.append(_pad(layer.ffn_out.t(), layout.ffn, layout.width).reshape(-1))
        biases.append(_pad(layer.q_bias.view(layout.tiles, columns), layout.tiles, layout.head).reshape(-1))
        biases.append(_pad_row(layer.out_bias, layout.width))
        biases.append(_pad_row(layer.ffn_out_bias, layout.width))
        biases.append(_pad_row(layer.ffn_in_bias, layout.ffn))
    biases.append(_pad_row(model.final_norm.weight.double(), layout.width))
    biases.append(_pad_row(model.final_norm.bias.double(), layout.width))
    return {
        "weights": torch.cat(weights).to(operand_dtype).contiguous(),
        "biases": torch.cat(biases).float().contiguous(),
    }


def _pad(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Return the last two dimensions padded with zeros to `rows x columns`."""
    return nn.functional.pad(tensor, (0, columns - tensor.shape[-1], 0, rows - tensor.shape[-2]))


def _pad_row(tensor: Tensor, columns: int) -> Tensor:
    """Return a vector padded with zeros."""
    return nn.functional.pad(tensor, (0, columns - tensor.shape[-1]))
