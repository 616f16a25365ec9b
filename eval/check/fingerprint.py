"""Fingerprints: a few numbers that tell an output from any other, taken on the timed stream right after each call.

The output is cut into at most 128 rows and each row multiplied by one vector of random signs. The sum changes when
any element does, and of an error it shows the root of its square sum, whatever its place. Equal bytes give equal
fingerprints, bit for bit, on one device: every row is summed by one program in one order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rooflane.eval.check.gate import ATOL, RTOL

ROWS_AT_MOST = 128
BLOCK = 1024
# Bytes: what Triton assumes of a pointer it was compiled for.
ALIGNMENT = 16
# A sum of random signs times errors is normal; five deviations of the largest error the gate allows, never met by
# chance: 1e-6 a row, a few thousand rows a campaign.
DEVIATIONS = 5.0

# Bound here, before any candidate is imported, so that replacing them in torch's namespace changes nothing.
_mv = torch.mv
_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_reshape = torch.Tensor.reshape
_float = torch.Tensor.float


class Fingerprinter:
    """Takes fingerprints of one shape's outputs into numbered slots."""

    def __init__(self, numel: int, tokens: int, dtype: torch.dtype, device: torch.device, seed: int, slots: int):
        self.rows = _rows(tokens)
        self.width = numel // self.rows
        self.device = device
        self._dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (self.width,), generator=generator, dtype=torch.int8)
        self._signs = (signs.to(torch.float32) * 2 - 1).to(device)
        # Slots begin at multiples of 16 bytes, which a bound kernel assumes.
        self._slots = torch.zeros(slots, -(-self.rows // 4) * 4, dtype=torch.float32, device=device)
        self._stride = self._slots.stride(0) * 4
        self._kernel = self._bind() if device.type == "cuda" else None

    def like(self, slots: int) -> Fingerprinter:
        """Return another one with the same signs and new slots."""
        other = copy.copy(self)
        other._slots = torch.zeros(max(1, slots), self._slots.shape[1], dtype=torch.float32, device=self.device)
        return other

    def take(self, out: Tensor, slot: int) -> None:
        """Queue the fingerprint of an output of the right size on the current stream."""
        pointer = _data_ptr(out)
        if self._kernel is not None and _is_contiguous(out) and pointer % ALIGNMENT == 0:
            self.launcher()(pointer, slot)
            return
        flat = _reshape(out, self.rows, self.width)
        _mv(flat if flat.dtype == torch.float32 else _float(flat), self._signs, out=self._slots[slot, : self.rows])

    def launcher(self) -> Callable[[int, int], None] | None:
        """Return `take` for contiguous outputs given by their aligned address, None where no kernel is bound.

        The stream is the one that is current now: what a candidate makes current later is not the timed one.
        """
        if self._kernel is None:
            return None
        kernel, stream = self._kernel, torch._C._cuda_getCurrentRawStream(self.device.index or 0)
        signs, first, stride = self._signs.data_ptr(), self._slots.data_ptr(), self._stride
        return lambda pointer, slot: kernel(stream, pointer, signs, first + slot * stride)

    def read(self) -> Tensor:
        """Wait for the device and return every slot, `[slots, rows]` on the CPU."""
        return self._slots[:, : self.rows].cpu()

    def _bind(self):
        """Return the compiled kernel, None where Triton cannot run."""
        try:
            from rooflane.eval.check.fingerprint_kernel import bind_fingerprint

            return bind_fingerprint(self._dtype, self.device, self.rows, self.width, BLOCK)
        except ImportError:
            return None


def of_output(out: Tensor, tokens: int, seed: int) -> Tensor:
    """Return the fingerprint `[rows]` of one output, on the CPU."""
    taker = Fingerprinter(out.numel(), tokens, out.dtype, out.device, seed, 1)
    taker.take(out, 0)
    return taker.read()[0]


def limits(ref: Tensor, tokens: int, atol: float = ATOL, rtol: float = RTOL) -> Tensor:
    """Return for each row how far a fingerprint may lie from the reference's `ref`, from the gate's own tolerance."""
    rows = _rows(tokens)
    size = ref.detach().reshape(rows, -1).float().abs()
    allowed = torch.clamp(size * rtol, min=atol)
    rounding = size.sum(dim=1) * 2**-20
    return (DEVIATIONS * allowed.square().sum(dim=1).sqrt() + rounding).cpu()


def worst_row(found: Tensor, expected: Tensor, limit: Tensor) -> tuple[int, float]:
    """Return the row that differs most and its difference in units of the limit; not finite counts as infinite."""
    ratio = (found - expected).abs() / limit
    ratio = torch.where(torch.isfinite(ratio), ratio, math.inf)
    row = int(ratio.argmax())
    return row, float(ratio[row])


def _rows(tokens: int) -> int:
    """Return the largest divisor of the token count that is at most 128."""
    return next(rows for rows in range(min(ROWS_AT_MOST, tokens), 0, -1) if tokens % rows == 0)
