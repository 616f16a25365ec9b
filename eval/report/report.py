"""Reports: the terminal's tables, Markdown, JSON and the README's table, all from one summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.escape import Ready, markdown, markdown_code
from rooflane.eval.report.files import write_file
from rooflane.eval.report.render import make_environment
from rooflane.eval.report.table import NONE, Table, grouped, interval, number, print_table, print_text, ratio_columns
from rooflane.eval.report.tables import (
    all_tables,
    conditions,
    counted_shapes,
    environment_line,
    headline_line,
    headline_lines,
    main_tables,
    not_run_lines,
    oversize_lines,
    oversize_table,
    speed_table,
    verdict_word,
)
from rooflane.eval.stats.comparison import Comparison
from rooflane.eval.stats.figures import Summary
from rooflane.eval.stats.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console


def render_terminal(summary: Summary, console: Console, details: bool = False) -> None:
    """Print the result of a run: its table, what was not run, and the headline last.

    `details` prints every table of the report before it, and the conditions of the run.
    """
    tables = all_tables(summary) if details else main_tables(summary)
    for table in tables:
        print_table(table, console)
    lines = [*oversize_lines(summary), *not_run_lines(summary)]
    if details:
        lines += [details for _, details in headline_lines(summary) if details]
        lines += [environment_line(summary), *conditions(summary)]
    for line in lines:
        print_text(line, console)
    for headline in summary.headlines:
        print_text(headline_line(headline), console, style="bold")


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print a comparison as a table, the rows without a verdict with their reasons, and the mean under them."""
    print_table(comparison_table(comparison), console)
    reasons = [(pair.shape, pair.why) for pair in comparison.pairs if pair.verdict == Verdict.NONE]
    left_out = [(shape, reason) for shape, reason in comparison.left_out.items()]
    for what, rows in (("no verdict", reasons), ("left out", left_out)):
        for names, reason in grouped(rows):
            print_text(f"{what} on {counted_shapes(names)}: {reason}", console)
    for note in comparison.notes:
        print_text(f"note: {note}", console)
    mean = f"geometric mean {interval(comparison.geomean)}" if comparison.geomean else "no geometric mean"
    subject = "" if comparison.verdict == Verdict.NONE else "A is "
    print_text(f"{mean}; {subject}{verdict_word(comparison.verdict)}: {comparison.why}", console, style="bold")


def comparison_table(comparison: Comparison) -> Table:
    """Return a row a shape: the verdict on A, both times and their ratio."""
    rows = []
    for pair in comparison.pairs:
        b_ms, a_ms = ratio_columns(pair.b_ms, pair.a_ms, pair.ratio)
        floor = pair.floor.share() if pair.floor else NONE
        figures = (a_ms, b_ms, interval(pair.ratio), floor, number(pair.holm_p))
        rows.append((pair.shape, verdict_word(pair.verdict), *figures))
    return Table(
        title=f"A = {comparison.a}, B = {comparison.b}: B's event time over A's ({comparison.method})",
        columns=("id", "A is", "A ms", "B ms", "ratio [95%]", "floor", "Holm p"),
        rows=tuple(rows),
        left=2,
        optional=("Holm p", "floor"),
    )


def render_markdown(summary: Summary) -> str:
    """Return the whole report as Markdown; the same records give the same bytes."""
    environment = make_environment(finalize=_as_markdown)
    environment.filters["code"] = markdown_code
    return environment.get_template("report.md.j2").render(
        meta=summary.meta,
        headlines=headline_lines(summary),
        not_run=[_sentence(line) for line in not_run_lines(summary)],
        tables=[(table.title, markdown_table(table)) for table in all_tables(summary)],
        environment=environment_line(summary),
        conditions=[_sentence(line) for line in conditions(summary)],
        problems=summary.problems(),
    )


def _as_markdown(value: Any) -> Any:
    """Return what a template shows of a value: a text escaped, unless it is Markdown already."""
    return markdown(value) if isinstance(value, str) and not isinstance(value, Ready) else value


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def render_json(summary: Summary) -> str:
    """Return every figure as JSON; values that are not finite become null."""
    return json.dumps(_finite(summary.as_dict()), indent=2)


def render_readme_table(summary: Summary) -> str:
    """Return the README's table: every candidate beside eager and the controls, headline and conditions under it."""
    tables = [speed_table(summary, candidate) for candidate in summary.meta.candidates] + [oversize_table(summary)]
    parts = [f"{markdown(table.title)}:\n\n{markdown_table(table)}" for table in tables if table.rows]
    lines = []
    for line, details in headline_lines(summary):
        lines += [f"- **{markdown(line)}**", *([f"  - {markdown(details)}"] if details else [])]
    return "\n\n".join([*parts, "\n".join(lines), markdown(f"Run {summary.meta.id}: {environment_line(summary)}.")])


def update_between_markers(path: str | Path, name: str, text: str) -> bool:
    """Replace what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; return whether the file changed.

    Raises `EvaluationError` when the file is a link, cannot be read or does not hold each marker once, in order.
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
    write_file(path, new)
    return True


def markdown_table(table: Table) -> Ready:
    """Return a table in Markdown, every text escaped, with its note below."""
    table = table.shown(markdown)

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---" if index < table.left else "--:" for index in range(len(table.columns))]
    lines = [line(table.columns), "|" + "|".join(rule) + "|", *map(line, table.rows)]
    return Ready("\n".join(lines) + (f"\n\n{table.note}." if table.note else ""))


def _finite(value: Any) -> Any:
    """Return a value with infinities and NaN as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
