"""A table as text cells, and how figures are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooflane.eval.stats.figures import Spread
from rooflane.eval.stats.intervals import Interval

NONE = "-"


@dataclass(frozen=True)
class Table:
    """A titled table of text; `left` counts the leading columns that are words, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    note: str = ""


def number(value: float | None) -> str:
    """Return a figure with three significant digits."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:#.3g}".rstrip(".")


def spread(value: Spread | None) -> str:
    """Return a median with its range over processes."""
    return f"{number(value.centre)} ({number(value.low)}-{number(value.high)})" if value else NONE


def interval(value: Interval | None) -> str:
    """Return a ratio with its interval."""
    if value is None:
        return NONE
    if value.low is None:
        return f"{value.centre:.3g}x"
    return f"{value.centre:.3g}x [{value.low:.3g}, {value.high:.3g}]"


def ratio(measured: float | None, predicted: float | None) -> str:
    """Return measured over predicted."""
    return number(measured / predicted) if measured and predicted else NONE


def size(count: int | None) -> str:
    """Return bytes in the unit that reads best."""
    if count is None:
        return NONE
    unit, scale = next((pair for pair in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if count >= pair[1]), ("kB", 1e3))
    return f"{count / scale:.3g} {unit}"


def price(value: Interval | None) -> str:
    """Return a price with its interval."""
    if value is None:
        return NONE
    if value.low is None:
        return number(value.centre)
    return f"{number(value.centre)} [{number(value.low)}, {number(value.high)}]"


def percent(value: float | None) -> str:
    """Return a share as a percentage."""
    return NONE if value is None else f"{value:.1%}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 process, 3 processes."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def grouped(rows: Sequence[tuple[str, ...]], column: int = 0) -> tuple[tuple[str, ...], ...]:
    """Return rows that agree in all but one column as one row, that column's texts joined."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(row[:column] + row[column + 1 :], []).append(row[column])
    return tuple((*key[:column], ", ".join(texts), *key[column:]) for key, texts in groups.items())
