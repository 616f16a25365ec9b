"""The rows a run owes: which are wanted, which are there, what is still to do, and those that need no worker."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rooflane.dispatch.units import size
from rooflane.eval.campaign.arm_row import arm_kind
from rooflane.eval.campaign.planning import foregone_candidates, infeasible, skip_reasons
from rooflane.eval.campaign.team import ReferenceLost
from rooflane.eval.record.records import COPY_PREFIX, EAGER, Key, Record, RunMeta
from rooflane.eval.record.settings import Settings, ShapeTodo
from rooflane.shapes import Shape


class Owed:
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
        self.skips = skip_reasons(meta, settings, tuple(self.planned))

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

    def foregone(self, process: int) -> list[Record]:
        """Return the rows that need no worker: eager where it cannot fit, and what is predicted too slow or too big."""
        records = []
        for shape in self.shapes.values():
            classification = self.meta.prediction(shape.id).classification
            foregone = {}
            if infeasible(self.meta, shape):
                need, have = classification["peak_bytes"], classification["memory_bytes"]
                reason = f"eager needs {size(need)} at its peak, the device has {size(have)}"
                foregone[EAGER] = ("infeasible", reason)
                foregone |= foregone_candidates(self.meta, self.settings, shape)
            elif self.skips[shape.id]:
                foregone = dict.fromkeys(self.meta.planned(process, shape.id), ("skipped", self.skips[shape.id]))
            else:
                # What the first process had no time to set up, the others would not pair with.
                planned = self.meta.planned(process, shape.id) if process else ()
                first = {arm: self.rows.get((0, shape.id, arm)) for arm in planned if arm in self.meta.controls}
                skipped = {arm: row for arm, row in first.items() if row and row.status == "skipped"}
                foregone = {arm: ("skipped", row.reason) for arm, row in skipped.items()}
            records += [
                self._bare_record(process, shape, arm, status, reason)
                for arm, (status, reason) in foregone.items()
                if (process, shape.id, arm) not in self.rows
            ]
        return records

    def losses(self, process: int, lost: ReferenceLost, todo: Sequence[ShapeTodo], at: str) -> list[Record]:
        """Return the error rows a lost reference costs, `at` being the shape at hand.

        They are those of the arm it was lost with; all that were left if it died without a name.
        """
        missing = [(item, arm) for item in todo for arm in item.arms if item.shape["id"] == at]
        if lost.arm != EAGER:
            missing = [(item, arm) for item, arm in missing if arm == lost.arm]
        missing = missing or [(item, arm) for item in todo for arm in item.arms]
        return [
            self._bare_record(process, Shape(**item.shape), arm, "error", str(lost))
            for item, arm in missing
            if (process, item.shape["id"], arm) not in self.rows
        ]

    def _bare_record(self, process: int, shape: Shape, arm: str, status: str, reason: str) -> Record:
        """Return a row that carries a reason and no measurement."""
        plan = self.meta.prediction(shape.id).candidates.get(arm.removeprefix(COPY_PREFIX), {})
        return Record(
            run=self.meta.id,
            process=process,
            shape=shape.as_dict(),
            arm=arm,
            kind=arm_kind(arm, self.meta.candidates),
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
