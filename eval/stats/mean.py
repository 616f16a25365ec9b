"""Means of log-ratios with their standard errors: over processes, over two runs, and over shapes with lost cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean
from typing import Any

CONFIDENCE = 0.95
# A shape with one clean process shows no spread, so no error can be given to a mean that holds it.
LEAST_CELLS = 2


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


@dataclass(frozen=True)
class Mean:
    """A mean of natural logarithms, its standard error, the degrees of freedom of that, and how many processes it uses.

    `error` is None where no spread is known: with one process, or with one clean process of some shape.
    """

    log: float
    error: float | None
    freedom: float
    count: int

    @property
    def p(self) -> float | None:
        """The two-sided p of a true mean of zero; None without an error."""
        if self.error is None:
            return None
        if self.error == 0:
            return 1.0 if self.log == 0 else 0.0
        from scipy.special import stdtr

        return float(2 * stdtr(self.freedom, -abs(self.log) / self.error))

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Return the exponential of the mean with its Student t interval."""
        if self.error is None:
            return Interval(math.exp(self.log), None, None, self.count)
        half = t_quantile(confidence, self.freedom) * self.error if self.error else 0.0
        return Interval(math.exp(self.log), _exp(self.log - half), _exp(self.log + half), self.count)

    def half_width(self) -> float | None:
        """Return the half-width of the interval as a natural logarithm; None without an error."""
        return None if self.error is None else t_quantile(CONFIDENCE, self.freedom) * self.error


def mean_of(logs: Sequence[float]) -> Mean:
    """Return the mean of one log-ratio for each process; the unit of replication is a process."""
    count = len(logs)
    if count < 2:
        return Mean(fmean(logs), None, 0, count)
    return Mean(fmean(logs), math.sqrt(variance(logs) / count), count - 1, count)


def difference(a: Mean, b: Mean) -> Mean:
    """Return the mean of `a` less that of `b` by Welch, for two means over different processes."""
    count = min(a.count, b.count)
    if a.error is None or b.error is None:
        return Mean(a.log - b.log, None, 0, count)
    parts = [(mean.error**2, mean.freedom) for mean in (a, b)]
    spread = sum(part for part, _ in parts)
    if spread == 0:
        return Mean(a.log - b.log, 0.0, a.freedom + b.freedom, count)
    freedom = spread**2 / sum(part**2 / own for part, own in parts)
    return Mean(a.log - b.log, math.sqrt(spread), freedom, count)


def contributions(logs: Mapping[str, Mapping[int, float]]) -> list[float]:
    """Return what each process adds to the mean over the shapes; the sum is the mean."""
    processes = sorted({process for found in logs.values() for process in found})
    return [
        math.fsum(found[process] / len(found) for found in logs.values() if process in found) / len(logs)
        for process in processes
    ]


def mean_over_shapes(logs: Mapping[str, Mapping[int, float]]) -> Mean:
    """Return the mean over shapes, each with equal weight, from log-ratios by shape and process.

    Each shape counts with the processes that have it, so a lost cell costs precision. Every shape needs at least one.
    """
    import numpy as np

    processes = sorted({process for found in logs.values() for process in found})
    cells = np.array([[found.get(process, math.nan) for found in logs.values()] for process in processes])
    log, error, freedom = (float(value) for value in shape_means(cells))
    known = not math.isnan(error)
    return Mean(log, error if known else None, freedom if known else 0, len(processes))


def shape_means(cells: Any) -> tuple[Any, Any, Any]:
    """Return mean, standard error and degrees of freedom of log-ratios `[..., process, shape]`, NaN where one is lost.

    Let m(s) be the mean of shape s over the n(s) processes that have it. The estimate is the mean of the m(s). A
    process adds u(p) = sum over its shapes of (value - m(s)) / (n(s) shapes) to the estimate's error. The sum of the
    u(p)^2 estimates the variance. It holds each shape's own spread and the correlation of shapes within a process.

    Estimated means make the sum too small. The factor against that and the degrees of freedom (Satterthwaite) come from
    a model: an effect of the process common to its shapes, plus a residual of each shape with a variance of its own.
    Both are estimated by moments. Without lost cells the result is Student's t over the means of the processes.

    The error is NaN where a shape has fewer than two processes. Leading dimensions are campaigns.
    """
    import numpy as np

    known = ~np.isnan(cells)
    have = known.astype(float)
    processes, shapes = cells.shape[-2:]
    counts = have.sum(-2)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(known, cells, 0.0).sum(-2) / counts
        left = np.where(known, cells - means[..., None, :], 0.0)
        weights = have / (shapes * counts)[..., None, :]
        added = ((weights * left).sum(-1) ** 2).sum(-1)

        # Products of residuals of two shapes in one process have the process effect's variance as their mean, times
        # a factor for the estimated means.
        both = have.swapaxes(-1, -2) @ have
        inverse = 1 / counts
        row, column = inverse[..., None, :], inverse[..., :, None]
        pairs = both * (1 - row - column + both * row * column)
        expected = pairs.sum((-1, -2)) - np.trace(pairs, axis1=-2, axis2=-1)
        products = (left.sum(-1) ** 2).sum(-1) - (left**2).sum((-1, -2))
        common = np.where(expected > 0, np.maximum(products, 0.0) / np.where(expected > 0, expected, 1.0), 0.0)
        own = np.maximum((left**2).sum(-2) / (counts - 1) - common[..., None], 0.0)

        # The covariance of the u(p) under the model, process by process.
        diagonal = np.arange(processes)
        part = own / (shapes * counts) ** 2
        covariance = -((have * (part / counts)[..., None, :]) @ have.swapaxes(-1, -2))
        covariance[..., diagonal, diagonal] += (have * part[..., None, :]).sum(-1)
        share = weights.sum(-1)
        effect = -(weights @ (have * row).swapaxes(-1, -2))
        effect[..., diagonal, diagonal] += share
        covariance += common[..., None, None] * (effect @ effect.swapaxes(-1, -2))
        trace = np.trace(covariance, axis1=-2, axis2=-1)

        spread = (own / counts).sum(-1) / shapes**2 + common * (share**2).sum(-1)
        flat = trace <= 0  # every residual is zero, and so is the error
        error = np.sqrt(np.where(flat, 0.0, added * spread / np.where(flat, 1.0, trace)))
        squares = (covariance**2).sum((-1, -2))
        # Rounding alone takes it out of these bounds, where all residuals are nearly zero.
        freedom = np.clip(np.where(flat, processes - 1.0, trace**2 / np.where(flat, 1.0, squares)), 1, processes - 1)
    few = counts.min(-1) < LEAST_CELLS
    return means.mean(-1), np.where(few, np.nan, error), np.where(few, np.nan, freedom)


def variance(values: Sequence[float]) -> float:
    """Return the sample variance of two values or more; the standard library's exact one is 50 times slower."""
    mean = fmean(values)
    return math.fsum([(value - mean) ** 2 for value in values]) / (len(values) - 1)


@cache
def t_quantile(confidence: float, freedom: float) -> float:
    """Return the two-sided Student t quantile."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + confidence / 2))


def _exp(log: float) -> float:
    """Return the exponential; infinity where it is too large for a float, which two processes can bring about."""
    return math.exp(log) if log < 709 else math.inf
