"""Build a resident forward: what the device offers, packed weights, a launch bound at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rooflane.families.lean.build import wide_forward
from rooflane.families.resident.config import CAPABILITY, H200, ResidentConfig, Room
from rooflane.families.runtime.bound import bound_forward
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.families.runtime.host import missing_compiler
from rooflane.families.runtime.weights import PackedWeights


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
    # A float16 model has float16's range itself.
    narrow = operands == torch.float16 and config.shape.dtype != "float16"
    weights = PackedWeights(
        model, lambda source: config.pack(source, operands), half_obstacle if narrow else lambda source: None
    )
    binder = config.binder(weights.tensors, operands, model.final_norm.eps, units)
    return bound_forward(binder, weights, config.shape, device, wide_forward(model, config.shape))
