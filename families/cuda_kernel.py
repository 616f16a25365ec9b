"""Compile CUDA C++ with the compiler library that ships with torch, once per source, and launch it with little else."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor

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
    cubin = _compile(source, architecture)
    cache.put(cubin, "kernel.cubin")
    return cubin


def _compile(source: str, architecture: str) -> bytes:
    nvrtc = _nvrtc()
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
        log = bytearray(size)
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"the CUDA source does not compile for {architecture}: {log.decode(errors='replace')[:2000]}")
    (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = bytearray(size)
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin)


class CudaKernel:
    """One kernel whose first `pointers` parameters change from call to call; the others are fixed here."""

    def __init__(
        self, cubin: bytes, name: str, grid: int, threads: int, shared_bytes: int, pointers: int, fixed: list[Any]
    ) -> None:
        """Load the code; `fixed` holds ctypes values, and tensors that stand for their address and are kept alive."""
        driver = _driver()
        torch.cuda.current_stream()  # the device's context must be current
        (module,) = _checked(driver.cuModuleLoadData(cubin))
        (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        self._kept = (module, fixed)
        self._pointers = [ctypes.c_void_p() for _ in range(pointers)]
        values = [ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in fixed]
        self._values = [*self._pointers, *values]
        table = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(value) for value in self._values))
        self._table = table
        # The driver's own entry point: the wrapper's checks of every argument cost more than the launch.
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        self._shape = (int(function), grid, 1, 1, threads, 1, 1, shared_bytes)

    def __call__(self, stream: int, *addresses: int | None) -> None:
        """Launch on a raw stream; raises `RuntimeError` when the driver refuses."""
        for pointer, address in zip(self._pointers, addresses, strict=True):
            pointer.value = address
        status = self._launch(*self._shape, stream, self._table, None)
        if status != 0:
            raise RuntimeError(f"cuLaunchKernel failed with status {status}")


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
