"""One shape in one process run, seen from the parent: build, verify, time, cross-check, hand over rows."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rooflane.dispatch import Profile
from rooflane.eval.environment import ROOT
from rooflane.eval.integrity import changed_files
from rooflane.eval.launch import Crash
from rooflane.eval.oversize_work import OversizeWork
from rooflane.eval.records import ANCHOR, COPY_PREFIX, EAGER, NOOP, Kind, Record, Status, Timing, Verification
from rooflane.eval.settings import Settings, ShapeTodo, derive_seed
from rooflane.eval.shape_timing import ShapeTiming
from rooflane.eval.team import REFERENCE, ReferenceLost, Team
from rooflane.eval.verify import CallFailed, WrongOutput, checked, verify
from rooflane.shapes import Shape

# A first call this many times over the limit stops a shape whose prediction was too kind.
PREDICTION_SLACK = 3
# Of the time left for a shape, what one arm's verification may start new checks in.
VERIFY_SHARE = 0.3


@dataclass
class ArmRow:
    """One arm of a shape, with everything found out about it so far."""

    name: str
    kind: Kind
    worker: str
    status: Status = "ok"
    reason: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    setup_s: float | None = None
    verification: Verification | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    integrity: list[str] = field(default_factory=list)
    ready: bool = False

    def fail(self, error: Exception, doing: str) -> None:
        """Note how the arm failed; it is not ready for anything more."""
        self.ready = False
        if isinstance(error, WrongOutput):
            self.status, self.reason = "incorrect", str(error)
        elif isinstance(error, CallFailed):
            self.status, self.reason = error.status, f"{doing}: {error}"
        else:
            self.status, self.reason = "error", str(error)


@dataclass(frozen=True)
class ProcessContext:
    """What the shapes of one process run share."""

    run: str
    process: int
    seed: int
    device: str
    settings: Settings
    profile: Profile
    candidates: tuple[str, ...]
    team: Team
    files: dict[str, str]
    on_stage: Callable[[str, str, str], None]
    on_rows: Callable[[Sequence[Record]], None]
    telemetry: Callable[[], dict[str, Any] | None]
    setup_s: dict[str, float] = field(default_factory=dict)


class ShapeWork:
    """One shape in one process run."""

    def __init__(self, context: ProcessContext, shape: Shape, todo: ShapeTodo, deadline: float) -> None:
        self.context = context
        self.settings = context.settings
        self.team = context.team
        self.shape = shape
        self.todo = todo
        self.deadline = deadline
        self.telemetry: dict[str, Any] = {}
        # Inputs each worker may hold at once.
        self.capacities: dict[str, int] = {}

    def seed(self, purpose: str) -> int:
        """Return this shape's seed for a purpose in this process run."""
        return derive_seed(self.context.seed, self.context.process, self.shape.id, purpose)

    def run(self) -> None:
        """Measure the arms that are still to do and hand over their rows, eager's last."""
        eager = ArmRow(EAGER, "baseline", REFERENCE)
        with self.team.spending("set-up"):
            self.begin_all()
            answer = self.ask(REFERENCE, "reference", f"build of {EAGER}", call=not self.todo.oversize)
        if self.todo.oversize:
            self.run_oversize()
            return
        try:
            eager.setup_s = checked(answer)["setup_s"]
        except CallFailed as error:  # most likely memory: the prediction was too kind
            eager.fail(error, "the first call of the eager forward")
            self.emit(eager)
            self.run_oversize()
            return
        limit = self.settings.max_call_s * PREDICTION_SLACK
        if eager.setup_s > limit:
            self.skip_all(f"the first eager call took {eager.setup_s:.1f} s, over {limit:g} s")
            return
        eager.ready = True
        self.compare_arms(eager)

    def compare_arms(self, eager: ArmRow) -> None:
        """Build and verify every arm, then time those whose outputs stand, interleaved with eager."""
        rows = {EAGER: eager}
        for name in self.todo.arms:
            if name != EAGER:
                row = rows[name] = self.prepare(name, rows)
                if not row.ready:
                    self.close(row)
                    self.emit(row)
        timed = [row for row in rows.values() if row.ready]
        timing = ShapeTiming(self, timed)
        timing.run()
        for row in timed:
            self.close(row, timing)
        # Eager's row comes last: its presence says that the rows it is paired with are complete.
        self.emit(*timed[1:], eager)

    def prepare(self, name: str, rows: dict[str, ArmRow]) -> ArmRow:
        """Build one arm and verify it; an arm that is not to be timed comes back not ready."""
        row = self.new_row(name)
        expected = self.context.setup_s.get(name, 0.0)
        if row.kind == "control" and monotonic() + expected > self.deadline:
            row.status = "skipped"
            row.reason = "the run's time budget was spent on the arms before it"
            if expected:
                row.reason = f"the run's time budget leaves no room for its set-up of about {expected:.0f} s"
            return row
        if row.kind == "copy" and not rows[row.worker].ready:
            row.status, row.reason = "skipped", "the candidate it copies is not timed"
            return row
        try:
            self.build(row)
            if row.ready and row.kind not in ("noop", "anchor"):
                self.verify(row)
        except Crash as crash:
            row.fail(crash, "")
        if row.status in ("error", "oom"):
            self.check_device(row)
        return row

    def build(self, row: ArmRow, *, call: bool = True) -> None:
        """Build an arm in its worker and make its first call."""
        started = monotonic()
        with self.team.spending("set-up"):
            if row.worker not in self.capacities:
                self.begin(row.worker)
            answer = self.ask(row.worker, "build", f"build of {row.name}", name=row.name, call=call)
        self.context.setup_s[row.name] = monotonic() - started
        if "failed" in answer:
            row.fail(CallFailed(answer["failed"], answer["reason"]), "building it")
            return
        row.plan, row.status, row.reason = answer["plan"], answer["status"], answer["reason"]
        row.setup_s, row.ready = answer["setup_s"], answer["status"] == "ok"

    def verify(self, row: ArmRow) -> None:
        """Verify an arm; decide whether it is timed."""
        full = row.kind == "candidate" and self.context.process == 0
        with self.team.spending("verification"):
            row.verification = verify(
                self.subject_of(row),
                self.judge_of(row),
                self.shape,
                device=self.context.device,
                seed=self.seed(f"verify {row.name}"),
                trials=self._trials(row),
                # Ragged masks, stress and contract depend on the code and not on the process: the first one does them.
                level="full" if full else "trials",
                # The checks of one arm must leave time for the others' and for the timing.
                deadline=monotonic() + (self.deadline - monotonic()) * VERIFY_SHARE,
            )
        row.status, row.reason = row.verification.status, row.verification.reason
        # A control that fails the gate is what users would get: it is timed and flagged. A candidate is not.
        if row.status != "ok" and (row.kind != "control" or row.status != "incorrect"):
            row.ready = False

    def _trials(self, row: ArmRow) -> int:
        """Return an arm's accuracy trials: one tells whether a copy, or a control again, was built right."""
        once = row.kind == "copy" or (row.kind == "control" and self.context.process > 0)
        return 1 if once else self.settings.trials

    def close(self, row: ArmRow, timing: ShapeTiming | None = None) -> None:
        """Ask a candidate's worker what it can see of tampering, and hold the clocks against each other."""
        if row.kind not in ("candidate", "copy"):
            return
        found = list(timing.findings(row)) if timing else []
        if row.kind == "candidate":
            found += changed_files(self.context.files, ROOT)
            if row.worker in self.team:
                try:
                    answer = self.ask(row.worker, "inspect", f"check of {row.name}")
                    found += answer.get("findings", [])
                    row.peak_bytes = answer.get("peak_bytes")
                except Crash as crash:
                    row.fail(crash, "")
            found += self.team.forged(row.worker)
        row.integrity += [line for line in dict.fromkeys(found) if line not in row.integrity]

    def run_oversize(self) -> None:
        """Measure each candidate alone against the chunked reference: two would not fit beside each other."""
        references = []
        if not self.todo.oversize:
            # Eager fitted by prediction and failed: what it left behind must be free, and its cap lifted.
            self.todo = self.todo.model_copy(update={"oversize": True})
            self.begin(REFERENCE)
            self.ask(REFERENCE, "reference", f"build of {EAGER}", call=False)
        for name in self.todo.arms:
            if name not in self.context.candidates:
                continue
            row = self.new_row(name)
            try:
                # No first call here: the verifying call is the first, so that its peak memory is a whole call's.
                self.build(row, call=False)
                if row.ready:
                    references.append(OversizeWork(self, row).run())
            except Crash as crash:
                row.fail(crash, "")
            except (CallFailed, WrongOutput) as error:
                row.fail(error, "its call on the whole shape")
            row.integrity += self.team.forged(name)
            self.emit(row)
            # Its memory must be free before the next one's call.
            self.team.end(name)
            self.capacities.pop(name, None)
        # One reference row a process, whichever candidate it was made with.
        self.emit(*references[:1])

    def begin_all(self) -> None:
        """Have every worker begin this shape, side by side: drawing a large model's weights takes seconds."""
        names = [REFERENCE, *(name for name in self.context.candidates if name in self.todo.arms)]
        if self.todo.oversize:
            names = names[:1]
        self.context.on_stage(self.shape.id, EAGER, "build")
        answers = self.team.ask_all(names, "shape", f"build of {EAGER}", **self._beginning(REFERENCE))
        for name, answer in answers.items():
            self._begun(name, answer)

    def begin(self, worker: str) -> None:
        """Have one worker begin this shape."""
        self.team.ensure(worker)
        stage = f"build of {EAGER if worker == REFERENCE else worker}"
        self._begun(worker, self.ask(worker, "shape", stage, **self._beginning(worker)))
        if worker not in self.capacities:
            raise Crash("its worker cannot begin the shape")

    def _beginning(self, worker: str) -> dict[str, Any]:
        # The cap stands for a smaller device; a chunked reference may use what is really there.
        capped = not (self.todo.oversize and worker == REFERENCE)
        cap = self.settings.memory_cap_bytes if capped else None
        return {"shape": self.shape.as_dict(), "seed": self.seed("weights"), "memory_cap_bytes": cap}

    def _begun(self, worker: str, answer: dict[str, Any]) -> None:
        if "failed" not in answer:
            self.capacities[worker] = answer["capacity"]
        elif worker == REFERENCE:
            raise ReferenceLost(f"its worker cannot begin the shape: {answer['reason']}", EAGER)

    def new_row(self, name: str) -> ArmRow:
        """Return an arm's empty row."""
        base = name.removeprefix(COPY_PREFIX)
        worker = base if base in self.context.candidates else REFERENCE
        return ArmRow(name, arm_kind(name, self.context.candidates), worker)

    def ask(self, worker: str, op: str, stage: str, /, **values: Any) -> dict[str, Any]:
        """Ask a worker, and say what is at hand."""
        what, _, arm = stage.partition(" of ")
        self.context.on_stage(self.shape.id, arm, what)
        return self.team.ask(worker, op, stage, **values)

    def subject_of(self, row: ArmRow) -> Callable[..., dict[str, Any]]:
        """Return the function that asks an arm's worker about the arm."""
        return lambda op, **values: self.ask(row.worker, op, f"verify of {row.name}", arm=row.name, **values)

    def judge_of(self, row: ArmRow) -> Callable[..., dict[str, Any]]:
        """Return the function that asks the judge about an arm's outputs; what the judge raises ends its worker."""
        buffer = {"buffer": self.team.buffer(row.worker)}

        def ask(op: str, **values: Any) -> dict[str, Any]:
            values |= buffer if "output" in values else {}
            answer = self.ask(REFERENCE, op, f"judging of {row.name}", **values)
            if "failed" in answer:
                # Not the arm's fault alone, yet nothing can be said about it: the row tells.
                raise CallFailed(answer["failed"], f"the reference beside it: {answer['reason']}")
            return answer

        return ask

    def check_device(self, row: ArmRow) -> None:
        """After a failure, end a worker whose GPU context is broken: every later call would inherit that."""
        if row.worker not in self.team:
            return
        try:
            ok = self.ask(row.worker, "device_ok", f"check of {row.name}").get("ok", False)
        except Crash:
            return
        if not ok:
            self.team.end(row.worker)
            if row.worker == REFERENCE:
                raise ReferenceLost("an arm broke its GPU context", row.name)

    def skip_all(self, reason: str) -> None:
        """Hand over a skipped row for every arm."""
        rows = [self.new_row(name) for name in self.todo.arms]
        for row in rows:
            row.status, row.reason = "skipped", reason
        self.emit(*rows)

    def emit(self, *rows: ArmRow) -> None:
        """Hand over rows."""
        context = self.context
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.context.on_rows(
            [
                Record(
                    run=context.run,
                    process=context.process,
                    shape=self.shape.as_dict(),
                    arm=row.name,
                    kind=row.kind,
                    status=row.status,
                    reason=row.reason,
                    family=row.plan.get("family", ""),
                    rule=row.plan.get("rule", ""),
                    options=row.plan.get("options", {}),
                    contract=row.plan.get("contract", ""),
                    integrity=row.integrity,
                    verification=row.verification,
                    timing=row.timing,
                    setup_s=row.setup_s,
                    predicted_s=row.plan.get("predicted_s"),
                    predicted_peak_bytes=row.plan.get("peak_bytes"),
                    measured_peak_bytes=row.peak_bytes,
                    seeds={what: self.seed(what) for what in ("weights", "timing", "order", f"verify {row.name}")},
                    telemetry=self.telemetry,
                    environment=self.team.environment,
                    measured_at=now,
                )
                for row in rows
            ]
        )


def arm_kind(name: str, candidates: Sequence[str]) -> Kind:
    """Return what kind of arm a name stands for in a run with these candidates."""
    if name in (EAGER, NOOP, ANCHOR):
        return {EAGER: "baseline"}.get(name, name)
    if name.startswith(COPY_PREFIX):
        return "copy"
    return "candidate" if name in candidates else "control"
