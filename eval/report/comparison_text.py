"""A comparison as the terminal shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooflane.eval.report.tables import interval, number
from rooflane.eval.stats.comparison import Comparison
from rooflane.eval.stats.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

SAID = {
    Verdict.FASTER: "faster",
    Verdict.SLOWER: "slower",
    Verdict.EQUIVALENT: "equivalent",
    Verdict.CONTAMINATED: "not judged, the campaign is contaminated",
    Verdict.NONE: "not judged",
}


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print the comparison as a table with the mean under it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"A = {comparison.a}, B = {comparison.b}: B's event time over A's ({comparison.method})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    columns = ("id", "A ms", "B ms", "ratio [95%]", "floor", "Holm p", "A is")
    for column in columns:
        table.add_column(column, justify="left" if column in ("id", "A is") else "right")
    for pair in comparison.pairs:
        floor = f"{pair.floor.value:.2%}" if pair.floor else "-"
        cells = (pair.shape, number(pair.a_ms), number(pair.b_ms), interval(pair.ratio), floor, number(pair.holm_p))
        table.add_row(*map(Text, (*cells, said(pair.verdict))))
    console.print(table)
    if any(pair.ratio.low is None for pair in comparison.pairs):
        console.print(
            "one process that timed both gives no interval, so nothing can be told apart; measure with --processes 2 "
            "or more. A compiled control is timed in three processes at most, in one of a --quick run on a CPU"
        )
    for shape, reason in comparison.left_out.items():
        console.print(f"shape {shape}: left out, {reason}", markup=False, highlight=False)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    mean = f"geometric mean {interval(comparison.geomean)}" if comparison.geomean else "no mean: a shape is left out"
    line = f"{mean}; A is {said(comparison.verdict)}: {comparison.why}"
    console.print(line, style="bold", markup=False, highlight=False)


def said(verdict: str) -> str:
    """Return a verdict on A in words."""
    return SAID.get(Verdict(verdict), "not distinguishable")
