"""Compare two arms by latency, with floor and verdict: in pairs within one run, by Welch's t between two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.record.nulls import machine_of, matching, software_of
from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.estimator import Estimate, ShapeEstimate, estimate, welch_by_shape
from rooflane.eval.stats.evidence import Evidence
from rooflane.eval.stats.figures import required
from rooflane.eval.stats.mean import Interval, Mean, difference, mean_over_shapes
from rooflane.eval.stats.run import Run, open_run
from rooflane.eval.stats.verdict import (
    MARGIN,
    Conditions,
    Floor,
    Floors,
    Judgement,
    Verdict,
    find_floors,
    judge_campaign,
)

SEPARATOR = "::"


@dataclass(frozen=True, eq=False)
class Side:
    """One arm of one run."""

    label: str
    run: Run
    arm: str
    evidence: Evidence

    def plans(self, shape: str) -> bool:
        """Tell whether the run planned the arm on a shape. Controls and copies run only where eager fits the memory."""
        meta = self.run.meta
        return all(found.id != shape for found in meta.shape_list()) or self.arm in meta.planned(0, shape)

    def unusable(self, shape: str) -> str:
        """Return why the arm cannot be compared on a shape, or an empty text."""
        rows = list(self.evidence.measured.rows(shape, self.arm).values())
        if not self.evidence.measured.rounds.of(shape, self.arm):
            return f"not measured by {self.label}"
        if any(row.integrity for row in rows):
            return f"{self.label} shows evidence of manipulation"
        if any(row.status == "incorrect" and row.kind == "candidate" for row in rows):
            return f"{self.label} is wrong"
        return ""

    def processes(self, shapes: Sequence[str]) -> set[int]:
        """Return the processes that timed the arm on any of some shapes."""
        return {process for shape in shapes for process in self.evidence.measured.rounds.of(shape, self.arm)}

    def timed_throughout(self, shapes: Sequence[str]) -> bool:
        """Tell whether every process that timed the arm on any of some shapes timed it on all of them."""
        needed = self.processes(shapes)
        return all(self.evidence.measured.rounds.of(shape, self.arm).keys() >= needed for shape in shapes)

    def logs(self, shape: str) -> dict[int, float]:
        """Return the mean log of the event nanoseconds by process, as reports print it."""
        return {process: math.log(ns) for process, ns in self.evidence.measured.times(shape, self.arm).items()}


def find_side(text: str, run: Run | None) -> Side:
    """Return the run and the arm that a text names."""
    place, separator, arm = text.partition(SEPARATOR)
    if run is not None and not separator and not Path(place).is_dir():
        place, arm = "", place
    found = open_run(place) if place else run
    arm = arm or found.meta.candidates[0]
    records = found.records()
    if not any(record.arm == arm for record in records):
        known = ", ".join(dict.fromkeys(record.arm for record in records)) or "none yet"
        raise EvaluationError(f"{text}: run {found.meta.id} has no arm {arm!r}; it has: {known}")
    return Side(f"{found.meta.id}{SEPARATOR}{arm}", found, arm, Evidence.of(found.meta, records))


# These settings decide how many calls a figure is made of.
TIMED_BY = ("budget_s", "rounds", "repeats", "warmups")


@dataclass(frozen=True)
class Pair:
    """One shape: both latencies in ms, how many times faster A is, and the verdict, with Holm's correction."""

    shape: str
    a_ms: float
    b_ms: float
    ratio: Interval
    verdict: str
    why: str = ""
    holm_p: float | None = None
    floor: Floor | None = None


@dataclass(frozen=True)
class Comparison:
    """A against B; `left_out` holds the reason for each shape without a pair."""

    a: str
    b: str
    method: str
    pairs: tuple[Pair, ...]
    left_out: dict[str, str]
    geomean: Interval | None
    verdict: str
    why: str = ""
    floor: Floor | None = None
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return asdict(self)

    def exit_code(self, require: str = "complete") -> ExitCode:
        """Return the exit status: contaminated, or what is required of the verdict."""
        return ExitCode.CONTAMINATED if self.verdict == Verdict.CONTAMINATED else required({self.verdict}, require)


def compare(a: str, b: str, *, run: Run | None = None, margin: float = MARGIN) -> Comparison:
    """Compare A with B by event time, shape by shape, and over the shapes both ran.

    Each is `RUN` (its first candidate), `RUN::ARM`, or an arm's name when `run` is given. Arms of one run are
    paired process by process, mirrored round by mirrored round; arms of two runs by Welch's t on the logs of the
    per-process medians. The geometric mean exists only when no shape of either side is left out. The verdict
    follows the rules of a verdict over eager: the floor of both arms' nulls, and Holm's correction over the shapes.
    Raises `EvaluationError` for an unknown run or arm and for runs without a common shape.
    """
    left, right = find_side(a, run), find_side(b, run)
    paired = left.run.folder.resolve() == right.run.folder.resolve()
    shapes, left_out = _common(left, right)
    if not shapes:
        why = "; ".join(f"shape {shape}: {reason}" for shape, reason in left_out.items()) or "neither has a row"
        raise EvaluationError(f"{left.label} and {right.label} have no shape that both measured ({why})")
    estimates, mean, times = (_by_pairs if paired else _by_welch)(left, right, shapes)
    left_out |= {shape: "no clean block holds both" for shape in shapes if shape not in estimates}
    mean = None if left_out else mean
    floors = _floors(left, right, shapes, paired)
    unlike = _unlike(left, right)
    conditions = Conditions(
        processes=min(len(side.processes(shapes)) for side in (left, right)),
        quick=any(side.run.meta.settings["quick"] for side in (left, right)),
        contaminated=_contaminated(left, right, floors),
        margin=margin,
    )

    def judge_ratio(mean: Mean | None, floor: Floor | None, holm_p: float | None = None) -> Judgement:
        if mean is None or unlike:
            return Judgement(Verdict.NONE, unlike if mean else "there is no mean over every shape and process")
        return judge_campaign(mean, floor, conditions, holm_p=holm_p)

    pairs = []
    for shape, one in estimates.items():
        floor = floors.shapes.get(shape)
        found = judge_ratio(one.mean, floor, one.holm_p)
        pairs.append(Pair(shape, *times[shape], one.interval, found.verdict, found.why, one.holm_p, floor))
    whole = judge_ratio(mean, floors.geomean)
    return Comparison(
        a=left.label,
        b=right.label,
        method="paired by process" if paired else "Welch, two runs",
        pairs=tuple(pairs),
        left_out=left_out,
        geomean=mean and mean.interval(),
        verdict=whole.verdict,
        why=whole.why,
        floor=floors.geomean,
        notes=_notes(left, right),
    )


def _common(left: Side, right: Side) -> tuple[list[str], dict[str, str]]:
    """Return the shapes on which both can be compared, in file order, and the reason for each other shape."""
    common, left_out = [], {}
    sizes = [{shape.id: shape for shape in side.run.meta.shape_list()} for side in (left, right)]
    for shape in dict.fromkeys(shape.id for side in (left, right) for shape in side.run.meta.shape_list()):
        if not any(side.evidence.measured.rows(shape, side.arm) for side in (left, right)):
            continue
        if not (left.plans(shape) and right.plans(shape)):
            continue
        reasons = [reason for side in (left, right) if (reason := side.unusable(shape))]
        own, other = (side.get(shape) for side in sizes)
        if own and other and own != other:
            left_out[shape] = f"it is {own.label()} in one run and {other.label()} in the other"
        elif reasons:
            left_out[shape] = " and ".join(dict.fromkeys(reasons))
        elif (
            left.run.folder.resolve() == right.run.folder.resolve()
            and not left.logs(shape).keys() & right.logs(shape).keys()
        ):
            left_out[shape] = "the two were never timed in one process"
        else:
            common.append(shape)
    return common, left_out


Found = tuple[dict[str, ShapeEstimate], Mean | None, dict[str, tuple[float, float]]]


def _by_pairs(left: Side, right: Side, shapes: Sequence[str]) -> Found:
    """Return the estimates of two arms of one run, and both times in ms over the same processes and blocks."""
    processes = sorted(left.processes(shapes) & right.processes(shapes))
    measured = left.evidence.measured
    found = estimate(measured.rounds, shapes, right.arm, left.arm, processes, measured.contamination)
    pairs = {shape: measured.pair(shape, right.arm, left.arm) for shape in found.shapes}
    return dict(found.shapes), found.mean, {shape: (_ms(one.arm), _ms(one.base)) for shape, one in pairs.items()}


def _by_welch(left: Side, right: Side, shapes: Sequence[str]) -> Found:
    """Return the estimates of arms of two runs, and both times in ms, each over its own processes."""
    logs = {shape: [side.logs(shape) for side in (left, right)] for shape in shapes}
    estimates = welch_by_shape({shape: (list(b.values()), list(a.values())) for shape, (a, b) in logs.items()})
    times = {shape: (_ms(a), _ms(b)) for shape, (a, b) in logs.items()}
    if not (left.timed_throughout(shapes) and right.timed_throughout(shapes)):
        return estimates, None, times
    slow, fast = (mean_over_shapes({shape: logs[shape][index] for shape in shapes}) for index in (1, 0))
    return estimates, difference(slow, fast), times


def _floors(left: Side, right: Side, shapes: Sequence[str], paired: bool) -> Floors:
    """Return the floors under a comparison: from both arms' nulls, and from those stored beside each run."""
    nulls: list[Estimate] = []
    means: list[Sequence[float]] = []
    by_shape: dict[str, list[Sequence[float]]] = {}
    used: set[str] = set()
    for side in dict.fromkeys((left, right)):
        # An arm without a timed copy uses eager's null.
        timed = [shape for shape in shapes if shape in side.evidence.counted]
        own = side.evidence.nulls(side.arm, shapes=timed) or side.evidence.nulls(EAGER, shapes=timed)
        nulls += own.values()
        if paired and side is right:
            continue  # both sides are of one run, so its stored nulls were added already
        found = matching(side.run.stored_nulls(), side.evidence.key, side.run.meta.id)
        stored = side.evidence.stored([null for null in found if null.run not in used])
        used |= {null.run for null in found}  # both runs may have kept the same ones
        means += stored.geomean
        for shape, logs in (stored.shapes or {}).items():
            by_shape.setdefault(shape, []).extend(logs)
    return find_floors(nulls, means, by_shape)


def _unlike(left: Side, right: Side) -> str:
    """Return why two runs cannot be compared: fresh inputs in one and fixed in the other. Else an empty text."""
    inputs = [side.run.meta.settings["inputs"] for side in (left, right)]
    if inputs[0] == inputs[1]:
        return ""
    return f"one run timed calls on {inputs[0]} inputs, the other on {inputs[1]} ones; measure both the same way"


def _contaminated(left: Side, right: Side, floors: Floors) -> str:
    """Return which run was disturbed too much for a verdict, or an empty text."""
    for side in (left, right):
        contamination = side.evidence.measured.contamination
        if contamination.too_much:
            return f"run {side.run.meta.id}: {contamination.describe()}"
    return floors.broken


def _notes(left: Side, right: Side) -> tuple[str, ...]:
    """Return the conditions that a reader must know: contracts, disturbed blocks, other machines and settings."""
    notes = []
    for side in dict.fromkeys((left, right)):
        rows = [
            row
            for shape in side.run.meta.shape_list()
            for row in side.evidence.measured.rows(shape.id, side.arm).values()
        ]
        if any(row.contract or (row.verification and row.verification.contract) for row in rows):
            notes.append(f"{side.label} is right only under a contract")
        unplanned = [shape.id for shape in side.run.meta.shape_list() if not side.plans(shape.id)]
        if unplanned:
            notes.append(f"{side.label} was not planned on shape {', '.join(unplanned)}, which eager does not fit")
        if disturbed := side.evidence.measured.contamination.describe():
            notes.append(f"run {side.run.meta.id}: {disturbed}")
    places = [(machine_of(side.evidence.environment), software_of(side.evidence.environment)) for side in (left, right)]
    if places[0] != places[1]:
        notes.append(f"the runs differ in machine or software: {'; '.join(', '.join(place) for place in places)}")
    settings = [side.run.meta.settings for side in (left, right)]
    other = [
        f"{name} {settings[0][name]} and {settings[1][name]}"
        for name in TIMED_BY
        if len({str(one[name]) for one in settings}) > 1
    ]
    if other:
        notes.append(f"the runs timed with other settings: {', '.join(other)}")
    return tuple(dict.fromkeys(notes))


def _ms(logs: Mapping[int, float]) -> float:
    """Return the geometric mean of nanoseconds in milliseconds, from their logs by process."""
    return math.exp(fmean(logs.values())) / 1e6
