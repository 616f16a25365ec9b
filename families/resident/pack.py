"""Pack a model's weights for the resident kernels: one operand buffer and one float32 buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rooflane.families.resident.layout import Layout


def pack_resident(model: nn.Module, layout: Layout, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `weights` (operands) and `biases` (float32), folded in float64 before the one rounding.

    LayerNorm's scale and shift go into the projection behind them; d^-0.5 log2(e) into q; the value bias, which every
    row of probabilities sums to exactly itself, into the output bias; the key bias cancels in softmax and is dropped.
    """
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in model.layers:
        attention = layer.attention
        scale = attention.head_dim**-0.5 * math.log2(math.e)
        columns = attention.head_dim * layout.pack
        q_weight, q_bias = _fold(layer.norm1, attention.q_proj)
        k_weight, _ = _fold(layer.norm1, attention.k_proj)
        v_weight, v_bias = _fold(layer.norm1, attention.v_proj)
        out_weight, out_bias = attention.out_proj.weight.double(), attention.out_proj.bias.double()
        # [tiles, columns, D] each; the output projection's rows are a tile's columns already.
        split = [w.view(layout.tiles, columns, -1) for w in (q_weight * scale, k_weight, v_weight)]
        q_tile, k_tile, v_tile = (_pad(w.transpose(1, 2), layout.width, layout.head) for w in split)
        out_tile = _pad(out_weight.t().reshape(layout.tiles, columns, -1), layout.head, layout.width)
        tile = (q_tile, torch.cat([k_tile, v_tile], dim=2), out_tile)  # [width, head], [width, 2 head], [head, width]
        weights.append(torch.cat([part.reshape(layout.tiles, -1) for part in tile], dim=1).reshape(-1))
        in_weight, in_bias = _fold(layer.norm2, layer.ffn_in)
        weights.append(_pad(in_weight.t(), layout.width, layout.ffn).reshape(-1))
        weights.append(_pad(layer.ffn_out.weight.double().t(), layout.ffn, layout.width).reshape(-1))
        biases.append(_pad((q_bias * scale).view(layout.tiles, columns), layout.tiles, layout.head).reshape(-1))
        biases.append(_pad_row(out_bias + out_weight @ v_bias, layout.width))
        biases.append(_pad_row(layer.ffn_out.bias.double(), layout.width))
        biases.append(_pad_row(in_bias, layout.ffn))
    biases.append(_pad_row(model.final_norm.weight.double(), layout.width))
    biases.append(_pad_row(model.final_norm.bias.double(), layout.width))
    return {
        "weights": torch.cat(weights).to(operand_dtype).contiguous(),
        "biases": torch.cat(biases).float().contiguous(),
    }


def _fold(norm: nn.LayerNorm, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the float64 `(weight, bias)` of `linear(norm(x))` as an affine map of the normalised x."""
    weight = linear.weight.double()
    return weight * norm.weight.double(), linear.bias.double() + weight @ norm.bias.double()


def _pad(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Return the last two dimensions padded with zeros to `rows x columns`."""
    return nn.functional.pad(tensor, (0, columns - tensor.shape[-1], 0, rows - tensor.shape[-2]))


def _pad_row(tensor: Tensor, columns: int) -> Tensor:
    """Return a vector padded with zeros."""
    return nn.functional.pad(tensor, (0, columns - tensor.shape[-1]))
