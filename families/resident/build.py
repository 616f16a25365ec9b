"""Build a resident forward: packed weights and the launches of one configuration, bound at the first call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rooflane.families.bound import BoundForward
from rooflane.families.door import operand_dtype
from rooflane.families.resident.bind import Binder
from rooflane.families.resident.config import HOPPER, ResidentConfig, Room, resident_config
from rooflane.families.resident.layout import layout_of
from rooflane.families.resident.pack import pack_resident
from rooflane.families.weights import PackedWeights
from rooflane.shapes import Shape


def build(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`."""
    device = torch.device(device)
    dtype = operand_dtype(operands, shape, device.type)
    return build_configured(model, shape, device, dtype, resident_config(shape, room_of(device)))


def room_of(device: torch.device) -> Room:
    """Return what a device offers; on a CPU, where the kernels are only interpreted, what an H200 does."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    return Room(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def build_configured(
    model: nn.Module, shape: Shape, device: torch.device, operands: torch.dtype, config: ResidentConfig
) -> BoundForward:
    """Return the forward of one configuration."""
    layout = layout_of(shape, config.ffn_tile, config.pack)
    weights = PackedWeights(model, lambda source: pack_resident(source, layout, operands))
    binder = Binder(shape, layout, config, weights.tensors, model.final_norm.eps)
    return BoundForward(binder, weights, shape, device)
