"""A submission: its files (one JSON line a shape and process, with the printed text) and the figures made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import BaseModel, ConfigDict

from rooflane.dispatch.units import counted
from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.record.records import SUBMISSION_FILE, append_records, create_folder, parse_page, read_rows
from rooflane.eval.report.table import interval
from rooflane.eval.stats.estimator import Interval, t_interval
from rooflane.eval.submit.parse import Figures, Outcome, largest
from rooflane.shapes import Shape

SCHEMA_VERSION = 1
ROWS_FILE = "rows.jsonl"
NONE = "-"
# A shape is as bad as its worst run.
SEVERITY = ("passed", "oom", "unsupported", "timeout", "usage", "error", "unreadable", "failed")
_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

Key = tuple[int, str]


class SubmitMeta(BaseModel):
    """What was submitted: the script, the candidate, the shapes, the flags and the plan for each shape."""

    model_config = _CONFIG

    schema_version: int = SCHEMA_VERSION
    id: str
    started_at: str
    command: str
    rooflane_version: str
    commit: str | None
    organiser: str
    sha256: str
    known: str
    candidate: str
    candidate_sha256: str
    device: str
    profile: str
    arguments: list[str]
    processes: int
    time_limit_s: float
    shapes: list[dict[str, Any]]
    plans: dict[str, dict[str, Any]]
    infeasible: dict[str, str]

    def shape_list(self) -> list[Shape]:
        """Return the shapes, in file order."""
        return [Shape(**fields) for fields in self.shapes]


class SubmitRow(BaseModel):
    """One run of the script on one shape: what it was given, how it ended, what it printed."""

    model_config = _CONFIG

    schema_version: int = SCHEMA_VERSION
    submission: str
    process: int
    shape: str
    outcome: Outcome
    reason: str = ""
    exit_status: int | None
    arguments: list[str]
    figures: Figures | None = None
    expected: bool = False  # an end that was predicted, such as a baseline that does not fit the memory
    stdout: str
    stderr: str
    wall_s: float
    environment: dict[str, Any] = {}
    measured_at: str

    @property
    def key(self) -> Key:
        """What identifies a row."""
        return self.process, self.shape


@dataclass
class Submission:
    """One submission's folder; `interrupted` is set when it was ended by Ctrl-C."""

    folder: Path
    meta: SubmitMeta
    interrupted: bool = False

    def rows(self) -> list[SubmitRow]:
        """Return the rows written so far; a line torn off by an interruption is left out."""
        return read_rows(self.folder / ROWS_FILE, SubmitRow)

    def append(self, row: SubmitRow) -> None:
        """Write one row."""
        append_records(self.folder / ROWS_FILE, [row])

    def missing(self) -> Sequence[Key]:
        """Return the keys that have no row yet, one process after the other, shapes in file order."""
        done = {row.key for row in self.rows()}
        keys = [(process, shape["id"]) for process in range(self.meta.processes) for shape in self.meta.shapes]
        return [key for key in keys if key not in done]

    def resume_hint(self) -> str:
        """Return the line that names the command to continue with."""
        rows = len(self.rows())
        return f"interrupted; {rows} runs are kept. To continue: rooflane submit --resume {self.folder}"


def create_submission(folder: Path, meta: SubmitMeta) -> Submission:
    """Make the folder of a new submission and write its page."""
    folder = folder / meta.id
    create_folder(folder, SUBMISSION_FILE, meta, "submission")
    return Submission(folder, meta)


def open_submission(folder: str | Path) -> Submission:
    """Return the submission in a folder; raises `EvaluationError` when there is none, or of another version."""
    folder = Path(folder)
    try:
        return Submission(folder, parse_page(folder / SUBMISSION_FILE, SubmitMeta, "submission"))
    except OSError:
        raise EvaluationError(
            f"{folder}: not a submission, there is no {SUBMISSION_FILE} in it; name a folder that `rooflane submit` "
            "wrote"
        ) from None


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


def render_json(summary: SubmitSummary) -> str:
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


def remarks(summary: SubmitSummary) -> Iterator[str]:
    """Yield the lines under the tables: the geometric mean and every failure."""
    meta = summary.submission.meta
    if summary.geomean:
        shapes = counted(sum(not row.expected for row in summary.rows), "shape")
        mean = f"geometric mean {interval(summary.geomean)} over {shapes}"
        yield f"{meta.candidate}: {mean}, {counted(meta.processes, 'process')}"
    else:
        yield f"{meta.candidate}: no geometric mean: {summary.why}"
    for row in summary.rows:
        if row.reason:
            yield f"shape {row.shape.id}: {row.outcome}: {row.reason}"


def _shape_figures(shape: Shape, family: str, rows: Sequence[SubmitRow]) -> ShapeFigures:
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
    """Return a row as JSON's values; an error that is not finite is a word, because JSON has no number for it."""
    values = asdict(row)
    if row.max_abs is not None and not math.isfinite(row.max_abs):
        values["max_abs"] = str(row.max_abs)
    return values


def _range(values: Sequence[float], digits: int, unit: str = "") -> str:
    if not values:
        return NONE
    text = f"{median(values):.{digits}g}{unit}"
    return f"{text} ({min(values):.{digits}g}-{max(values):.{digits}g})" if len(values) > 1 else text
