"""The speed of the host CPU, from a timed fixed loop of the interpreter. Loads no torch.

On a rented H200's virtual cores eager took 1.6 ms or 3.3 ms on one launch-bound shape, and this loop 95 us or 170 to
210 with it (briefs/host.md). The times of the arms do not show whether the host or the arm is slow.
The loop does: no arm takes part in it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooflane.eval.record.records import Record

# About 0.1 ms: short beside a window, long beside the clock.
LOOP = 3000
# The two states of that host lie 1.9 times apart for eager; a loop repeated on a fast core stays well within this.
SLOW = 1.3

_now = time.perf_counter_ns


def loop_ns() -> int:
    """Return the nanoseconds that the fixed loop takes now, the lesser of two."""
    return min(_loop(), _loop())


def core_paces(cores: Iterable[int] = ()) -> dict[int, int]:
    """Return the loop's nanoseconds on some cores, all that this process may use where none are named.

    Empty where it cannot choose its core.
    """
    try:
        allowed = os.sched_getaffinity(0)
        try:
            paces = {}
            for core in cores or sorted(allowed):
                os.sched_setaffinity(0, {core})
                paces[core] = loop_ns()
            return paces
        finally:
            os.sched_setaffinity(0, allowed)
    except (AttributeError, OSError):  # not Linux, or forbidden
        return {}


def slow_cores(paces: Mapping[int, int]) -> list[int]:
    """Return the cores on which the loop takes over 1.3 times what it takes on the quickest."""
    return [core for core, pace in paces.items() if pace > SLOW * min(paces.values())]


@dataclass(frozen=True)
class HostPace:
    """A campaign's host: the loop's time on a fast core, and each arm's rounds and slow rounds."""

    fast_ns: float
    rounds: Mapping[str, int]
    slow: Mapping[str, int]

    def describe(self) -> str:
        """Return in words how often each arm met a slow host; empty when none did."""
        if not any(self.slow.values()):
            return ""
        each = ", ".join(f"{self.slow[arm]} of {count} of {arm}" for arm, count in self.rounds.items())
        return (
            f"a fixed loop of the interpreter, {self.fast_ns / 1e3:.0f} us on a fast core, took over {SLOW:g} times "
            f"that before these rounds: {each}; a slow host CPU inflates launch-bound times in them"
        )


def host_pace(records: Iterable[Record]) -> HostPace | None:
    """Return how often eager and the candidates met a slow host; None for a run of before the loop was timed.

    The fast core's time is the lowest tenth of all loops.
    """
    timed = [record for record in records if record.timing and record.timing.loop_ns]
    loops = [pace for record in timed for pace in record.timing.loop_ns]
    if len(loops) < 2:
        return None
    fast = quantiles(loops, n=10, method="inclusive")[0]
    rounds, slow = Counter(), Counter()
    for record in timed:
        if record.kind in ("baseline", "candidate"):
            rounds[record.arm] += len(record.timing.loop_ns)
            slow[record.arm] += sum(pace > SLOW * fast for pace in record.timing.loop_ns)
    return HostPace(fast, dict(rounds), dict(slow))


def _loop() -> int:
    start = _now()
    total = 0
    for number in range(LOOP):
        total += number & 7
    return _now() - start
