"""Clocks: how one worker times calls.

*Event time* is an event pair on the current stream round one call, with no synchronisation between calls (on a CPU,
the wall time of the call); *host time* is the call's return with nothing awaited; *device time* is the event pair
with the host kept ahead of the device, so that no launch gap is inside; *idle-start time* is the event pair after a
synchronisation; *cold time* the event pair behind a write of twice the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

Forward = Callable[..., Any]
# The inputs of one call.
Case = tuple[Any, ...]
# What is done with an output behind its call and outside the clock: `(number, output)`.
After = Callable[[int, Any], None]

# The spin must outlast the host's work for one call; clock64 ticks at most 2 per ns on the GPUs we know.
SPIN_TICKS_PER_HOST_NS = 3
SPIN_TICKS_MIN = 100_000
# About half a millisecond: the event pair's own cost vanishes beside it.
CALIBRATION_TICKS = 1_000_000
# Calls longer than this are device-bound and steady: one tells as much for an estimate as three, and three spans as
# much as twenty.
LONG_CALL_NS = 200_000_000
# A last-level cache where the system names none; and the most that is written to empty one.
CPU_CACHE_BYTES = 32 << 20
FLUSH_BYTES_MAX = 256 << 20
# A CPU writes that much in tens of milliseconds: a few cold calls must do.
CPU_COLD_CALLS = 3

# Bound here, before any candidate is imported: a replaced clock is not the one that is read.
_now = time.perf_counter_ns
_Event = torch.cuda.Event
_record = torch.cuda.Event.record
_elapsed = torch.cuda.Event.elapsed_time
_synchronize = torch.cuda.synchronize
_sleep = torch.cuda._sleep


class Clock(Protocol):
    """What times a window of calls; tests bring a synthetic one."""

    name: str

    def synchronize(self) -> None:
        """Wait for the device."""

    def window(
        self, forward: Forward, cases: Sequence[Case], after: After | None = None
    ) -> Callable[[], tuple[list[int], list[int]]]:
        """Run one call per case; return a function that reads event and host nanoseconds."""

    def pause(self, ticks: int) -> None:
        """Queue a pause of the device."""

    def ticks_per_ns(self) -> float:
        """Return how long such a pause is; 0 where there is none."""

    def spans(self, forward: Forward, cases: Sequence[Case], host_ns: int) -> list[int]:
        """Return device nanoseconds of one call per case; empty where the device has no clock of its own."""

    def idle(self, forward: Forward, cases: Sequence[Case]) -> list[int]:
        """Return idle-start nanoseconds of one call per case; empty where a call never finds the device busy."""

    def cold(self, forward: Forward, cases: Sequence[Case]) -> list[int]:
        """Return cold nanoseconds of one call per case."""


class CpuClock:
    """Wall time of each call; host and event time are one, and there is no device clock."""

    name = "perf-counter"

    def synchronize(self) -> None:
        """Do nothing: calls on a CPU return when they are done."""

    def window(
        self, forward: Forward, cases: Sequence[Case], after: After | None = None
    ) -> Callable[[], tuple[list[int], list[int]]]:
        """Take wall nanoseconds per call; the host list stays empty."""
        times = []
        for number, case in enumerate(cases):
            start = _now()
            out = forward(*case)
            times.append(_now() - start)
            if after:
                after(number, out)
            del out
        return lambda: (times, [])

    def pause(self, ticks: int) -> None:
        """Do nothing."""

    def ticks_per_ns(self) -> float:
        """Return 0: the host is the device."""
        return 0.0

    def spans(self, forward: Forward, cases: Sequence[Case], host_ns: int) -> list[int]:
        """Return nothing."""
        return []

    def idle(self, forward: Forward, cases: Sequence[Case]) -> list[int]:
        """Return nothing."""
        return []

    def cold(self, forward: Forward, cases: Sequence[Case]) -> list[int]:
        """Return wall nanoseconds per call, each behind a write of twice the last-level cache."""
        flush = torch.empty(min(FLUSH_BYTES_MAX, 2 * cache_bytes(torch.device("cpu"))), dtype=torch.uint8)
        times = []
        for number, case in enumerate(cases[:CPU_COLD_CALLS]):
            flush.fill_(number)
            start = _now()
            forward(*case)
            times.append(_now() - start)
        return times


class CudaClock:
    """Event pairs on the current stream."""

    name = "cuda-events"

    def __init__(self) -> None:
        self._ticks_per_ns = 0.0

    def synchronize(self) -> None:
        """Wait for the device."""
        _synchronize()

    def window(
        self, forward: Forward, cases: Sequence[Case], after: After | None = None
    ) -> Callable[[], tuple[list[int], list[int]]]:
        """Take event and host nanoseconds per call, nothing awaited between calls."""
        starts, ends = _events(len(cases))
        host = [0] * len(cases)
        _synchronize()
        for number, case in enumerate(cases):
            _record(starts[number])
            before = _now()
            out = forward(*case)
            host[number] = _now() - before
            _record(ends[number])
            if after:
                after(number, out)
            del out
        _synchronize()
        return lambda: (_elapsed_ns(starts, ends), host)

    def pause(self, ticks: int) -> None:
        """Queue a kernel that spins for a number of clock ticks."""
        _sleep(ticks)

    def ticks_per_ns(self) -> float:
        """Return the device's ticks per nanosecond, measured once."""
        if not self._ticks_per_ns:
            starts, ends = _events(2)
            for start, end in zip(starts, ends, strict=True):
                _record(start)
                _sleep(CALIBRATION_TICKS)
                _record(end)
            _synchronize()
            self._ticks_per_ns = CALIBRATION_TICKS / max(1, _elapsed_ns(starts, ends)[-1])
        return self._ticks_per_ns

    def spans(self, forward: Forward, cases: Sequence[Case], host_ns: int) -> list[int]:
        """Return device nanoseconds per call: a spin kernel holds the stream while the host submits the call."""
        ticks = max(SPIN_TICKS_MIN, host_ns * SPIN_TICKS_PER_HOST_NS)
        return self._each(forward, cases, lambda number: _sleep(ticks))

    def idle(self, forward: Forward, cases: Sequence[Case]) -> list[int]:
        """Return event nanoseconds per call, the device idle before each."""
        return self._each(forward, cases, lambda number: _synchronize())

    def cold(self, forward: Forward, cases: Sequence[Case]) -> list[int]:
        """Return event nanoseconds per call, each queued behind a write of twice the L2 cache."""
        size = min(FLUSH_BYTES_MAX, 2 * cache_bytes(torch.device("cuda")))
        flush = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self._each(forward, cases, lambda number: flush.fill_(number))

    def _each(self, forward: Forward, cases: Sequence[Case], before: Callable[[int], object]) -> list[int]:
        starts, ends = _events(len(cases))
        _synchronize()
        for number, case in enumerate(cases):
            before(number)
            _record(starts[number])
            forward(*case)
            _record(ends[number])
        _synchronize()
        return _elapsed_ns(starts, ends)


def make_clock(device: torch.device | str) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last cache before memory: a GPU's L2, a CPU's highest level."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        number = int(text.rstrip("KMG") or 0)
        sizes.append(number << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
    return max(sizes, default=CPU_CACHE_BYTES)


def estimate_ns(forward: Forward, case: Case, clock: Clock) -> int:
    """Return a call's nanoseconds, the median of three, the host's share counted where it is larger.

    One call is enough where it is long.
    """
    events, host = clock.window(forward, [case])()
    if events[0] < LONG_CALL_NS:
        events, host = clock.window(forward, [case] * 3)()
    return int(max(median(events), median(host or [0]), 1))


def _events(count: int) -> tuple[list, list]:
    """Return start and end events of `count` calls."""
    return [_Event(enable_timing=True) for _ in range(count)], [_Event(enable_timing=True) for _ in range(count)]


def _elapsed_ns(starts: Sequence[torch.cuda.Event], ends: Sequence[torch.cuda.Event]) -> list[int]:
    """Return the nanoseconds of recorded event pairs."""
    return [round(_elapsed(start, end) * 1e6) for start, end in zip(starts, ends, strict=True)]
