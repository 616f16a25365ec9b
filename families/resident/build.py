"""Build a resident forward: packed weights and the launches of one configuration or plan, bound at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rooflane.families.resident.bind import Binder
from rooflane.families.resident.choice import choose
from rooflane.families.resident.config import HOPPER, ResidentConfig, Room
from rooflane.families.resident.hopper.bind import HopperBinder
from rooflane.families.resident.hopper.pack import pack_hopper
from rooflane.families.resident.hopper.plan import HopperPlan
from rooflane.families.resident.layout import layout_of
from rooflane.families.resident.pack import pack_resident
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
    choice = choose(shape, room)
    if isinstance(choice, ResidentConfig):
        return build_configured(model, shape, device, dtype, choice)
    return build_hopper(model, device, dtype, choice, room.units)


def room_of(device: torch.device) -> Room:
    """Return what a device offers; on a CPU, which interprets Triton's kernels alone, what an H200 offers those."""
    if device.type != "cuda":
        return replace(HOPPER, warpgroups=False)
    properties = torch.cuda.get_device_properties(device)
    hopper = (properties.major, properties.minor) == CAPABILITY
    if hopper and (reason := missing_compiler()):
        warnings.warn(
            f"this GPU has kernels in CUDA C++ that cannot be compiled ({reason}); Triton's run in their place. "
            "pip install 'rooflane[hopper]' brings the compiler",
            stacklevel=2,
        )
        hopper = False
    return Room(properties.multi_processor_count, properties.shared_memory_per_block_optin, hopper)


def build_configured(
    model: nn.Module, shape: Shape, device: torch.device, operands: torch.dtype, config: ResidentConfig
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the forward of one Triton configuration."""
    layout = layout_of(shape, config.ffn_tile, config.pack)
    weights = PackedWeights(model, lambda source: pack_resident(source, layout, operands))
    binder = Binder(shape, layout, config, weights.tensors, model.final_norm.eps)
    return bound_forward(binder, weights, shape, device)


def build_hopper(
    model: nn.Module, device: torch.device, operands: torch.dtype, plan: HopperPlan, units: int
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the forward of one Hopper plan on a device of so many multiprocessors."""
    weights = PackedWeights(model, lambda source: pack_hopper(source, plan, operands))
    binder = HopperBinder(plan, weights.tensors, operands, model.final_norm.eps, units)
    return bound_forward(binder, weights, plan.shape, device)
