"""What other processes do to this one from outside: its priority, its cores, and stops. Loads no torch.

Eager's worker looks at itself around each of its windows. A process of the same user may renice it, take cores from
it or stop it; each makes eager slower and a candidate look faster.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

THREADS = Path("/proc/self/task")
AUTOGROUP = Path("/proc/self/autogroup")
STOPPED, PRIORITY, CORES = "a stop of eager's process", "another priority of eager's", "other cores for eager"


@dataclass(frozen=True)
class Standing:
    """How the system schedules one thread: its nice value, its policy, and the cores it may use."""

    # Travels between processes: no field may be missing, unknown or of another type.
    __pydantic_config__ = {"strict": True, "extra": "forbid"}

    nice: int
    policy: int
    cores: tuple[int, ...]


def standing(thread: int = 0) -> Standing | None:
    """Return how a thread is scheduled, this one by default; None where the system does not say or it has ended."""
    try:
        cores = tuple(sorted(os.sched_getaffinity(thread)))
        return Standing(os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread), cores)
    except (AttributeError, OSError):
        return None


class Outside:
    """Tells what was done to this process; `expected` is the parent's own standing before any candidate ran."""

    def __init__(self, expected: Standing | None) -> None:
        now = standing()
        self._expected = expected or now
        self._group = _autogroup_nice()
        self._met = {thread: found for thread in _threads() if (found := standing(thread))}
        self._continued = 0
        # Whoever is stopped is told to go on afterwards; a signal is handled before the next line of Python runs.
        with suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGCONT, self._note_continued)

    def found(self, ours: Iterable[Iterable[int]] = ()) -> list[str]:
        """Return what is not as it should be, each reason once, stops since the last time it was asked.

        `ours` are sets of cores that this process chose itself.
        """
        if self._expected is None:
            return []
        chosen = {tuple(sorted(cores)) for cores in ours}
        lines = []
        if _autogroup_nice() != self._group:
            lines.append(PRIORITY)
        main, living = os.getpid(), _threads()
        self._met = {thread: found for thread, found in self._met.items() if thread in living}
        for thread in living:
            now = standing(thread)
            if now is None:
                continue
            # Libraries choose cores for threads of their own: one stands as it did when it was first met.
            met = self._met.setdefault(thread, now)
            usual = self._expected if thread == main else met
            if (now.nice, now.policy) != (usual.nice, usual.policy):
                lines.append(PRIORITY)
            if now.cores not in (met.cores, self._expected.cores, *chosen):
                lines.append(CORES)
        # Last: the system may hand the signal to another thread, and this one learns of it a moment later.
        stopped, self._continued = self._continued, 0
        return list(dict.fromkeys([STOPPED, *lines] if stopped else lines))

    def _note_continued(self, number: int, frame: object) -> None:
        self._continued += 1


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir(THREADS)]
    except OSError:
        return []


def _autogroup_nice() -> str:
    """Return the nice value of this session's scheduling group; empty where there are no such groups."""
    try:
        return AUTOGROUP.read_text().rpartition("nice")[2].strip()
    except OSError:
        return ""
