"""What the clocks of a run say: one median a round, and each arm's clocks beside each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from rooflane.eval.record.records import ANCHOR, EAGER, NOOP, Record, Timing


class TimesError(ValueError):
    """Times no ratio can be formed from: missing, zero, negative or not finite."""


def median_ns(samples: Sequence[int]) -> float:
    """Return the median of one window's nanoseconds.

    Raises `TimesError` when there are none, or one is zero, negative or not finite: such a clock reading is a
    fault, and dropping it silently would make the arm look faster.
    """
    if not samples:
        raise TimesError("no time was taken")
    for sample in samples:
        if not (math.isfinite(sample) and sample > 0):
            raise TimesError(f"a call was timed at {sample} ns, which no real call takes")
    return median(samples)


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


# With a larger share of dropped blocks the campaign has no verdict.
MOST_DROPPED = 0.2
# A block counts as slowed when its clock is under this share of the campaign's median.
LEAST_CLOCK = 0.75
MADS = 5
# A block this near to the median is not disturbed, however steady the other blocks are: no verdict rests on 2%, and
# a no-op may fall on either side of a tick.
LEAST_SHARE = 0.02
# Reasons a driver reports for a clock that was chosen, not forced down.
CHOSEN_CLOCKS = {"ApplicationsClocksSetting", "DisplayClockSetting", "GpuIdle", "None", "SyncBoost"}
# The board's power limit: what heavy work meets by itself, unlike heat or a slowdown from outside.
POWER_CAP = {"SwPowerCap"}
POWER_LIMIT, SLOW_CLOCK = "the power limit", "a slow clock"
# Both set one clock for every arm of a block. Where every block of a shape in a process meets one, it is the state the
# ratio was taken in. Heat and neighbours come and go within a block, so they are never that.
LASTING = (POWER_LIMIT, SLOW_CLOCK)


@dataclass(frozen=True)
class Contamination:
    """The dropped blocks by shape and process, the number of all blocks, and the number dropped by each reason.

    `lasting` has the places where one condition lasted over every block: it met all arms alike, and drops none.
    """

    dropped: Mapping[Place, frozenset[int]] = field(default_factory=dict)
    total: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    lasting: Mapping[Place, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of dropped blocks."""
        return sum(map(len, self.dropped.values()))

    @property
    def too_much(self) -> bool:
        """Whether so many were dropped that the campaign is contaminated."""
        return self.count > MOST_DROPPED * self.total

    def at(self, shape: str, process: int) -> frozenset[int]:
        """Return the dropped blocks of a shape in a process."""
        return self.dropped.get((shape, process), frozenset())

    def describe(self) -> str:
        """Return what was dropped, and why, in words; empty when nothing was."""
        if not self.count:
            return ""
        why = ", ".join(f"{count} by {reason}" for reason, count in sorted(self.reasons.items()))
        left = "" if self.count < self.total else "; nothing is left"
        several = ", some by more than one" if sum(self.reasons.values()) > self.count else ""
        return f"{self.count} of {self.total} blocks dropped for every arm ({why}{several}){left}"

    def conditions(self, shape: str) -> dict[str, int]:
        """Return the conditions that lasted over a shape, each with the number of processes it lasted in."""
        return dict(Counter(what for (name, _), what in sorted(self.lasting.items()) if name == shape))


def find_contamination(rounds: Rounds) -> Contamination:
    """Return the disturbed blocks; a campaign without anchor, no-op and telemetry has none."""
    places = rounds.places()
    found: dict[Place, set[int]] = {}
    reasons: Counter[str] = Counter()

    def drop(place: Place, block: int, reason: str) -> None:
        found.setdefault(place, set()).add(block)
        reasons[reason] += 1

    for arm in (ANCHOR, NOOP):
        for place, block in _outliers(rounds, arm, places):
            drop(place, block, f"the {'no-op' if arm == NOOP else arm}")
    clock = _median_clock(rounds, places)
    lasting: dict[Place, str] = {}
    for place in places:
        states = [_states(state, clock) for state in rounds.telemetry.get(place, ())]
        # A block without a reading would not be known to share the condition.
        if len(states) >= len(rounds.of(place[0], EAGER)[place[1]]) // 2:
            kept = [reason for reason in LASTING if all(reason in state for state in states)]
            # The power limit lowers the clock, in some blocks by more than in others.
            kept += [SLOW_CLOCK] if POWER_LIMIT in kept and SLOW_CLOCK not in kept else []
            states = [[reason for reason in state if reason not in kept] for state in states]
            if kept:
                lasting[place] = kept[0]
        for block, state in enumerate(states):
            for reason in state:
                drop(place, block, reason)
    total = sum(len(rounds.of(shape, EAGER)[process]) // 2 for shape, process in places)
    dropped = {place: frozenset(blocks) for place, blocks in found.items()}
    return Contamination(dropped, total, dict(reasons), lasting)


def _outliers(rounds: Rounds, arm: str, places: list[Place]) -> list[tuple[Place, int]]:
    """Return the blocks in which a watching arm lies beyond the campaign's median by 5 MAD.

    Each block is first divided by the lower quartile of its shape over the campaign. The work before a shape leaves a
    different cache state for each shape, which is no disturbance. A quartile, because a disturbance slows, possibly in
    half of the few blocks of a shape.
    """
    blocks: dict[str, dict[tuple[int, int], float]] = {}
    for shape, process in places:
        medians = rounds.of(shape, arm).get(process, ())
        for block in range(len(medians) // 2):
            first, second = medians[2 * block : 2 * block + 2]
            if first is not None and second is not None:
                blocks.setdefault(shape, {})[process, block] = (first + second) / 2
    usual = {shape: sorted(values.values())[len(values) // 4] for shape, values in blocks.items()}
    scaled = {
        (shape, process, block): value / usual[shape]
        for shape, values in blocks.items()
        for (process, block), value in values.items()
    }
    if not scaled:
        return []
    centre = median(scaled.values())
    spread = median(abs(value - centre) for value in scaled.values())
    tick = TICK_NS if arm == NOOP else 0
    return [
        ((shape, process), block)
        for (shape, process, block), value in scaled.items()
        if abs(value - centre) > max(MADS * spread, LEAST_SHARE * centre, tick / usual[shape])
    ]


def _median_clock(rounds: Rounds, places: list[Place]) -> float | None:
    clocks = [state["sm_mhz"] for place in places for state in rounds.telemetry.get(place, ()) if state.get("sm_mhz")]
    return median(clocks) if clocks else None


def _states(state: Mapping[str, Any], clock: float | None) -> list[str]:
    throttle = state.get("throttle") or ()
    forced = set(throttle) - CHOSEN_CLOCKS if isinstance(throttle, (list, tuple)) else throttle
    found = [POWER_LIMIT if forced == POWER_CAP else "throttling"] if forced else []
    if clock and state.get("sm_mhz") and state["sm_mhz"] < LEAST_CLOCK * clock:
        found.append(SLOW_CLOCK)
    if state.get("other_processes"):
        found.append("another process")
    return found + _eager_states(state.get("eager") or {})


# Of the cores eager asked for, the share that it may miss beyond what the candidates miss in the same block.
MOST_LOST = 0.25


def _eager_states(state: Mapping[str, Any]) -> list[str]:
    """Return what was done to eager's process in a block, and whether something else ran in its place."""
    found = list(state.get("disturbed", ()))
    if state.get("lost", 0.0) - state.get("others_lost", 0.0) > MOST_LOST:
        found.append("work in eager's place")
    return found
