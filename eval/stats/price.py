"""What tokens cost: from throughput with its interval to dollars, over one shape or a mix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.estimator import Interval, t_interval
from rooflane.eval.stats.evidence import Evidence

if TYPE_CHECKING:
    from rooflane.eval.stats.run import Run

BILLION = 1e9
SECONDS_PER_HOUR = 3600


def price_per_1e9(price_per_hour: float, tokens_per_s: float, utilisation: float = 1.0) -> float:
    """Return the price of 10^9 tokens; `utilisation` is the share of paid time that serves tokens, over 0 to 1."""
    return price_per_hour * BILLION / (SECONDS_PER_HOUR * tokens_per_s * utilisation)


def price_interval(price_per_hour: float, tokens_per_s: Interval, utilisation: float = 1.0) -> Interval:
    """Return the price of 10^9 tokens with its interval: price falls as throughput rises, so the ends change places."""

    def price(value: float | None) -> float | None:
        return None if value is None else price_per_1e9(price_per_hour, value, utilisation)

    return Interval(price(tokens_per_s.centre), price(tokens_per_s.high), price(tokens_per_s.low), tokens_per_s.count)


def throughput(seconds: Mapping[int, float], tokens: float) -> Interval | None:
    """Return tokens per second with its interval over processes, from each process's seconds a call."""
    if not seconds or tokens <= 0:
        return None
    return t_interval([math.log(tokens / seconds[process]) for process in sorted(seconds)])


def mix_throughput(
    seconds: Mapping[str, Mapping[int, float]], tokens: Mapping[str, float], calls: Mapping[str, float] | None = None
) -> Interval | None:
    """Return tokens per second of a mix of shapes: all its tokens over all its time, never a mean of rates.

    `seconds` are those of a call by shape and process, `tokens` the valid ones of a call, `calls` how often the mix
    has each shape (once by default). Only processes that timed every shape count; None when none did.
    """
    weights = dict.fromkeys(seconds, 1.0) if calls is None else calls
    shapes = [shape for shape in weights if weights[shape]]
    if not shapes or any(shape not in seconds for shape in shapes):
        return None
    processes = set.intersection(*(set(seconds[shape]) for shape in shapes))
    total = sum(weights[shape] * tokens[shape] for shape in shapes)
    spent = {process: sum(weights[shape] * seconds[shape][process] for shape in shapes) for process in processes}
    return throughput(spent, total)


def break_even_calls(setup_s: float, base_s: float, arm_s: float, *, faster: bool) -> float:
    """Return after how many calls a set-up has paid for itself; infinite unless the arm is proven faster."""
    if not faster or arm_s >= base_s:
        return math.inf
    return setup_s / (base_s - arm_s)


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
