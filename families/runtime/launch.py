"""Launch a Triton kernel with everything but its pointers bound beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class BoundKernel:
    """One compiled kernel for fixed sizes; a launch costs the driver call and little else.

    Triton's own call path hashes every argument to find the compiled kernel, on every launch; here that is done once.
    The kernel's compile-time parameters must stand last in its signature.
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
        """Launch on a raw stream; tensors are given as their `data_ptr()`."""
        self._run(
            self._grid, 1, 1, stream, self._handle, self._metadata, None, None, None, *arguments, *self._constants
        )


def _missing(*arguments: int) -> int:
    raise RuntimeError("this build of torch has no CUDA")


# `() -> index of the device that is current` and `(device index) -> handle of its current stream`: torch's own, without
# a Python function around them, which costs every launch 0.2 us.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _missing)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _missing)
