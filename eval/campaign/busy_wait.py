"""Workers that wait without sleeping while they are timed: asked for here, done in the worker. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.team import ReferenceLost
from rooflane.eval.check.verify import CallFailed
from rooflane.eval.record.arm_id import EAGER_ARM, REFERENCE, ArmId
from rooflane.eval.worker import protocol
from rooflane.eval.worker.cpu_pinning import core_shares, usable_cores

if TYPE_CHECKING:
    from rooflane.eval.campaign.session import ShapeSession

# For the parent and for the rest of the machine.
SPARE_CORES = 2


@contextmanager
def awake(work: ShapeSession, workers: Sequence[str]) -> Iterator[None]:
    """Let a GPU's workers busy-wait, each on cores of its own, where that leaves cores to spare.

    Not on a CPU: there the arms' threads need every core.
    """
    if work.context.device == "cpu" or usable_cores() < len(workers) + SPARE_CORES:
        workers = ()
    for worker, cores in zip(workers, core_shares(len(workers)), strict=True):
        _ask(work, worker, protocol.BusyWait(on=True, cores=cores))
    try:
        yield
    except Exception:
        _let_sleep(work, workers)
        raise
    # Not behind Ctrl-C: a worker in the midst of a call would be waited for, and it is ended anyway.
    _let_sleep(work, workers)


def _let_sleep(work: ShapeSession, workers: Sequence[str]) -> None:
    for worker in workers:
        if worker in work.team:
            _ask(work, worker, protocol.BusyWait(on=False, cores=[]))


def _ask(work: ShapeSession, worker: str, request: protocol.BusyWait) -> None:
    arm = EAGER_ARM if worker == REFERENCE else ArmId(worker, "candidate", worker)
    # The next request to a lost worker tells of it, or the check of its process.
    with suppress(Crash, CallFailed, ReferenceLost):
        work.ask(worker, request, "clocks", arm)
