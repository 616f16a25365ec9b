"""Logarithmic axes: where a value stands, and which ticks say so."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rooflane.eval.report.page.scene import text_width

SHORT_AXIS = 20  # an axis of under this factor has few of the usual ticks
ROOM = 1.25  # free space beyond the outermost values, as a factor


@dataclass(frozen=True)
class LogScale:
    """Values from `low` to `high` on pixels from `start` to `end`; a value outside stands on the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return a value's pixel."""
        share = math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, apart: float) -> list[tuple[float, str]]:
        """Return values and their labels, at least `apart` pixels plus the label's width between two."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        # The powers of ten come first: the others fill what room is left, the odd ones where the axis is short.
        steps = (1, 5, 2) if self.high / self.low > SHORT_AXIS else (1, 5, 2, 3, 1.5, 4, 7)
        values = [step * 10.0**power for step in steps for power in range(first, last + 1)]
        chosen: list[tuple[float, str]] = []
        for value in values:
            label = tick_label(value)
            room = apart + (text_width(label) if self.end > self.start else 0)
            free = all(abs(self(value) - self(other)) >= room for other, _ in chosen)
            if self.low <= value <= self.high and free:
                chosen.append((value, label))
        return sorted(chosen)


def log_scale(values: Iterable[float], start: float, end: float) -> LogScale:
    """Return a scale that holds the values with some room; at least a factor of four wide."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(known) / ROOM, max(known) * ROOM
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    return LogScale(low, high, start, end)


def tick_label(value: float) -> str:
    """Return a round value in its shortest form."""
    if 1e-3 <= value < 1e5:
        return f"{value:g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
