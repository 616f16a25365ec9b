"""Launch a Triton kernel with all arguments bound in advance except its pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class BoundKernel:
    """One compiled kernel for fixed sizes; a launch costs little more than the driver call.

    Triton's own call path hashes every argument on every launch to find the compiled kernel. Here that happens once.
    The kernel's compile-time parameters must come last in its signature.
    """

    def __init__(
        self, function: Any, grid: int, sample: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int
    ) -> None:
        """Compile `function` for arguments like `sample` (tensors 16-byte aligned) and a one-dimensional grid."""
        compiled = function.warmup(*sample, grid=(grid,), **constants, num_warps=warps, num_stages=stages)
        self._run = compiled.run
        self._handle = compiled.function
        self._metadata = compiled.packed_metadata
        self._grid = grid
        self._constants = tuple(constants[name] for name in function.arg_names if name in constants)

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Launch on a raw stream; each tensor is passed as its `data_ptr()`."""
        self._run(
            self._grid, 1, 1, stream, self._handle, self._metadata, None, None, None, *arguments, *self._constants
        )


def _missing(*arguments: int) -> int:
    raise RuntimeError("this build of torch has no CUDA")


# `() -> index of the current device` and `(device index) -> handle of its current stream`. These are torch's internal
# functions: its public ones add a Python call, which costs every launch 0.2 us.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _missing)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _missing)
