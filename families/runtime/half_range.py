"""Whether float16 holds what a model's weights can compute, for any finite input.

A LayerNorm or RMSNorm bounds what stands behind it: its normalised row has the length sqrt(D) at most. So the weights
alone bound every value that a forward stores in float16: norms, projections, the hidden row and both updates of a
layer. Every activation is x times a factor between 0 and 1. Attention takes means of v. Rotary positions turn pairs, so
an element grows by sqrt(2) at most.

The first layer of a post-norm stack reads x without a norm. No weight bounds x, so neither are its q, k, v and first
update bounded: there the bound starts at norm1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooflane.shapes import PUBLISHED

# The largest float16 is 65504. The bound is of exact arithmetic; the factor of 2 leaves room for rounding.
LARGEST = 65504.0 / 2
# Relative error of a matrix in float16, by root mean square. Rounding alone gives 2e-4; more means that most of the
# weights are below 6e-5, where float16 loses bits.
LOSS = 2.0**-10


def half_obstacle(model: nn.Module, *, summed: bool = False) -> str | None:
    """Return why float16 operands cannot take a stack's weights, or None. Waits for the device once.

    `summed` says that float16 holds the sum of all updates too.
    """
    form = getattr(model, "form", PUBLISHED)
    reach: dict[str, Tensor] = {}
    loss: dict[str, Tensor] = {}
    # The norm before the layer: that of the layer before it where norms follow the sums.
    before: nn.Module | None = None
    for index, layer in enumerate(model.layers):
        attention = layer.attention
        first, second = (layer.norm1, layer.norm2) if form.norm_first else (before, layer.norm1)
        before = layer.norm2
        behind = {
            "q_proj": (first, attention.q_proj),
            "k_proj": (first, attention.k_proj),
            "v_proj": (first, attention.v_proj),
            "ffn_in": (second, layer.ffn_in),
        }
        found: dict[str, Tensor] = {}
        # No product reads the last norm of a post-norm stack, so its float16 range does not matter.
        read = form.norm_first or index + 1 < len(model.layers)
        for name, norm in {"norm1": layer.norm1, **({"norm2": layer.norm2} if read else {})}.items():
            found[name] = norm.weight.double().abs() * len(norm.weight) ** 0.5 + norm.bias.double().abs()
            loss[f"layers.{index}.{name}"] = _loss(norm.weight.double())
        for name, (norm, linear) in behind.items():
            weight, bias = linear.weight.double(), linear.bias.double()
            lost = _loss(weight)
            if norm is not None:
                folded = weight * norm.weight.double()
                longest = folded.square().sum(1).mul(folded.shape[1]).sqrt()
                reached = torch.maximum(longest + (bias + weight @ norm.bias.double()).abs(), bias.abs())
                turned = form.rotary_theta is not None and name in ("q_proj", "k_proj")
                found[name] = reached * 2**0.5 if turned else reached
                # Some kernels multiply by the raw weight, others by the folded one.
                lost = torch.maximum(lost, _loss(folded))
            loss[f"layers.{index}.{name}"] = lost
        for name, linear, source in (("out_proj", attention.out_proj, "v_proj"), ("ffn_out", layer.ffn_out, "ffn_in")):
            weight = linear.weight.double()
            if source in found:
                found[name] = weight.abs() @ found[source] + linear.bias.double().abs()
            loss[f"layers.{index}.{name}"] = _loss(weight, found.get(source, 1.0))
        reach |= {f"layers.{index}.{name}": bound.max() for name, bound in found.items()}
    if summed:
        updates = [bound for name, bound in reach.items() if name.endswith(("out_proj", "ffn_out"))]
        reach["the sum of all updates"] = torch.stack(updates).sum()
    bounds, losses = torch.stack([*reach.values(), *loss.values()]).split([len(reach), len(loss)])
    for name, bound in zip(reach, bounds.tolist(), strict=True):
        if not bound <= LARGEST:
            return f"{name} may reach {bound:.2g}, and float16 ends at 65504"
    for name, lost in zip(loss, losses.tolist(), strict=True):
        if not lost <= LOSS:
            return f"the weights of {name} lose {lost:.1%} of themselves in float16, which ends at 6e-8"
    return None


def _loss(weight: Tensor, inputs: Tensor | float = 1.0) -> Tensor:
    """Return the error of a float64 weight `[out, in]` in float16, relative to its size, weighted by its inputs."""
    error = (weight - weight.half().double()) * inputs
    return error.norm() / (weight * inputs).norm().clamp_min(1e-300)
