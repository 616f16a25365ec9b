"""The lean forward's Triton kernels as they ship, for the resource gate. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooflane.families.lean.attention.config import LADDER
from rooflane.families.resources.kernel_case import ARCHITECTURES, KernelCase, TritonCase

ATTENTION_TYPES = {"qkv_ptr": "*fp16", "mask_ptr": "*i1", "extent_ptr": "*i32", "out_ptr": "*fp16", "length": "i32"}
EXTENT_TYPES = {"mask_ptr": "*i1", "extent_ptr": "*i32", "length": "i32"}
ADD_NORM_TYPES = {
    "x_ptr": "*fp32", "update_ptr": "*fp16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "mask_ptr": "*i1",
    "residual_ptr": "*fp32", "out_ptr": "*fp16", "tokens": "i32", "eps": "fp32",
}  # fmt: skip
GELU_TYPES = {"x_ptr": "*fp16", "out_ptr": "*fp16", "elements": "i32"}


def lean_cases() -> Iterator[KernelCase]:
    """Yield every configuration of the lean kernels, for every architecture."""
    for at in ARCHITECTURES:
        for width, length, _, config in LADDER:
            tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": width}
            model = {"SCALE_LOG2": 0.25, "NUM_HEADS": 4, "HEAD_DIM": width, "CAUSAL": True, "HAS_MASK": True}
            name = f"attention d{width} s{length or 'any'} {config.block_m}x{config.block_n}"
            launch = (model | tiles, config.num_warps, config.num_stages)
            yield TritonCase(name, at, attention_kernel, ATTENTION_TYPES, *launch)
        yield TritonCase("mask_extent", at, mask_extent_kernel, EXTENT_TYPES, {"BLOCK": 1024}, 1, 1)
        for width in (128, 1024):
            flags = {"HAS_UPDATE": True, "STORE_RESIDUAL": True, "HAS_MASK": False}
            tiles = {"WIDTH": width, "BLOCK_T": 2048 // width, "BLOCK_W": width}
            yield TritonCase(f"add_norm d{width}", at, add_norm_kernel, ADD_NORM_TYPES, flags | tiles, 4, 3)
        yield TritonCase("gelu", at, gelu_kernel, GELU_TYPES, {"BLOCK": 2048}, 4, 3)


def attention_kernel() -> Any:
    """Return the attention kernel."""
    from rooflane.families.lean.attention import kernel

    return kernel.attention_kernel


def mask_extent_kernel() -> Any:
    """Return the kernel of a mask's extents."""
    from rooflane.families.lean.attention import kernel

    return kernel.mask_extent_kernel


def add_norm_kernel() -> Any:
    """Return the kernel of addition and LayerNorm."""
    from rooflane.families.lean.pointwise import kernel

    return kernel.add_norm_kernel


def gelu_kernel() -> Any:
    """Return the GELU kernel."""
    from rooflane.families.lean.pointwise import kernel

    return kernel.gelu_kernel
