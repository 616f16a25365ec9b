"""From round medians to a verdict on one candidate: estimate, nulls, floors, judgement, in that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooflane.eval.record.records import COPY_PREFIX, EAGER
from rooflane.eval.stats.contamination import Contamination
from rooflane.eval.stats.estimator import Estimate, estimate
from rooflane.eval.stats.figures import NULL
from rooflane.eval.stats.floor import Floors, find_floors
from rooflane.eval.stats.rounds import Rounds
from rooflane.eval.stats.verdict import LEAST_PROCESSES, MARGIN, Judgement, Verdict, judge_campaign


@dataclass(frozen=True)
class Stored:
    """Log-ratios of stored nulls that match a campaign: of its geometric mean, and of each of its shapes."""

    geomean: Sequence[float] = ()
    shapes: Mapping[str, Sequence[float]] | None = None


@dataclass(frozen=True)
class Assessment:
    """A candidate's speedup over eager, the nulls of both, the floors they imply, and the verdict."""

    estimate: Estimate
    nulls: Mapping[str, Estimate]
    floors: Floors
    judgement: Judgement


def copy_of(arm: str) -> str:
    """Return the name of an arm's separately built copy."""
    return NULL if arm == EAGER else COPY_PREFIX + arm


def estimate_nulls(
    rounds: Rounds,
    contamination: Contamination,
    shapes: Sequence[str],
    arms: Sequence[str],
    processes: Sequence[int],
) -> dict[str, Estimate]:
    """Return the estimates of arms over their own copies, as far as those were timed."""
    found = {arm: estimate(rounds, shapes, arm, copy_of(arm), processes, contamination) for arm in arms}
    return {arm: null for arm, null in found.items() if null.shapes}


def assess(
    rounds: Rounds,
    contamination: Contamination,
    shapes: Sequence[str],
    candidate: str,
    processes: Sequence[int],
    stored: Stored | None = None,
    *,
    quick: bool = False,
    margin: float = MARGIN,
) -> Assessment:
    """Judge a candidate by its times alone; what was found about its outputs comes before this verdict."""
    stored = stored or Stored()
    found = estimate(rounds, shapes, EAGER, candidate, processes, contamination)
    nulls = estimate_nulls(rounds, contamination, shapes, (EAGER, candidate), processes)
    floors = find_floors(nulls.values(), stored.geomean, stored.shapes)
    contaminated = contamination.describe() if contamination.too_much else floors.broken
    if found.geomean is None:
        condemned = contamination.too_much and not quick and len(processes) >= LEAST_PROCESSES
        verdict = Verdict.CONTAMINATED if condemned else Verdict.NONE
        judgement = Judgement(verdict, contaminated or "the candidate was not timed on every shape in every process")
    else:
        judgement = judge_campaign(
            found.geomean,
            floors.geomean,
            processes=len(processes),
            quick=quick,
            contaminated=contaminated,
            margin=margin,
        )
    return Assessment(found, nulls, floors, judgement)
