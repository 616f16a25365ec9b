"""Times, sizes and counts as people read them: three digits and the unit that fits."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return seconds as text, such as `0.85 us`, `12.3 ms`, `135 s` or `2 h`."""
    if seconds == 0:
        return "0"
    units = ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (3600, 1, "s"), (float("inf"), 1 / 3600, "h"))
    scale, unit = next((scale, unit) for limit, scale, unit in units if seconds < limit)
    return f"{_three_digits(seconds * scale)} {unit}"


def size(count: float) -> str:
    """Return bytes as text, such as `1.5 kB`, `2.5 GB` or `41.1 TB`."""
    for limit, unit, scale in ((1e3, "B", 1), (1e6, "kB", 1e3), (1e9, "MB", 1e6), (1e12, "GB", 1e9)):
        if count < limit:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{_three_digits(count / 1e12)} TB"


def rough_duration(seconds: float) -> str:
    """Return a long time for a progress display, such as `45 s`, `4 min` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 shape`, `2 shapes` or `3 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else plural}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
