"""One shape in one process run and the workers that hold it: seeds, requests, and the rows handed over."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooflane.dispatch import Profile
from rooflane.eval.campaign.arm_row import ArmRow, arm_kind
from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.team import REFERENCE, ReferenceLost, Team
from rooflane.eval.check.verify import CallFailed
from rooflane.eval.record.environment import available_memory_bytes
from rooflane.eval.record.records import COPY_PREFIX, EAGER, Record
from rooflane.eval.record.settings import Settings, ShapeTodo, derive_seed
from rooflane.shapes import Shape


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
    on_stage: Callable[[str, str, str], None]
    on_rows: Callable[[Sequence[Record]], None]
    telemetry: Callable[[], dict[str, Any] | None]
    setup_s: dict[str, float] = field(default_factory=dict)


class ShapeDesk:
    """What every step of a shape's work asks of the workers; `ShapeWork` says in which order."""

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

    def begin_all(self) -> None:
        """Have every worker begin this shape, side by side: drawing a large model's weights takes seconds."""
        names = [REFERENCE, *(name for name in self.context.candidates if name in self.todo.arms)]
        if self.todo.oversize:
            names = names[:1]
        self.context.on_stage(self.shape.id, EAGER, "build")
        answers = self.team.ask_all(names, "shape", f"build of {EAGER}", **self.beginning(REFERENCE))
        for name, answer in answers.items():
            self._begun(name, answer)

    def begin(self, worker: str) -> None:
        """Have one worker begin this shape."""
        self.team.ensure(worker)
        stage = f"build of {EAGER if worker == REFERENCE else worker}"
        self._begun(worker, self.ask(worker, "shape", stage, **self.beginning(worker)))
        if worker not in self.capacities:
            raise Crash("its worker cannot begin the shape")

    def beginning(self, worker: str) -> dict[str, Any]:
        """Return what a worker begins this shape with."""
        # The cap stands for a smaller device; a chunked reference may use what is really there.
        capped = not (self.todo.oversize and worker == REFERENCE)
        cap = self.settings.memory_cap_bytes if capped else None
        if self.context.device == "cpu":
            # Nothing else stands between a user's own file, tried on a shape too large for eager, and all the memory.
            cap = available_memory_bytes() if capped and self.todo.oversize else None
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
        common = {
            "run": self.context.run,
            "process": self.context.process,
            "shape": self.shape.as_dict(),
            "telemetry": self.telemetry,
            "environment": self.team.environment,
            "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self.context.on_rows([row.record(seeds=self._seeds(row), **common) for row in rows])

    def _seeds(self, row: ArmRow) -> dict[str, int]:
        return {what: self.seed(what) for what in ("weights", "timing", "order", f"verify {row.name}")}
