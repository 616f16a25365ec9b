"""Choose the lean forward's ops for a device: ours where Triton and the tile sizes allow, torch's elsewhere."""

from __future__ import annotations

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
    """Return the ops for a device; with `compiled` all but attention are left for the compiler to fuse."""
    if not kernels_run(shape, device):
        return TORCH_OPS
    from rooflane.families.lean.fused_ops import COMPILED_OPS, FUSED_OPS

    return COMPILED_OPS if compiled else FUSED_OPS
