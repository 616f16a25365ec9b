"""A run's evidence: its rows in order, the shapes that count, and the estimates over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rooflane.eval.record.nulls import Key, NullResult, machine_of, matching, software_of, stored_logs
from rooflane.eval.record.records import EAGER, Record, RunMeta
from rooflane.eval.stats.assess import Assessment, Stored, assess, estimate_nulls
from rooflane.eval.stats.cells import Measured
from rooflane.eval.stats.contamination import find_contamination
from rooflane.eval.stats.estimator import Estimate
from rooflane.eval.stats.rounds import rounds_of


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
