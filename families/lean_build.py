"""Build a lean forward from the fused ops, direct or captured; importing it loads torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rooflane.families.captured import CapturedForward, DirectForward
from rooflane.families.door import operand_dtype
from rooflane.families.lean import TORCH_OPS, LeanOps, lean_forward, packed_weights
from rooflane.shapes import Shape


def build_lean(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None, captured: bool
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`; `captured` applies to CUDA alone."""
    device = torch.device(device)
    weights = packed_weights(model, operand_dtype(operands, shape, device.type))
    ops = TORCH_OPS if device.type == "cpu" else fused_ops()
    eps = model.final_norm.eps

    def run(x: Tensor, mask: Tensor | None) -> Tensor:
        return lean_forward(x, mask, weights.tensors, shape, ops, eps)

    if captured and device.type == "cuda":
        return CapturedForward(run, weights, shape, device)
    return DirectForward(run, weights, shape)


def fused_ops() -> LeanOps:
    """Return the Triton ops; triton is imported here so that a CPU without it can build."""
    from rooflane.families.fused_ops import FUSED_OPS

    return FUSED_OPS
