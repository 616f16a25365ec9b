"""What changes in a worker's process while a candidate runs: flags, threads, helper processes.

Such a change is ordinary: pools grow, programs choose their precision, compilers start helpers. Eager and the judge
live in another process, so nothing here reaches what a candidate is compared with. It is a note, and becomes evidence
only beside a finding that a clock or a fingerprint makes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

TASKS = Path("/proc/self/task")
# How long work that a call left to a new thread or process is given to end, before its output is read again.
LATE_WORK_S = 0.05
LATE_POLL_S = 0.002


class RunningState:
    """A worker's flags, and from `settle` on its threads and processes; `changes` compares them with now."""

    def __init__(self) -> None:
        self._flags = flags()
        self._threads: set[int] | None = None
        self._children: set[int] = set()

    def settle(self) -> None:
        """Note which threads and processes run now, before anything is timed."""
        self._threads, self._children = threads(), children()

    def changes(self) -> list[str]:
        """Return a line for each flag that has another value, and for threads and processes that came and still run."""
        current = flags()
        lines = [
            f"in the candidate's own process {name} went from {value} to {current[name]}"
            for name, value in self._flags.items()
            if current[name] != value
        ]
        if self._threads is None:
            return lines
        for what, now, before in (("threads", threads(), self._threads), ("processes", children(), self._children)):
            if grown := len(now - before):
                lines.append(f"{grown} {what if grown > 1 else _ONE[what]} of the candidate's came while it was timed")
        return lines


_ONE = {"threads": "thread", "processes": "process"}


class LateWork:
    """Threads and processes that appear from now on; `wait` gives them time to end."""

    def __init__(self) -> None:
        self._threads, self._children = threads(), children()

    def wait(self) -> None:
        """Return when none is left, or after `LATE_WORK_S` seconds; at once where none appeared.

        An output that one of them writes after its call has then changed, whatever the order in which they ran.
        """
        end = monotonic() + LATE_WORK_S
        while (threads() - self._threads or children() - self._children) and monotonic() < end:
            sleep(LATE_POLL_S)


def flags() -> dict[str, Any]:
    """Return the global switches that decide how fast and how exactly torch computes.

    The default dtype, default device and autocast are `leftovers`' subject: they are put back after a build.
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "the number of threads": torch.get_num_threads(),
        "the float32 matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in matmul": cuda.matmul.allow_tf32,
        "TF32 in cuDNN": cudnn.allow_tf32,
        "cuDNN": cudnn.enabled,
        "cuDNN's determinism": cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "reduced precision in half matmul": str(cuda.matmul.allow_fp16_reduced_precision_reduction),
        "flash attention": cuda.flash_sdp_enabled(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "math attention": cuda.math_sdp_enabled(),
    }


def threads() -> set[int]:
    """Return the numbers of this process's threads; empty where the system does not list them."""
    try:
        return set(map(int, os.listdir(TASKS)))
    except OSError:
        return set()


def children() -> set[int]:
    """Return the processes that this one has started and that still run; empty where the system does not list them."""
    listed = list(TASKS.glob("*/children"))
    # Some kernels list no children; there every process names its parent.
    return _listed_children(listed) if listed else _processes_of(os.getpid())


def _listed_children(files: list[Path]) -> set[int]:
    found: set[int] = set()
    for file in files:
        with suppress(OSError):  # the thread ended meanwhile
            found.update(map(int, file.read_text().split()))
    return found


def _processes_of(parent: int) -> set[int]:
    """Return the processes of a parent, those that have ended and were not waited for left out."""
    found: set[int] = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended meanwhile
            # The name before the last parenthesis may hold anything.
            state, owner = file.read_text().rpartition(")")[2].split()[:2]
            if int(owner) == parent and state != "Z":
                found.add(int(file.parent.name))
    return found
