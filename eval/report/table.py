"""A table as text cells, how figures are written in them, and how a table fits a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from rooflane.eval.report.escape import plain

if TYPE_CHECKING:
    from rich.console import Console

    from rooflane.eval.stats.estimator import Interval
    from rooflane.eval.stats.figures import Cell, Spread

NONE = "-"
GAP = "  "
# Nearer to 1 than this a ratio is 1: what is left is rounding.
SAME = 5e-7
MOST_DECIMALS = 6
MOST_DIGITS = 9
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Table:
    """A titled table of text; `left` counts the leading columns that are words, the others are figures.

    `optional` columns are dropped on a narrow terminal, in this order. The last column of a `prose` table holds
    sentences.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int
    note: str = ""
    optional: tuple[str, ...] = ()
    prose: bool = False

    def shown(self, escape: Callable[[str], str]) -> Table:
        """Return the table with every text escaped for a medium."""
        rows = tuple(tuple(map(escape, row)) for row in self.rows)
        names = tuple(map(escape, self.columns))
        optional = tuple(map(escape, self.optional))
        return Table(escape(self.title), names, rows, self.left, escape(self.note), optional, self.prose)

    def without(self, name: str) -> Table:
        """Return the table without a column."""
        at = self.columns.index(name)
        rows = tuple(row[:at] + row[at + 1 :] for row in self.rows)
        columns = self.columns[:at] + self.columns[at + 1 :]
        return Table(self.title, columns, rows, self.left - (at < self.left), self.note, self.optional, self.prose)


def terminal_lines(table: Table, width: int) -> list[str]:
    """Return a table as lines of at most `width` columns that never split a cell.

    A table that is too wide loses its optional columns, and a note names them; one that is still too wide has its
    rows stacked. Sentences are wrapped between words.
    """
    table = table.shown(plain)
    if table.prose:
        return [table.title, *_prose(table, width)]
    dropped = []
    for name in table.optional:
        if _width(table) <= width:
            break
        if name in table.columns:
            dropped.append(name)
            table = table.without(name)
    body = _grid(table) if _width(table) <= width else _stack(table, width)
    note = [table.note] if table.note else []
    if dropped:
        note.append(f"not shown at this width: {', '.join(dropped)}")
    return [*wrap(table.title, width), *body, *wrap("; ".join(note), width)]


def print_table(table: Table, console: Console) -> None:
    """Print a table that fits the console, and a blank line after it; brackets in its cells are text."""
    for index, line in enumerate(terminal_lines(table, console.width)):
        _print_line(line, console, "bold" if index == 0 else "")
    console.print()


def print_text(text: str, console: Console, style: str = "", indent: str = GAP) -> None:
    """Print text broken between words to the width of the console; later lines are indented."""
    for line in wrap(plain(text), console.width, indent):
        _print_line(line, console, style)


def _print_line(line: str, console: Console, style: str) -> None:
    console.print(line, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return text as lines of at most `width` columns, broken between words; later lines are indented."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with some significant digits; the digits before the point are always whole."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    return f"{value:#.{digits}g}".rstrip(".")


def spread(value: Spread | None) -> str:
    """Return a time with its range over processes."""
    return f"{number(value.centre)} ({number(value.low)}-{number(value.high)})" if value else NONE


def times(value: float, decimals: int = 3) -> str:
    """Return a ratio: three significant digits, and from 0.1 to 2 three decimals, so that 1.004 keeps its meaning."""
    return f"{value:.{decimals}f}" if 0.1 <= round(value, decimals) < 2 else number(value)


def interval(value: Interval | None) -> str:
    """Return a ratio with its interval; where a bound is not 1 but would print as 1, decimals are added."""
    if value is None:
        return NONE
    decimals = _decimals(value)
    centre = f"{times(value.centre, decimals)}x"
    if value.low is None:
        return centre
    return f"{centre} [{times(value.low, decimals)}, {times(value.high, decimals)}]"


def time_columns(cell: Cell) -> tuple[str, str]:
    """Return what an arm is compared with and the arm's own time, in ms.

    Four digits, and more where the first over the second would not print as the speedup beside them.
    """
    if cell.base_ms is None or cell.event_ms is None or cell.speedup is None:
        return NONE, number(cell.event_ms.centre, 4) if cell.event_ms else cell.status
    return ratio_columns(cell.base_ms, cell.event_ms.centre, cell.speedup)


def ratio_columns(base: float, arm: float, ratio: Interval) -> tuple[str, str]:
    """Return two times with as many digits as it takes for the first over the second to print as their ratio."""
    decimals = _decimals(ratio)
    texts = ("", "")
    for digits in range(4, MOST_DIGITS):
        texts = number(base, digits), number(arm, digits)
        first, second = (float(text.replace(",", "")) for text in texts)
        if times(first / second, decimals) == times(ratio.centre, decimals):
            break
    return texts


def ratio(measured: float | None, predicted: float | None) -> str:
    """Return measured over predicted."""
    return times(measured / predicted) if measured and predicted else NONE


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


def grouped(rows: Sequence[tuple[str, ...]], column: int = 0) -> tuple[tuple[str, ...], ...]:
    """Return rows that agree in all but one column as one row, that column's texts joined.

    The last column's texts agree when they differ in numbers alone; each such number becomes its range.
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault((*row[:column], *row[column + 1 : -1], NUMBER.sub("#", row[-1])), []).append(row)
    return tuple(
        (
            *group[0][:column],
            ", ".join(dict.fromkeys(row[column] for row in group)),
            *group[0][column + 1 : -1],
            _ranges([row[-1] for row in group]),
        )
        for group in groups.values()
    )


def _ranges(texts: Sequence[str]) -> str:
    """Return texts that differ in numbers alone as one text, with the least and the greatest of each number."""
    columns = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    merged = []
    for numbers in columns:
        ends = [pick(numbers, key=lambda text: float(text.replace(",", ""))) for pick in (min, max)]
        merged.append(" to ".join(dict.fromkeys(ends)))
    numbers = iter(merged)
    return NUMBER.sub(lambda found: next(numbers), texts[0])


def _decimals(value: Interval) -> int:
    """Return the decimals at which no bound of an interval prints as 1 unless it is 1."""
    ends = [end for end in (value.low, value.high) if end is not None and abs(end - 1) >= SAME]
    return next(
        (count for count in range(3, MOST_DECIMALS) if all(round(end, count) != 1 for end in ends)), MOST_DECIMALS
    )


def _widths(table: Table) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(table.columns, *table.rows, strict=True)]


def _width(table: Table) -> int:
    return sum(_widths(table)) + len(GAP) * (len(table.columns) - 1)


def _grid(table: Table) -> Iterator[str]:
    widths = _widths(table)

    def line(cells: Iterable[str]) -> str:
        padded = []
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            padded.append(cell + space if index < table.left else space + cell)
        return GAP.join(padded).rstrip()

    yield line(table.columns)
    yield "─" * _width(table)
    yield from map(line, table.rows)


def _stack(table: Table, width: int) -> Iterator[str]:
    """Return the lines of a table with each row as `column value` parts, as many on a line as fit.

    Only a part that is itself wider than a line is wrapped, between words.
    """
    for row in table.rows:
        line = ""
        for name, cell in zip(table.columns, row, strict=True):
            part = f"{name} {cell}".strip()
            joined = f"{line}{GAP}{part}" if line.strip() else line + part
            if line.strip() and cell_len(joined) > width:
                yield from wrap(line, width, GAP * 2)
                joined = GAP + part
            line = joined
        yield from wrap(line, width, GAP * 2)


def _prose(table: Table, width: int) -> Iterator[str]:
    for *cells, text in table.rows:
        head = ", ".join(f"{name} {cell}" for name, cell in zip(table.columns, cells, strict=False))
        yield from wrap(f"{head}: {text}", width, GAP)
