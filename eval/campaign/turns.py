"""Whether eager's turns were its own: what its worker saw done to it, and the processor time it had to wait for.

Loads no torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rooflane.eval.record.records import REFERENCE
from rooflane.eval.worker.cpu_pinning import usable_cores

# The system adds up a thread's time at its ticks of up to 4 ms: in less time than this a share says nothing.
LEAST_WALL_NS = 20_000_000

# Nanoseconds by thread: run, and waited for a core.
CpuTimes = dict[int, tuple[int, int]]


def cpu_times(pid: int | None) -> CpuTimes:
    """Return the processor time of each thread of a process; empty where the system does not say."""
    found: CpuTimes = {}
    if pid is None:
        return found
    folder = Path(f"/proc/{pid}/task")
    with suppress(OSError):
        for thread in os.listdir(folder):
            with suppress(OSError, ValueError):  # ended meanwhile
                run, waited, _ = (folder / thread / "schedstat").read_text().split()
                found[int(thread)] = int(run), int(waited)
    return found


@dataclass
class _Turns:
    """One arm's windows of one block: their wall time, what its threads ran and what they waited for a core."""

    wall_ns: int = 0
    run_ns: int = 0
    waited_ns: int = 0

    def lost(self, cores: float) -> float | None:
        """Return the share of the cores it asked for that it did not get; None where the turns were too short.

        More threads than cores wait for each other: only what is missing from the cores there are counts.
        """
        if self.wall_ns < LEAST_WALL_NS:
            return None
        wanted = min((self.run_ns + self.waited_ns) / self.wall_ns, cores)
        return max(0.0, 1 - self.run_ns / self.wall_ns / wanted) if wanted else 0.0


@dataclass
class TurnWatch:
    """What was seen in the turns of one shape, block by block."""

    cores: float = field(default_factory=usable_cores)
    _turns: dict[tuple[int, str, str], _Turns] = field(default_factory=dict)
    _disturbed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, block: int, arm: str, worker: str, wall_ns: int, before: CpuTimes, after: CpuTimes) -> None:
        """Note one window's wall time, and its worker's processor time before and after it."""
        turns = self._turns.setdefault((block, arm, worker), _Turns())
        turns.wall_ns += wall_ns
        for thread in before.keys() & after.keys():
            turns.run_ns += after[thread][0] - before[thread][0]
            turns.waited_ns += after[thread][1] - before[thread][1]

    def disturb(self, block: int, reasons: list[str]) -> None:
        """Note what the reference's worker saw done to it."""
        kept = self._disturbed.setdefault(block, [])
        kept += [reason for reason in reasons if reason not in kept]

    def state(self, block: int, eager: str) -> dict[str, Any]:
        """Return what stands in a block's telemetry, empty where nothing is known.

        `lost` is the share of its cores that eager did not get, `others_lost` the median over the candidates: a busy
        machine takes from all alike.
        """
        found: dict[str, Any] = {"disturbed": self._disturbed[block]} if self._disturbed.get(block) else {}
        mine = self._turns.get((block, eager, REFERENCE))
        others = [
            share
            for (number, _, worker), turns in self._turns.items()
            if number == block and worker != REFERENCE and (share := turns.lost(self.cores)) is not None
        ]
        if mine and others and (lost := mine.lost(self.cores)) is not None:
            found |= {"lost": round(lost, 3), "others_lost": round(median(others), 3)}
        return found
