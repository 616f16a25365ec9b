"""Timed windows: where the device is made to pause behind a call, and where it is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rooflane.eval.check.tamper import ProcessState
from rooflane.eval.record.records import EAGER_ARM, ArmId
from rooflane.eval.worker.clock import CpuClock
from rooflane.eval.worker.protocol import Finish, Go, Prepare
from rooflane.eval.worker.windows import Windows
from rooflane.eval.worker.workload import workload_of
from rooflane.shapes import Shape

CPU = torch.device("cpu")
WORKLOAD = workload_of(Shape("a", 2, 4, 16, 2, 16, 1), CPU)

NOOP_ARM = ArmId("noop", "noop")


class PausingClock(CpuClock):
    """A clock of a device that can pause, a tick a nanosecond."""

    def __init__(self):
        self.pauses = []

    def ticks_per_ns(self):
        return 1.0

    def pause(self, ticks):
        self.pauses.append(ticks)


@pytest.mark.parametrize(("arm", "pauses"), [(EAGER_ARM, 3), (NOOP_ARM, 0)])
def test_every_call_but_the_empty_one_is_followed_by_a_pause(arm, pauses):
    """The pause hides from short calls what a look costs the host; the empty call measures the host."""
    subject = SimpleNamespace(
        workload=WORKLOAD, device=CPU, state=ProcessState(),
        arms={arm: SimpleNamespace(forward=lambda x, mask: x.clone())},
    )  # fmt: skip
    clock = PausingClock()
    windows = Windows(subject, clock)
    windows.prepare(Prepare(arm, seed=1, calls=3, lead=0, mark_seed=2))
    windows.go(Go())
    assert len(clock.pauses) == pauses and all(ticks > 0 for ticks in clock.pauses)
    found = windows.finish(Finish())
    assert len(found.event_ns) == 3 and found.loop_ns > 0


def test_the_hosts_loop_stands_outside_what_the_parent_times():
    """The parent's wall clock stands round `go`: a loop in there would look like time that the events leave out."""
    loops = []
    subject = SimpleNamespace(
        workload=WORKLOAD, device=CPU, state=ProcessState(),
        arms={EAGER_ARM: SimpleNamespace(forward=lambda x, mask: x.clone())},
    )  # fmt: skip
    windows = Windows(subject, PausingClock(), pace_ns=lambda: loops.append(1) or 777)
    windows.prepare(Prepare(EAGER_ARM, seed=1, calls=1, lead=0, mark_seed=2))
    assert len(loops) == 1
    windows.go(Go())
    assert windows.finish(Finish()).loop_ns == 777 and len(loops) == 1


def test_the_empty_call_leaves_the_other_arms_pause_alone():
    """A look without a pause behind it takes less: taken for one with, it would shorten the next window's pause."""
    subject = SimpleNamespace(
        workload=WORKLOAD, device=CPU, state=ProcessState(),
        arms={name: SimpleNamespace(forward=lambda x, mask: x.clone()) for name in (EAGER_ARM, NOOP_ARM)},
    )  # fmt: skip
    windows = Windows(subject, PausingClock())
    for arm in (EAGER_ARM, NOOP_ARM):
        before = windows._look_ns
        windows.prepare(Prepare(arm, seed=1, calls=3, lead=0, mark_seed=2))
        windows.go(Go())
    assert windows._look_ns == before
