"""The lean forward's ops on CUDA; importing it loads torch and triton."""

from __future__ import annotations

from dataclasses import replace

from rooflane.families.lean.attention.attention import attention, mask_extent
from rooflane.families.lean.lean import TORCH_OPS, LeanOps
from rooflane.families.lean.pointwise.pointwise import add_norm, gelu

FUSED_OPS = LeanOps(add_norm, gelu, attention, mask_extent)
# SDPA's flash kernels take no key mask and its masked kernel builds [B, S, S]: ours takes any mask as it is.
COMPILED_OPS = replace(TORCH_OPS, attention=attention, mask_extent=mask_extent)
