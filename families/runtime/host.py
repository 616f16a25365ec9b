"""The part of a call's host path that Python is too slow for, in C++, compiled at first use and kept on the disk."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflane.families.runtime.host_code import CODE
from rooflane.families.runtime.runtime_compiler import HOST_COMPILERS, host_compiler, python_header

NAME = "rooflane_host"
# Without NDEBUG pybind11 looks for the interpreter's lock at every reference it counts: a microsecond a call.
OPTIONS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
# cuLaunchKernel's grid, block and shared memory; and the status on a thread that has not used the device yet.
SIZES = [ctypes.c_uint] * 7
NO_CONTEXT = 201
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")
_LOCK = threading.Lock()


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
    with _LOCK:
        try:
            return _module()
        except (RuntimeError, OSError, ImportError) as error:
            warnings.warn(
                f"the host's part of a call could not be compiled: {error}; calls go through Python and take the host "
                "longer. It needs a C++ compiler with C++20 and Python's headers (Debian: apt-get install g++ "
                "python3-dev) and a folder that can be written (TRITON_CACHE_DIR); see rooflane doctor",
                stacklevel=2,
            )
            return None


def _module() -> Any:
    """Return the module from the disk, compiled where it is not there or does not load."""
    from triton.runtime.cache import get_cache_manager

    text = "\n".join((torch.__version__, sys.version, *OPTIONS, CODE))
    digest = hashlib.sha256(text.encode()).hexdigest()
    file_name = NAME + sysconfig.get_config_var("EXT_SUFFIX")
    store = get_cache_manager(digest)
    found = store.get_file(file_name)
    if found is not None:
        # Torn, or linked on another host against libraries that this one lacks: made anew.
        with suppress(ImportError):
            return _load(found, digest)
    return _load(store.put(_compile(CODE), file_name, binary=True), digest)


def _load(path: str, digest: str) -> Any:
    """Import a module from a file; pybind11 tells modules apart by name, so each text has one of its own."""
    spec = spec_from_file_location(f"{digest}.{NAME}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(code: str) -> bytes:
    """Return a module's machine code; raises `RuntimeError` with what the compiler says first of an error."""
    compiler = host_compiler()
    if not compiler:
        raise RuntimeError(f"none of {', '.join(HOST_COMPILERS)} is on the path")
    home = Path(torch.__file__).parent
    headers = (home / "include", home / "include/torch/csrc/api/include", python_header().parent)
    folders = [*(f"-I{path}" for path in headers), f"-L{home / 'lib'}"]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / f"{NAME}.cpp", Path(folder) / f"{NAME}.so"
        source.write_text(code)
        command = [*compiler, *OPTIONS, *folders, str(source), "-o", str(target), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            lines = done.stderr.splitlines()
            said = next((line for line in lines if "error" in line), "\n".join(lines))
            raise RuntimeError(f"{compiler[0]} ended with status {done.returncode}: {' '.join(said.split())[:300]}")
        return target.read_bytes()
