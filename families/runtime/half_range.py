"""Whether float16 holds what a model's weights can compute, for any finite input.

A LayerNorm bounds what stands behind it: its normalised row has the length sqrt(D) at most. So the weights alone bound
every value that a forward stores in float16: norms, projections, the hidden row and both updates of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The largest float16 is 65504. The bound is of exact arithmetic; the factor of 2 leaves room for rounding.
LARGEST = 65504.0 / 2
# Relative error of a matrix in float16, by root mean square. Rounding alone gives 2e-4; more means that most of the
# weights are below 6e-5, where float16 loses bits.
LOSS = 2.0**-10


def half_obstacle(model: nn.Module) -> str | None:
    """Return why float16 operands cannot take a baseline-shaped model, or None. Waits for the device once."""
    reach: dict[str, Tensor] = {}
    loss: dict[str, Tensor] = {}
    for index, layer in enumerate(model.layers):
        attention = layer.attention
        norms = {"norm1": layer.norm1, "norm2": layer.norm2}
        behind = {
            "q_proj": (layer.norm1, attention.q_proj),
            "k_proj": (layer.norm1, attention.k_proj),
            "v_proj": (layer.norm1, attention.v_proj),
            "ffn_in": (layer.norm2, layer.ffn_in),
        }
        found: dict[str, Tensor] = {}
        for name, norm in norms.items():
            found[name] = norm.weight.double().abs() * len(norm.weight) ** 0.5 + norm.bias.double().abs()
            loss[f"layers.{index}.{name}"] = _loss(norm.weight.double())
        for name, (norm, linear) in behind.items():
            weight, bias = linear.weight.double(), linear.bias.double()
            folded = weight * norm.weight.double()
            longest = folded.square().sum(1).mul(folded.shape[1]).sqrt()
            found[name] = torch.maximum(longest + (bias + weight @ norm.bias.double()).abs(), bias.abs())
            # Some kernels multiply by the raw weight, others by the folded one.
            loss[f"layers.{index}.{name}"] = torch.maximum(_loss(weight), _loss(folded))
        for name, linear, inputs in (
            ("out_proj", attention.out_proj, found["v_proj"]),
            ("ffn_out", layer.ffn_out, found["ffn_in"]),
        ):
            weight = linear.weight.double()
            found[name] = weight.abs() @ inputs + linear.bias.double().abs()
            loss[f"layers.{index}.{name}"] = _loss(weight, inputs)
        reach |= {f"layers.{index}.{name}": bound.max() for name, bound in found.items()}
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
