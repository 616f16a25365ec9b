"""Compile beside the start of a campaign what its candidates will need: on a fresh machine this saves over a minute.

A team of workers takes seconds to start, and the C++ call path half a minute to build on one core. Meanwhile other
cores compile the kernels of every shape into the caches on the disk. Nothing here runs a candidate's file or uses the
GPU, and no candidate is built before all of it has ended. What fails here is compiled, or reported, by the worker that
needs it. `python -m rooflane.eval.campaign.build_ahead` is started by the parent, never by hand.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from rooflane.dispatch import Profile
from rooflane.eval.record.records import RunMeta
from rooflane.eval.worker.candidates import Candidate
from rooflane.eval.worker.cpu_pinning import usable_cores
from rooflane.eval.worker.problem_candidates import ProblemCandidate
from rooflane.eval.worker.process import module_command
from rooflane.families import get_family
from rooflane.families.runtime.host import host_build_pending
from rooflane.shapes import Shape

HOST_BUILD = "from rooflane.families.runtime.host import host_module; host_module()"
# A process compiles one kernel at a time. Cores left over serve the workers that start meanwhile.
MOST_PROCESSES = 6
CORES_A_PROCESS = 2
# A kernel takes some seconds; whoever waits longer than this goes on and compiles for itself.
WAIT_S = 90.0

_host: subprocess.Popen | None = None
_running: list[subprocess.Popen] = []


def start_host_build(candidates: Sequence[Candidate | ProblemCandidate]) -> None:
    """Start to build the call path where a candidate needs it and it is not there; at most once a process."""
    global _host
    if _host is None and any(item.uses_host_path for item in candidates) and host_build_pending():
        _host = _start([sys.executable, "-P", "-c", HOST_BUILD], "")


def start_kernels(meta: RunMeta) -> None:
    """Start to compile the kernels of a run's shapes, on a few cores."""
    orders = []
    for prediction in meta.predictions:
        shape = next(item for item in meta.shapes if item["id"] == prediction.shape)
        for plan in prediction.candidates.values():
            if plan["family"] and not plan["unsupported"]:
                orders.append({"family": plan["family"], "shape": shape, "options": plan["options"]})
    count = min(MOST_PROCESSES, int(usable_cores() / CORES_A_PROCESS) - 1, len(orders))
    for number in range(count):
        text = json.dumps({"profile": meta.profile, "orders": orders[number::count]})
        _start(module_command("rooflane.eval.campaign.build_ahead"), text)


def wait_for_builds() -> None:
    """Wait until all that was started has ended: a worker then finds it, and no compiler runs beside the worker."""
    deadline = monotonic() + WAIT_S
    for process in _running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - monotonic()))
    end_builds()


def end_builds() -> None:
    """End what still runs, and what it has started."""
    while _running:
        process = _running.pop()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(command: list[str], text: str) -> subprocess.Popen:
    """Start a process that says nothing, with a text on its standard input."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the parent alone, which ends it
    )
    with suppress(BrokenPipeError):
        process.stdin.write(text.encode())
        process.stdin.close()
    if not _running:
        atexit.register(end_builds)
    _running.append(process)
    return process


def compile_orders(profile: dict[str, Any], orders: Sequence[dict[str, Any]]) -> int:
    """Compile each order's kernels; return how many kernels that were."""
    limits, count = Profile.model_validate(profile), 0
    for order in orders:
        with suppress(Exception):  # the worker that builds it says what is wrong
            count += get_family(order["family"]).compile_ahead(Shape(**order["shape"]), limits, **order["options"])
    return count


if __name__ == "__main__":
    compile_orders(**json.load(sys.stdin))
