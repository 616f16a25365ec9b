"""A submission in figures: one line a shape, the geometric mean, and what our own run says beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.stats.intervals import Interval, t_interval
from rooflane.eval.submit.beside import QUANTITIES, Beside, Pair
from rooflane.eval.submit.parse import largest
from rooflane.eval.submit.records import Submission, SubmitRow
from rooflane.shapes import Shape

NONE = "-"
# A shape is as bad as its worst run.
SEVERITY = ("passed", "oom", "unsupported", "timeout", "usage", "error", "unreadable", "failed")


@dataclass(frozen=True)
class ShapeFigures:
    """One shape over its processes: each printed figure as a list, one value a process."""

    shape: Shape
    outcome: str
    reason: str
    expected: bool
    runs: int
    family: str
    baseline_ms: tuple[float, ...] = ()
    optimized_ms: tuple[float, ...] = ()
    speedup: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    max_abs: float | None = None
    failed_elements: int = 0


@dataclass(frozen=True)
class SubmitSummary:
    """A submission in figures; `geomean` is None unless every shape that can be run passed in every process."""

    submission: Submission
    rows: tuple[ShapeFigures, ...]
    geomean: Interval | None
    why: str
    missing: int
    environment: dict[str, Any]

    def exit_code(self) -> ExitCode:
        """Return the status the command leaves with."""
        if self.submission.interrupted:
            return ExitCode.INTERRUPTED
        if any(row.outcome == "failed" for row in self.rows):
            return ExitCode.INCORRECT
        whole = not self.missing and all(row.outcome == "passed" or row.expected for row in self.rows)
        return ExitCode.COMPLETE if whole else ExitCode.INCOMPLETE


def summarise_submission(submission: Submission) -> SubmitSummary:
    """Return every figure of a submission, from its rows alone."""
    meta, found = submission.meta, submission.rows()
    rows = tuple(
        _shape_figures(shape, meta.plans[shape.id]["family"], [row for row in found if row.shape == shape.id])
        for shape in meta.shape_list()
    )
    missing = len(submission.missing())
    count = [row for row in rows if not row.expected]
    bad = [row.shape.id for row in count if row.outcome != "passed" or len(row.speedup) != meta.processes]
    geomean, why = None, ""
    if bad:
        why = f"not passed in every process: shape {', '.join(bad)}"
    elif not count or any(value <= 0 for row in count for value in row.speedup):
        why = "no shape has a speedup"
    else:
        geomean = t_interval([fmean(math.log(row.speedup[p]) for row in count) for p in range(meta.processes)])
    environment = next((row.environment for row in found if row.environment), {})
    return SubmitSummary(submission, rows, geomean, why, missing, environment)


def render_json(summary: SubmitSummary, beside: Beside | None) -> str:
    """Return the submission as JSON; the raw printed text stays in the folder's rows."""
    submission = summary.submission
    document = {
        "folder": str(submission.folder),
        "interrupted": submission.interrupted,
        "missing": summary.missing,
        "exit_code": int(summary.exit_code()),
        "geomean": summary.geomean.as_dict() if summary.geomean else None,
        "why": summary.why,
        "environment": summary.environment,
        "meta": submission.meta.model_dump(mode="json"),
        "shapes": [_plain(row) for row in summary.rows],
        "beside": asdict(beside) if beside else None,
    }
    return json.dumps(document, indent=1)


def submission_table(summary: SubmitSummary) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of what the script printed, a shape a line."""
    columns = ("id", "shape", "family", "outcome", "baseline ms", "optimized ms", "speedup", "max_abs", "tokens/s")
    return columns, [
        (
            row.shape.id,
            row.shape.label(),
            row.family or NONE,
            ("as predicted: " if row.expected else "") + row.outcome,
            _range(row.baseline_ms, 4),
            _range(row.optimized_ms, 4),
            _range(row.speedup, 3, "x"),
            NONE if row.max_abs is None else f"{row.max_abs:.2g}",
            f"{median(row.tokens_per_s):.4g}" if row.tokens_per_s else NONE,
        )
        for row in summary.rows
    ]


def beside_table(beside: Beside) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the script's figures beside our own."""
    columns = ["id"]
    for name in ("optimized ms", "baseline ms", "speedup"):
        columns += [f"{name}: script", "ours", "script/ours", "agree"]
    rows = []
    for row in beside.rows:
        cells = [cell for name in QUANTITIES for cell in _pair(row.pairs.get(name))]
        rows.append((row.shape, *cells))
    return tuple(columns), rows


def remarks(summary: SubmitSummary, beside: Beside | None) -> Iterator[str]:
    """Yield the lines under the tables: the geometric mean, every failure, what the comparison rests on."""
    meta = summary.submission.meta
    processes = "1 process" if meta.processes == 1 else f"{meta.processes} processes"
    if summary.geomean:
        over = sum(not row.expected for row in summary.rows)
        low = "" if summary.geomean.low is None else f" [{summary.geomean.low:.3g}, {summary.geomean.high:.3g}]"
        yield f"{meta.candidate}: geometric mean {summary.geomean.centre:.3g}x{low} over {over} shapes, {processes}"
    else:
        yield f"{meta.candidate}: no geometric mean: {summary.why}"
    for row in summary.rows:
        if row.reason:
            yield f"shape {row.shape.id}: {row.outcome}: {row.reason}"
    if beside is None:
        return
    yield f"ours: {beside.run}, arm {beside.arm}"
    yield from beside.notes
    yield from (f"shape {row.shape}: not compared: {row.reason}" for row in beside.rows if row.reason)
    judged = [row.pairs["optimized"] for row in beside.rows if row.pairs]
    verdicts = [pair.agrees for pair in judged if pair.agrees is not None]
    if verdicts:
        yield f"the candidate's latency agrees within its spread on {sum(verdicts)} of {len(verdicts)} shapes"
    if len(verdicts) < len(judged):
        yield "one process on each side has no spread to judge by: use --processes 3 or more"


def _shape_figures(shape: Shape, family: str, rows: Sequence[SubmitRow]) -> ShapeFigures:
    """Return one shape's figures; the outcome and reason are those of its worst run."""
    if not rows:
        return ShapeFigures(shape, "missing", "not run yet", False, 0, family)
    worst = max(rows, key=lambda row: (not row.expected, SEVERITY.index(row.outcome)))
    timed = [row.figures for row in rows if row.figures and row.figures.optimized]
    checked = [row.figures.accuracy for row in rows if row.figures]
    return ShapeFigures(
        shape=shape,
        outcome=worst.outcome,
        reason=worst.reason,
        expected=all(row.expected for row in rows),
        runs=len(rows),
        family=family,
        baseline_ms=tuple(figures.baseline.median_ms for figures in timed),
        optimized_ms=tuple(figures.optimized.median_ms for figures in timed),
        speedup=tuple(figures.speedup for figures in timed),
        tokens_per_s=tuple(figures.optimized.tokens_per_s for figures in timed),
        max_abs=largest(accuracy.max_abs for accuracy in checked) if checked else None,
        failed_elements=sum(accuracy.failed for accuracy in checked),
    )


def _plain(row: ShapeFigures) -> dict[str, Any]:
    """Return a row as JSON's values; an error that is not finite as a word, which JSON has no number for."""
    values = asdict(row)
    if row.max_abs is not None and not math.isfinite(row.max_abs):
        values["max_abs"] = str(row.max_abs)
    return values


def _range(values: Sequence[float], digits: int, unit: str = "") -> str:
    """Return the median, and the range where there are several values."""
    if not values:
        return NONE
    text = f"{median(values):.{digits}g}{unit}"
    return f"{text} ({min(values):.{digits}g}-{max(values):.{digits}g})" if len(values) > 1 else text


def _pair(pair: Pair | None) -> tuple[str, str, str, str]:
    if pair is None:
        return (NONE,) * 4
    interval = "" if pair.low is None else f" [{pair.low:.3g}, {pair.high:.3g}]"
    agree = NONE if pair.agrees is None else "yes" if pair.agrees else "no"
    return f"{pair.theirs:.4g}", f"{pair.ours:.4g}", f"{pair.ratio:.3g}{interval}", agree
