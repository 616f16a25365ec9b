"""The noise floor from null results, and the verdict on an interval: one word and one reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from rooflane.eval.stats.estimator import CONFIDENCE, Estimate, Interval, half_width, t_interval

# A further null exceeds the largest of k with probability 1 / (k + 1): 19 make that 5%.
LEAST_STORED = 19
# A null may exclude 1 while the floor that covers it is below this. From here on no ratio can be trusted.
CAP = 0.02


@dataclass(frozen=True)
class Floor:
    """The smallest difference from 1 that counts, as a fraction; from `count` stored nulls, or provisional."""

    value: float
    provisional: bool
    count: int
    biased: bool = False

    def describe(self) -> str:
        """Return the floor in words."""
        source = "provisional" if self.provisional else f"from {self.count} stored nulls"
        bias = ", raised to this run's own null" if self.biased else ""
        return f"{self.value:.2%} ({source}{bias})"


@dataclass(frozen=True)
class Floors:
    """The floor of the geometric mean and of each shape, and why the null check rejects the campaign, if it does."""

    geomean: Floor | None = None
    shapes: dict[str, Floor] = field(default_factory=dict)
    broken: str = ""


def null_floor(
    own: Sequence[Sequence[float]], stored: Sequence[float] = (), *, tests: int = 1
) -> tuple[Floor | None, bool]:
    """Return the floor from log-ratios, and whether one of this campaign's nulls excludes 1.

    `own` has one list of logs by process for each null of this campaign, `stored` the log-ratios of earlier ones.
    With at least 19 stored, the floor is the 95th percentile of |log ratio|. With fewer it is the root mean square of
    this campaign's null half-widths: the variance of A against B is half of A's null and half of B's null. A null of
    this campaign whose interval excludes 1 raises the floor to its own size. That interval is corrected for the number
    of nulls times `tests` shapes.
    """
    nulls = [logs for logs in own if len(logs) > 1]
    widths = [half_width(t_interval(logs)) for logs in nulls]
    if len(stored) >= LEAST_STORED:
        log, provisional = _upper(stored), False
    elif widths:
        log, provisional = math.sqrt(fmean(width**2 for width in widths)), True
    else:
        return None, False
    level = 1 - (1 - CONFIDENCE) / (len(nulls) * tests) if nulls else CONFIDENCE
    found = [t_interval(logs, level) for logs in nulls]
    off = [abs(math.log(null.centre)) for null in found if not null.low <= 1 <= null.high]
    raised = max(off, default=0.0) > log
    value = math.expm1(max([log, *off]))
    return Floor(value, provisional, len(stored), raised), bool(off)


def find_floors(
    nulls: Iterable[Estimate],
    stored_geomean: Sequence[float] = (),
    stored_shapes: dict[str, Sequence[float]] | None = None,
) -> Floors:
    """Return a campaign's floors from its own nulls and the log-ratios of stored ones.

    The null check fails when the interval of a null excludes 1 and the floor reaches the cap. An effect of order,
    address or allocation of that size applies to every arm of the campaign.
    """
    nulls, stored_shapes = list(nulls), stored_shapes or {}
    own = [list(null.per_process.values()) for null in nulls if null.geomean]
    geomean, excludes = null_floor(own, stored_geomean)
    names = list(dict.fromkeys(shape for null in nulls for shape in null.logs))
    shapes = {}
    for name in names:
        logs = [list(null.logs[name].values()) for null in nulls if null.logs.get(name)]
        floor, _ = null_floor(logs, stored_shapes.get(name, ()), tests=len(names))
        if floor:
            shapes[name] = floor
    broken = ""
    if geomean and excludes and geomean.value >= CAP:
        broken = (
            f"an arm timed against its own copy differs by {geomean.value:.1%}, over the cap of {CAP:.0%}: order, "
            "addresses or allocation favour one side"
        )
    return Floors(geomean, shapes, broken)


def _upper(stored: Sequence[float]) -> float:
    """Return the 95th percentile of |log ratio|: a further null exceeds it with a probability of 5%."""
    import numpy as np

    return float(np.quantile(np.abs(stored), CONFIDENCE, method="weibull"))


# Two arms are equivalent within this fraction of 1, unless the caller gives another margin.
MARGIN = 0.01
# With fewer processes a campaign shows intervals and claims nothing.
LEAST_PROCESSES = 6


class Verdict(StrEnum):
    """One word for a candidate or a comparison; `none` where nothing is claimed."""

    FASTER = "faster"
    SLOWER = "slower"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    CONTRACT = "contract"
    INCORRECT = "incorrect"
    INTEGRITY = "integrity"
    CONTAMINATED = "contaminated"
    NONE = "none"


@dataclass(frozen=True)
class Judgement:
    """A verdict and why."""

    verdict: Verdict
    why: str


def judge(interval: Interval, floor: Floor | None, *, margin: float = MARGIN, holm_p: float | None = None) -> Judgement:
    """Judge a ratio by its interval: faster, slower, equivalent or inconclusive; none without an interval.

    `holm_p` is Holm's p-value where several shapes are tested; faster and slower also need it at 5% or less.
    """
    if interval.low is None:
        return Judgement(Verdict.NONE, "one process gives no interval")
    if floor is None:
        return Judgement(Verdict.INCONCLUSIVE, "no identity null was timed, so the noise floor is unknown")
    place = f"the floor of {floor.describe()}"
    proven = holm_p is None or holm_p <= 1 - CONFIDENCE
    if proven and interval.low > 1 + floor.value:
        return Judgement(Verdict.FASTER, f"the interval lies above {place}")
    if proven and interval.high < 1 - floor.value:
        return Judgement(Verdict.SLOWER, f"the interval lies below {place}")
    if interval.low > 1 - margin and interval.high < 1 + margin:
        return Judgement(Verdict.EQUIVALENT, f"the whole interval lies within {margin:.2%} of 1")
    if interval.low <= 1 <= interval.high:
        return Judgement(Verdict.INCONCLUSIVE, "the interval contains 1")
    if not proven:
        return Judgement(Verdict.INCONCLUSIVE, f"not significant among all shapes (Holm p {holm_p:.2g})")
    return Judgement(Verdict.INCONCLUSIVE, f"detected, below {place}")


def judge_campaign(
    interval: Interval,
    floor: Floor | None,
    *,
    processes: int,
    quick: bool = False,
    contaminated: str = "",
    margin: float = MARGIN,
) -> Judgement:
    """Judge a campaign's geometric mean; `contaminated` is why the campaign has no figure, or empty.

    A quick campaign claims nothing. A campaign claims nothing either when fewer than six processes have clean blocks
    of every shape.
    """
    if quick:
        return Judgement(Verdict.NONE, "a quick run claims no verdict")
    if processes < LEAST_PROCESSES:
        return Judgement(Verdict.NONE, f"a verdict takes {LEAST_PROCESSES} processes or more, this run has {processes}")
    if contaminated:
        return Judgement(Verdict.CONTAMINATED, contaminated)
    if interval.count < LEAST_PROCESSES:
        left = f"{interval.count} of this run's {processes} have clean blocks of every shape"
        return Judgement(Verdict.NONE, f"a verdict takes {LEAST_PROCESSES} processes or more, {left}")
    return judge(interval, floor, margin=margin)
