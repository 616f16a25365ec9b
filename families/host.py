"""The part of a call's host path that Python is too slow for, in C++, compiled at first use and kept on the disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflane.families.host_code import CODE

NAME = "rooflane_host"
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
# cuLaunchKernel's grid, block and shared memory; and the status on a thread that has not used the device yet.
SIZES = [ctypes.c_uint] * 7
NO_CONTEXT = 201
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")


class PythonLauncher:
    """Launch like the compiled `Launcher`, from Python."""

    def __init__(
        self,
        entry: int,
        function: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        fixed: tuple[int, ...],
        enter: Callable[[], None],
        held: object,
    ) -> None:
        self._driver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *SIZES, *[ctypes.c_void_p] * 3)(entry)
        self._sizes = (function, grid, 1, 1, threads, 1, 1, shared_bytes)
        self._fixed, self._enter, self._held = fixed, enter, held

    def __call__(self, stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Launch one call; raises `RuntimeError` when the driver refuses."""
        bits = (x.data_ptr(), 0 if mask is None else mask.data_ptr(), out.data_ptr(), *self._fixed)
        values = (ctypes.c_uint64 * len(bits))(*bits)
        first = ctypes.addressof(values)
        parameters = (ctypes.c_void_p * len(bits))(*range(first, first + 8 * len(bits), 8))
        status = self._driver(*self._sizes, stream, parameters, None)
        if status == NO_CONTEXT:
            self._enter()
            status = self._driver(*self._sizes, stream, parameters, None)
        if status:
            raise RuntimeError(f"the driver refused the launch with status {status}")


@cache
def host_module() -> Any | None:
    """Return the compiled module; None, after a warning, where it cannot be had, and Python's paths serve.

    `Launcher(entry, function, grid, threads, shared_bytes, fixed, enter, held)` binds a kernel whose parameters are x,
    mask, output and the `fixed` bits; called with a raw stream, x, mask or None, and output it launches, and raises
    `RuntimeError` when the driver refuses. Where the thread has no context yet, `enter()` is called and the launch
    tried again. `Call(...)` is the common call of a `BoundForward`. `sum_versions(tensors)` sums their versions.
    """
    from triton.runtime.cache import get_cache_manager

    file_name = NAME + sysconfig.get_config_var("EXT_SUFFIX")
    text = "\n".join((torch.__version__, sys.version, *OPTIONS, CODE))
    try:
        store = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
        path = store.get_file(file_name) or store.put(_compile(CODE), file_name, binary=True)
        spec = spec_from_file_location(NAME, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except (RuntimeError, OSError, ImportError) as error:
        warnings.warn(
            f"the host's part of a call could not be compiled: {' '.join(str(error).split())[:300]}; calls go through "
            "Python and take the host longer. It needs a C++ compiler and Python's headers (Debian: apt-get install "
            "g++ python3-dev) and a folder that can be written (TRITON_CACHE_DIR); rooflane doctor says what is "
            "missing",
            stacklevel=2,
        )
        return None
    return module


def _compile(code: str) -> bytes:
    """Return a module's machine code; raises `RuntimeError` with what the compiler says."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"none of {', '.join(COMPILERS)} is on the path")
    home = Path(torch.__file__).parent
    headers = (home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    folders = [*(f"-I{path}" for path in headers), f"-L{home / 'lib'}"]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / f"{NAME}.cpp", Path(folder) / f"{NAME}.so"
        source.write_text(code)
        command = [compiler, *OPTIONS, *folders, str(source), "-o", str(target), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler} ended with status {done.returncode}: {done.stderr}")
        return target.read_bytes()
