"""One arm of a shape as the parent knows it, and the record it becomes."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, TypeVar

from rooflane.dispatch import Profile
from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.requests import requests_of
from rooflane.eval.campaign.team import Doing, ReferenceLost, Team
from rooflane.eval.check.cases import Called, Case, OutputFacts
from rooflane.eval.check.promises import PROMISES
from rooflane.eval.check.verify import CallFailed, WrongOutput
from rooflane.eval.record.environment import available_memory_bytes
from rooflane.eval.record.records import (
    EAGER_ARM,
    REFERENCE,
    ArmId,
    GateResult,
    Record,
    Status,
    Timing,
    TruthCheck,
    Verification,
    parse_arm,
)
from rooflane.eval.record.settings import Settings, ShapeTodo, derive_seed
from rooflane.eval.worker import protocol
from rooflane.eval.worker.candidates import Plan
from rooflane.shapes import Problem, Shape


@dataclass
class ArmRow:
    """One arm of a shape, with everything found out about it so far."""

    arm: ArmId
    status: Status = "ok"
    reason: str = ""
    plan: Plan = field(default_factory=Plan)
    setup_s: float | None = None
    built_note: str = ""
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
        """Add a line, if there is one, to the notes of its verification, where it has one."""
        if self.verification and line:
            self.verification = self.verification.model_copy(update={"notes": [*self.verification.notes, line]})

    def record(self, **common: Any) -> Record:
        """Return the arm's row; `common` holds what the rows of one shape in one process share."""
        return Record(
            arm=str(self.arm),
            kind=self.arm.kind,
            status=self.status,
            reason=self.reason,
            silent=self.silent,
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


A = TypeVar("A")
# What a candidate's answer may take: a build that compiles, any other request, and calls of eager as slow as those.
BUILD_LIMIT_S = 300.0
CALL_LIMIT_S = 60.0
EAGER_CALLS = 100
# Granted when the run's time budget is spent too.
LIMIT_LEAST_S = 30.0
# Of the seconds of an arm's first build, what another build may take whatever time is left.
SECOND_BUILD = 3


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
    on_stage: Callable[[str, Doing], None]
    on_rows: Callable[[Sequence[Record]], None]
    telemetry: Callable[[], dict[str, Any] | None]
    # When the process should have ended, by `time.monotonic()`.
    deadline: float = inf
    setup_s: dict[ArmId, float] = field(default_factory=dict)
    # Returns when what the arms need has been compiled, and nothing runs any more that would disturb them.
    before_arms: Callable[[], None] = lambda: None


class ShapeSession:
    """What every step of a shape's work asks of the workers; `ShapeWork` says in which order."""

    def __init__(self, context: ProcessContext, shape: Shape | Problem, todo: ShapeTodo, deadline: float) -> None:
        self.context = context
        self.settings = context.settings
        self.team = context.team
        self.shape = shape
        self.requests = requests_of([shape])
        self.todo = todo
        self.deadline = deadline
        # Seconds that the shape was given when its work began.
        self.share_s = deadline - monotonic()
        self.telemetry: dict[str, Any] = {}
        # Seconds of eager's first call; not known where eager does not fit, and then no bound on a candidate's.
        self.eager_s = inf
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
        doing = Doing("build")
        self.context.on_stage(self.shape.id, doing)
        for name, answer in self.team.ask_all(names, self.beginning(REFERENCE), doing).items():
            self._begun(name, answer)

    def begin(self, worker: str) -> None:
        """Have one worker begin this shape."""
        self.team.ensure(worker)
        arm = EAGER_ARM if worker == REFERENCE else ArmId(worker, "candidate", worker)
        try:
            answer = self.ask(worker, self.beginning(worker), "build", arm)
        except CallFailed as error:
            answer = error
        self._begun(worker, answer)
        if worker not in self.capacities:
            raise Crash("its worker cannot begin the shape")

    def beginning(self, worker: str) -> protocol.BeginShape:
        """Return what a worker begins this shape with."""
        # A cap of the run's own stands for a smaller device; a chunked reference may use what is really there.
        capped = not (self.todo.oversize and worker == REFERENCE)
        cap = self.settings.memory_cap_bytes if capped else None
        if self.context.device == "cpu":
            # An allocation past what is free must fail; the system would otherwise end some process.
            free = available_memory_bytes()
            tight = self.todo.oversize or self.requests.peak_bytes(self.shape, self.context.profile) > free
            cap = free if capped and tight else None
        return protocol.BeginShape(self.shape, self.seed("weights"), cap)

    def _begun(self, worker: str, answer: protocol.Begun | CallFailed) -> None:
        if isinstance(answer, protocol.Begun):
            self.capacities[worker] = answer.capacity
        elif worker == REFERENCE:
            raise ReferenceLost(f"its worker cannot begin the shape: {answer}", EAGER_ARM)

    def new_row(self, name: str) -> ArmRow:
        """Return an arm's empty row."""
        return ArmRow(parse_arm(name, self.context.candidates))

    def ask(self, worker: str, request: protocol.Request[A], what: str, arm: ArmId) -> A:
        """Ask a worker, and report the stage; raises like `Team.ask`."""
        doing = Doing(what, arm)
        self.context.on_stage(self.shape.id, doing)
        return self.team.ask(worker, request, doing, self._limit_s(worker, request))

    def _limit_s(self, worker: str, request: protocol.Request) -> float | None:
        """Return the seconds that a candidate's answer may take, None for the reference: its worker has one limit."""
        if worker == REFERENCE:
            return None
        builds = isinstance(request, protocol.Build)
        if isinstance(request, protocol.Call) and request.promise:
            promise = PROMISES.get(request.promise)
            builds = promise is not None and promise.builds
        limit = max(BUILD_LIMIT_S if builds else CALL_LIMIT_S, EAGER_CALLS * self.eager_s)
        # A second model may take what the first one took, on a host that has become slower.
        first = self.context.setup_s.get(request.arm, 0.0) if builds else 0.0
        least = max(LIMIT_LEAST_S, SECOND_BUILD * first)
        return max(least, min(limit, self.context.deadline - monotonic()))

    def subject_of(self, row: ArmRow) -> ArmWorker:
        """Return an arm in its worker, as verification asks it."""
        return ArmWorker(self, row.arm)

    def judge_of(self, row: ArmRow) -> ArmJudge:
        """Return the judge, asked about an arm's outputs."""
        return ArmJudge(self, row.arm)

    def check_device(self, row: ArmRow) -> None:
        """After a failure, end a worker whose GPU context is broken: every later call would inherit that."""
        worker = row.arm.worker
        if worker not in self.team:
            return
        try:
            ok = self.ask(worker, protocol.CheckDevice(), "check", row.arm).ok
        except CallFailed:
            ok = False
        except Crash:
            return
        if not ok:
            self.team.end(worker)
            if worker == REFERENCE:
                raise ReferenceLost("an arm broke its GPU context", row.arm)

    def skip_all(self, reason: str, but: Collection[str] = ()) -> None:
        """Hand over a skipped row for every arm but some."""
        rows = [self.new_row(name) for name in self.todo.arms if name not in but]
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
        return {what: self.seed(what) for what in ("weights", "timing", "order", f"verify {row.arm}")}


@dataclass(frozen=True)
class ArmWorker:
    """One arm in its worker, as `verify` asks it."""

    session: ShapeSession
    arm: ArmId

    def digest_weights(self) -> tuple[tuple[str, int], ...]:
        """Return a digest of each of the arm's weights."""
        return self._ask(protocol.DigestWeights(self.arm)).digests

    def call(self, case: Case, promise: str = "") -> Called:
        """Call the arm on a case, or as a promise allows."""
        return self._ask(protocol.Call(self.arm, case, promise))

    def load_weights(self) -> None:
        """Load the shape's weights into the arm."""
        self._ask(protocol.LoadWeights(self.arm))

    def repeats(self, case: Case) -> bool:
        """Return whether several calls on one input give the same bytes."""
        return self._ask(protocol.Repeat(self.arm, case)).same

    def is_baseline(self, case: Case) -> bool:
        """Return whether the arm runs the baseline's operations and no others."""
        return self._ask(protocol.CompareOperations(self.arm, case)).same

    def _ask(self, request: protocol.Request[A]) -> A:
        return self.session.ask(self.arm.worker, request, "verify", self.arm)


@dataclass(frozen=True)
class ArmJudge:
    """The judge, asked about one arm's outputs. What it raises says nothing of the arm alone: the row reports it."""

    session: ShapeSession
    arm: ArmId

    @property
    def _buffer(self) -> int:
        return self.session.team.buffer(self.arm.worker)

    def compare(self, case: Case, output: OutputFacts, flipped: bool = False) -> GateResult:
        """Gate an output on a case."""
        return self._ask(protocol.Compare(case, output, self._buffer, flipped)).gate

    def stress_names(self) -> list[str]:
        """Return the names of the stress inputs."""
        return self._ask(protocol.ListStresses()).names

    def compare_stressed(self, case: Case, output: OutputFacts) -> TruthCheck | str:
        """Compare an output on a stress input with float64; return why not where that cannot be done."""
        found = self._ask(protocol.CompareStressed(case, output, self._buffer))
        return found.check or found.fault

    def compare_marks(self, case: Case, marks: str, mark_seed: int) -> float:
        """Return how far a timed call's fingerprint lies from the reference's, in units of the limit."""
        return self._ask(protocol.CompareMarks(case, marks, mark_seed)).ratio

    def compare_kept(self, case: Case, output: OutputFacts, marks: str, mark_seed: int) -> protocol.Gated:
        """Gate a kept output of a timed call, and check its bytes against its fingerprint."""
        return self._ask(protocol.CompareKept(case, output, self._buffer, marks, mark_seed))

    def compare_element(
        self, seed: int, padding: float, element: int, rows: int, output: OutputFacts
    ) -> protocol.ElementCompared:
        """Gate the first rows of one element against the chunked reference."""
        return self._ask(protocol.CompareElement(seed, padding, element, rows, output, self._buffer))

    def _ask(self, request: protocol.Request[A]) -> A:
        try:
            return self.session.ask(REFERENCE, request, "judging", self.arm)
        except CallFailed as error:
            raise CallFailed(error.status, f"the reference beside it: {error}") from None
