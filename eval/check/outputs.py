"""Outputs on their way to the judge: what kind of thing was returned, and its raw bytes in shared memory."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from rooflane.eval.check.cases import OutputFacts

# Freed NaN blocks the next allocation of the output's size may land on.
POISON_BLOCKS = 4
POISON_BYTES = 4 << 30

# Bound here, before any candidate is imported: replacing them elsewhere changes nothing below.
_type = type
_Tensor = torch.Tensor
_data_ptr = torch.Tensor.data_ptr
_copy = torch.Tensor.copy_
_storage = torch.Tensor.untyped_storage
_detach = torch.Tensor.detach
_is_contiguous = torch.Tensor.is_contiguous
_is_conj = torch.Tensor.is_conj
_is_neg = torch.Tensor.is_neg
_stride = torch.Tensor.stride
_numel = torch.Tensor.numel
_element_size = torch.Tensor.element_size
_storage_offset = torch.Tensor.storage_offset
_empty_like = torch.empty_like
_fill = torch.Tensor.fill_
# An attribute of one of these names, put on an output, stands before the method of that name.
TENSOR_NAMES = frozenset(dir(torch.Tensor))


def output_fault(out: object, x: Tensor, mask: Tensor | None = None) -> str | None:
    """Return why an output is not a plain tensor of x's shape, dtype and device in memory of its own, None if it is."""
    # Exact type: a subclass may compute its values when they are looked at, outside the timed window.
    if _type(out) is not _Tensor:
        return f"the output is a {_type(out).__name__}, not a torch.Tensor"
    if hidden := sorted(TENSOR_NAMES.intersection(out.__dict__)):
        return f"the output carries attributes that hide methods of torch.Tensor: {', '.join(hidden)}"
    if out.shape != x.shape:
        return f"the output has shape {tuple(out.shape)}, expected {tuple(x.shape)}"
    if out.dtype != x.dtype:
        return f"the output has dtype {out.dtype}, expected {x.dtype}"
    if out.device != x.device:
        return f"the output has device {out.device}, expected {x.device}"
    if out.layout != torch.strided or _is_conj(out) or _is_neg(out):
        return "the output is no plain strided tensor"
    if (0 in _stride(out) and _numel(out) > 1 and _extent(out) < _numel(out)) or _storage(out).nbytes() < (
        _storage_offset(out) + _extent(out)
    ) * _element_size(out):
        return "the output has no memory of its own for every element"
    for other, name in ((x, "the input x"), (mask, "the mask")):
        if other is not None and _overlaps(out, other):
            return f"the output lies in the memory of {name}"
    return None


def stride_class(out: Tensor) -> str:
    """Return how an output lies in memory: contiguous, dense in another order, or with gaps."""
    if _is_contiguous(out):
        return "contiguous"
    return "dense" if _extent(out) == _numel(out) else "strided"


def describe_output(out: Tensor) -> OutputFacts:
    """Describe an output for the judge, without its bytes."""
    return OutputFacts(
        shape=tuple(out.shape),
        dtype=str(out.dtype).removeprefix("torch."),
        device=out.device.type,
        strides=stride_class(out),
        bytes=_numel(out) * _element_size(out),
    )


def poison(like: Tensor, blocks: int = POISON_BLOCKS) -> None:
    """Fill memory the next allocation of that size may reuse with NaN, so that unwritten elements show."""
    blocks = max(1, min(blocks, POISON_BYTES // max(1, like.numel() * like.element_size())))
    for block in [_empty_like(like, memory_format=torch.contiguous_format) for _ in range(blocks)]:
        _fill(block, math.nan)


class SharedBytes:
    """Memory behind a descriptor that two processes map; one output at a time lies in it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bytes: Tensor | None = None
        self._unpin: Callable[[], object] = _nothing

    def write(self, out: Tensor) -> None:
        """Copy an output's bytes, in the order of its elements."""
        flat = _detach(out).contiguous().reshape(-1)
        size = flat.numel() * flat.element_size()
        _copy(self._map(size)[:size].view(flat.dtype), flat)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a copy of the bytes as a tensor on a device."""
        size = math.prod(shape) * dtype.itemsize
        held = self._map(size)[:size].view(dtype).reshape(shape)
        return held.to(device) if device.type != "cpu" else held.clone()

    def _map(self, size: int) -> Tensor:
        if self._bytes is None or self._bytes.numel() < size:
            size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._unpin()
            self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
            if torch.cuda.is_initialized():
                # Pinned, or each copy of a large output would pass through a small staging buffer. Unpinned before the
                # memory goes, or the next mapping at its address could not be pinned.
                runtime, address = torch.cuda.cudart(), self._bytes.data_ptr()
                self._unpin = _nothing
                if int(runtime.cudaHostRegister(address, size, 0)) == 0:
                    self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
                    self._unpin.atexit = False
        return self._bytes


def _nothing() -> None:
    """Unpin nothing."""


def _extent(tensor: Tensor) -> int:
    """Return the elements from a tensor's first to its last in memory."""
    if _numel(tensor) == 0:
        return 0
    return 1 + sum((size - 1) * abs(step) for size, step in zip(tensor.shape, _stride(tensor), strict=True))


def _overlaps(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors' ranges of memory meet."""
    starts = _data_ptr(one), _data_ptr(other)
    ends = (
        starts[0] + _extent(one) * _element_size(one),
        starts[1] + _extent(other) * _element_size(other),
    )
    return _numel(one) > 0 and _numel(other) > 0 and starts[0] < ends[1] and starts[1] < ends[0]
