"""Choose the lean forward's ops for a device: our kernels where Triton and the tile sizes allow, else torch's."""

from __future__ import annotations

from dataclasses import replace

import torch

from rooflane.families.lean.attention.config import attention_refusal
from rooflane.families.lean.lean import TORCH_OPS, LeanOps
from rooflane.shapes import Shape

# Triton 3.6 compiles for nothing older.
LEAST_CAPABILITY = (8, 0)


def kernels_run(shape: Shape, device: torch.device) -> bool:
    """Return whether the Triton kernels can run the shape on the device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return attention_refusal(shape.head_dim, shape.seq_len, shared) is None


def choose_ops(shape: Shape, device: torch.device, *, compiled: bool = False) -> LeanOps:
    """Return the ops for a device; with `compiled` the compiler fuses all of them but attention."""
    if not kernels_run(shape, device):
        return TORCH_OPS
    # These import Triton.
    from rooflane.families.lean.attention.attention import attention, mask_extent
    from rooflane.families.lean.pointwise.pointwise import add_norm, gelu

    if compiled:
        # SDPA's flash kernels take no key mask and its masked kernel builds [B, S, S]; our kernel takes any mask.
        return replace(TORCH_OPS, attention=attention, mask_extent=mask_extent)
    return LeanOps(add_norm, gelu, attention, mask_extent)
