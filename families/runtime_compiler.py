"""Whether CUDA C++ can be compiled here at run time; no torch."""

from __future__ import annotations

from functools import cache
from importlib import import_module

# Where the kernels run that are compiled so.
CAPABILITY = (9, 0)


@cache
def missing_compiler() -> str:
    """Return why NVRTC or the driver's bindings cannot be used, "" when they can."""
    try:
        import_module("cuda.bindings.driver")
        status, *_ = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception as error:  # a missing library, a foreign module named cuda: the bindings raise many kinds
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if int(status) == 0 else f"nvrtcVersion answers {status}"
