"""A run's evidence: its rows in order, the shapes that count, and the verdict on each candidate's times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rooflane.eval.record.nulls import Key, NullResult, machine_of, matching, software_of, stored_logs
from rooflane.eval.record.records import COPY_PREFIX, EAGER, Record, RunMeta
from rooflane.eval.stats.estimator import Estimate, Paired, estimate, pair_arms
from rooflane.eval.stats.figures import NULL
from rooflane.eval.stats.mean import LEAST_CELLS
from rooflane.eval.stats.rounds import Contamination, Rounds, find_contamination, rounds_of
from rooflane.eval.stats.verdict import MARGIN, Conditions, Floors, Judgement, Verdict, find_floors, judge_campaign


@dataclass(frozen=True)
class Stored:
    """Log-ratios of stored nulls that match a campaign, by run: of its geometric mean, and of each of its shapes."""

    geomean: Sequence[Sequence[float]] = ()
    shapes: Mapping[str, Sequence[Sequence[float]]] | None = None


@dataclass(frozen=True)
class Assessment:
    """A candidate's speedup over eager, the nulls of both, the floors they imply, and the verdict with its terms."""

    estimate: Estimate
    nulls: Mapping[str, Estimate]
    floors: Floors
    conditions: Conditions
    judgement: Judgement


def copy_of(arm: str) -> str:
    """Return the name of an arm's separately built copy."""
    return NULL if arm == EAGER else COPY_PREFIX + arm


def estimate_nulls(
    rounds: Rounds, contamination: Contamination, shapes: Sequence[str], arms: Sequence[str], processes: Sequence[int]
) -> dict[str, Estimate]:
    """Return the estimates of arms over their own copies, as far as those were timed."""
    found = {arm: estimate(rounds, shapes, arm, copy_of(arm), processes, contamination) for arm in arms}
    return {arm: null for arm, null in found.items() if null.shapes}


def assess(
    rounds: Rounds,
    contamination: Contamination,
    shapes: Sequence[str],
    candidate: str,
    processes: Sequence[int],
    stored: Stored | None = None,
    *,
    quick: bool = False,
    partial: int = 0,
    margin: float = MARGIN,
) -> Assessment:
    """Judge a candidate by its times alone; what was found about its outputs comes before this verdict.

    `partial` counts the shapes that were timed in some processes only and are not among `shapes`.
    """
    stored = stored or Stored()
    found = estimate(rounds, shapes, EAGER, candidate, processes, contamination)
    nulls = estimate_nulls(rounds, contamination, shapes, (EAGER, candidate), processes)
    floors = find_floors(nulls.values(), stored.geomean, stored.shapes)
    contaminated = contamination.describe() if contamination.too_much else floors.broken
    conditions = Conditions(len(processes), quick, partial, contaminated, margin)
    if found.mean is not None and found.mean.error is not None:
        judgement = judge_campaign(found.mean, floors.geomean, conditions)
    elif contamination.too_much and not conditions.short:
        judgement = Judgement(Verdict.CONTAMINATED, contaminated)
    else:
        judgement = Judgement(Verdict.NONE, _no_interval(found, len(processes)))
    return Assessment(found, nulls, floors, conditions, judgement)


def _no_interval(found: Estimate, processes: int) -> str:
    """Return why an estimate has no mean, or a mean without an interval."""
    thin = [shape for shape, logs in found.logs.items() if len(logs) < LEAST_CELLS]
    if processes > 1 and thin and all(any(shape in lost for lost in found.lost.values()) for shape in thin):
        return f"fewer than {LEAST_CELLS} processes have a clean block of shape {', '.join(thin)}"
    if found.mean is None:
        return "the candidate was not timed on every shape in every process"
    return "one process gives no interval"


@dataclass(frozen=True)
class Measured:
    """A run's rows by shape and arm, their round medians, and the disturbed blocks."""

    meta: RunMeta
    by_cell: Mapping[tuple[str, str], Mapping[int, Record]]
    rounds: Rounds
    contamination: Contamination

    def rows(self, shape: str, arm: str) -> Mapping[int, Record]:
        """Return an arm's rows on a shape by process."""
        return self.by_cell.get((shape, arm), {})

    def pair(self, shape: str, base: str, arm: str) -> Paired:
        """Return two arms on a shape by pairs of clean blocks."""
        return pair_arms(self.rounds, shape, base, arm, self.contamination)

    def times(self, shape: str, arm: str) -> dict[int, float]:
        """Return each process's nanoseconds of a call: the geometric mean of its clean rounds' medians.

        A process without a clean block is left out, unless none has one. Of the chunked reference, the sum over all
        batch elements; where not every one was timed, the mean of those that were stands for the rest.
        """
        found, all_rounds = {}, {}
        for process, medians in self.rounds.of(shape, arm).items():
            timing = self.rows(shape, arm)[process].timing
            if timing.elements_total:
                found[process] = fmean(timing.event_ns[0]) * timing.elements_total
                continue
            dropped = self.contamination.at(shape, process)
            taken = {index: math.log(value) for index, value in enumerate(medians) if value is not None}
            clean = [log for index, log in taken.items() if index // 2 not in dropped]
            if clean:
                found[process] = math.exp(fmean(clean))
            if taken:
                all_rounds[process] = math.exp(fmean(taken.values()))
        return found or all_rounds


@dataclass(frozen=True)
class Evidence:
    """A run's rows, the shapes that count, and what can be estimated over them."""

    measured: Measured
    counted: tuple[str, ...]
    environment: dict[str, Any]

    @classmethod
    def of(cls, meta: RunMeta, records: Iterable[Record]) -> Evidence:
        """Sort the rows; a shape counts when eager was timed on it in every process."""
        by_cell: dict[tuple[str, str], dict[int, Record]] = {}
        for record in records:
            by_cell.setdefault((record.shape_id, record.arm), {})[record.process] = record
        rows = [record for cells in by_cell.values() for record in cells.values()]
        rounds = rounds_of(rows)
        counted = [
            shape.id for shape in meta.shape_list() if len(rounds.of(shape.id, EAGER)) == meta.settings["processes"]
        ]
        environments = [record.environment for record in rows if record.environment]
        measured = Measured(meta, by_cell, rounds, find_contamination(rounds))
        return cls(measured, tuple(counted), environments[-1] if environments else {})

    @property
    def partial(self) -> list[str]:
        """The shapes on which eager was timed in some processes only, by id."""
        ids = [shape.id for shape in self.measured.meta.shape_list() if shape.id not in self.counted]
        return [shape for shape in ids if self.measured.rounds.of(shape, EAGER)]

    @property
    def processes(self) -> range:
        """The processes the run planned."""
        return range(self.measured.meta.settings["processes"])

    def assess(self, candidate: str, nulls: Sequence[NullResult]) -> Assessment:
        """Judge a candidate by its times; `nulls` are stored ones, of any machine."""
        return assess(
            self.measured.rounds,
            self.measured.contamination,
            self.counted,
            candidate,
            self.processes,
            self.stored(nulls),
            quick=self.measured.meta.settings["quick"],
            partial=len(self.partial),
        )

    def nulls(self, *arms: str, shapes: Sequence[str] | None = None) -> dict[str, Estimate]:
        """Return the estimates of arms over their own copies on the shapes that count, as far as those were timed."""
        wanted = self.counted if shapes is None else shapes
        return estimate_nulls(self.measured.rounds, self.measured.contamination, wanted, arms, self.processes)

    def stored(self, nulls: Sequence[NullResult]) -> Stored:
        """Return what stored nulls of the same machine, software and number of processes say."""
        return Stored(*stored_logs(matching(nulls, self.key, self.measured.meta.id), self.labels()))

    @property
    def key(self) -> Key:
        """What a stored null must share with this run."""
        return machine_of(self.environment), software_of(self.environment), len(self.processes)

    def labels(self) -> dict[str, str]:
        """Return the sizes of the shapes that count, by id: another file may name them otherwise."""
        return {shape.id: shape.label() for shape in self.measured.meta.shape_list() if shape.id in self.counted}
