"""A layer's weights folded in float64, before the one rounding: what both kinds of resident kernels pack."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class FoldedLayer:
    """Float64 weights `[out, in]` and biases `[out]` of one layer.

    LayerNorm's scale and shift stand in the projection behind them; d^-0.5 log2(e) in q; the value bias, which every
    row of probabilities sums to exactly itself, in the output bias; the key bias cancels in softmax and is dropped.
    """

    q: Tensor
    q_bias: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    out_bias: Tensor
    ffn_in: Tensor
    ffn_in_bias: Tensor
    ffn_out: Tensor
    ffn_out_bias: Tensor


def fold_layer(layer: nn.Module) -> FoldedLayer:
    """Return the folded weights of a layer of the baseline model."""
    attention = layer.attention
    scale = attention.head_dim**-0.5 * math.log2(math.e)
    q, q_bias = _fold(layer.norm1, attention.q_proj)
    k, _ = _fold(layer.norm1, attention.k_proj)
    v, v_bias = _fold(layer.norm1, attention.v_proj)
    out, out_bias = attention.out_proj.weight.double(), attention.out_proj.bias.double()
    ffn_in, ffn_in_bias = _fold(layer.norm2, layer.ffn_in)
    return FoldedLayer(
        q * scale, q_bias * scale, k, v, out, out_bias + out @ v_bias, ffn_in, ffn_in_bias,
        layer.ffn_out.weight.double(), layer.ffn_out.bias.double(),
    )  # fmt: skip


def _fold(norm: nn.LayerNorm, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the float64 `(weight, bias)` of `linear(norm(x))` as an affine map of the normalised x."""
    weight = linear.weight.double()
    return weight * norm.weight.double(), linear.bias.double() + weight @ norm.bias.double()
