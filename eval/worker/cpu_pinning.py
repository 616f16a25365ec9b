"""A fast core for the thread that launches a GPU's work: usable cores, shares of them, and the fastest one.

A thread that sleeps between its windows comes back on hardware that others use, one that never sleeps keeps its core,
and one that is on a slow core can leave it (briefs/host.md). Loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from pathlib import Path

from rooflane.eval.stats.host_pace import SLOW, core_paces, loop_ns

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
THREADS = Path("/proc/self/task")
# Measuring one core takes 0.2 ms.
CORES_AT_MOST = 32


def usable_cores() -> float:
    """Return how many cores this process may keep busy: those it may run on, or its container's share of time."""
    cores = len(_allowed_cores()) or os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no control group, or no limit in it
        return cores


def core_shares(count: int) -> list[list[int]]:
    """Return the cores this process may use in `count` shares of neighbours, none in two; empty ones where it cannot
    choose its core.

    Two threads that busy-wait on one core take it from each other for 4 ms at a time: every other eager call took 6 ms
    in place of 2 (H200's host).
    """
    cores = _allowed_cores()
    return [cores[len(cores) * number // count : len(cores) * (number + 1) // count] for number in range(count)]


def _allowed_cores() -> list[int]:
    """Return the cores this process may run on; empty where the system does not say."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return []


def free_threads(threads: Iterable[int], held: set[int], allowed: set[int]) -> None:
    """Let threads, given by their ids, run on `allowed` again where they were kept to `held`."""
    for thread in threads:
        with suppress(OSError):  # ended meanwhile, or its cores were taken away
            if os.sched_getaffinity(thread) <= held:
                os.sched_setaffinity(thread, allowed)


class FastCore:
    """Keeps this thread to some cores, and on the fastest of them, from `hold` to `leave`."""

    def __init__(self) -> None:
        self._allowed: set[int] = set()
        self._cores: set[int] = set()
        self._fast_ns = 0
        # Every set of cores that threads of this process were kept to, for who asks whether another did it.
        self.chosen: list[set[int]] = []

    def hold(self, cores: Iterable[int]) -> None:
        """Keep to these cores; does nothing where there are none, or none may be chosen."""
        self.leave()
        cores = set(cores)
        if not cores:
            return
        try:
            allowed = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cores)
        except (AttributeError, OSError):  # not Linux, or forbidden
            return
        self._allowed, self._cores, self._fast_ns = allowed, cores, 0
        self.chosen = [cores]

    def pace_ns(self) -> int:
        """Return the loop's nanoseconds; where they are over 1.3 times the least known, move to the fastest core first.

        The first call of a held thread always looks for that core.
        """
        pace = loop_ns()
        if self._cores and pace > SLOW * self._fast_ns:
            with suppress(OSError):  # the machine's owner took cores away meanwhile
                self._move()
            pace = loop_ns()
        self._fast_ns = min(self._fast_ns or pace, pace)
        return pace

    def leave(self) -> None:
        """Let the system choose among all cores again, for threads too that were started meanwhile."""
        held, self._cores = self._cores, set()
        if held:
            threads = os.listdir(THREADS) if THREADS.is_dir() else ["0"]
            free_threads(map(int, threads), held, self._allowed)

    def _move(self) -> None:
        """Move to the fastest of the held cores; of many cores, measure every second or third."""
        os.sched_setaffinity(0, self._cores)
        cores = sorted(self._cores)
        if paces := core_paces(cores[:: -(-len(cores) // CORES_AT_MOST)]):
            self._fast_ns = min(self._fast_ns or inf, *paces.values())
            best = {min(paces, key=paces.get)}
            os.sched_setaffinity(0, best)
            if best not in self.chosen:
                self.chosen.append(best)
