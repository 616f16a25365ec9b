"""Tables for the page: text cells with the value that a sort goes by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rooflane.eval.report.tables import Table

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?")
_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class PageCell:
    """A cell: what it shows, its sort value (None sorts last), and the tokens a second that a price follows from."""

    text: str
    key: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Column:
    """A column: its name, whether it holds figures, and whether it sorts by `PageCell.key`."""

    name: str
    figures: bool
    numeric: bool


@dataclass(frozen=True)
class PageTable:
    """A table with a caption; the first cell of a row is its header."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[PageCell, ...], ...]
    note: str = ""

    @property
    def sortable(self) -> bool:
        """Whether there is anything to sort."""
        return len(self.rows) > 1


def page_table(name: str, table: Table) -> PageTable:
    """Return one of the report's tables for the page."""
    return make_table(name, table.title, table.columns, table.rows, table.left, table.note)


def make_table(
    name: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, note: str = ""
) -> PageTable:
    """Return a table of texts; columns from `left` on hold figures and sort by the number each cell begins with.

    A column of words sorts as numbers when every cell is one, as shape ids often are.
    """
    figures = [index >= left for index in range(len(columns))]
    numeric = [figures[i] or all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    return PageTable(
        id=name,
        caption=caption,
        columns=tuple(Column(text, figures[i], numeric[i]) for i, text in enumerate(columns)),
        rows=tuple(
            tuple(PageCell(text, sort_key(text) if numeric[i] else None) for i, text in enumerate(row)) for row in rows
        ),
        note=note,
    )


def sort_key(text: str) -> float | None:
    """Return the number a cell begins with, bytes in units of one; None where there is none."""
    match = _NUMBER.match(text)
    if not match:
        return None
    rest = text[match.end() :].split()
    return float(match.group().replace(",", "")) * _BYTES.get(rest[0] if rest else "", 1.0)


def _is_number(text: str) -> bool:
    match = _NUMBER.fullmatch(text)
    return match is not None
