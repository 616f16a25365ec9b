"""Statistics of a run: paired log-ratios, Student t intervals over processes, corrected and permutation p-values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean, median
from typing import Any

CONFIDENCE = 0.95
# Every sign pattern is tried up to this many processes; beyond, as many drawn ones stand for them all.
EXACT_FLIPS = 14


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
    """Return the log of how many times faster `arm` is than `base`, from the nanoseconds `[round][call]` of each.

    Raises `TimesError` on an odd or unequal number of rounds and on impossible times.
    """
    first, second = block_means([median_ns(part) for part in base], [median_ns(part) for part in arm])
    return first - second


def block_means(
    base: Sequence[float], arm: Sequence[float], dropped: frozenset[int] | set[int] = frozenset()
) -> tuple[float, float] | None:
    """Return the mean log of each arm over the same blocks, from one median a round; None when no block is left.

    Rounds 2i and 2i + 1 are the mirrored halves of block i, the second in reversed order, so a linear drift of the
    machine cancels within a block. A dropped block loses both halves of both arms. The difference of the two means is
    the log-ratio of the arms; the exponentials of the means are the times that a report prints beside it. Raises
    `TimesError` on rounds that cannot be paired.
    """
    if len(base) != len(arm) or len(base) % 2 or not base:
        raise TimesError(f"{len(base)} and {len(arm)} rounds cannot be paired; both need the same even number")
    kept = [index for index in range(len(base)) if index // 2 not in dropped]
    if not kept:
        return None
    return fmean(math.log(base[index]) for index in kept), fmean(math.log(arm[index]) for index in kept)


def t_interval(logs: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return exp of the mean of log-ratios with its Student t interval; the unit of replication is a process."""
    count = len(logs)
    centre = fmean(logs)
    if count < 2:
        return Interval(math.exp(centre), None, None, count)
    half = t_quantile(confidence, count - 1) * math.sqrt(variance(logs)) / math.sqrt(count)
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), count)


def welch_interval(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return exp(mean a - mean b) with Welch's interval, for logs that come from different processes."""
    centre, count = fmean(a) - fmean(b), min(len(a), len(b))
    if count < 2:
        return Interval(math.exp(centre), None, None, count)
    error, freedom = _welch(a, b)
    half = t_quantile(confidence, freedom) * error if error else 0.0
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), count)


def variance(values: Sequence[float]) -> float:
    """Return the sample variance of two values or more; the standard library's exact one is 50 times slower."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def t_p_value(logs: Sequence[float]) -> float | None:
    """Return the two-sided p of log-ratios with mean zero; None with fewer than two processes."""
    if len(logs) < 2:
        return None
    return _p_value(fmean(logs), math.sqrt(variance(logs)) / math.sqrt(len(logs)), len(logs) - 1)


def welch_p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p of equal means of logs from different processes; None with fewer than two of either."""
    if min(len(a), len(b)) < 2:
        return None
    return _p_value(fmean(a) - fmean(b), *_welch(a, b))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p-values: what is at most 0.05 holds at 5% for the whole family of tests."""
    adjusted, floor = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = floor
    return {name: adjusted[name] for name in p_values}


def sign_flip_p(logs: Sequence[float]) -> float | None:
    """Return the two-sided sign-flip permutation p of log-ratios symmetric about zero; at least 2 / 2^count.

    It assumes no normal distribution, so it is the check on the t interval. None with fewer than two processes.
    """
    if len(logs) < 2:
        return None
    import numpy as np

    means = np.abs(_flips(len(logs)) @ np.asarray(logs))
    # Rounding must not tell a pattern from its own mirror image.
    return float(np.mean(means >= abs(sum(logs)) * (1 - 1e-12)))


@cache
def t_quantile(confidence: float, freedom: float) -> float:
    """Return the two-sided Student t quantile."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + confidence / 2))


def _p_value(mean: float, error: float, freedom: float) -> float:
    """Return the two-sided p of a mean with its standard error."""
    from scipy.special import stdtr

    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stdtr(freedom, -abs(mean) / error))


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the standard error of a difference of means and Welch's degrees of freedom."""
    parts = variance(a) / len(a), variance(b) / len(b)
    spread = sum(parts)
    if spread == 0:
        return 0.0, float(len(a) + len(b) - 2)
    freedom = spread**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    return math.sqrt(spread), freedom


@cache
def _flips(count: int) -> Any:
    """Return the sign patterns of `count` processes, one a row."""
    import numpy as np

    if count <= EXACT_FLIPS:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(count).integers(0, 2, (2**EXACT_FLIPS, count))
        bits[0] = 1
    return 2.0 * bits - 1
