"""A mix of shapes served by one arm of a run: its throughput and price, beside eager's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.evidence import Evidence
from rooflane.eval.stats.intervals import Interval, t_interval
from rooflane.eval.stats.price import mix_throughput, price_interval
from rooflane.eval.stats.run import Run


@dataclass(frozen=True)
class MixPrice:
    """An arm's tokens per second and price over a mix, eager's, and how many times faster the arm serves it."""

    arm: str
    calls: dict[str, float]
    price_per_hour: float
    tokens_per_s: Interval
    price: Interval
    eager: tuple[Interval | None, Interval | None]
    ratio: Interval | None


def price_mix(
    run: Run,
    arm: str | None = None,
    calls: Mapping[str, float] | None = None,
    utilisation: float = 1.0,
    price_per_hour: float | None = None,
) -> MixPrice:
    """Price a mix on an arm; one call of every shape it timed where no calls are given.

    Raises `EvaluationError` for an arm or shape that was not timed, or was wrong, and when no price is known.
    """
    meta = run.meta
    arm = arm or meta.candidates[0]
    if price_per_hour is not None and not 0 < price_per_hour < math.inf:
        raise EvaluationError(f"--price-per-hour {price_per_hour:g}: it must be a number above 0")
    price = price_per_hour or meta.price_per_hour
    if not price:
        raise EvaluationError("the run's profile has no price per hour; give --price-per-hour")
    if not 0 < utilisation <= 1:
        raise EvaluationError(f"utilisation is a share over 0 and up to 1, got {utilisation:g}")
    measured = Evidence.of(meta, run.records()).measured
    good = [
        shape.id
        for shape in meta.shape_list()
        if (rows := measured.rows(shape.id, arm))
        and all(row.status == "ok" and not row.integrity for row in rows.values())
        and measured.rounds.of(shape.id, arm)
    ]
    wanted = {name: count for name, count in (calls or dict.fromkeys(good, 1.0)).items() if count}
    if calls and not wanted:
        raise EvaluationError("the mix holds no call; give at least one shape a number above 0")
    for name in wanted:
        if name not in good:
            raise EvaluationError(
                f"shape {name!r} has no right and timed output of {arm!r} in run {meta.id}; there are: "
                f"{', '.join(good) or 'none'}"
            )
    if not wanted:
        raise EvaluationError(f"arm {arm!r} of run {meta.id} has no shape to price")
    tokens = {
        name: fmean(row.timing.valid_tokens for row in measured.rows(name, arm).values() if row.timing)
        for name in wanted
    }
    seconds = {
        side: {name: {process: ns / 1e9 for process, ns in measured.times(name, side).items()} for name in wanted}
        for side in (arm, EAGER)
    }
    rates = {side: mix_throughput(found, tokens, wanted) for side, found in seconds.items()}
    if rates[arm] is None:
        raise EvaluationError(f"no process of run {meta.id} timed {arm!r} on every shape of the mix")
    eager = rates[EAGER]
    return MixPrice(
        arm=arm,
        calls=wanted,
        price_per_hour=price,
        tokens_per_s=rates[arm],
        price=price_interval(price, rates[arm], utilisation),
        eager=(eager, price_interval(price, eager, utilisation) if eager else None),
        ratio=_ratio(seconds[EAGER], seconds[arm], wanted),
    )


def _ratio(
    base: Mapping[str, Mapping[int, float]], arm: Mapping[str, Mapping[int, float]], calls: Mapping[str, float]
) -> Interval | None:
    """Return how many times faster an arm serves a mix, paired by process."""
    processes = set.intersection(*(set(side[name]) for side in (base, arm) for name in calls))
    totals = [
        [sum(calls[name] * side[name][process] for name in calls) for side in (base, arm)] for process in processes
    ]
    return t_interval([math.log(first / second) for first, second in totals]) if totals else None
