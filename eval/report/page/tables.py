"""The page's tables, by section: text cells with the value that a sort uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rooflane.eval.report.page.source import EAGER, NONE, PageData, Truth, number, report_tables, size
from rooflane.eval.report.tables import Table

REGIMES = ("launch", "bandwidth", "compute")
UNMEASURED = "not measured"
# Which section shows a table of the report, by how its title begins; a table that no line names goes with the clocks.
_PLACES = (
    ("event time", "results"),
    ("verdict", "results"),
    ("Ranking", "results"),
    ("Too large", "results"),
    ("Prediction", "predictions"),
    ("set-up and price", "price"),
    ("Failures", "outcomes"),
    ("Findings", "outcomes"),
    ("Not run", "outcomes"),
)
ELSEWHERE = "clocks"
SECTIONS = ("results", "predictions", "price", ELSEWHERE, "outcomes")


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


def report_sections(data: PageData) -> dict[str, list[PageTable]]:
    """Return every table of the report by section, in the report's order."""
    found: dict[str, list[PageTable]] = {name: [] for name in SECTIONS}
    for title, table in report_tables(data.summary):
        section = next((place for start, place in _PLACES if title.startswith(start)), ELSEWHERE)
        found[section].append(page_table(f"{section}-{len(found[section])}", table))
    return found


def integrity_table(data: PageData) -> PageTable | None:
    """Return the evidence of manipulation that records carry; None when there is none."""
    if not data.integrity:
        return None
    return make_table("integrity", "Integrity", ("id", "arm", "evidence"), data.integrity, 3)


def truth_table(data: PageData) -> PageTable | None:
    """Return each candidate's error against fp64 in units of eager's own, a column for each stress input."""
    inputs = list(
        dict.fromkeys(check.name for shape in data.shapes for arm in shape.arms.values() for check in arm.truth)
    )
    rows = []
    for shape in data.shapes:
        for name in data.candidates:
            arm = shape.arms.get(name)
            if arm is None or not arm.truth:
                continue
            by_name = {check.name: check for check in arm.truth}
            rows.append((shape.id, name, *(_ratio(by_name.get(text)) for text in inputs)))
    if not rows:
        return None
    return make_table(
        "fp64",
        "Worst error against fp64, in units of eager's own error",
        ("id", "arm", *inputs),
        rows,
        2,
        "below 1 is closer to fp64 than eager; ~ outside the tolerance, where eager itself strays, and within the "
        "allowed factor of eager's error; ! fails",
    )


def price_table(data: PageData) -> PageTable:
    """Return tokens a second and the price of 1e9 tokens, of eager and every candidate."""
    rows = []
    for shape in data.shapes:
        for name in (EAGER, *data.candidates):
            arm = shape.arms.get(name)
            if arm is None or not arm.tokens_per_s:
                continue
            rows.append(
                (
                    PageCell(shape.id),
                    PageCell(shape.label),
                    PageCell(name),
                    PageCell(number(arm.tokens_per_s), arm.tokens_per_s),
                    PageCell(number(arm.price), arm.price, arm.tokens_per_s),
                )
            )
    names = ("id", "shape", "arm", "tokens/s", "$ per 1e9 tokens")
    columns = tuple(Column(text, index > 2, index > 2) for index, text in enumerate(names))
    note = "valid tokens only, the geometric mean over processes: the price of an hour over the tokens of an hour"
    return PageTable("price", "Price of 1e9 tokens", columns, tuple(rows), note)


def environment_tables(data: PageData) -> list[PageTable]:
    """Return the machine and its software, the run's settings, and the limits the predictions were made with."""
    meta, facts = data.run.meta, data.summary.environment
    machine = [(name, size(value) if name.endswith("_bytes") else str(value)) for name, value in facts.items()]
    machine += [("rooflane of the run", meta.rooflane_version), ("device asked for", meta.device)]
    settings = [(name, str(value)) for name, value in meta.settings.items() if value is not None]
    limits = [
        (name, f"{figure['value']:.5g} {figure['unit']}", figure["mark"], figure["source"])
        for name, figure in meta.profile.items()
        if isinstance(figure, dict) and "value" in figure
    ]
    title = f"Device profile {meta.profile['name']}: {meta.profile['title']}"
    return [
        make_table("environment", "Environment", ("fact", "value"), machine, 2),
        make_table("settings", "Settings", ("setting", "value"), settings, 2),
        make_table("profile", title, ("limit", "value", "mark", "source"), limits, 4),
    ]


def confusion_table(data: PageData) -> PageTable:
    """Return predicted regimes against measured ones, the shapes' ids in the cells."""
    used = [name for name in REGIMES if any(name in (s.regime, s.measured_regime) for s in data.shapes)]
    predicted = used + (["infeasible"] if any(shape.regime == "infeasible" for shape in data.shapes) else [])
    columns = used + ([UNMEASURED] if any(shape.measured_regime is None for shape in data.shapes) else [])
    rows = []
    for regime in predicted:
        cells = []
        for was in columns:
            ids = [s.id for s in data.shapes if s.regime == regime and (s.measured_regime or UNMEASURED) == was]
            mark = "" if was == UNMEASURED else " ✓" if regime == was else " ✗"
            cells.append(f"{len(ids)}{mark}: {', '.join(ids)}" if ids else NONE)
        rows.append((regime, *cells))
    hits = sum(shape.measured_regime == shape.regime for shape in data.shapes)
    known = sum(shape.measured_regime is not None for shape in data.shapes)
    note = (
        f"{hits} of {known} regimes as predicted"
        if known
        else "no regime was measured: this device has no clock of its own"
    )
    heads = ("predicted", *(name if name == UNMEASURED else f"measured {name}" for name in columns))
    return make_table("confusion", "Regimes: predicted against measured", heads, rows, len(heads), note)


def _ratio(check: Truth | None) -> str:
    """Return an error in units of eager's own, marked where it is outside the gate or fails."""
    if check is None:
        return NONE
    return number(check.ratio) + ("!" if not check.passed else "" if check.within_gate else "~")
