"""The checks that every built forward makes before it uses the device."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflane.shapes import Shape

# Bytes. Triton compiles for pointers of this alignment, and vector loads need it.
ALIGNMENT = 16
HALF_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES = HALF_DTYPES | {"float32": torch.float32}


def check_call(x: Tensor, mask: Tensor | None, shape: Shape) -> None:
    """Raise `ValueError` unless x has the built shape `[B, S, D]` and dtype and the mask is `[B, S]` bool beside it."""
    expected = (shape.batch_size, shape.seq_len, shape.d_model)
    if x.shape != expected:
        raise ValueError(f"built for x of shape {expected}, called with {tuple(x.shape)}; build one for that shape too")
    if x.dtype is not DTYPES[shape.dtype]:
        raise ValueError(
            f"built for x of {shape.dtype}, called with {x.dtype}; cast x, or build one for that dtype too"
        )
    if mask is not None and mask.device != x.device:
        raise ValueError(f"x is on {x.device}, the mask on {mask.device}; move the mask")
    if mask is not None and (mask.shape != expected[:2] or mask.dtype is not torch.bool):
        raise ValueError(
            f"built for a bool mask of shape {expected[:2]}, called with {tuple(mask.shape)} of {mask.dtype}"
        )


def check_bias(bias: Tensor, x: Tensor, shape: Shape) -> Tensor:
    """Return a bias of the scores as 4 dimensions that broadcast to `[B, H, S, S]`.

    Raises `ValueError` unless it broadcasts, is bool or floating, and lies on the device of x.
    """
    full = (shape.batch_size, shape.num_heads, shape.seq_len, shape.seq_len)
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(sizes) > 4 or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
        raise ValueError(f"built for a bias that broadcasts to {full}, called with one of shape {tuple(bias.shape)}")
    if bias.dtype is not torch.bool and not bias.is_floating_point():
        raise ValueError(f"the bias is {bias.dtype}; give a bool mask (True is visible) or a floating bias")
    if bias.device != x.device:
        raise ValueError(f"x is on {x.device}, the bias on {bias.device}; move the bias")
    return bias.view(sizes)


def operand_dtype(requested: str | None, shape: Shape, device_type: str) -> torch.dtype:
    """Return the GEMM operand dtype: the requested one, else the model's own on a CPU, else a half type.

    float32 and float16 models take float16 operands and bfloat16 models take bfloat16, to keep the model's range.
    Raises `ValueError` on a name other than float16 and bfloat16.
    """
    if requested is not None:
        if requested not in HALF_DTYPES:
            raise ValueError(f"operand_dtype {requested!r} is unknown; accepted: {', '.join(HALF_DTYPES)}")
        return HALF_DTYPES[requested]
    if device_type == "cpu" and shape.dtype == "float32":
        return torch.float32
    return HALF_DTYPES["bfloat16" if shape.dtype == "bfloat16" else "float16"]


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and 16-byte aligned, as bound launches assume; copies it only when it is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
