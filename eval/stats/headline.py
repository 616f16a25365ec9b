"""A candidate's headline: the geometric mean over the shapes that count, its floor and its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.cells import Measured
from rooflane.eval.stats.estimator import Estimate
from rooflane.eval.stats.evidence import Assessment
from rooflane.eval.stats.figures import Headline, ShapeRow
from rooflane.eval.stats.intervals import Interval, t_interval
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
        if partial:
            why = f"{partial} more were timed in some processes only, and the clock must not choose what counts"
            result = replace(result, verdict=Verdict.NONE, ratio_verdict=Verdict.NONE, why=why)
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
        "excused": found.excused,
        "dividend": math.exp(fmean(map(math.log, dividends))) if all(dividends) else None,
        "mix_tokens_per_s": mix,
        "mix_price": price_interval(price, mix) if price and mix else None,
    }


def penalised(counted: Sequence[ShapeRow], candidate: str, found: Estimate) -> Interval | None:
    """Return the second figure of a candidate that failed somewhere: a failed shape at 1x, or its own ratio if lower.

    Processes count where every shape that passed has a ratio.
    """
    ok = {row.shape.id for row in counted if row.cells[candidate].status == "ok" and row.cells[candidate].event_ms}
    if not ok:
        return None
    processes = set.intersection(*(set(found.logs[shape]) for shape in ok))
    limit = math.log(PENALTY)
    means = [
        fmean(
            found.logs[row.shape.id][process]
            if row.shape.id in ok
            else min(limit, found.logs[row.shape.id].get(process, limit))
            for row in counted
        )
        for process in sorted(processes)
    ]
    return t_interval(means) if means else None


def _mix(measured: Measured, candidate: str, counted: Sequence[ShapeRow]) -> Interval | None:
    """Return the candidate's tokens per second over one call of each shape that counts."""
    seconds, tokens = {}, {}
    for row in counted:
        name = row.shape.id
        seconds[name] = {process: value / 1e9 for process, value in measured.times(name, candidate).items()}
        timed = [record.timing for record in measured.rows(name, candidate).values() if record.timing]
        tokens[name] = fmean(timing.valid_tokens for timing in timed)
    return mix_throughput(seconds, tokens)
