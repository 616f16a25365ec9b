"""How whatever a candidate raised is named in its row; loads no torch."""

from __future__ import annotations


def is_oom(error: Exception) -> bool:
    """Tell whether an exception says that memory ran out; the CPU allocator raises a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        # torch.OutOfMemoryError is a RuntimeError too.
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def one_line(error: Exception, limit: int = 300) -> str:
    """Return an exception's text on one line."""
    return " ".join(str(error).split())[:limit] or "no message"
