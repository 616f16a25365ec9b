"""Build the C++ host path (`host.cpp`) at first use and keep it on the disk; which compilers there are. No torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAME = "rooflane_host"
HOST_COMPILERS = ("g++", "clang++", "c++")
# Without NDEBUG pybind11 checks the interpreter's lock at every reference that it counts: a microsecond a call.
OPTIONS = ("-std=c++20", "-O2", "-DNDEBUG", "-fvisibility=hidden", "-w")
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")
# The longest wait for another process's build, which takes about half a minute on a free core.
WAIT_S = 300.0
# Holds the reason of a failed build, for the processes that waited for it.
FAILED = "failed"
# cuLaunchKernel's grid, block and shared memory; and the status on a thread that has not used the device yet.
SIZES = [ctypes.c_uint] * 7
NO_CONTEXT = 201
_LOCK = threading.Lock()


def host_compiler() -> list[str]:
    """Return the C++ compiler's command, that of `CXX` or the first on the path; empty where there is none.

    Raises `RuntimeError` where `CXX` is no command.
    """
    text = os.environ.get("CXX", "")
    try:
        named = shlex.split(text)
    except ValueError as error:
        raise RuntimeError(f"CXX={text!r} is no command ({error}); fix the variable or unset it") from None
    return named or [path for path in map(shutil.which, HOST_COMPILERS) if path][:1]


def python_header() -> Path:
    """Return where Python's own header belongs; a system's Python often comes without."""
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


@cache
def missing_compiler() -> str:
    """Return why NVRTC or the driver's bindings cannot be used, "" when they can."""
    try:
        import_module("cuda.bindings.driver")
        status, *_ = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception as error:  # a missing library, a foreign module named cuda: the bindings raise many kinds
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if int(status) == 0 else f"nvrtcVersion returns {status}"


class PythonLauncher:
    """Launch like the compiled `Launcher`, from Python."""

    def __init__(
        self, entry: int, function: int, grid: int, threads: int, shared_bytes: int, fixed: tuple[int, ...],
        enter: Callable[[], None], held: object,
    ) -> None:  # fmt: skip
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


def find_ninja() -> str | None:
    """Return the path of ninja: this environment's, which need not be on the path, else the first on the path."""
    user = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    folders = [sysconfig.get_path("scripts"), user, *os.get_exec_path()]
    return shutil.which("ninja", path=os.pathsep.join(filter(None, folders)))


def host_module() -> ModuleType | None:
    """Return the compiled module, or None after one warning where it cannot be built.

    `Launcher(entry, function, grid, threads, shared_bytes, fixed, enter, held)` binds a kernel whose parameters are x,
    mask, output and the `fixed` bits. A call with a raw stream, x, mask or None, and output launches it, and raises
    `RuntimeError` when the driver refuses. On a thread without a context it calls `enter()` and launches again.
    `Call(...)` is the common call of a `BoundForward`. `Watch(...)` is the comparison of a `ModelWatch`.
    """
    with _LOCK:
        return _host_module()


@cache
def _host_module() -> ModuleType | None:
    """Load or build the module, once a process, whether it succeeds or fails."""
    try:
        return _load_or_build()
    except (RuntimeError, OSError, ImportError) as error:
        warnings.warn(
            f"the C++ host path could not be built: {error}; calls go through Python and take the host longer. To fix "
            "this, install a compiler of C++20 and Python's headers (Debian: apt-get install g++ python3-dev), or set "
            "TORCH_EXTENSIONS_DIR to a folder that can be written; see rooflane doctor",
            stacklevel=3,
        )
        return None


def host_build_pending() -> bool:
    """Return whether the next `host_module()` of a process will compile, which takes half a minute; loads no torch."""
    with suppress(RuntimeError):
        return bool(host_compiler()) and not _library(_code()).exists()
    return False


def _code() -> str:
    return files("rooflane.families.runtime").joinpath("host.cpp").read_text(encoding="utf-8")


def _library(code: str) -> Path:
    """Return where the library built from this source is kept, for this torch, Python and options."""
    # torch/version.py holds torch's version, its commit and its CUDA; importing torch for them takes seconds.
    torch_version = Path(find_spec("torch").origin).with_name("version.py").read_text(encoding="utf-8")
    text = "\n".join((torch_version, sys.version, *OPTIONS, code))
    # pybind11 knows modules by name, so each text has a name of its own.
    name = f"{NAME}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return cache_root() / name / f"{name}.so"


def _load_or_build() -> ModuleType:
    """Return the module from the disk, built where it is not there or does not load."""
    import torch  # noqa: F401  (the library links against torch's, which must be loaded first)

    code = _code()
    library = _library(code)
    name, folder = library.stem, library.parent
    # A library of another machine may need libraries that are not here: it is built again.
    with suppress(ImportError):
        return _import(name, library)
    folder.mkdir(parents=True, exist_ok=True)
    with _sole_builder(folder) as waited:
        with suppress(ImportError):
            return _import(name, library)
        if waited and (failed := folder / FAILED).exists():
            raise RuntimeError(f"another process has just failed: {failed.read_text()}")
        return _build(name, code, folder, library)


def cache_root() -> Path:
    """Return torch's folder of extensions, or the folder that the environment names for it or for Triton's cache."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named).absolute()
    if named := os.environ.get("TRITON_CACHE_DIR"):
        return Path(named).absolute() / "torch_extensions"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"


def _import(name: str, library: Path) -> ModuleType:
    """Import a library under a module's name; raises `ImportError` where it is absent or does not load."""
    spec = spec_from_file_location(name, library)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _sole_builder(folder: Path) -> Iterator[bool]:
    """Keep other processes from building in the folder; yields whether another one had to be waited for.

    The system drops a file lock when its process ends, so a killed build leaves none behind.
    """
    import fcntl

    path = folder / "lock"
    with open(path, "w") as file:
        start, waited = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = True
            if time.monotonic() - start > WAIT_S:
                raise RuntimeError(f"another process has held {path} for {WAIT_S:g} s; end it and start again")
            time.sleep(0.1)
        yield waited


def _build(name: str, code: str, folder: Path, library: Path) -> ModuleType:
    """Build in a private folder and move the library into its place whole, so that no reader meets half a file."""
    compiler = host_compiler()
    if not compiler or not shutil.which(compiler[0]):
        raise RuntimeError(f"{' '.join(compiler) or ', '.join(HOST_COMPILERS)}: not found")
    failed = folder / FAILED
    failed.unlink(missing_ok=True)
    print("rooflane: compiling the C++ host path (once per version, about 30 s)", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = Path(scratch) / "host.cpp"
            source.write_text(code, encoding="utf-8")
            ninja = find_ninja()
            # torch's builder imports setuptools, and takes no compiler of several words, such as ccache before g++.
            if ninja and find_spec("setuptools") and len(compiler) == 1:
                module = _build_with_ninja(name, source, compiler[0], ninja)
            else:
                module = _build_directly(name, source, compiler)
            os.replace(source.with_name(library.name), library)
            return module
    except (RuntimeError, ImportError) as error:
        failed.write_text(str(error))
        raise


def _build_with_ninja(name: str, source: Path, compiler: str, ninja: str) -> ModuleType:
    """Build through torch's extension builder, which reads its tools from the environment."""
    from torch.utils.cpp_extension import load

    path = os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", os.defpath)])
    tools = {"PATH": path, "CXX": compiler, "TORCH_DONT_CHECK_COMPILER_ABI": "1"}
    before = {key: os.environ.get(key) for key in tools}
    os.environ.update(tools)
    try:
        return load(name, [str(source)], extra_cflags=list(OPTIONS), build_directory=str(source.parent))
    except RuntimeError as error:
        raise RuntimeError(f"{compiler} failed: {_first_error(str(error))}") from None
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def _build_directly(name: str, source: Path, compiler: list[str]) -> ModuleType:
    """Call the compiler itself, for machines without ninja, such as those of an exported file."""
    import torch

    home = Path(torch.__file__).parent
    headers = (home / "include", home / "include/torch/csrc/api/include", python_header().parent)
    folders = [*(f"-I{path}" for path in headers), f"-L{home / 'lib'}"]
    options = [*OPTIONS, "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={name}", *folders]
    library = source.with_name(f"{name}.so")
    command = [*compiler, *options, str(source), "-o", str(library), *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{compiler[0]} ended with status {done.returncode}: {_first_error(done.stderr)}")
    return _import(name, library)


def _first_error(output: str) -> str:
    """Return the first line of a compiler's output that reports an error, or the output's end, on one line."""
    line = next((line[:300] for line in output.splitlines() if "error:" in line), output[-300:])
    return " ".join(line.split())
