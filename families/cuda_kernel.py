"""Compile CUDA C++ with the compiler library that ships with torch, once per source, and launch it with little else."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooflane.families.host import host_module

# Compiler options that decide the code; part of the cache key.
OPTIONS = ("--std=c++17",)


def compile_cubin(source: str, architecture: str) -> bytes:
    """Return the machine code of a translation unit for an architecture like "sm_90a", from the disk where it can.

    Raises `RuntimeError` with the compiler's log when the source does not compile.
    """
    from triton.runtime.cache import get_cache_manager

    version = ".".join(map(str, _checked(_nvrtc().nvrtcVersion())))
    text = "\n".join((architecture, version, *OPTIONS, source))
    cache = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
    found = cache.get_file("kernel.cubin")
    if found is not None:
        with open(found, "rb") as file:
            return file.read()
    cubin, _ = _compile(source, architecture)
    cache.put(cubin, "kernel.cubin")
    return cubin


def compiler_report(source: str, architecture: str) -> str:
    """Return what the assembler says of a translation unit's registers, spills and static shared memory."""
    return _compile(source, architecture, "--ptxas-options=-v")[1]


def _compile(source: str, architecture: str, *more: str) -> tuple[bytes, str]:
    """Return the machine code and the compiler's log."""
    nvrtc = _nvrtc()
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *more)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    log = bytearray(size)
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"the CUDA source does not compile for {architecture}: {text[:2000]}")
    (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = bytearray(size)
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin), text


def load_kernel(
    cubin: bytes, name: str, grid: int, threads: int, shared_bytes: int, fixed: Sequence[Tensor | int | float]
) -> Callable[..., None]:
    """Load a kernel and return `launch(stream, x address, mask address or None, output address)`.

    `fixed` are the parameters behind those three: tensors stand for their addresses and must outlive the launch; int
    and float are 32 bits wide. Raises `RuntimeError` when the driver refuses the code or the shared memory.
    """
    driver = _driver()
    torch.cuda.current_stream()  # the device's context must be current
    (module,) = _checked(driver.cuModuleLoadData(cubin))
    (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    entry = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    values = tuple(map(parameter_bits, fixed))
    return host_module().Launcher(entry, int(function), grid, threads, shared_bytes, 3, values)


def parameter_bits(value: Tensor | int | float) -> int:
    """Return a kernel parameter's bits: a tensor's address, 32 bits of an int or float."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int.from_bytes(struct.pack("<f" if isinstance(value, float) else "<i", value), "little")


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a call of the bindings gave behind its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{type(status).__name__} {status.name}")
    return tuple(values)


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _driver() -> Any:
    from cuda.bindings import driver

    return driver
