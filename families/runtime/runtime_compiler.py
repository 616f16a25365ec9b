"""Whether CUDA C++ and the host's C++ can be compiled here at run time; no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from functools import cache
from importlib import import_module
from pathlib import Path

# Where the kernels run that are compiled so.
CAPABILITY = (9, 0)
HOST_COMPILERS = ("g++", "clang++", "c++")


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
