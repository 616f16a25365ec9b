"""Statistics of a run: paired log-ratios, Student t intervals over processes, geometric means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev, variance

CONFIDENCE = 0.95


class TimesError(ValueError):
    """Times no ratio can be formed from: missing, zero, negative or not finite."""


@dataclass(frozen=True)
class Interval:
    """A ratio with its confidence interval over `count` processes; one process gives no interval, only a centre."""

    centre: float
    low: float | None
    high: float | None
    count: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the fields as plain values."""
        return asdict(self)


def median_ns(samples: Sequence[int]) -> float:
    """Return the median of one window's nanoseconds.

    Raises `TimesError` when there are none, or one is zero, negative or not finite: such a clock reading is a
    fault, and dropping it silently would make the arm look faster.
    """
    if not samples:
        raise TimesError("no time was taken")
    for sample in samples:
        if not (math.isfinite(sample) and sample > 0):
            raise TimesError(f"a call was timed at {sample} ns, which no real call takes")
    return median(samples)


def paired_log_ratio(base: Sequence[Sequence[int]], arm: Sequence[Sequence[int]]) -> float:
    """Return the mean over rounds of log(median base / median arm), positive where the arm is faster.

    Rounds come in mirrored pairs, the second in reversed order, so a linear drift of the machine cancels within a
    pair. Raises `TimesError` on an odd or unequal number of rounds and on impossible times.
    """
    if len(base) != len(arm) or len(base) % 2 or not base:
        raise TimesError(f"{len(base)} and {len(arm)} rounds cannot be paired; both need the same even number")
    return fmean(math.log(median_ns(b) / median_ns(a)) for b, a in zip(base, arm, strict=True))


def t_interval(logs: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return exp of the mean of log-ratios with its Student t interval; the unit of replication is a process."""
    count = len(logs)
    centre = fmean(logs)
    if count < 2:
        return Interval(math.exp(centre), None, None, count)
    half = _t(confidence, count - 1) * stdev(logs) / math.sqrt(count)
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), count)


def welch_interval(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return exp(mean a - mean b) with Welch's interval, for logs that come from different processes."""
    centre = fmean(a) - fmean(b)
    count = min(len(a), len(b))
    if count < 2:
        return Interval(math.exp(centre), None, None, count)
    parts = variance(a) / len(a), variance(b) / len(b)
    spread = sum(parts)
    if spread == 0:
        return Interval(math.exp(centre), math.exp(centre), math.exp(centre), count)
    freedom = spread**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    half = _t(confidence, freedom) * math.sqrt(spread)
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), count)


def _t(confidence: float, freedom: float) -> float:
    """Return the two-sided Student t quantile."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom))
