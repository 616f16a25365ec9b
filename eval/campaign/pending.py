"""Pending rows of a run: planned, present, still to measure, and those that need no worker."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rooflane.dispatch.units import size
from rooflane.eval.campaign.planning import infeasible, skip_reasons, skipped_candidates
from rooflane.eval.campaign.team import ReferenceLost
from rooflane.eval.record.arm_id import EAGER_ARM, parse_arm
from rooflane.eval.record.records import ANCHOR, EAGER, NOOP, Key, Record, RunMeta
from rooflane.eval.record.settings import Settings, ShapeTodo
from rooflane.shapes import Shape


class Pending:
    """The rows of one run by process, shape and arm."""

    def __init__(self, meta: RunMeta, settings: Settings, records: Sequence[Record]) -> None:
        self.meta = meta
        self.settings = settings
        self.shapes = {shape.id: shape for shape in meta.shape_list()}
        self.rows: dict[Key, Record] = {record.key: record for record in records}
        self.planned: set[Key] = {
            (process, shape_id, arm)
            for process in range(settings.processes)
            for shape_id in self.shapes
            for arm in meta.planned(process, shape_id)
        }
        self.not_run = skip_reasons(meta, settings) if meta.not_run is None else meta.not_run
        # Shape and candidate whose worker hung in this part of the run.
        self.silent: set[tuple[str, str]] = set()

    @property
    def done(self) -> int:
        """The number of planned rows that are there."""
        return sum(key in self.planned for key in self.rows)

    def add(self, record: Record) -> None:
        """Count a row as there."""
        self.rows[record.key] = record

    def todo(self, process: int, order: Sequence[Shape]) -> tuple[ShapeTodo, ...]:
        """Return what is missing of a process, shape by shape."""
        todo = []
        for shape in order:
            eager = self.rows.get((process, shape.id, EAGER))
            missing = []
            for arm in self.meta.planned(process, shape.id):
                row = self.rows.get((process, shape.id, arm))
                # A timed row without eager's beside it was torn off by an interruption: pairs are measured together.
                if row is None or (row.timing is not None and eager is None):
                    missing.append(arm)
            if missing:
                oversize = infeasible(self.meta, shape) or (eager is not None and eager.status == "oom")
                if eager is not None and not oversize:
                    continue
                todo.append(ShapeTodo(shape=shape.as_dict(), arms=tuple(missing), oversize=oversize))
        return tuple(todo)

    def skipped_in_advance(self, process: int) -> list[Record]:
        """Return the rows that need no worker: eager where it cannot fit, and what is predicted too slow or too big."""
        records = []
        for shape in self.shapes.values():
            classification = self.meta.prediction(shape.id).classification
            skipped = {}
            if infeasible(self.meta, shape):
                need, have = classification["peak_bytes"], classification["memory_bytes"]
                reason = f"eager needs {size(need)} at its peak, the device has {size(have)}"
                skipped[EAGER] = ("infeasible", reason)
                skipped |= skipped_candidates(self.meta, self.settings, shape)
            elif reason := self.not_run.get(shape.id):
                skipped = dict.fromkeys(self.meta.planned(process, shape.id), ("skipped", reason))
            else:
                skipped = self._settled(process, shape)
            records += [
                self._bare_record(process, shape, arm, status, reason)
                for arm, (status, reason) in skipped.items()
                if (process, shape.id, arm) not in self.rows
            ]
        return records

    def _settled(self, process: int, shape: Shape) -> dict[str, tuple[str, str]]:
        """Return the arms whose row an earlier process has settled: status and reason."""
        if not process:
            return {}
        planned = self.meta.planned(process, shape.id)
        first = {arm: self.rows.get((0, shape.id, arm)) for arm in planned}
        eager = first[EAGER]
        if eager and eager.status == "skipped":
            return dict.fromkeys(planned, ("skipped", eager.reason))
        # What the first process had no time to set up, the others would not pair with.
        skipped = {arm: row for arm, row in first.items() if arm in self.meta.controls and row}
        found = {arm: ("skipped", row.reason) for arm, row in skipped.items() if row.status == "skipped"}
        if all(first[arm] and first[arm].timing is None for arm in self.meta.candidates):
            reason = "no candidate was timed on this shape in the first process, so there is nothing to compare"
            context = [arm for arm in planned if arm in (*self.meta.controls, NOOP, ANCHOR)]
            found |= dict.fromkeys(context, ("skipped", reason))
        hung = [arm for arm in self.meta.candidates if (shape.id, arm) in self.silent]
        return found | dict.fromkeys(hung, ("error", "not asked again: it gave no answer in an earlier process"))

    def losses(self, process: int, lost: ReferenceLost, todo: Sequence[ShapeTodo], at: str) -> list[Record]:
        """Return the error rows a lost reference costs, `at` being the shape at hand.

        They are those of the arm it was lost with; all that were left if it died without a name.
        """
        missing = [(item, arm) for item in todo for arm in item.arms if item.shape["id"] == at]
        if lost.arm != EAGER_ARM:
            missing = [(item, arm) for item, arm in missing if arm == str(lost.arm)]
        missing = missing or [(item, arm) for item in todo for arm in item.arms]
        return [
            self._bare_record(process, Shape(**item.shape), arm, "error", str(lost))
            for item, arm in missing
            if (process, item.shape["id"], arm) not in self.rows
        ]

    def _bare_record(self, process: int, shape: Shape, arm: str, status: str, reason: str) -> Record:
        """Return a row that carries a reason and no measurement."""
        which = parse_arm(arm, self.meta.candidates)
        plan = self.meta.prediction(shape.id).candidates.get(which.name, {})
        return Record(
            run=self.meta.id,
            process=process,
            shape=shape.as_dict(),
            arm=arm,
            kind=which.kind,
            status=status,
            reason=reason,
            family=plan.get("family", ""),
            rule=plan.get("rule", ""),
            options=plan.get("options", {}),
            contract=plan.get("contract", ""),
            predicted_s=plan.get("predicted_s"),
            predicted_peak_bytes=plan.get("peak_bytes"),
            measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
