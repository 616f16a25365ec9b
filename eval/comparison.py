"""Compare two arms by latency: in one run by pairs, across two runs by Welch's interval."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.records import Record
from rooflane.eval.run import Run, open_run
from rooflane.eval.stats import Interval, t_interval, welch_interval
from rooflane.eval.summary import log_ratios, process_medians
from rooflane.eval.tables import interval, number

if TYPE_CHECKING:
    from rich.console import Console

SEPARATOR = "::"


@dataclass(frozen=True)
class Pair:
    """One shape: both latencies in ms, and how many times faster A is."""

    shape: str
    a_ms: float
    b_ms: float
    ratio: Interval
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """A against B; `left_out` tells why a shape has no pair."""

    a: str
    b: str
    method: str
    pairs: tuple[Pair, ...]
    left_out: dict[str, str]
    geomean: Interval | None
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Side:
    """One arm of one run: its rows by shape and process."""

    label: str
    run: Run
    arm: str
    rows: dict[str, dict[int, Record]]


def compare(a: str, b: str, *, run: Run | None = None) -> Comparison:
    """Compare A with B by event time, shape by shape, and over the shapes both ran.

    Each is `RUN` (its first candidate), `RUN::ARM`, or an arm's name when `run` is given. Arms of one run are
    paired process by process, mirrored round by mirrored round; arms of two runs by Welch's t on the logs of the
    per-process medians. The geometric mean exists only when no shape of either side is left out. Raises
    `EvaluationError` for an unknown run or arm and for runs without a common shape.
    """
    left, right = _side(a, run), _side(b, run)
    paired = left.run.folder.resolve() == right.run.folder.resolve()
    pairs, left_out, logs = [], {}, []
    # In the shape files' order: rows come in the order each process drew.
    for shape in dict.fromkeys(shape.id for side in (left, right) for shape in side.run.meta.shape_list()):
        if shape not in left.rows and shape not in right.rows:
            continue
        mine, theirs = _usable(left.rows.get(shape, {})), _usable(right.rows.get(shape, {}))
        absent = [side.label for side, rows in ((left, mine), (right, theirs)) if not rows]
        reason = f"not measured by {' nor by '.join(absent)}" if absent else ""
        ratios = log_ratios(theirs, mine) if paired else {}
        if paired and not reason and not ratios:
            reason = "the two were never timed in one process"
        if reason:
            left_out[shape] = reason
            continue
        a_ns, b_ns = process_medians(mine), process_medians(theirs)
        a_logs, b_logs = [math.log(value) for value in a_ns.values()], [math.log(value) for value in b_ns.values()]
        found = t_interval(list(ratios.values())) if paired else welch_interval(b_logs, a_logs)
        logs.append(ratios if paired else (dict(zip(a_ns, a_logs, strict=True)), dict(zip(b_ns, b_logs, strict=True))))
        pairs.append(Pair(shape, _ms(a_logs), _ms(b_logs), found, _verdict(found)))
    if not pairs:
        why = "; ".join(f"shape {shape}: {reason}" for shape, reason in left_out.items()) or "neither has a row"
        raise EvaluationError(f"{left.label} and {right.label} have no shape that both measured ({why})")
    geomean = None if left_out else _geomean(logs, paired)
    return Comparison(
        a=left.label,
        b=right.label,
        method="paired by process" if paired else "Welch, two runs",
        pairs=tuple(pairs),
        left_out=left_out,
        geomean=geomean,
        verdict=_verdict(geomean),
    )


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
    for column in ("id", "A ms", "B ms", "ratio [95%]", "A is"):
        table.add_column(column, justify="left" if column in ("id", "A is") else "right")
    for pair in comparison.pairs:
        cells = (pair.shape, number(pair.a_ms), number(pair.b_ms), interval(pair.ratio), pair.verdict)
        table.add_row(*map(Text, cells))
    console.print(table)
    if any(pair.ratio.low is None for pair in comparison.pairs):
        console.print("one process gives no interval, so nothing can be told apart; measure with --processes 2 or more")
    for shape, reason in comparison.left_out.items():
        console.print(f"shape {shape}: left out, {reason}", markup=False, highlight=False)
    mean = f"geometric mean {interval(comparison.geomean)}" if comparison.geomean else "no mean: a shape is left out"
    console.print(f"{mean}; A is {comparison.verdict}", style="bold", markup=False, highlight=False)


def _side(text: str, run: Run | None) -> _Side:
    """Find the run and arm a text names."""
    place, separator, arm = text.partition(SEPARATOR)
    if run is not None and not separator and not Path(place).is_dir():
        place, arm = "", place
    found = open_run(place) if place else run
    arm = arm or found.meta.candidates[0]
    rows: dict[str, dict[int, Record]] = {}
    arms = []
    for record in found.records():
        arms.append(record.arm)
        if record.arm == arm:
            rows.setdefault(record.shape_id, {})[record.process] = record
    if not rows:
        known = ", ".join(dict.fromkeys(arms)) or "none yet"
        raise EvaluationError(f"{text}: run {found.meta.id} has no arm {arm!r}; it has: {known}")
    return _Side(f"{found.meta.id}{SEPARATOR}{arm}", found, arm, rows)


def _usable(rows: dict[int, Record]) -> dict[int, Record]:
    """Return the rows with a right output and a time; none when any process found a wrong output."""
    if any(record.status == "incorrect" and record.kind == "candidate" for record in rows.values()):
        return {}
    return {process: record for process, record in rows.items() if process in process_medians(rows)}


def _geomean(logs: list[Any], paired: bool) -> Interval | None:
    """Return the ratio over all shapes, from the processes that have every one of them."""
    if paired:
        common = set.intersection(*(set(ratios) for ratios in logs))
        means = [fmean(ratios[process] for ratios in logs) for process in sorted(common)]
        return t_interval(means) if means else None
    sides = []
    for side in (0, 1):
        common = set.intersection(*(set(pair[side]) for pair in logs))
        sides.append([fmean(pair[side][process] for pair in logs) for process in sorted(common)])
    return welch_interval(sides[1], sides[0]) if all(sides) else None


def _verdict(found: Interval | None) -> str:
    """Return what an interval says about A: faster, slower, or not distinguishable."""
    if found is None or found.low is None:
        return "not distinguishable"
    return "faster" if found.low > 1 else "slower" if found.high < 1 else "not distinguishable"


def _ms(logs: list[float]) -> float:
    """Return the geometric mean of nanoseconds given as logs, in milliseconds."""
    return math.exp(fmean(logs)) / 1e6
