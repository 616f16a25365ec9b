"""What tokens cost: from throughput with its interval to dollars, over one shape or a mix."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rooflane.eval.stats.intervals import Interval, t_interval

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
