"""A stack of any form in torch's plain ops, in the input's own number type: what a mapping is tried against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
}


def reference_stack(
    view: Any, x: Tensor, valid: Tensor | None = None, bias: Tensor | None = None, *, causal: bool
) -> Tensor:
    """Return the output `[B, S, D]` of a viewed stack, rows of invalid tokens 0.

    `valid [B, S]` bool hides keys. `bias` broadcasts to `[B, H, S, S]`: bool (True = visible) or added to the scores.
    """
    form = view.form
    for layer in view.layers:
        if form.norm_first:
            x = x + _attend(layer.attention, _norm(layer.norm1, x, form), form, valid, bias, causal)
            x = x + _feed_forward(layer, _norm(layer.norm2, x, form), form)
        else:
            x = _norm(layer.norm1, x + _attend(layer.attention, x, form, valid, bias, causal), form)
            x = _norm(layer.norm2, x + _feed_forward(layer, x, form), form)
    if view.final_norm is not None:
        x = _norm(view.final_norm, x, form)
    return x if valid is None else x.masked_fill(~valid[:, :, None], 0)


def _norm(norm: Any, x: Tensor, form: Any) -> Tensor:
    if form.norm == "rms":
        return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) + norm.bias
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _feed_forward(layer: Any, x: Tensor, form: Any) -> Tensor:
    return _linear(layer.ffn_out, ACTIVATIONS[form.activation](_linear(layer.ffn_in, x)))


def _linear(linear: Any, x: Tensor) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _attend(attention: Any, x: Tensor, form: Any, valid: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor:
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (_linear(one, x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for one in projections)
    if form.rotary_theta is not None:
        q, k = _rotate(q, form.rotary_theta), _rotate(k, form.rotary_theta)
    scores = q @ k.transpose(-2, -1) * attention.scale
    length = x.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool, device=x.device)
    if causal:
        visible = visible.tril()
    if valid is not None:
        visible = visible & valid[:, None, None, :]
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    # A row that sees no key is an invalid token's; 0 keeps NaN out of the other rows.
    probabilities = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return _linear(attention.out_proj, (probabilities @ v).transpose(1, 2).flatten(2))


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Turn the pairs (i, i + d / 2) of `x [B, H, S, d]` by position theta^(-2 i / d)."""
    length, width = x.shape[2:]
    turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=x.device), turns)
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
