"""What an interval says against the noise floor, in one word and one reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rooflane.eval.stats.floor import Floor
from rooflane.eval.stats.intervals import CONFIDENCE, Interval

# Within this of 1 two arms count as equal, where the caller declares no other margin.
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

    `holm_p`, where several shapes are tested, must hold too before one of them is called faster or slower.
    """
    if interval.low is None:
        return Judgement(Verdict.NONE, "one process gives no interval")
    if floor is None:
        return Judgement(Verdict.INCONCLUSIVE, "no identity null was timed to tell the noise floor")
    said = f"the floor of {floor.describe()}"
    proven = holm_p is None or holm_p <= 1 - CONFIDENCE
    if proven and interval.low > 1 + floor.value:
        return Judgement(Verdict.FASTER, f"the interval lies above {said}")
    if proven and interval.high < 1 - floor.value:
        return Judgement(Verdict.SLOWER, f"the interval lies below {said}")
    if interval.low > 1 - margin and interval.high < 1 + margin:
        return Judgement(Verdict.EQUIVALENT, f"the whole interval lies within {margin:.2%} of 1")
    if interval.low <= 1 <= interval.high:
        return Judgement(Verdict.INCONCLUSIVE, "the interval holds 1")
    if not proven:
        return Judgement(Verdict.INCONCLUSIVE, f"not significant among all shapes (Holm p {holm_p:.2g})")
    return Judgement(Verdict.INCONCLUSIVE, f"detected, below {said}")


def judge_campaign(
    interval: Interval,
    floor: Floor | None,
    *,
    processes: int,
    quick: bool = False,
    contaminated: str = "",
    margin: float = MARGIN,
) -> Judgement:
    """Judge a campaign's geometric mean; `contaminated` says why the campaign has no figure, empty when it has.

    A quick campaign and one of fewer than six processes claim nothing, nor one of which fewer than six are left once
    those are out that have no clean block of some shape.
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
