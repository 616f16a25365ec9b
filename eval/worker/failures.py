"""How whatever a candidate raised is named in its row; loads no torch."""

from __future__ import annotations

import sysconfig
from pathlib import Path

OURS = [Path(__file__).resolve().parents[2] / name for name in ("shapes", "baseline", "families", "dispatch", "eval")]
# Folders of installed packages; Python's own modules lie in one named like its version.
INSTALLED = {"site-packages", "dist-packages", Path(sysconfig.get_paths()["stdlib"]).name}


def is_oom(error: Exception) -> bool:
    """Tell whether an exception says that memory ran out; the CPU allocator raises a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        # torch.OutOfMemoryError is a RuntimeError too.
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def told(error: BaseException) -> str:
    """Return an exception's kind, its text on one line, and where in the candidate's own files it was raised."""
    where = place(error)
    return f"{type(error).__name__}: {one_line(error)}" + (f" ({where})" if where else "")


def place(error: BaseException) -> str:
    """Return where an exception left code that is neither ours, torch's nor an installed package's; "" for none.

    A candidate's author looks for their own file and line, and both sides call into torch.
    """
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        path = Path(code.co_filename)
        theirs = INSTALLED & set(path.parts) or any(map(path.is_relative_to, OURS))
        if not theirs and path.is_file():
            found = f"{path.name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text on one line."""
    return " ".join(str(error).split())[:limit] or "no message"
