"""Compile a rung, launch it on tensors, and measure an error."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooflane.families.ladder.rungs import Rung
from rooflane.families.resources.kernel_case import SM90
from rooflane.families.runtime.cuda_kernel import compile_cubin, load_function


class RungError(ValueError):
    """Tensors that a rung does not take; the message says which and why."""


def bind(rung: Rung, inputs: Sequence[Tensor], out: Tensor) -> Callable[[], None]:
    """Return a function that launches a rung on the current stream; each launch writes the whole of `out`.

    The kernel is compiled where no cache holds it. Raises `RungError` for tensors that the rung does not take, and
    `RuntimeError` when the source does not compile or the driver refuses.
    """
    if reason := refuse_tensors(rung, inputs, out):
        raise RungError(f"rung {rung.name} of the {rung.LADDER} ladder: {reason}; give tensors that it takes")
    device = out.device
    units = torch.cuda.get_device_properties(device).multi_processor_count
    of_call = rung.sizes(inputs)
    words = rung.scratch_words(units, *of_call)
    scratch = [torch.zeros(words, dtype=torch.int32, device=device)] if words else []
    return bind_kernel(
        rung.source(), rung.kernel, rung.grid(units, *of_call), rung.threads, rung.shared_bytes,
        rung.arguments(inputs, out, *scratch), device, (scratch, inputs, out),
    )  # fmt: skip


def bind_kernel(
    source: str, kernel: str, grid: int, threads: int, shared_bytes: int, arguments: Sequence[Any],
    device: torch.device, held: object,
) -> Callable[[], None]:  # fmt: skip
    """Return a function that launches a kernel of a source on the current stream of a device.

    `arguments` are tensors, None for no tensor, 32-bit ints and floats, or bytes that are passed as they are. `held`
    is kept alive: what the arguments lead to.
    """
    function = _load(source, kernel, shared_bytes, device.index or 0)
    values = [_parameter(value) for value in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    sizes = (grid, 1, 1, threads, 1, 1, shared_bytes)
    entry = _entry()

    def launch(held: object = (values, held)) -> None:
        status = entry(function, *sizes, torch.cuda.current_stream(device).cuda_stream, pointers, None)
        if status:
            raise RuntimeError(f"the driver refused to launch {kernel} with status {status}")

    return launch


def refuse_tensors(rung: Rung, inputs: Sequence[Tensor], out: Tensor) -> str | None:
    """Return None when the rung takes these tensors, else the reason on one line."""
    try:
        sizes = rung.sizes(inputs)
    except (IndexError, ValueError):
        return "its inputs must be matrices, and all of them"
    if reason := rung.refuse(*sizes):
        return reason
    wanted = list(zip(rung.input_shapes(*sizes), rung.input_types(), strict=False))
    wanted.append((rung.output_shape(*sizes), rung.result))
    given = [*inputs, out]
    if len(given) != len(wanted):
        return f"it takes {len(wanted) - 1} inputs, not {len(inputs)}"
    for tensor, (shape, dtype) in zip(given, wanted, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, dtype):
            return f"it needs {dtype} {list(shape)}, not {str(tensor.dtype)[6:]} {list(tensor.shape)}"
        if not tensor.is_contiguous() or tensor.data_ptr() % 16 or tensor.device != out.device:
            return "its tensors must be contiguous, aligned to 16 bytes and on one device"
    return None if out.is_cuda else "its tensors must be on a CUDA device"


def normwise_error(out: Tensor, truth: Tensor) -> float:
    """Return |out - truth| / |truth| by the Frobenius norm in float64; infinite unless `out` is finite.

    Where the truth is zero, the error is zero for zeros and infinite for others.
    """
    truth = truth.double()
    apart, size = (out.double() - truth).norm().item(), truth.norm().item()
    if not math.isfinite(apart) or not size:
        return 0.0 if apart == 0 else math.inf
    return apart / size


@cache
def _load(source: str, kernel: str, shared_bytes: int, device_index: int) -> int:
    """Return the handle of a kernel on a device."""
    return load_function(compile_cubin(source, f"sm_{SM90.number}a"), kernel, shared_bytes, device_index)


@cache
def _entry() -> Callable[..., int]:
    """Return the driver's launch function."""
    sizes = [ctypes.c_uint] * 7
    types = (ctypes.c_void_p, *sizes, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(("cuLaunchKernel", ctypes.CDLL("libcuda.so.1")))


def _parameter(value: Tensor | int | float | bytes | None) -> Any:
    """Return a kernel parameter in memory: a tensor's address, 32 bits of an int or float, or bytes as they are."""
    if value is None or isinstance(value, Tensor):
        return ctypes.c_uint64(0 if value is None else value.data_ptr())
    if not isinstance(value, bytes):
        value = struct.pack("<f" if isinstance(value, float) else "<i", value)
    return ctypes.create_string_buffer(value, len(value))
