"""The noise floor: how far from 1 a comparison of an arm with its own copy strays on this machine (d4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rooflane.eval.stats.estimator import Estimate, half_width
from rooflane.eval.stats.intervals import CONFIDENCE, t_interval

# A further null exceeds the largest of k with probability 1 / (k + 1): 19 make that 5%.
LEAST_STORED = 19
# A null that excludes 1 is tolerated while the floor that covers it stays under this; above, nothing can be trusted.
CAP = 0.02


@dataclass(frozen=True)
class Floor:
    """The least departure from 1 that counts, as a fraction; stored from `count` nulls, or provisional."""

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
    """The floor of the geometric mean and of each shape, and why the null gate condemns the campaign, if it does."""

    geomean: Floor | None = None
    shapes: dict[str, Floor] = field(default_factory=dict)
    broken: str = ""


def null_floor(
    own: Sequence[Sequence[float]], stored: Sequence[float] = (), *, tests: int = 1
) -> tuple[Floor | None, bool]:
    """Return the floor from log-ratios, and whether one of this campaign's nulls excludes 1.

    `own` has one list of logs by process for each null of this campaign, `stored` the log-ratios of earlier ones.
    From 19 stored on, the floor is their 95th percentile. Until then it is the root mean square of this campaign's
    null half-widths: A against B has half the variance of A against its copy and half of B's against its own. A null
    of this campaign whose interval excludes 1 (corrected for how many nulls there are, times `tests` shapes) raises
    the floor to its own size.
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

    The gate breaks when a null's interval excludes 1 and no floor below the cap covers it: an effect of order,
    address or allocation of that size sits on the campaign, whatever the candidate did.
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
    """Return the 95th percentile of absolute log-ratios, such that a further one exceeds it with 5%."""
    import numpy as np

    return float(np.quantile(np.abs(stored), CONFIDENCE, method="weibull"))
