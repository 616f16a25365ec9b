"""The table of the script's own rounds, which runs on fixed inputs end with."""

from __future__ import annotations

from rooflane.eval.report.table import Table, number, spread
from rooflane.eval.stats.figures import Summary


def script_table(summary: Summary, candidate: str) -> Table:
    """Return what the organiser's protocol tells of a candidate and of eager beside it."""
    rows = []
    for row in summary.rows:
        cell = row.cells[candidate]
        if cell.bare_ms is None or cell.bare_eager_ms is None or cell.event_ms is None:
            continue
        speedup = f"{cell.bare_eager_ms.median / cell.bare_ms.median:.3g}x"
        figures = (spread(cell.bare_eager_ms), spread(cell.bare_ms), speedup, number(cell.event_ms.median))
        rows.append((row.shape.id, *figures))
    return Table(
        title=f"{candidate}: as the organiser's script times it, in ms",
        columns=("id", "eager", "candidate", "speedup", "in its windows"),
        rows=tuple(rows),
        left=1,
        note="eager and candidate in turn in one process on one input, no look between the calls: what rooflane submit "
        "--beside holds against the script; median (range over processes), the speedup of the medians",
    )
