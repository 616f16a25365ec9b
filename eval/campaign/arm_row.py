"""One arm of a shape as the parent knows it, and the record it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rooflane.eval.campaign.launch import Crash
from rooflane.eval.check.verify import CallFailed, WrongOutput
from rooflane.eval.record.arm_id import ArmId
from rooflane.eval.record.records import Record, Status, Timing, Verification
from rooflane.eval.worker.candidates import Plan


@dataclass
class ArmRow:
    """One arm of a shape, with everything found out about it so far."""

    arm: ArmId
    status: Status = "ok"
    reason: str = ""
    plan: Plan = field(default_factory=Plan)
    setup_s: float | None = None
    verification: Verification | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    integrity: list[str] = field(default_factory=list)
    ready: bool = False
    silent: bool = False

    def fail(self, error: Exception, doing: str) -> None:
        """Note how the arm failed; it is not ready for anything more."""
        self.ready = False
        self.silent = isinstance(error, Crash) and error.silent
        if isinstance(error, WrongOutput):
            self.status, self.reason = "incorrect", str(error)
        elif isinstance(error, CallFailed):
            self.status, self.reason = error.status, f"{doing}: {error}"
        else:
            self.status, self.reason = "error", str(error)

    def note(self, line: str) -> None:
        """Add a line to the notes of its verification, where it has one."""
        if self.verification:
            self.verification = self.verification.model_copy(update={"notes": [*self.verification.notes, line]})

    def record(self, **common: Any) -> Record:
        """Return the arm's row; `common` holds what the rows of one shape in one process share."""
        return Record(
            arm=str(self.arm),
            kind=self.arm.kind,
            status=self.status,
            reason=self.reason,
            family=self.plan.family,
            rule=self.plan.rule,
            options=self.plan.options,
            contract=self.plan.contract,
            integrity=self.integrity,
            verification=self.verification,
            timing=self.timing,
            setup_s=self.setup_s,
            predicted_s=self.plan.predicted_s,
            predicted_peak_bytes=self.plan.peak_bytes,
            measured_peak_bytes=self.peak_bytes,
            **common,
        )
