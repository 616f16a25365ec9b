"""Ablations: copies of the reference with one thing wrong, to see whether the checks would notice.

An ablation is an edit of a float64 copy of the model, so that its error is the fault's own and no rounding hides it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooflane.baseline import BaselineTransformer

Forward = Callable[[Tensor, Tensor | None], Tensor]
DEFAULT_WINDOW = 256
BIASES = ("q_proj", "k_proj", "v_proj", "out_proj", "ffn_in", "ffn_out")


@dataclass(frozen=True)
class Ablation:
    """One fault: its name, what it models, and the edit that returns the faulty forward of a model it owns."""

    name: str
    stands_for: str
    edit: Callable[[BaselineTransformer], Forward]
    remembers: bool = False

    def build(self, model: BaselineTransformer) -> Forward:
        """Return the faulty forward of a copy of `model`; a stale mask is that of a call with every token valid."""
        forward = self.edit(copy.deepcopy(model))
        if not self.remembers:
            return forward

        def after_a_full_mask(x: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                forward(x, torch.ones_like(mask))
            return forward(x, mask)

        return after_a_full_mask


def ablations(window: int = DEFAULT_WINDOW) -> tuple[Ablation, ...]:
    """Return every ablation; `window` is the width, in keys, of the windowed attention."""
    return (
        Ablation("tanh GELU", "the approximation of erf GELU", _tanh_gelu),
        Ablation("exp cubic", "softmax by a Taylor polynomial: linear attention", partial(_attend, _polynomial(3))),
        Ablation("exp quadratic", "the same with two terms fewer", partial(_attend, _polynomial(2))),
        Ablation("exp linear", "the same with one term", partial(_attend, _polynomial(1))),
        Ablation("uniform attention", "every visible key weighs the same", partial(_attend, _uniform)),
        Ablation("attention = 0", "no attention, its output bias kept", partial(_attend, torch.zeros_like)),
        Ablation(f"window {window}", "only the nearest keys are read", partial(_attend, _windowed(window))),
        Ablation("not causal", "the causal flag forgotten", _not_causal),
        Ablation("scale d_model", "scores scaled by the model's width, not the head's", _wrong_scale),
        *(
            Ablation(f"no {name} bias", "a bias forgotten in every layer", _filled(f"{name}.bias", 0.0))
            for name in BIASES
        ),
        Ablation("no norm bias", "LayerNorm biases forgotten", _filled("bias", 0.0, "norm")),
        Ablation("no norm weight", "LayerNorm weights forgotten", _filled("weight", 1.0, "norm")),
        Ablation("no final norm", "the last LayerNorm left out", _no_final_norm),
        Ablation("no last layer", "one layer too few", _no_last_layer),
        Ablation("no residual", "the last layer's attention residual dropped", _no_residual),
        Ablation("stale mask", "the mask of the call before", _stale_mask, remembers=True),
        Ablation("no mask", "the mask not read at all", lambda model: lambda x, mask=None: model(x)),
        Ablation("no key mask", "padded rows zeroed, padded keys still attended to", _no_key_mask),
    )


def _each_layer(model: BaselineTransformer, method: str, replacement: Callable[..., Tensor]) -> Forward:
    """Replace a method of every layer, or of its attention, by a function of the same arguments."""
    for layer in model.layers:
        owner = layer if method == "forward" else layer.attention
        setattr(owner, method, MethodType(replacement, owner))
    return model


def _layer_forward(approximate: str = "none", residual: bool = True) -> Callable[..., Tensor]:
    """Return a layer's forward with another GELU, or without the residual of its attention."""

    def forward(layer: nn.Module, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        attended = layer.attention(layer.norm1(x), mask, causal)
        x = x + attended if residual else attended
        x = x + layer.ffn_out(functional.gelu(layer.ffn_in(layer.norm2(x)), approximate=approximate))
        return x if mask is None else x.masked_fill(~mask[:, :, None], 0)

    return forward


def _tanh_gelu(model: BaselineTransformer) -> Forward:
    return _each_layer(model, "forward", _layer_forward(approximate="tanh"))


def _no_residual(model: BaselineTransformer) -> Forward:
    model.layers[-1].forward = MethodType(_layer_forward(residual=False), model.layers[-1])
    return model


def _attend(weights: Callable[[Tensor], Tensor], model: BaselineTransformer) -> Forward:
    """Replace softmax: `weights` makes unnormalised weights `[B, H, S, S]` of the scores, masked ones at -inf."""

    def attend(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * attention.scale
        if causal:
            length = scores.shape[-1]
            future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(diagonal=1)
            scores.masked_fill_(future, float("-inf"))
        if mask is not None:
            scores.masked_fill_(~mask[:, None, None, :], float("-inf"))
        found = weights(scores)
        total = found.sum(dim=-1, keepdim=True)
        return torch.matmul(found / torch.where(total == 0, 1.0, total), v)

    return _each_layer(model, "attend", attend)


def _polynomial(degree: int) -> Callable[[Tensor], Tensor]:
    """Return exp's Taylor polynomial; a query times a key stays a product of features, so it is linear attention."""

    def weights(scores: Tensor) -> Tensor:
        hidden = torch.isinf(scores)
        scores = scores.masked_fill(hidden, 0)
        found = torch.ones_like(scores)
        for term in range(degree, 0, -1):
            found = 1 + found * scores / term
        return found.masked_fill(hidden, 0)

    return weights


def _uniform(scores: Tensor) -> Tensor:
    return (~torch.isinf(scores)).to(scores.dtype)


def _windowed(width: int) -> Callable[[Tensor], Tensor]:
    """Return softmax over the nearest `width` keys: the last ones where later keys are hidden, else those around."""

    def weights(scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        place = torch.arange(length, device=scores.device)
        back = place[:, None] - place[None, :]
        causal = length > 1 and bool(torch.isinf(scores[:, :, 0, 1:]).all())
        far = (back >= width) if causal else (back.abs() > width // 2)
        # A row whose every near key is masked would have no softmax; it keeps its weights instead.
        near = scores.masked_fill(far, float("-inf"))
        lost = torch.isinf(near).all(dim=-1, keepdim=True)
        near = torch.where(lost, scores, near)
        return torch.softmax(near, dim=-1)

    return weights


def _not_causal(model: BaselineTransformer) -> Forward:
    model.config = replace(model.config, causal=False)
    return model


def _wrong_scale(model: BaselineTransformer) -> Forward:
    for layer in model.layers:
        layer.attention.scale = model.config.d_model**-0.5
    return model


def _filled(end: str, value: float, part: str = "") -> Callable[[BaselineTransformer], Forward]:
    """Return the edit that fills the parameters whose path ends in `end` and has `part` in it."""

    def edit(model: BaselineTransformer) -> Forward:
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if part in path and path.endswith(end):
                    parameter.fill_(value)
        return model

    return edit


def _no_final_norm(model: BaselineTransformer) -> Forward:
    model.final_norm = nn.Identity()
    return model


def _no_last_layer(model: BaselineTransformer) -> Forward:
    model.layers = model.layers[:-1]
    return model


def _stale_mask(model: BaselineTransformer) -> Forward:
    held: list[Tensor | None] = []

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        held.append(mask)
        return model(x, held.pop(0) if len(held) > 1 else mask)

    return forward


def _no_key_mask(model: BaselineTransformer) -> Forward:
    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = model(x)
        return out if mask is None else out.masked_fill(~mask[:, :, None], 0)

    return forward
