"""What the clocks of a run say: one median a round, and each arm's clocks beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from rooflane.eval.record.records import EAGER, Record, Timing
from rooflane.eval.stats.intervals import TimesError, median_ns

Cell = tuple[str, str]  # shape, arm
Place = tuple[str, int]  # shape, process
# Compared arms have every round; controls, no-op and anchor may skip blocks of a long suite.
SPARSE_KINDS = ("control", "noop", "anchor")


@dataclass(frozen=True)
class Rounds:
    """Medians in ns by shape, arm and process, and each block's telemetry by shape and process.

    Rounds 2i and 2i + 1 are the mirrored halves of block i. A sparse arm has None where it sat out.
    """

    times: Mapping[Cell, Mapping[int, Sequence[float | None]]]
    telemetry: Mapping[Place, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def of(self, shape: str, arm: str) -> Mapping[int, Sequence[float | None]]:
        """Return an arm's medians on a shape by process; empty when it was not timed."""
        return self.times.get((shape, arm), {})

    def places(self) -> list[Place]:
        """Return the shapes and processes in which eager was timed, in order."""
        return sorted(
            (shape, process) for (shape, arm), found in self.times.items() if arm == EAGER for process in found
        )


def rounds_of(records: Iterable[Record]) -> Rounds:
    """Reduce rows to medians; an arm with an impossible time in a process has none there."""
    times: dict[Cell, dict[int, list[float | None]]] = {}
    telemetry: dict[Place, list[Mapping[str, Any]]] = {}
    for record in records:
        if record.timing is None:
            continue
        sparse = record.kind in SPARSE_KINDS
        try:
            medians = [None if sparse and not part else median_ns(part) for part in record.timing.event_ns]
        except TimesError:
            continue
        times.setdefault((record.shape_id, record.arm), {})[record.process] = medians
        blocks = record.telemetry.get("blocks")
        if blocks and (record.arm == EAGER or (record.shape_id, record.process) not in telemetry):
            # A reading that failed is no evidence either way.
            telemetry[record.shape_id, record.process] = [state or {} for state in blocks]
    return Rounds(times, telemetry)


# A tick of the event clock, 1.024 us, and a little more.
TICK_NS = 1200.0
# What two clocks may disagree by: a share of the call, and a tick of the event clock.
AGREEMENT = 0.02
# An event pair's time comes as float32 milliseconds: its last place is 0.24 ns here, and above 16 ms more than one.
EXACT_NS = 4_000_000
# With fewer different times the least step between two may be many ticks.
LEAST_TIMES = 100


def launch_share(timings: Iterable[Timing]) -> float | None:
    """Return the share of a call's event time in which the device had nothing to do; None without a device clock.

    Only processes that read both clocks count, because event time differs between processes.
    """
    shares = [
        1 - median(timing.device_ns) / median(value for part in timing.event_ns for value in part)
        for timing in timings
        if timing.device_ns and any(timing.event_ns)
    ]
    return max(0.0, median(shares)) if shares else None


def hidden_ns(arm: Iterable[Timing], null: Iterable[Timing]) -> float | None:
    """Return how much of a call's event time neither the device nor the host accounts for, beyond what the null has.

    Event time should end with the later of the device's work and the host's. What is left over, where eager and its
    copy leave less, is work that ran where neither clock looked. None without both clocks, 0 where they agree.
    """
    mine = [left for timing in arm if (left := _left_over(timing)) is not None]
    theirs = [left for timing in null if (left := _left_over(timing)) is not None]
    if not mine or not theirs:
        return None
    excess = median(left for left, _ in mine) - max(left for left, _ in theirs)
    allowed = max(TICK_NS, AGREEMENT * median(event for _, event in mine))
    return excess if excess > allowed else 0.0


def dividend(base: Mapping[int, Record], arm: Mapping[int, Record], logs: Mapping[int, float]) -> float | None:
    """Return the harness dividend: the speedup on one fixed input object over the speedup on fresh inputs.

    `logs` are the fresh log-ratios by process; both speedups come from the processes that timed both ways. About 1
    where an arm computes the same either way; what is above is earned by the harness giving one object again.
    """
    found = []
    for process, log in logs.items():
        timings = base[process].timing, arm[process].timing
        try:
            fixed = [median_ns(timing.harness_ns) for timing in timings]
        except TimesError:
            continue
        found.append(math.log(fixed[0] / fixed[1]) - log)
    return math.exp(sum(found) / len(found)) if found else None


def clock_tick_ns(timings: Iterable[Timing]) -> int | None:
    """Return the tick of a GPU's event clock, the least step between two recorded times; None where few were taken.

    A CPU's clock ticks in nanoseconds, which no call is short enough to feel.
    """
    times = sorted(
        {
            value
            for timing in timings
            if timing.clock == "cuda-events"
            for part in timing.event_ns
            for value in part
            if 0 < value < EXACT_NS
        }
    )
    return min(b - a for a, b in pairwise(times)) if len(times) >= LEAST_TIMES else None


def _left_over(timing: Timing) -> tuple[float, float] | None:
    """Return the event time beyond the later of device and host, and the event time itself, in ns."""
    event = [value for part in timing.event_ns for value in part]
    host = [value for part in timing.host_ns for value in part]
    if not event or not host or not timing.device_ns:
        return None
    whole = median(event)
    return whole - max(median(timing.device_ns), median(host)), whole
