"""Launch what is bound in advance: a Triton kernel, all but its pointers, or a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARM_UP_CALLS = 3
BLOCK = 2048


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


@triton.jit
def stage_kernel(
    x_ptr, mask_ptr, to_x_ptr, to_mask_ptr, elements, tokens, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the input and the mask to the graph's fixed memory, in one launch instead of two."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_x_ptr + index, tl.load(x_ptr + index, mask=index < elements), mask=index < elements)
    if HAS_MASK:
        tl.store(to_mask_ptr + index, tl.load(mask_ptr + index, mask=index < tokens), mask=index < tokens)


class CapturedGraph:
    """Capture `body()` once; each `run` replays it. `result` is what the body returned during capture."""

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        """Warm `body` up on a side stream, then capture it."""
        with torch.inference_mode(False), torch.no_grad():
            self._body = body
            here = torch.cuda.current_stream(device)
            side = _side_stream(here.device)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_CALLS):
                    body()
            here.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.result = body()

    def run(self) -> Any:
        """Replay on the current stream and return `result`.

        During the capture of another graph the body itself runs, and what it returns belongs to that graph.
        """
        if _capturing():
            with torch.inference_mode(False), torch.no_grad():
                return self._body()
        self._graph.replay()
        return self.result


class StagedGraph:
    """Capture `body(x, mask)` once; each `run` copies a call's tensors to fixed memory and replays it.

    Nothing depends on the addresses of the caller's tensors. `result` is what the body returned during capture. It is
    fixed memory that the next run overwrites, so the caller computes a fresh output from it.
    """

    def __init__(
        self, body: Callable[[Tensor, Tensor | None], Any], x: Tensor, mask: Tensor | None, device: torch.device
    ) -> None:
        """Warm `body` up on a side stream, then capture it for tensors like `x` and `mask`."""
        # The fixed memory must be ordinary: inference tensors cannot be written outside inference mode.
        with torch.inference_mode(False):
            fixed_x = torch.zeros(x.shape, dtype=x.dtype, device=device)
            fixed_mask = None if mask is None else torch.ones(mask.shape, dtype=torch.bool, device=device)
        # The function must not hold this object: a cycle would keep the memory until the garbage collector runs, and a
        # graph that is freed while another is captured breaks that capture.
        self._graph = CapturedGraph(lambda: body(fixed_x, fixed_mask), device)
        self.result = self._graph.result
        sizes = (x.numel(), 0 if mask is None else mask.numel())
        self._stage = BoundKernel(
            stage_kernel,
            triton.cdiv(max(sizes), BLOCK),
            (x, mask, fixed_x, fixed_mask, *sizes),
            {"HAS_MASK": mask is not None, "BLOCK": BLOCK},
            warps=4,
            stages=1,
        )
        self._fixed = (fixed_x.data_ptr(), None if fixed_mask is None else fixed_mask.data_ptr(), *sizes)

    def run(self, stream: int, x: Tensor, mask: Tensor | None) -> Any:
        """Stage `x` and `mask` (contiguous, 16-byte aligned) and replay, both on the current stream `stream`.

        Returns what `CapturedGraph.run` returns; during another capture, that of the body on the fixed memory.
        """
        self._stage(stream, x.data_ptr(), None if mask is None else mask.data_ptr(), *self._fixed)
        return self._graph.run()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device on which bodies warm up.

    cuBLAS keeps a workspace for every stream that it ever ran on, 32 MiB each on Hopper. If each forward had its own
    stream, a deleted forward would leave that much memory in use.
    """
    return torch.cuda.Stream(device)


def _missing(*arguments: int) -> int:
    raise RuntimeError("this build of torch has no CUDA")


# `() -> index of the current device` and `(device index) -> handle of its current stream`. These are torch's internal
# functions: its public ones add a Python call, which costs every launch 0.2 us.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _missing)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _missing)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _missing)
