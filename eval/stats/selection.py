"""Choosing among many configurations without believing the luckiest one.

The best of many identical configurations looks faster than all of them by the noise alone. So: screen by successive
halving on interleaved rounds, confirm the finalists on processes that had no part in the screening, and change an
entry only where the confirmed lower bound clears the floor; else the simplest configuration stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rooflane.eval.stats.estimator import ShapeEstimate, by_shape
from rooflane.eval.stats.floor import Floor, null_floor
from rooflane.eval.stats.intervals import median_ns
from rooflane.eval.stats.verdict import LEAST_PROCESSES, Verdict, judge

MOST_FINALISTS = 8
COPY = "copy of the simplest"

# Times some configurations once each, interleaved in the order given, and returns the nanoseconds of each one's calls.
Round = Callable[[Sequence[str]], Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class Candidate:
    """One finalist: how much faster than the simplest it looked when screened, and what new processes confirmed."""

    name: str
    screened: float
    confirmed: ShapeEstimate
    verdict: str
    why: str


@dataclass(frozen=True)
class Selection:
    """The entry to write, the finalists with both their figures, the floor, and why."""

    chosen: str
    changed: bool
    why: str
    floor: Floor | None
    finalists: tuple[Candidate, ...]


def screen(
    names: Sequence[str], simplest: str, run: Round, *, rounds: int = 4, keep: int = MOST_FINALISTS
) -> dict[str, float]:
    """Return the finalists with their apparent log-ratio over the simplest, the fastest first.

    Each stage times all that are left and the simplest in `rounds` rounds, every second one in reverse order, and
    keeps the better half until at most `keep` are left; a last stage orders those.
    """
    if rounds < 2 or rounds % 2:
        raise ValueError(f"{rounds} rounds cannot be mirrored; use an even number")
    left = [name for name in names if name != simplest]
    while True:
        found = _stage([simplest, *left], simplest, run, rounds)
        left = sorted(left, key=found.__getitem__, reverse=True)
        if len(left) <= keep:
            return {name: found[name] for name in left}
        left = left[: max(keep, math.ceil(len(left) / 2))]


def confirm(
    finalists: Mapping[str, float],
    simplest: str,
    process: Callable[[int], Round],
    *,
    processes: int,
    rounds: int = 4,
    stored: Sequence[float] = (),
) -> Selection:
    """Confirm finalists on new processes and return what the entry should be.

    `process(i)` starts a fresh process i and returns its timer, which must know the simplest configuration also under
    the name `COPY`, built separately: their ratio tells the floor, with `stored` null log-ratios where there are
    enough. Holm's correction holds over the finalists; of those whose lower bound clears the floor, the one with the
    highest is chosen.
    """
    if processes < LEAST_PROCESSES:
        raise ValueError(f"a confirmation takes {LEAST_PROCESSES} new processes or more, got {processes}")
    logs: dict[str, list[float]] = {name: [] for name in finalists}
    null: list[float] = []
    for index in range(processes):
        found = _stage([simplest, COPY, *finalists], simplest, process(index), rounds)
        null.append(found[COPY])
        for name in finalists:
            logs[name].append(found[name])
    floor, _ = null_floor([null], stored)
    judged = []
    for name, one in by_shape(logs).items():
        judgement = judge(one.holm_interval, floor, holm_p=one.holm_p)
        judged.append(Candidate(name, finalists[name], one, judgement.verdict, judgement.why))
    proven = [candidate for candidate in judged if candidate.verdict == Verdict.FASTER]
    if not proven:
        why = f"no finalist's confirmed lower bound clears the floor of {floor.describe()}; the simplest stays"
        return Selection(simplest, False, why, floor, tuple(judged))
    best = max(proven, key=lambda candidate: candidate.confirmed.holm_interval.low)
    return Selection(best.name, True, f"confirmed on {processes} new processes: {best.why}", floor, tuple(judged))


def select(
    names: Sequence[str],
    simplest: str,
    screening: Round,
    process: Callable[[int], Round],
    *,
    processes: int = 8,
    rounds: int = 4,
    stored: Sequence[float] = (),
) -> Selection:
    """Screen configurations in one process, confirm the finalists on new ones, and return the entry to write."""
    finalists = screen(names, simplest, screening, rounds=rounds)
    if not finalists:
        return Selection(simplest, False, "there is no other configuration", None, ())
    return confirm(finalists, simplest, process, processes=processes, rounds=rounds, stored=stored)


def _stage(names: Sequence[str], simplest: str, run: Round, rounds: int) -> dict[str, float]:
    """Return each configuration's mean log-ratio over the simplest, from mirrored rounds."""
    logs: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        times = run(names if index % 2 == 0 else names[::-1])
        base = median_ns(times[simplest])
        for name in names:
            logs[name].append(math.log(base / median_ns(times[name])))
    return {name: fmean(found) for name, found in logs.items()}
