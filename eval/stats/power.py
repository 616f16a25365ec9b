"""How many processes a campaign needs to detect a gain of a given size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.nulls import NullResult
from rooflane.eval.stats.mean import CONFIDENCE, t_quantile
from rooflane.eval.stats.verdict import LEAST_PROCESSES

POWER = 0.8
MOST_PROCESSES = 64
# Thirty halvings of an interval of 1 give the gain to 1e-9.
BISECTIONS = 30


@dataclass(frozen=True)
class Plan:
    """The processes that detect a gain, their power, the smallest gain they detect, and the minutes where known."""

    see: float
    sd: float
    floor: float | None
    processes: int
    enough: bool
    power: float
    smallest: float
    minutes: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def power(effect: float, sd: float, processes: int, floor: float | None = None, *, gate: bool = True) -> float:
    """Return the chance that a true gain of `effect` (0.01 is 1%) is called FASTER.

    `sd` is that of the per-process log of the geometric mean. The interval's lower bound must clear the floor: a
    known one, or the null half-width of the same campaign where it is None. Without `gate` the bound must only clear 1.
    """
    if processes < 2:
        return 0.0
    if sd == 0:
        return float(effect > (floor or 0.0) * gate)
    from scipy.special import nctdtr

    t = t_quantile(CONFIDENCE, processes - 1)
    away = math.log1p(effect) - (math.log1p(floor) if gate and floor else 0.0)
    # A provisional floor is a further half-width of the same size: t standard errors.
    shift = away * math.sqrt(processes) / sd - (t if gate and floor is None else 0.0)
    return float(1 - nctdtr(processes - 1, shift, t))


def smallest_effect(
    sd: float, processes: int, floor: float | None = None, *, gate: bool = True, wanted: float = POWER
) -> float:
    """Return the smallest gain that is called FASTER with the wanted power."""
    low, high = 0.0, 1.0
    while power(high, sd, processes, floor, gate=gate) < wanted:
        high *= 2
        if high > 1e6:
            return math.inf
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, sd, processes, floor, gate=gate) < wanted else (low, middle)
    return high


def plan(
    see: float,
    sd: float,
    *,
    floor: float | None = None,
    most: int = MOST_PROCESSES,
    process_s: float | None = None,
    wanted: float = POWER,
) -> Plan:
    """Return the fewest processes, from six to `most`, that detect a gain of `see` with the wanted power."""
    if not 0 < see < math.inf:
        raise EvaluationError(f"a gain to see must be above 0, got {see:.3g}; write it as 1% or 0.01")
    if not 0 <= sd < math.inf:
        raise EvaluationError(f"a standard deviation cannot be {sd:.3g}; write it as 1% or 0.01")
    if most < LEAST_PROCESSES:
        raise EvaluationError(f"a verdict takes {LEAST_PROCESSES} processes or more; allow at least that many")
    if floor is not None and floor >= see:
        raise EvaluationError(
            f"no number of processes sees {see:.2%}: the noise floor of {floor:.2%} lies above it; quieten the "
            "machine, or ask for more"
        )
    processes = next(
        (count for count in range(LEAST_PROCESSES, most + 1) if power(see, sd, count, floor) >= wanted), most
    )
    reached = power(see, sd, processes, floor)
    return Plan(
        see=see,
        sd=sd,
        floor=floor,
        processes=processes,
        enough=reached >= wanted,
        power=reached,
        smallest=smallest_effect(sd, processes, floor, wanted=wanted),
        minutes=None if process_s is None else processes * process_s / 60,
    )


def noise_of(nulls: Sequence[NullResult]) -> tuple[float, float | None]:
    """Return the standard deviation that nulls of one machine show, and the seconds their processes took.

    The variances are averaged with their degrees of freedom. Raises `EvaluationError` when no null has a spread.
    """
    known = [null for null in nulls if null.sd is not None]
    if not known:
        raise EvaluationError("no null result with a spread is stored; run a campaign first, or give --sd")
    freedom = [null.processes - 1 for null in known]
    spread = sum(f * null.sd**2 for f, null in zip(freedom, known, strict=True)) / sum(freedom)
    seconds = [null.process_s for null in known if null.process_s]
    return math.sqrt(spread), median(seconds) if seconds else None


def parse_share(text: str) -> float:
    """Return a share written as `1%` or `0.01`; raises `EvaluationError` for anything else, a bare `1` too."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise EvaluationError(f"{text!r} is no share; write it as 1% or 0.01")
    if value >= 1 and not text.endswith("%"):
        raise EvaluationError(f"{text!r} would be {value:.0%}; write {text}% or {value / 100:g} for a share of that")
    return value
