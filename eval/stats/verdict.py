"""The noise floor from null results, and the verdict on an interval: one word and one reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from rooflane.eval.stats.estimator import Estimate
from rooflane.eval.stats.mean import CONFIDENCE, Interval, Mean

# A further null exceeds the largest of k with probability 1 / (k + 1): 19 make that 5%.
LEAST_STORED = 19
# A null may exclude 1 while the floor that covers it is below this. From here on no ratio can be trusted.
CAP = 0.02
# A floor this many times the half-width of the campaign's own nulls is of another machine state, and told.
FAR = 3.0
# From here on a floor says only that too few processes spread too widely: with two of them t is 12.7.
UNKNOWN = 1.0


@dataclass(frozen=True)
class Floor:
    """The smallest difference from 1 that counts, as a fraction; from `count` stored nulls, or provisional.

    `own` is what the `processes` of this campaign show: the half-width of its nulls, as a fraction; None without any.
    """

    value: float
    provisional: bool
    count: int
    biased: bool = False
    own: float | None = None
    processes: int = 0

    @property
    def unknown(self) -> bool:
        """Whether the nulls spread too widely for a floor that means anything."""
        return self.value >= UNKNOWN

    def share(self) -> str:
        """Return the floor as a percentage, `unknown` where it means nothing."""
        return "unknown" if self.unknown else f"{self.value:.2%}"

    def describe(self) -> str:
        """Return the floor in words."""
        if self.unknown and self.provisional:
            return f"unknown: the nulls of {self.processes} processes spread too widely"
        if self.unknown:
            return f"unknown: the {self.count} stored nulls spread too widely"
        source = "provisional" if self.provisional else f"from {self.count} stored nulls"
        bias = ", raised to this run's own null" if self.biased else ""
        far = ""
        if self.own and not self.biased and math.log1p(self.value) > FAR * math.log1p(self.own):
            far = f", over {FAR:g} times the {self.own:.2%} that this run's own nulls show"
        return f"{self.value:.2%} ({source}{bias}{far})"


@dataclass(frozen=True)
class Floors:
    """The floor of the geometric mean and of each shape, and why the null check rejects the campaign, if it does."""

    geomean: Floor | None = None
    shapes: dict[str, Floor] = field(default_factory=dict)
    broken: str = ""


def null_floor(
    own: Sequence[Mean], stored: Sequence[Sequence[float]] = (), *, tests: int = 1
) -> tuple[Floor | None, bool]:
    """Return the floor, and whether one of this campaign's nulls excludes 1.

    `own` has the mean of each null of this campaign, `stored` the log-ratios of earlier ones, those of a run together.
    With at least 19 stored, of two runs or more, the floor is the 95th percentile of |log ratio|, and at most the
    largest of the other runs: one run cannot set it. With fewer it is the root mean square of this campaign's null
    half-widths: the variance of A against B is half of A's null and half of B's null. A null of this campaign whose
    interval excludes 1 raises the floor to its own size. That interval is corrected for the number of nulls times
    `tests` shapes.
    """
    nulls = [mean for mean in own if mean.error is not None]
    count = sum(map(len, stored))
    width = math.sqrt(fmean(mean.half_width() ** 2 for mean in nulls)) if nulls else None
    if count >= LEAST_STORED and len(stored) > 1:
        log, provisional = _upper(stored), False
    elif width is not None:
        log, provisional = width, True
    else:
        return None, False
    level = 1 - (1 - CONFIDENCE) / (len(nulls) * tests) if nulls else CONFIDENCE
    found = [(mean.log, mean.interval(level)) for mean in nulls]
    off = [abs(log) for log, null in found if not null.low <= 1 <= null.high]
    raised = max(off, default=0.0) > log
    processes = min((mean.count for mean in nulls), default=0)
    value, mine = _fraction(max([log, *off])), None if width is None else _fraction(width)
    return Floor(value, provisional, count, raised, mine, processes), bool(off)


def find_floors(
    nulls: Iterable[Estimate],
    stored_geomean: Sequence[Sequence[float]] = (),
    stored_shapes: dict[str, Sequence[Sequence[float]]] | None = None,
) -> Floors:
    """Return a campaign's floors from its own nulls and the log-ratios of stored ones.

    The null check fails when the interval of a null excludes 1 and the floor reaches the cap. An effect of order,
    address or allocation of that size applies to every arm of the campaign.
    """
    nulls, stored_shapes = list(nulls), stored_shapes or {}
    geomean, excludes = null_floor([null.mean for null in nulls if null.mean], stored_geomean)
    names = list(dict.fromkeys(shape for null in nulls for shape in null.logs))
    shapes = {}
    for name in names:
        means = [null.shapes[name].mean for null in nulls if name in null.shapes]
        floor, _ = null_floor(means, stored_shapes.get(name, ()), tests=len(names))
        if floor:
            shapes[name] = floor
    broken = ""
    if geomean and excludes and geomean.value >= CAP:
        broken = (
            f"an arm timed against its own copy differs by {geomean.value:.1%}, over the cap of {CAP:.0%}: order, "
            "addresses or allocation favour one side"
        )
    return Floors(geomean, shapes, broken)


def _upper(stored: Sequence[Sequence[float]]) -> float:
    """Return the 95th percentile of |log ratio|, at most the largest of all runs but the one that strays most."""
    import numpy as np

    percentile = float(np.quantile(np.abs(np.concatenate(stored)), CONFIDENCE, method="weibull"))
    return min(percentile, sorted(max(map(abs, run)) for run in stored)[-2])


def _fraction(log: float) -> float:
    """Return how far a log-ratio lies from 1; infinity where that is too large for a float."""
    return math.expm1(log) if log < 709 else math.inf


# Two arms are equivalent within this fraction of 1, unless the caller gives another margin.
MARGIN = 0.01
# With fewer processes a campaign claims only what the strict level shows, or a difference by the factor below.
LEAST_PROCESSES = 6
STRICT = 0.999
# A disturbance that no watch saw can favour one arm, by parts of the ratio and not by this factor.
WIDE = 2.0


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
        return Judgement(Verdict.INCONCLUSIVE, _unknown(floor))
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
    if floor.unknown:
        return Judgement(Verdict.INCONCLUSIVE, _unknown(floor))
    return Judgement(Verdict.INCONCLUSIVE, f"detected, below {place}")


@dataclass(frozen=True)
class Conditions:
    """What a campaign's figures are judged under; `contaminated` is why its blocks or nulls reject it, or empty.

    `partial` counts the shapes that were timed in some processes only.
    """

    processes: int
    quick: bool = False
    partial: int = 0
    contaminated: str = ""
    margin: float = MARGIN

    @property
    def short(self) -> str:
        """Why the campaign is held to the strict level, or an empty text."""
        if self.quick:
            return "this is a quick run"
        if self.processes < LEAST_PROCESSES:
            count = "1 process" if self.processes == 1 else f"{self.processes} processes"
            return f"this run has {count}, fewer than {LEAST_PROCESSES}"
        if self.partial:
            return f"{self.partial} more were timed in some processes only"
        return ""


def judge_campaign(
    mean: Mean, floor: Floor | None, conditions: Conditions, *, holm_p: float | None = None
) -> Judgement:
    """Judge a campaign's mean, or one of its shapes with Holm's p-value.

    A quick campaign, one of fewer than six processes and one with shapes that were timed in part claim faster or slower
    when the interval at 99.9% clears the floor, or the one at 95% clears it by a factor of 2. A contaminated campaign
    claims it in the second case alone: its clean blocks would have to be wrong by that factor.
    """
    short, contaminated = conditions.short, conditions.contaminated
    if not short and not contaminated and mean.error is not None:
        return judge(mean.interval(), floor, margin=conditions.margin, holm_p=holm_p)
    because = "; ".join(filter(None, (short, contaminated)))
    for level, factor, said in (
        (CONFIDENCE, WIDE, f"the interval lies {{}} the floor of {{}} by more than a factor of {WIDE:g}"),
        (STRICT, 1.0, f"even the interval at {STRICT:.1%} lies {{}} the floor of {{}}"),
    ):
        if mean.error is None or floor is None or (contaminated and factor < WIDE):
            continue
        interval, proven = mean.interval(level), holm_p is None or holm_p <= 1 - level
        if proven and interval.low > factor * (1 + floor.value):
            return Judgement(Verdict.FASTER, f"{said.format('above', floor.describe())} ({because})")
        if proven and interval.high < (1 - floor.value) / factor:
            return Judgement(Verdict.SLOWER, f"{said.format('below', floor.describe())} ({because})")
    if contaminated and not short:
        return Judgement(Verdict.CONTAMINATED, contaminated)
    if mean.error is None:
        one = "one process gives no interval"
        thin = "a shape has clean blocks in one process only, which gives no interval"
        return Judgement(Verdict.NONE, one if mean.count < 2 else thin)
    if floor is None or floor.unknown:
        return Judgement(Verdict.NONE, f"{because}; {_unknown(floor)}")
    levels = f"the interval at {STRICT:.1%}, nor that at {CONFIDENCE:.0%} by a factor of {WIDE:g}"
    return Judgement(Verdict.NONE, f"{because}; the floor of {floor.describe()} is not cleared by {levels}")


def _unknown(floor: Floor | None) -> str:
    """Return why no floor is known."""
    if floor is None:
        return "no identity null was timed, so the noise floor is unknown"
    return f"the noise floor is {floor.describe()}"
