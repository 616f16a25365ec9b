"""Compile CUDA C++ with the compiler library that ships with torch, once per source, and launch it with little else."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rooflane.families.runtime.host import PythonLauncher, host_module

# Compiler options that decide the code; part of the cache key.
OPTIONS = ("--std=c++17",)


def compile_cubin(source: str, architecture: str) -> bytes:
    """Return the machine code of a translation unit for an architecture like "sm_90a", from the disk where it can.

    Raises `RuntimeError` with the compiler's log when the source does not compile, or when the cache cannot be used.
    """
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    version = ".".join(map(str, _checked(nvrtc.nvrtcVersion(), "ask NVRTC for its version")))
    text = "\n".join((architecture, version, *OPTIONS, source))
    try:
        store = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
        found = store.get_file("kernel.cubin")
        if found is not None:
            with open(found, "rb") as file:
                return file.read()
        cubin, _ = _compile(source, architecture)
        store.put(cubin, "kernel.cubin")
    except OSError as error:
        raise RuntimeError(
            f"compiled kernels cannot be kept in Triton's cache: {error}; name a folder that can be written in "
            "TRITON_CACHE_DIR"
        ) from None
    return cubin


def compiler_report(source: str, architecture: str) -> str:
    """Return what the assembler says of a translation unit's registers, spills and static shared memory."""
    from cuda.bindings import nvrtc

    # From 12.9 on NVRTC keeps what it compiled where there is a driver, and gives no report of what it finds there.
    fresh = ["--no-cache"] if _checked(nvrtc.nvrtcVersion(), "ask NVRTC for its version") >= (12, 9) else []
    return _compile(source, architecture, "--ptxas-options=-v", *fresh)[1]


def _compile(source: str, architecture: str, *more: str) -> tuple[bytes, str]:
    """Return the machine code and the compiler's log."""
    from cuda.bindings import nvrtc

    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []), "begin a compilation")
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *more)]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program), "read the compiler's log")
        log = bytearray(size)
        _checked(nvrtc.nvrtcGetProgramLog(program, log), "read the compiler's log")
        text = log.decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"the CUDA source does not compile for {architecture}: {text[:2000]}")
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program), "read the machine code")
        cubin = bytearray(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "read the machine code")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), text


def load_kernel(
    cubin: bytes, name: str, grid: int, threads: int, shared_bytes: int, fixed: Sequence[Tensor | int | float],
    device: torch.device,
) -> Callable[[int, Tensor, Tensor | None, Tensor], None]:  # fmt: skip
    """Load a kernel and return `launch(stream, x, mask, out)`.

    `fixed` are the parameters behind those three: tensors stand for their addresses and are kept alive with the launch;
    int and float are 32 bits wide. Raises `RuntimeError` when the driver refuses the code or the shared memory.
    """
    index = device.index or 0
    function = load_function(cubin, name, shared_bytes, index)
    entry = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    module = host_module()
    launcher = PythonLauncher if module is None else module.Launcher
    bits = tuple(map(parameter_bits, fixed))
    return launcher(entry, function, grid, threads, shared_bytes, bits, partial(torch.cuda.set_device, index), fixed)


@cache
def load_function(cubin: bytes, name: str, shared_bytes: int, device_index: int) -> int:
    """Return the handle of a kernel, its module loaded once a device and kept for the life of the process."""
    from cuda.bindings import driver

    what = f"load the kernel {name} with {shared_bytes} bytes of shared memory on cuda:{device_index}"
    with torch.cuda.device(device_index):
        torch.cuda.set_device(device_index)  # makes the context current, for a thread that never used the device too
        (module,) = _checked(driver.cuModuleLoadData(cubin), what)
        (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()), what)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes), what)
    return int(function)


def parameter_bits(value: Tensor | int | float) -> int:
    """Return a kernel parameter's bits: a tensor's address, 32 bits of an int or float."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int.from_bytes(struct.pack("<f" if isinstance(value, float) else "<i", value), "little")


def _checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Return what a call of the bindings gave behind its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"could not {what}: {status.name}; rooflane doctor says what is missing")
    return tuple(values)
