"""One side of a comparison: an arm of a run, by the text that names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.run import Run, open_run
from rooflane.eval.stats.evidence import Evidence

SEPARATOR = "::"


@dataclass(frozen=True, eq=False)
class Side:
    """One arm of one run."""

    label: str
    run: Run
    arm: str
    evidence: Evidence

    def owes(self, shape: str) -> bool:
        """Tell whether the run planned the arm on a shape: controls and copies only run where eager fits."""
        meta = self.run.meta
        return all(found.id != shape for found in meta.shape_list()) or self.arm in meta.planned(0, shape)

    def unusable(self, shape: str) -> str:
        """Return why the arm cannot be compared on a shape, empty when it can."""
        rows = list(self.evidence.measured.rows(shape, self.arm).values())
        if not self.evidence.measured.rounds.of(shape, self.arm):
            return f"not measured by {self.label}"
        if any(row.integrity for row in rows):
            return f"{self.label} shows evidence of manipulation"
        if any(row.status == "incorrect" and row.kind == "candidate" for row in rows):
            return f"{self.label} is wrong"
        return ""

    def processes(self, shapes: Sequence[str]) -> set[int]:
        """Return the processes that timed the arm on any of some shapes."""
        return {process for shape in shapes for process in self.evidence.measured.rounds.of(shape, self.arm)}

    def logs(self, shape: str) -> dict[int, float]:
        """Return the log of the median event nanoseconds by process."""
        return {process: math.log(ns) for process, ns in self.evidence.measured.medians(shape, self.arm).items()}


def find_side(text: str, run: Run | None) -> Side:
    """Find the run and arm a text names."""
    place, separator, arm = text.partition(SEPARATOR)
    if run is not None and not separator and not Path(place).is_dir():
        place, arm = "", place
    found = open_run(place) if place else run
    arm = arm or found.meta.candidates[0]
    records = found.records()
    if not any(record.arm == arm for record in records):
        known = ", ".join(dict.fromkeys(record.arm for record in records)) or "none yet"
        raise EvaluationError(f"{text}: run {found.meta.id} has no arm {arm!r}; it has: {known}")
    return Side(f"{found.meta.id}{SEPARATOR}{arm}", found, arm, Evidence.of(found.meta, records))
