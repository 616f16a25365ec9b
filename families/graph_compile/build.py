"""Compile the lean forward and capture it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rooflane.families.captured import CapturedForward, DirectForward
from rooflane.families.door import operand_dtype
from rooflane.families.lean import TORCH_OPS, LeanOps, lean_forward, packed_weights
from rooflane.shapes import Shape


def build(
    model: nn.Module, shape: Shape, device: torch.device, operands: str | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`."""
    device = torch.device(device)
    weights = packed_weights(model, operand_dtype(operands, shape, device.type))
    ops = _cuda_ops() if device.type == "cuda" else TORCH_OPS
    eps = model.final_norm.eps

    def forward(x: Tensor, mask: Tensor | None, packed: dict[str, Tensor]) -> Tensor:
        return lean_forward(x, mask, packed, shape, ops, eps)

    compiled = torch.compile(forward, dynamic=False)

    def run(x: Tensor, mask: Tensor | None) -> Tensor:
        return compiled(x, mask, weights.tensors)

    if device.type == "cuda":
        return CapturedForward(run, weights, shape, device)
    return DirectForward(run, weights, shape)


def _cuda_ops() -> LeanOps:
    """Return torch ops for the compiler to fuse, with the attention kernel between them."""
    from rooflane.families.attention.attention import attention, mask_extent

    # SDPA's flash kernels take no key mask and its masked kernel builds [B, S, S]: ours takes any mask as it is.
    return replace(TORCH_OPS, attention=attention, mask_extent=mask_extent)
