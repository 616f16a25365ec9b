"""A submission beside a run of our own evaluator: do the two clocks tell the same latency?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER, Record, Timing
from rooflane.eval.stats.contamination import Contamination, find_contamination
from rooflane.eval.stats.intervals import CONFIDENCE, welch_interval
from rooflane.eval.stats.rounds import rounds_of
from rooflane.eval.stats.run import Run
from rooflane.eval.submit.parse import Figures
from rooflane.eval.submit.records import Submission

QUANTITIES = ("optimized", "baseline", "speedup")
# Half a unit of the last place that the script prints: ms to four places, the speedup to three.
ROUNDING = {"optimized": 5e-5, "baseline": 5e-5, "speedup": 5e-4}


@dataclass(frozen=True)
class Pair:
    """One quantity on both sides: medians over processes, theirs over ours, and whether 1 lies in the interval.

    `agrees` is None where neither side has a spread: one process on each.
    """

    theirs: float
    ours: float
    ratio: float
    low: float | None
    high: float | None
    agrees: bool | None


@dataclass(frozen=True)
class Agreement:
    """One shape beside our run: latencies in ms and the speedup, or why there is nothing to compare."""

    shape: str
    pairs: dict[str, Pair]
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Beside:
    """The whole comparison: the run, its arm, remarks on what differs between the two, and a row a shape."""

    run: str
    arm: str
    notes: tuple[str, ...]
    rows: tuple[Agreement, ...]


def compare_with_run(submission: Submission, run: Run, arm: str = "") -> Beside:
    """Compare a submission's printed latencies with a run's event times, shape by shape.

    `arm` names the run's candidate; "" is the submission's own, or the run's only one. The run's disturbed blocks are
    left out as in its own table, but for those at the board's power limit: the script works on through it. Where the
    run has rounds of the script's own kind, these are compared. Raises `EvaluationError` when the run has no such
    candidate.
    """
    meta = submission.meta
    arms = run.meta.candidates
    wanted = arm or meta.candidate
    if wanted not in arms and (arm or len(arms) != 1):
        raise EvaluationError(
            f"{run.folder}: has the candidates {', '.join(arms)}, none of them {wanted!r}; name one as RUN::ARM, or "
            "evaluate that one with --inputs fixed and name its run"
        )
    arm = wanted if wanted in arms else arms[0]
    notes = []
    if arm != meta.candidate:
        notes.append(f"the run's candidate is {arm}, the submission's {meta.candidate}")
    if run.meta.settings.get("inputs") != "fixed":
        notes.append("the run gave each call a fresh input, the script repeats one: use --inputs fixed to compare like")
    if run.meta.device != meta.device:
        notes.append(f"the run was made on {run.meta.device}, the submission on {meta.device}")
    records = run.records()
    spoilt = find_contamination(rounds_of(records), power_limit=False)
    records = [record for record in records if record.timing is not None and record.status == "ok"]
    rows = [row for row in submission.rows() if row.figures and row.figures.optimized]
    compared, windows = [], []
    for shape in meta.shape_list():
        mine = [record for record in records if _same_shape(record, shape)]
        theirs = [row.figures for row in rows if row.shape == shape.id]
        compared.append(_compare_shape(shape.id, theirs, _ours(mine, arm, spoilt)))
        if compared[-1].pairs and not _script_rounds(mine, arm):
            windows.append(shape.id)
    if windows:
        which = f"shape {', '.join(windows)}" if len(windows) < len(compared) else "every shape"
        notes.append(f"ours on {which}: windows with a look at each output, for want of the script's own rounds")
        if spoilt.count:
            notes.append(f"ours: {spoilt.describe()}")
    return Beside(str(run.folder), arm, tuple(notes), tuple(compared))


def pair_of(theirs: Sequence[float], ours: Sequence[float], rounding: float = 0.0) -> Pair:
    """Return one quantity compared over the processes of both sides.

    Two or more processes on each: Welch's interval of the ratio. One on a side: the interval in which the other
    side's processes expect one more of their kind. Either is widened by what `theirs` may have lost in print.
    """
    logs = [math.log(value) for value in theirs], [math.log(value) for value in ours]
    ratio = math.exp(fmean(logs[0]) - fmean(logs[1]))
    low = high = None
    if min(len(theirs), len(ours)) > 1:
        interval = welch_interval(*logs)
        low, high = interval.low, interval.high
    elif max(len(theirs), len(ours)) > 1:
        many = max(logs, key=len)
        half = _quantile(len(many) - 1) * stdev(many) * math.sqrt(1 + 1 / len(many))
        low, high = ratio * math.exp(-half), ratio * math.exp(half)
    agrees = None
    if low is not None:
        lost = rounding / median(theirs)
        low, high = low * (1 - lost), high * (1 + lost)
        agrees = low <= 1 <= high
    return Pair(median(theirs), median(ours), ratio, low, high, agrees)


def _compare_shape(shape: str, theirs: list[Figures], ours: dict[str, list[float]]) -> Agreement:
    if not theirs:
        return Agreement(shape, {}, "the script printed no latency")
    if not ours:
        return Agreement(shape, {}, "the run has no timed rows of this shape")
    read: dict[str, Callable[[Figures], float]] = {
        "optimized": lambda figures: figures.optimized.median_ms,
        "baseline": lambda figures: figures.baseline.median_ms,
        "speedup": lambda figures: figures.speedup,
    }
    values = {name: [read[name](figures) for figures in theirs] for name in QUANTITIES}
    if any(value <= 0 for series in values.values() for value in series):
        return Agreement(shape, {}, "the script printed a latency of 0 ms, too short for its four decimals")
    return Agreement(shape, {name: pair_of(values[name], ours[name], ROUNDING[name]) for name in QUANTITIES})


def _ours(records: list[Record], arm: str, spoilt: Contamination) -> dict[str, list[float]]:
    """Return each process's pooled medians in ms, and their quotient, for processes that timed both sides.

    A process without a clean block is left out, unless none has one; rounds of the script's kind have no blocks.
    """
    if as_script := _script_rounds(records, arm):
        pairs = [(_median_ms(timing.bare_ns), _median_ms(timing.bare_eager_ns)) for timing in as_script]
    else:
        rows = [record for record in records if record.arm in (arm, EAGER)]
        clean = {(row.process, row.arm): _clean(row, spoilt.at(row.shape_id, row.process)) for row in rows}
        if not any(clean.values()):
            clean = {(row.process, row.arm): row.timing.event_ns for row in rows}
        medians = {key: _median_ms(rounds) for key, rounds in clean.items() if any(rounds)}
        both = [process for process, name in medians if name == arm and (process, EAGER) in medians]
        pairs = [(medians[process, arm], medians[process, EAGER]) for process in both]
    if not pairs:
        return {}
    mine, base = map(list, zip(*pairs, strict=True))
    return {"optimized": mine, "baseline": base, "speedup": [theirs / ours for ours, theirs in pairs]}


def _script_rounds(records: list[Record], arm: str) -> list[Timing]:
    """Return the timings that hold rounds of the script's own kind, one a process."""
    return [row.timing for row in records if row.arm == arm and row.timing.bare_eager_ns]


def _clean(record: Record, dropped: frozenset[int]) -> list[list[int]]:
    """Return the rounds outside the dropped blocks, of two rounds each."""
    return [window for index, window in enumerate(record.timing.event_ns) if index // 2 not in dropped]


def _median_ms(rounds: Sequence[Sequence[int]]) -> float:
    return median(call for window in rounds for call in window) / 1e6


def _same_shape(record: Record, shape: Any) -> bool:
    """Tell whether a record is of a shape, whatever either file calls it."""
    return {**record.shape, "id": ""} == {**shape.as_dict(), "id": ""}


def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + CONFIDENCE / 2, freedom))
