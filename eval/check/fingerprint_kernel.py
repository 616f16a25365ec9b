"""The fingerprint as one small kernel: one program a row, summed in one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl

from rooflane.families.runtime.launch import BoundKernel

WARPS = 4


@triton.jit
def _fingerprint(out_ptr, signs_ptr, slot_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + offsets < WIDTH
        value = tl.load(out_ptr + row * WIDTH + start + offsets, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(signs_ptr + start + offsets, mask=inside, other=0.0)
    tl.store(slot_ptr + row, tl.sum(total, axis=0))


@cache
def bind_fingerprint(
    dtype: torch.dtype, device: torch.device, rows: int, width: int, block: int
) -> Callable[[int, int, int, int], None]:
    """Return a launch `(stream, output, signs, slot)` of raw pointers for contiguous outputs `[rows * width]`."""
    sample = torch.empty(16, dtype=dtype, device=device), *torch.empty(2, 16, device=device)
    return BoundKernel(_fingerprint, rows, sample, {"WIDTH": width, "BLOCK": block}, WARPS, 1)
