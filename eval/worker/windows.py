"""Timed windows in a worker: fresh inputs, one call each, a fingerprint behind every call, some outputs kept.

A window has three steps, each its own request, so that the parent's clock stands round the calls alone: `prepare`
draws inputs and poisons memory, `go` runs the calls, `finish` reads the clocks and looks at what was kept.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rooflane.eval.check.cases import OutputFacts
from rooflane.eval.check.fingerprint import ALIGNMENT, Fingerprinter
from rooflane.eval.check.held_stream import call_held
from rooflane.eval.check.leftovers import dispatch_modes, function_modes, get_profile, get_trace
from rooflane.eval.check.outputs import describe_output
from rooflane.eval.check.running import LateWork
from rooflane.eval.check.tamper import GivenInputs
from rooflane.eval.record.environment import available_memory_bytes
from rooflane.eval.record.records import ArmId
from rooflane.eval.stats.host_pace import loop_ns
from rooflane.eval.worker import protocol
from rooflane.eval.worker.clock import Clock, cache_bytes, estimate_ns
from rooflane.eval.worker.subject import Subject

# Inputs alive at once: enough for 100 calls of 4 MB, and never more than a tenth of what is free.
POOL_BYTES = {"cpu": 1 << 29, "cuda": 4 << 30}
POOL_FREE_SHARE = 10
# Outputs kept for the judge; few enough that the caches see what they would see without.
KEEP_BYTES = {"cpu": 1 << 25, "cuda": 1 << 26}

# What looking at an output costs the host until a window has shown it; what a fingerprint and a pause cost an H200 by
# their launches alone (with 2 us the empty call fell from 10 to 1.5 us: the host was ahead where the organiser's is
# not), and the rate at which a fingerprint reads.
LOOK_NS = 15_000
MARK_NS = 8_000
MARK_BYTES_PER_NS = 2500

# Bound here, before any candidate is imported.
_type = type
_now = time.perf_counter_ns
_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous


@dataclass
class _Window:
    """One window from its preparation to its end."""

    arm: ArmId
    cases: list
    lead: int
    keep: frozenset[int]
    taker: Fingerprinter
    mark_seed: int
    given: GivenInputs | None
    late: LateWork | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    places: list[Any] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    read: Any = None
    loop_ns: int = 0


class Windows:
    """Runs the windows of one subject's arms; `pace_ns` times the host's loop ahead of each."""

    def __init__(self, subject: Subject, clock: Clock, pace_ns: Callable[[], int] = loop_ns) -> None:
        self.subject = subject
        self.clock = clock
        self.pace_ns = pace_ns
        # Set in the reference's worker: what other processes do to this one.
        self.outside: Callable[[], list[str]] | None = None
        self._fixed: tuple | None = None
        self._now: _Window | None = None
        self._look_ns = LOOK_NS

    def capacity(self) -> int:
        """Return how many inputs may be alive at once."""
        device = self.subject.device
        free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else available_memory_bytes()
        budget = min(POOL_BYTES[device.type], free // POOL_FREE_SHARE)
        return max(1, budget // self.subject.workload.input_bytes)

    def handlers(self) -> protocol.Handlers:
        """Return what this answers, by request."""
        return {
            protocol.Estimate: self.estimate,
            protocol.Prepare: self.prepare,
            protocol.Go: self.go,
            protocol.Finish: self.finish,
            protocol.Hold: self.hold,
            protocol.Ship: self.ship,
            protocol.Release: self.release,
        }

    def estimate(self, request: protocol.Estimate) -> protocol.Estimated:
        """Return a call's nanoseconds after the warm-up calls that a budget allows, and how many these were."""
        forward = self.subject.arms[request.arm].forward
        with torch.inference_mode():
            case = self.draw(request.seed)
            call_ns = estimate_ns(forward, case, self.clock)
            count = max(1, min(request.warmups, int(request.budget_s * 1e9 / call_ns)))
            for number in range(count):
                forward(*self.draw(request.seed + 1 + number))
            self.clock.synchronize()
            # Again: the first calls may have compiled or tuned, and a slow start must not buy few calls.
            call_ns = min(call_ns, estimate_ns(forward, case, self.clock))
        return protocol.Estimated(call_ns, count)

    def prepare(self, request: protocol.Prepare) -> protocol.Done:
        """Draw the inputs of a window, choose the outputs to keep, and poison the memory they may land in."""
        workload, seed, calls, lead = self.subject.workload, request.seed, request.calls, request.lead
        self._now = None
        if request.fixed:
            self._fixed = self._fixed or self.draw(seed)
            seeds, cases = [seed] * (lead + calls), [self._fixed] * (lead + calls)
        else:
            # Leading calls have numbers of their own: no content is met twice.
            seeds = [seed + number for number in [*range(calls, calls + lead), *range(calls)]]
            cases = [self.draw(one) for one in seeds]
        keep = max(1, KEEP_BYTES[self.subject.device.type] // workload.output_bytes)
        mark_seed = request.mark_seed
        kept = range(calls) if keep >= calls else random.Random(mark_seed).sample(range(calls), keep)
        taker = workload.fingerprinter(mark_seed, calls)
        given = GivenInputs(cases, seeds) if request.watch else None
        self._now = _Window(request.arm, cases, lead, frozenset(kept) | {calls - 1}, taker, mark_seed, given)
        workload.poison(cases[0], blocks=len(self._now.keep))
        self.clock.synchronize()
        if request.watch:
            self._now.late = LateWork()
        # Not in `go`: the parent's wall clock stands round that, and would find the loop's time hidden.
        self._now.loop_ns = self.pace_ns()
        if self.outside:
            self.outside()
        return protocol.Done()

    def go(self, request: protocol.Go) -> protocol.Done:
        """Run the window's calls; its times are read by `finish`."""
        window, workload = self._now, self.subject.workload
        forward = self.subject.arms[window.arm].forward
        size, dtype, device, kind = workload.size, workload.dtype, workload.place, torch.Tensor
        pack = workload.pack if workload.packed else None
        take, launch = window.taker.take, window.taker.launcher()
        keep, outputs, places = window.keep, window.outputs, window.places
        # The empty call stays without a pause: behind one it took 1.3 us or 12 (H200) as the device was ahead of the
        # host or not, and the contamination rule reads it.
        pause, ticks = self.clock.pause, 0 if window.arm.kind == "noop" else self._ticks(workload.output_bytes)
        looks = []
        left, depth = self.subject.state.leftovers, (function_modes(), dispatch_modes())
        profile, trace = left.profile, left.trace

        def after(number: int, given: Any) -> None:
            start = _now()
            # First of all: a mode or a hook would run its code in what follows.
            if (
                (function_modes(), dispatch_modes()) != depth
                or get_profile() is not profile
                or get_trace() is not trace
            ) and (lines := left.take_away()):
                window.wrong.append(lines[0])
                places.append(0)
                return
            out = given if pack is None else pack(given)
            if _type(out) is not kind or out.shape != size or out.dtype != dtype or out.device != device:
                window.wrong.append(workload.fault(given) or "the output is not what it was")
                places.append(0)
                return
            pointer = _data_ptr(out)
            if launch and pointer % ALIGNMENT == 0 and _is_contiguous(out):
                launch(pointer, number)
            else:
                take(out, number)
            if ticks:
                pause(ticks)
            places.append(pointer if pack is None else workload.place_of(given))
            if number in keep:
                outputs[number] = given
            looks.append(_now() - start)

        try:
            with torch.inference_mode():
                for case in window.cases[: window.lead]:
                    forward(*case)
                window.read = self.clock.window(forward, window.cases[window.lead :], after)
            # The cost of a check without a pause behind it differs from the cost with one.
            if looks and (ticks or window.arm.kind != "noop"):
                self._look_ns = median(looks)
        except Exception:
            self._now = None
            raise
        return protocol.Done()

    def _ticks(self, output_bytes: int) -> int:
        """Return the ticks the device pauses behind each call, 0 for none.

        Looking at an output costs the host more time than the device. Without the pause the host would fall behind
        on short calls, and the events would show launch gaps that the organiser's loop does not have; with it, both
        sides are lengthened alike.
        """
        device_ns = MARK_NS + output_bytes / MARK_BYTES_PER_NS
        return round(max(0.0, self._look_ns - device_ns) * self.clock.ticks_per_ns())

    def finish(self, request: protocol.Finish) -> protocol.Window:
        """Return the window's times, its fingerprints and what the kept outputs show."""
        window = self._now
        outside = self.outside() if self.outside else []
        event_ns, host_ns = window.read()
        self.clock.synchronize()
        marks = window.taker.read()
        if window.late:
            window.late.wait()
        last = {place: number for number, place in enumerate(window.places)}
        whole = [number for number in sorted(window.outputs) if last[window.places[number]] == number]
        overwritten = len(whole) < len(window.outputs)
        window.outputs = {number: window.outputs[number] for number in whole}
        fault = self._fault(window)
        again = self._marks_again(window, whole)
        return protocol.Window(
            event_ns=event_ns,
            host_ns=host_ns,
            loop_ns=window.loop_ns,
            marks=base64.b64encode(marks.numpy().tobytes()).decode(),
            kept=whole,
            overwritten=overwritten,
            tokens=float(self.subject.workload.tokens(window.cases[window.lead :])),
            deferred=[number for number in whole if not torch.equal(again[number], marks[number])],
            fault=fault,
            changed=window.given.change(self.draw, window.mark_seed) if window.given else "",
            outside=outside,
        )

    def hold(self, request: protocol.Hold) -> protocol.StreamHeld:
        """Call the window's arm on a held stream and compare its fingerprint behind the call with a later one."""
        window, workload = self._now, self.subject.workload
        forward = self.subject.arms[window.arm].forward
        taker = window.taker.like(2)
        faults: list[str] = []

        def read(out: Any) -> None:
            fault = workload.fault(out)
            faults[:] = [fault] if fault else []
            if not fault:
                taker.take(workload.pack(out), 0)

        with torch.inference_mode():
            number, out = call_held(forward, lambda number: self.draw(request.seed + number), read)
            if not faults:
                taker.take(workload.pack(out), 1)
        first, second = taker.read()
        return protocol.StreamHeld(
            number=number,
            marks=base64.b64encode(first.numpy().tobytes()).decode(),
            deferred=not torch.equal(first, second),
            fault=next(iter(faults), ""),
        )

    def ship(self, request: protocol.Ship) -> OutputFacts:
        """Write a kept output's bytes for the judge."""
        out = self.subject.workload.pack(self._now.outputs[request.number])
        self.subject.buffer.write(out)
        return describe_output(out)

    def release(self, request: protocol.Release) -> protocol.Done:
        """Release the window."""
        self._now = None
        return protocol.Done()

    def _marks_again(self, window: _Window, numbers: Sequence[int]) -> dict[int, Tensor]:
        """Return the fingerprints of kept outputs as they are now."""
        taker = window.taker
        again = taker.like(len(numbers))
        for slot, number in enumerate(numbers):
            again.take(self.subject.workload.pack(window.outputs[number]), slot)
        marks = again.read()
        return {number: marks[slot] for slot, number in enumerate(numbers)}

    def _fault(self, window: _Window) -> str:
        """Return why an output of the window is no output of its own, "" when all are."""
        if window.wrong:
            return window.wrong[0]
        cases = window.cases[window.lead :]
        for number, out in window.outputs.items():
            if fault := self.subject.workload.fault(out, cases[number]):
                return fault
        return self.subject.workload.aliased(window.places, cases)

    def draw(self, seed: int) -> tuple:
        """Return the inputs of a seed."""
        return self.subject.workload.draw(self.subject.workload.timed_case(seed))


# Inputs that are used in turn must overflow the cache this many times before none is found in it.
ROTATION = 5
ROTATION_CASES_MAX = 256


class CacheStates:
    """Times an arm by every clock once: what they say against each other is for the report."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def states(self, request: protocol.TimeStates) -> protocol.States:
        """Return an arm's nanoseconds by the other clocks and in the other cache states, as many calls as fit."""
        windows, clock, seed = self._windows, self._windows.clock, request.seed
        forward = windows.subject.arms[request.arm].forward
        fit = int(request.budget_s * 1e9 / 5 / max(1, request.call_ns))
        calls = max(1, min(request.calls, fit, windows.capacity()))
        fresh = [windows.draw(seed + number) for number in range(calls)]
        same = [windows.draw(seed + calls)] * calls
        with torch.inference_mode():
            forward(*same[0])
            return protocol.States(
                harness_ns=clock.window(forward, same)()[0],
                device_ns=clock.spans(forward, fresh, request.host_ns),
                idle_ns=clock.idle(forward, fresh),
                cold_ns=clock.cold(forward, fresh),
                rotating_ns=self._rotate(forward, fresh, calls),
            )

    def _rotate(self, forward: Any, cases: list, calls: int) -> list[int]:
        """Time calls over inputs that overflow the L2 five times between two uses; nothing where that is too many."""
        device = self._windows.subject.device
        if device.type != "cuda":
            return []
        size = self._windows.subject.workload.input_bytes
        wanted = -(-ROTATION * cache_bytes(device) // size)
        if wanted > min(ROTATION_CASES_MAX, self._windows.capacity()):
            return []
        ring = [self._windows.subject.workload.clone(cases[0]) for _ in range(max(2, wanted))]
        self._windows.clock.window(forward, ring)
        return self._windows.clock.window(forward, (ring * (-(-calls // len(ring))))[:calls])()[0]
