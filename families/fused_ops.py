"""The lean forward's ops as Triton kernels; importing it loads torch and triton."""

from __future__ import annotations

from rooflane.families.attention.attention import attention, mask_extent
from rooflane.families.lean import LeanOps
from rooflane.families.pointwise.pointwise import add_norm, gelu

FUSED_OPS = LeanOps(add_norm, gelu, attention, mask_extent)
