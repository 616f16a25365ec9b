"""Reports: the terminal's tables, Markdown, JSON and the README's table, all from one summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.render import render
from rooflane.eval.report.tables import (
    Table,
    all_tables,
    conditions,
    environment_line,
    headline_lines,
    oversize_table,
    speed_table,
)
from rooflane.eval.stats.figures import Summary

if TYPE_CHECKING:
    from rich.console import Console


def render_terminal(summary: Summary, console: Console, details: bool = False) -> None:
    """Print the first table, or with `details` all of them and the conditions; the headline last."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in all_tables(summary)[: None if details else 1]:
        shown = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for index, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if index < table.left else "right", overflow="fold")
        for row in table.rows:
            # As text: an interval or an error message in brackets is no markup.
            shown.add_row(*map(Text, row))
        console.print(shown)
        if table.note:
            console.print(table.note + "\n", markup=False, highlight=False)
    for line in (environment_line(summary), *conditions(summary)) if details else ():
        console.print(line, markup=False, highlight=False)
    for line in headline_lines(summary):
        console.print(line, style="bold", markup=False, highlight=False)


def render_markdown(summary: Summary) -> str:
    """Return the whole report as Markdown; the same records give the same bytes."""
    return render(
        "report.md.j2",
        meta=summary.meta,
        headlines=headline_lines(summary),
        tables=[(table.title, _markdown(table)) for table in all_tables(summary)],
        environment=environment_line(summary),
        conditions=conditions(summary),
        problems=summary.problems(),
    )


def render_json(summary: Summary) -> str:
    """Return every figure as JSON; values that are not finite become null."""
    return json.dumps(_finite(summary.as_dict()), indent=2)


def render_readme_table(summary: Summary) -> str:
    """Return the README's table: every candidate beside eager and the controls, headline and conditions under it."""
    tables = [speed_table(summary, candidate) for candidate in summary.meta.candidates] + [oversize_table(summary)]
    parts = [f"{table.title}:\n\n{_markdown(table)}" for table in tables if table.rows]
    lines = "\n".join(f"- {line}" for line in headline_lines(summary))
    return "\n\n".join([*parts, lines, f"Run {summary.meta.id}: {environment_line(summary)}."])


def update_between_markers(path: str | Path, name: str, text: str) -> bool:
    """Replace what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; return whether the file changed.

    Raises `EvaluationError` when the file cannot be read or does not hold each marker once, in order.
    """
    path = Path(path)
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        old = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from None
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise EvaluationError(f"{path}: needs the lines {begin} and {end}, once each and in this order")
    head, rest = old.split(begin)
    new = f"{head}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}"
    if new == old:
        return False
    path.write_text(new, encoding="utf-8")
    return True


def _markdown(table: Table) -> str:
    """Return a table in Markdown."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = ["---" if index < table.left else "--:" for index in range(len(table.columns))]
    lines = [line(table.columns), "|" + "|".join(rule) + "|", *map(line, table.rows)]
    return "\n".join(lines) + (f"\n\n{table.note}." if table.note else "")


def _finite(value: Any) -> Any:
    """Return a value with infinities and NaN as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
