"""Number formats of the operands of matrix products, simulated on float32 tensors.

A format takes both operands, `[..., M, K]` and `[..., N, K]`, and returns them rounded to values that it holds, times
their scales, in float32. A product of the two in float32 then has the format's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Rounding = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]

E4M3_LARGEST, INT8_LARGEST, INT4_LARGEST = 448, 127, 7
BLOCK = 128
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Format:
    """One format: how both operands are rounded, and whether the two products of attention can have it.

    A product of attention has no weights: none that are known before the call, or that scales could be moved to.
    """

    name: str
    operands: Callable[[Tensor, Tensor], Pair]
    attention: bool = True


class RoundedOperands(TorchFunctionMode):
    """Round the float32 operands of linear layers and of matmul, attention's products, each to a format."""

    def __init__(self, linear: Format | None, attention: Format | None) -> None:
        super().__init__()
        self.formats = {functional.linear: linear, torch.matmul: attention}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Round the first two arguments of products; call everything else as it is."""
        wanted = self.formats.get(function)
        if wanted and args[0].dtype == torch.float32:
            a, b = args[:2]
            if function is torch.matmul:
                a, b = wanted.operands(a, b.mT)
                b = b.mT
            else:
                a, b = wanted.operands(a, b)
            args = (a, b, *args[2:])
        return function(*args, **(kwargs or {}))


def to_tf32(values: Tensor) -> Tensor:
    """Return float32 values rounded to 10 bits of mantissa, ties to even."""
    bits = values.detach().contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def to_type(dtype: torch.dtype, values: Tensor) -> Tensor:
    """Return values rounded to a narrower type of torch, as float32."""
    return values.to(dtype).float()


to_e4m3 = partial(to_type, torch.float8_e4m3fn)


def scaled(values: Tensor, dims: tuple[int, ...], largest: float, to_grid: Rounding = torch.round) -> Tensor:
    """Return values rounded on a grid that ends at `largest`, with one scale for all elements along `dims`.

    The scale maps the greatest magnitude to `largest`, so nothing is clamped but what rounding lifted above it.
    """
    scale = (values.abs().amax(dims, keepdim=True) / largest).clamp_min(TINY)
    return to_grid((values / scale).clamp(-largest, largest)) * scale


def per_tensor(largest: float, to_grid: Rounding, values: Tensor) -> Tensor:
    """Return values rounded with one scale."""
    return scaled(values, tuple(range(values.dim())), largest, to_grid)


def per_row(largest: float, to_grid: Rounding, values: Tensor) -> Tensor:
    """Return values `[..., M, K]` rounded with a scale for each row."""
    return scaled(values, (-1,), largest, to_grid)


def per_block(largest: float, to_grid: Rounding, values: Tensor, rows: int = 1) -> Tensor:
    """Return values `[..., M, K]` rounded with a scale for each block of `rows` x 128; the last may be smaller."""
    height, width = values.shape[-2:]
    padded = functional.pad(values, (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, rows))
    rounded = scaled(blocks, (-3, -1), largest, to_grid)
    return rounded.flatten(-4, -3).flatten(-2)[..., :height, :width]


def smooth(activations: Tensor, weights: Tensor) -> Pair:
    """Return operands with the same product, where each input channel's range is shared evenly by the two.

    Channel j of the activations is divided by sqrt(max |activations_j| / max |weights_j|), that of the weights is
    multiplied by it. The maxima are those of this call: the best that a calibration can know.
    """
    ranges = [values.abs().flatten(0, -2).amax(0) for values in (activations, weights)]
    used = (ranges[0] > 0) & (ranges[1] > 0)
    factors = torch.where(used, (ranges[0] / ranges[1]).sqrt(), 1)
    return activations / factors, weights * factors


def _both(rounding: Rounding) -> Callable[[Tensor, Tensor], Pair]:
    return lambda a, b: (rounding(a), rounding(b))


_int8 = _both(partial(per_row, INT8_LARGEST, torch.round))

TF32 = Format("TF32", _both(to_tf32))
FORMATS = (
    TF32,
    Format("fp16", _both(partial(to_type, torch.float16))),
    Format("bf16", _both(partial(to_type, torch.bfloat16))),
    Format("FP8 e4m3 per tensor", _both(partial(per_tensor, E4M3_LARGEST, to_e4m3))),
    Format("FP8 e4m3 per row", _both(partial(per_row, E4M3_LARGEST, to_e4m3))),
    # As published kernels scale: 1 x 128 of the activations, 128 x 128 of the weights.
    Format(
        "FP8 e4m3 per block",
        lambda a, b: (per_block(E4M3_LARGEST, to_e4m3, a), per_block(E4M3_LARGEST, to_e4m3, b, BLOCK)),
        attention=False,
    ),
    Format("INT8 per row", _int8),
    Format("INT8 smooth", lambda a, b: _int8(*smooth(a, b)), attention=False),
    Format("INT4 weights", lambda a, b: (a, per_block(INT4_LARGEST, torch.round, b)), attention=False),
)
