"""Timing: the organiser's protocol, arms interleaved in mirrored order, fresh inputs by default.

Clocks: *event time* is an event pair on the current stream round one call, with no synchronisation between calls
(on a CPU, the wall time of the call); *host time* is the call's return with nothing awaited; *device time* is the
event pair with the host kept ahead of the device, so that no launch gap is inside.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from rooflane.eval.records import Timing

Forward = Callable[[Tensor, Tensor | None], Tensor]
Case = tuple[Tensor, Tensor]

DEVICE_CALLS = 20
# The spin must outlast the host's work for one call; clock64 ticks at most 2 per ns on the GPUs we know.
SPIN_TICKS_PER_HOST_NS = 3
SPIN_TICKS_MIN = 100_000
# Calls longer than this are device-bound and steady: one tells as much for an estimate as three, and three spans as
# much as twenty.
LONG_CALL_NS = 200_000_000


class Clock(Protocol):
    """What times a window of calls; tests bring a synthetic one."""

    name: str

    def synchronize(self) -> None:
        """Wait for the device."""

    def window(self, forward: Forward, cases: Sequence[Case]) -> tuple[list[int], list[int]]:
        """Return event and host nanoseconds of one call per case."""

    def spans(self, forward: Forward, cases: Sequence[Case], host_ns: int) -> list[int]:
        """Return device nanoseconds of one call per case; empty where the device has no clock of its own."""


class CpuClock:
    """Wall time of each call; host and event time are one, and there is no device clock."""

    name = "perf-counter"

    def synchronize(self) -> None:
        """Do nothing: calls on a CPU return when they are done."""

    def window(self, forward: Forward, cases: Sequence[Case]) -> tuple[list[int], list[int]]:
        """Return wall nanoseconds per call; the host list stays empty."""
        times = []
        for x, mask in cases:
            start = perf_counter_ns()
            forward(x, mask)
            times.append(perf_counter_ns() - start)
        return times, []

    def spans(self, forward: Forward, cases: Sequence[Case], host_ns: int) -> list[int]:
        """Return nothing."""
        return []


class CudaClock:
    """Event pairs on the current stream."""

    name = "cuda-events"

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def window(self, forward: Forward, cases: Sequence[Case]) -> tuple[list[int], list[int]]:
        """Return event and host nanoseconds per call, nothing awaited between calls."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in cases]
        ends = [torch.cuda.Event(enable_timing=True) for _ in cases]
        host = [0] * len(cases)
        torch.cuda.synchronize()
        for index, (x, mask) in enumerate(cases):
            starts[index].record()
            before = perf_counter_ns()
            forward(x, mask)
            host[index] = perf_counter_ns() - before
            ends[index].record()
        torch.cuda.synchronize()
        return _elapsed_ns(starts, ends), host

    def spans(self, forward: Forward, cases: Sequence[Case], host_ns: int) -> list[int]:
        """Return device nanoseconds per call: a spin kernel holds the stream while the host submits the call."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in cases]
        ends = [torch.cuda.Event(enable_timing=True) for _ in cases]
        ticks = max(SPIN_TICKS_MIN, host_ns * SPIN_TICKS_PER_HOST_NS)
        torch.cuda.synchronize()
        for index, (x, mask) in enumerate(cases):
            torch.cuda._sleep(ticks)
            starts[index].record()
            forward(x, mask)
            ends[index].record()
        torch.cuda.synchronize()
        return _elapsed_ns(starts, ends)


def make_clock(device: torch.device | str) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


def _elapsed_ns(starts: Sequence[torch.cuda.Event], ends: Sequence[torch.cuda.Event]) -> list[int]:
    """Return the nanoseconds of recorded event pairs."""
    return [round(start.elapsed_time(end) * 1e6) for start, end in zip(starts, ends, strict=True)]


class InputPool:
    """Inputs for timed calls: in fresh mode no arm sees one content twice; refills happen outside the windows.

    `draw(index)` makes the case of a running number. `capacity` bounds the cases alive at once; a window of more
    calls than that is cut, with a refill in between.
    """

    def __init__(self, draw: Callable[[int], Case], capacity: int, *, fixed: bool) -> None:
        self._draw = draw
        self._fixed = fixed
        self._seen: set[str] = set()
        self._drawn = 0
        self._cases: list[Case] = [self._next() for _ in range(1 if fixed else max(1, capacity))]

    def windows(self, arm: str, count: int) -> Iterator[list[Case]]:
        """Yield lists of cases, `count` in all, whose contents the arm has not met before."""
        if self._fixed:
            yield self._cases * count
            return
        while count > 0:
            if arm in self._seen:
                self._refill()
            self._seen.add(arm)
            part = self._cases[:count]
            count -= len(part)
            yield part

    def valid_tokens(self) -> float:
        """Return the mean number of valid tokens of the cases at hand."""
        return sum(int(mask.sum()) for _, mask in self._cases) / len(self._cases)

    def _next(self) -> Case:
        self._drawn += 1
        # Ordinary tensors, as the accuracy inputs are: a candidate must not be able to tell the phases apart.
        with torch.inference_mode(False), torch.no_grad():
            return self._draw(self._drawn - 1)

    def _refill(self) -> None:
        for index in range(len(self._cases)):
            # Freed first: at the largest shapes two of one input do not fit beside the arms.
            self._cases[index] = None
            self._cases[index] = self._next()
        self._seen.clear()


@dataclass(frozen=True)
class Counts:
    """Calls of one arm: warm-ups, calls per round, and whether the budget reduced either."""

    warmups: int
    repeats: int
    shrunk: bool


def choose_counts(call_ns: int, *, warmups: int, repeats: int, rounds: int, budget_s: float) -> Counts:
    """Return counts that keep an arm's calls within its budget: a fifth for warm-ups, the rest for the rounds."""
    calls = budget_s * 1e9 / max(1, call_ns)
    warm = max(1, min(warmups, int(calls / 5)))
    timed = max(1, min(repeats, int(calls * 4 / 5 / rounds)))
    return Counts(warm, timed, warm < warmups or timed < repeats)


@dataclass
class _Samples:
    """Nanoseconds of one arm as they come in."""

    counts: Counts
    event: list[list[int]] = field(default_factory=list)
    host: list[list[int]] = field(default_factory=list)
    device: list[int] = field(default_factory=list)


def estimate_ns(forward: Forward, case: Case, clock: Clock) -> int:
    """Return a call's nanoseconds, the median of three, the host's share counted where it is larger.

    One call is enough where it is long.
    """
    events, host = clock.window(forward, [case])
    if events[0] < LONG_CALL_NS:
        events, host = clock.window(forward, [case] * 3)
    return int(max(median(events), median(host or [0]), 1))


def time_arms(
    arms: dict[str, Forward],
    counts: dict[str, Counts],
    pool: InputPool,
    clock: Clock,
    *,
    rounds: int,
    order_seed: int,
    inputs: str,
    on_arm: Callable[[str], None] = lambda arm: None,
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Time the arms interleaved: each odd round runs them in the reverse order of the round before.

    Every arm is warmed up first. An arm that raises is dropped from the rest and returned with its exception.
    `rounds` must be even, or an arm would stand first more often than last.
    """
    if rounds < 2 or rounds % 2:
        raise ValueError(f"{rounds} rounds cannot be mirrored; use an even number")
    shuffle = random.Random(order_seed)
    samples = {arm: _Samples(counts[arm]) for arm in arms}
    failures: dict[str, Exception] = {}

    def attempt(arm: str, work: Callable[[], None]) -> None:
        if arm in failures:
            return
        on_arm(arm)
        try:
            work()
            clock.synchronize()
        except Exception as error:  # a candidate may raise anything; the other arms go on
            failures[arm] = error

    def warm(arm: str) -> None:
        for cases in pool.windows(arm, counts[arm].warmups):
            for x, mask in cases:
                arms[arm](x, mask)

    def timed_round(arm: str) -> None:
        events, host = [], []
        for cases in pool.windows(arm, counts[arm].repeats):
            event_part, host_part = clock.window(arms[arm], cases)
            events += event_part
            host += host_part
        samples[arm].event.append(events)
        samples[arm].host.append(host)

    def spans(arm: str) -> None:
        found = samples[arm]
        host = int(max((median(part) for part in found.host if part), default=0))
        long = max(found.event[-1]) > LONG_CALL_NS
        for cases in pool.windows(arm, min(3 if long else DEVICE_CALLS, found.counts.repeats)):
            found.device += clock.spans(arms[arm], cases, host)

    names = list(arms)
    with torch.inference_mode():
        for arm in names:
            attempt(arm, lambda arm=arm: warm(arm))
        for round_index in range(rounds):
            if round_index % 2 == 0:
                shuffle.shuffle(names)
            else:
                names.reverse()
            for arm in names:
                attempt(arm, lambda arm=arm: timed_round(arm))
        for arm in names:
            attempt(arm, lambda arm=arm: spans(arm))
    tokens = pool.valid_tokens()
    timings = {
        arm: Timing(
            clock=clock.name,
            event_ns=found.event,
            host_ns=[part for part in found.host if part],
            device_ns=found.device,
            warmups=found.counts.warmups,
            repeats=found.counts.repeats,
            shrunk=found.counts.shrunk,
            inputs=inputs,
            valid_tokens=tokens,
        )
        for arm, found in samples.items()
        if arm not in failures
    }
    return timings, failures
