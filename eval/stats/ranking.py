"""Rank the candidates of one run by event time, ties shown as ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rooflane.eval.stats.cells import Measured
from rooflane.eval.stats.estimator import estimate
from rooflane.eval.stats.figures import ShapeRow
from rooflane.eval.stats.intervals import Interval, t_interval


@dataclass(frozen=True)
class Place:
    """One candidate's place; `rank` is None with the reason in `why` where it cannot be ranked.

    Candidates that do not differ from the first of their rank share the rank, and the next rank counts them. `behind`
    is this candidate's event time over that of the first of all. `like` names every ranked candidate whose paired
    interval with this one contains 1. That relation is not transitive, so ranks alone would not show it.
    """

    candidate: str
    rank: int | None
    shared: bool = False
    behind: Interval | None = None
    like: tuple[str, ...] = ()
    why: str = ""


def rank(measured: Measured, shapes: Sequence[ShapeRow]) -> tuple[Place, ...]:
    """Return the candidates of a run, the fastest first; none for a run of one.

    Ranked are those with a right output and a time on every shape eager was timed on, in every process: a failed shape
    takes the rank away. Two are compared as `rooflane compare` compares them: by pairs of clean blocks in each process,
    the mean over the shapes with Student's t over the processes.
    """
    meta = measured.meta
    if len(meta.candidates) < 2:
        return ()
    processes = range(meta.settings["processes"])
    counted = [row for row in shapes if row.eager.event_ms and row.eager.processes == len(processes)]
    unranked = []
    complete = []
    for name in meta.candidates:
        failed = [row.shape.id for row in counted if row.cells[name].status != "ok"]
        partly = [row.shape.id for row in counted if row.cells[name].processes < len(processes)]
        if not counted:
            unranked.append(Place(name, None, why="no shape was timed in every process"))
        elif failed or partly:
            said = "not right" if failed else "not timed in every process"
            unranked.append(Place(name, None, why=f"{said} on shape {', '.join(failed or partly)}"))
        else:
            complete.append(name)

    def against(slow: str, fast: str) -> list[float]:
        """Return log(time of slow / time of fast), the mean over the shapes, process by process."""
        ids = [row.shape.id for row in counted]
        found = estimate(measured.rounds, ids, slow, fast, processes, measured.contamination)
        return list(found.per_process.values())

    if complete and not against(complete[0], complete[0]):
        unranked += [Place(name, None, why="no process has clean blocks of every shape") for name in complete]
        complete = []
    if not complete:
        return tuple(unranked)
    order = sorted(complete, key=lambda name: fmean(against(name, complete[0])))
    alike = {
        (one, other)
        for at, one in enumerate(order)
        for other in order[at + 1 :]
        if _holds_one(t_interval(against(other, one)))
    }
    leaders: list[int] = []
    for at, name in enumerate(order):
        leaders.append(leaders[-1] if at and (order[leaders[-1]], name) in alike else at)
    ranked = [
        Place(
            candidate=name,
            rank=leaders[at] + 1,
            shared=leaders.count(leaders[at]) > 1,
            behind=t_interval(against(name, order[0])) if at else None,
            like=tuple(other for other in order if {(name, other), (other, name)} & alike),
        )
        for at, name in enumerate(order)
    ]
    return (*ranked, *unranked)


def _holds_one(found: Interval) -> bool:
    """Tell whether an interval leaves the order open; a single process gives none and leaves it open too."""
    return found.low is None or found.low <= 1 <= found.high
