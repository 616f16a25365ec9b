"""A candidate's headline: the geometric mean over the shapes that count, its floor and its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.estimator import Estimate, estimate
from rooflane.eval.stats.evidence import Assessment, Measured
from rooflane.eval.stats.figures import Headline, ShapeRow
from rooflane.eval.stats.mean import Interval, Mean, mean_over_shapes
from rooflane.eval.stats.price import mix_throughput, price_interval
from rooflane.eval.stats.verdict import Verdict

# What a shape counts at most in the second figure when it failed: a user would run eager there.
PENALTY = 1.0


def make_headline(
    measured: Measured,
    candidate: str,
    rows: Sequence[ShapeRow],
    shapes: Sequence[str],
    assessed: Assessment,
    fact: tuple[str, str] | None,
) -> Headline:
    """Return a candidate's headline; `shapes` are the ids of the rows that count.

    `fact` is a verdict and its reason that come before what the times say: an output or a state found wrong.
    """
    counted = [row for row in rows if row.shape.id in shapes]
    others = [row for row in rows if row.shape.id not in shapes]
    partial = sum(row.eager.event_ms is not None for row in others)
    oversize = sum(row.eager.event_ms is None and row.cells[candidate].event_ms is not None for row in others)
    found, judgement = assessed.estimate, assessed.judgement
    passed = [row for row in counted if row.cells[candidate].status == "ok" and row.cells[candidate].event_ms]
    eager_null, copy_null = assessed.nulls.get(EAGER), assessed.nulls.get(candidate)
    result = Headline(
        candidate=candidate,
        passed=len(passed),
        shapes=len(counted),
        geomean=None,
        per_process=(),
        null=eager_null and eager_null.geomean,
        verdict=Verdict.NONE,
        why=judgement.why if counted else "no shape was timed in every process",
        copy_null=copy_null and copy_null.geomean,
        floor=assessed.floors.geomean,
        partial=partial,
        oversize=oversize,
        not_run=len(others) - partial - oversize,
    )
    if len(passed) < len(counted):
        why = f"only {len(passed)} of {len(counted)} shapes passed; no mean is formed over the rest"
        result = replace(result, penalised=penalised(counted, candidate, found), why=why)
    elif counted:
        result = replace(result, verdict=judgement.verdict, ratio_verdict=judgement.verdict)
        if found.geomean:
            result = replace(result, **_means(measured, candidate, counted, found))
    return replace(result, verdict=fact[0], why=fact[1]) if fact else result


def _means(measured: Measured, candidate: str, counted: Sequence[ShapeRow], found: Estimate) -> dict[str, Any]:
    """Return the figures over all shapes of a candidate that has every one of them."""
    mix = _mix(measured, candidate, counted)
    price = measured.meta.price_per_hour
    dividends = [row.cells[candidate].dividend for row in counted]
    return {
        "geomean": found.geomean,
        "per_process": tuple(map(math.exp, found.per_process.values())),
        "sign_flip_p": found.sign_flip_p,
        "lost": found.lost,
        "dividend": math.exp(fmean(map(math.log, dividends))) if all(dividends) else None,
        "mix_tokens_per_s": mix,
        "mix_price": price_interval(price, mix) if price and mix else None,
    }


def penalised(counted: Sequence[ShapeRow], candidate: str, found: Estimate) -> Interval | None:
    """Return the second figure of a candidate that failed: a failed shape at 1x, or at its own ratio if lower."""
    ok = {row.shape.id for row in counted if row.cells[candidate].status == "ok" and row.cells[candidate].event_ms}
    if not ok:
        return None
    processes = {process for shape in ok for process in found.logs[shape]}
    limit = math.log(PENALTY)
    logs = {
        name: found.logs[name]
        if name in ok
        else {process: min(limit, found.logs[name].get(process, limit)) for process in processes}
        for name in (row.shape.id for row in counted)
    }
    return mean_over_shapes(logs).interval() if all(logs.values()) else None


def _mix(measured: Measured, candidate: str, counted: Sequence[ShapeRow]) -> Interval | None:
    seconds, tokens = {}, {}
    for row in counted:
        name = row.shape.id
        seconds[name] = {process: value / 1e9 for process, value in measured.times(name, candidate).items()}
        timed = [record.timing for record in measured.rows(name, candidate).values() if record.timing]
        tokens[name] = fmean(timing.valid_tokens for timing in timed)
    return mix_throughput(seconds, tokens)


@dataclass(frozen=True)
class Place:
    """One candidate's place; `rank` is None with the reason in `why` where it cannot be ranked.

    Candidates that do not differ from the first of their rank share the rank, and the next rank counts them. `behind`
    is this candidate's event time over that of the first of all. `like` names every ranked candidate whose paired
    interval with this one contains 1. That relation is not transitive, so ranks alone would not show it.
    """

    candidate: str
    rank: int | None
    shared: bool = False
    behind: Interval | None = None
    like: tuple[str, ...] = ()
    why: str = ""


def rank(measured: Measured, shapes: Sequence[ShapeRow]) -> tuple[Place, ...]:
    """Return the candidates of a run, the fastest first; none for a run of one.

    Ranked are those with a right output and a time on every shape eager was timed on, in every process: a failed shape
    takes the rank away. Two are compared as `rooflane compare` compares them: by pairs of clean blocks in each process,
    the mean over the shapes with its interval over the processes.
    """
    meta = measured.meta
    if len(meta.candidates) < 2:
        return ()
    processes = range(meta.settings["processes"])
    counted = [row for row in shapes if row.eager.event_ms and row.eager.processes == len(processes)]
    unranked = []
    complete = []
    for name in meta.candidates:
        failed = [row.shape.id for row in counted if row.cells[name].status != "ok"]
        partly = [row.shape.id for row in counted if row.cells[name].processes < len(processes)]
        if not counted:
            unranked.append(Place(name, None, why="no shape was timed in every process"))
        elif failed or partly:
            problem = "not right" if failed else "not timed in every process"
            unranked.append(Place(name, None, why=f"{problem} on shape {', '.join(failed or partly)}"))
        else:
            complete.append(name)

    def against(slow: str, fast: str) -> Mean | None:
        """Return the mean over the shapes of log(time of slow / time of fast)."""
        ids = [row.shape.id for row in counted]
        return estimate(measured.rounds, ids, slow, fast, processes, measured.contamination).mean

    if complete and not against(complete[0], complete[0]):
        unranked += [Place(name, None, why="a shape has no clean block") for name in complete]
        complete = []
    if not complete:
        return tuple(unranked)
    order = sorted(complete, key=lambda name: against(name, complete[0]).log)
    alike = {
        (one, other)
        for at, one in enumerate(order)
        for other in order[at + 1 :]
        # A single process gives no interval and leaves the order open too.
        if (found := against(other, one).interval()).low is None or found.low <= 1 <= found.high
    }
    leaders: list[int] = []
    for at, name in enumerate(order):
        leaders.append(leaders[-1] if at and (order[leaders[-1]], name) in alike else at)
    ranked = [
        Place(
            candidate=name,
            rank=leaders[at] + 1,
            shared=leaders.count(leaders[at]) > 1,
            behind=against(name, order[0]).interval() if at else None,
            like=tuple(other for other in order if {(name, other), (other, name)} & alike),
        )
        for at, name in enumerate(order)
    ]
    return (*ranked, *unranked)
