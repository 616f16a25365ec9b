"""Pack a model's weights for the resident kernels, folded in float64 before the one rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rooflane.families.resident.config import Layout

CORE = 8  # rows, and elements of a row, of a core matrix


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


def pack_padded(model: nn.Module, layout: Layout, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `weights` (operands) and `biases` (float32), folded in float64 before the one rounding."""
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
    return nn.functional.pad(tensor, (0, columns - tensor.shape[-1], 0, rows - tensor.shape[-2]))


def _pad_row(tensor: Tensor, columns: int) -> Tensor:
    return nn.functional.pad(tensor, (0, columns - tensor.shape[-1]))


def pack_fragments(model: nn.Module, ffn: int, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `tiles` (uint8) and `floats` (float32): tiles of fragments with their biases; the final norm."""
    tiles = []
    for operand, bias in (tile for layer in map(fold_layer, model.layers) for tile in _fragment_tiles(layer, ffn)):
        floats = operand.new_zeros(model.final_norm.weight.shape) if bias is None else bias
        tiles += [operand.to(operand_dtype).view(torch.uint8), floats.float().view(torch.uint8)]
    return {"tiles": torch.cat(tiles), "floats": _final_norm(model)}


def pack_core_matrices(model: nn.Module, ffn: int, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `tiles` (uint8) and `floats` (float32): tiles of core matrices; the biases and the final norm.

    One half of every product's columns stands behind the other, each as its warpgroups stream it.
    """
    layers = [fold_layer(layer) for layer in model.layers]
    operands = [operand for layer in layers for operand in _products(layer, ffn)]
    half = operands[0].shape[0] // 2
    halves = [_core_matrices(operand[start : start + half]) for start in (0, half) for operand in operands]
    biases = [bias.float() for layer in layers for bias in _biases(layer, ffn)]
    tiles = torch.cat(halves).to(operand_dtype).view(torch.uint8)
    return {"tiles": tiles, "floats": torch.cat([*biases, _final_norm(model)])}


def _final_norm(model: nn.Module) -> Tensor:
    return torch.cat([model.final_norm.weight, model.final_norm.bias]).float()


def _products(layer: FoldedLayer, ffn: int) -> Iterator[Tensor]:
    """Yield `[D, D]` operands: keys, values, queries, output projection, the feed-forward's in turn."""
    yield from (layer.k, layer.v, layer.q, layer.out)
    for ffn_in, _, ffn_out in _hidden_steps(layer, ffn):
        yield from (ffn_in, ffn_out)


def _biases(layer: FoldedLayer, ffn: int) -> tuple[Tensor, ...]:
    """Return the biases of queries, output projection, and the feed-forward's second and first product."""
    hidden = torch.cat([bias for _, bias, _ in _hidden_steps(layer, ffn)])
    return layer.q_bias, layer.out_bias, layer.ffn_out_bias, hidden


def _fragment_tiles(layer: FoldedLayer, ffn: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield an operand, flat in its tile's order, and its bias: of keys, values, queries, output, feed-forward."""
    yield _fragments(layer.k), None
    yield _fragments(layer.v), None
    yield _fragments(layer.q), layer.q_bias
    yield _fragments(layer.out), layer.out_bias
    for index, (ffn_in, bias, ffn_out) in enumerate(_hidden_steps(layer, ffn)):
        yield _fragments(ffn_in), bias
        yield _fragments(ffn_out), None if index else layer.ffn_out_bias


def _hidden_steps(layer: FoldedLayer, ffn: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the feed-forward's first operand, its bias and the second operand, D hidden columns at a time.

    Zeros stand behind the model's hidden columns up to `ffn`.
    """
    width = layer.ffn_in.shape[1]
    ffn_in = _pad(layer.ffn_in, ffn, width)
    bias, ffn_out = _pad_row(layer.ffn_in_bias, ffn), _pad(layer.ffn_out, width, ffn)
    for start in range(0, ffn, width):
        step = slice(start, start + width)
        yield ffn_in[step], bias[step], ffn_out[:, step]


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
