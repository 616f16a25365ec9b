"""Build a resident forward: packed weights and the launch of one configuration, bound at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rooflane.families.resident.choice import choose
from rooflane.families.resident.config import H200, ResidentConfig, Room
from rooflane.families.runtime.bound import bound_forward
from rooflane.families.runtime.call_checks import operand_dtype
from rooflane.families.runtime.runtime_compiler import CAPABILITY, missing_compiler
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape


def build(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`."""
    device = torch.device(device)
    dtype, room = operand_dtype(operands, shape, device.type), room_of(device)
    return build_configured(model, device, dtype, choose(shape, room).config, room.units)


def room_of(device: torch.device) -> Room:
    """Return what a device offers. A CPU, which interprets Triton's kernels alone, counts as an H200 for those."""
    if device.type != "cuda":
        return replace(H200, sm90=False)
    properties = torch.cuda.get_device_properties(device)
    sm90 = (properties.major, properties.minor) == CAPABILITY
    if sm90 and (reason := missing_compiler()):
        warnings.warn(
            f"the CUDA C++ kernels for this GPU cannot be compiled ({reason}); Triton kernels run in their place. "
            "To fix this, pip install 'rooflane[hopper]'",
            stacklevel=2,
        )
        sm90 = False
    return Room(properties.multi_processor_count, properties.shared_memory_per_block_optin, sm90)


def build_configured(
    model: nn.Module, device: torch.device, operands: torch.dtype, config: ResidentConfig, units: int
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the forward of one configuration on a device of so many multiprocessors."""
    weights = PackedWeights(model, lambda source: config.pack(source, operands))
    binder = config.binder(weights.tensors, operands, model.final_norm.eps, units)
    return bound_forward(binder, weights, config.shape, device)
