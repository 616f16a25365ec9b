"""Verification: is an arm's output right, on accuracy trials, ragged masks, stress inputs and the caller's terms.

The arm's worker calls, the judge compares; this drives both and holds no tensor. `ArmSide` and `JudgeSide` are the two,
whether they live in other processes or in this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, Protocol

from rooflane.eval.check.cases import MASK_NAMES, Called, Case, OutputFacts
from rooflane.eval.check.gate import merge_gates
from rooflane.eval.check.problem_promises import PROBLEM_PROMISES
from rooflane.eval.check.promises import HELD, IS_BASELINE, LAYOUT, PROMISES, UNSTABLE, Promise
from rooflane.eval.record.records import GateResult, TruthCheck, Verification
from rooflane.shapes import Problem, Shape

Level = Literal["full", "trials"]

# Numbers added to the seed: each part draws inputs that no other part has met.
MASKS, STRESSES, LAST_TRIAL, HELD_STREAM, CONTRACT = 100, 200, 300, 320, 400
LAYOUTS, REPEATED, TRACED, AFTER_PROMISES = CONTRACT + 60, CONTRACT + 62, CONTRACT + 64, CONTRACT + 66
HELD_CHECK = "a call on a held stream, whose work must follow the input's and precede the output's reader"
SPENT = "its time for checks was spent"
# Of the use of the gate: below it a failed promise may be rounding. Stale outputs are off by far more.
NEAR = 2.0


class WrongOutput(Exception):
    """An output that fails a check other than the gate; the text is the one-line reason."""


class CallFailed(Exception):
    """A call that raised: the row's status, and one line on what."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ArmSide(Protocol):
    """One arm in its worker; each method raises `CallFailed` or `WrongOutput` where the arm's call does."""

    def digest_weights(self) -> object:
        """Return what depends on every bit of the arm's weights."""

    def call(self, case: Case, promise: str = "") -> Called:
        """Call the arm on a case, or as a promise allows."""

    def load_weights(self) -> object:
        """Load the shape's weights into the arm."""

    def repeats(self, case: Case) -> bool:
        """Return whether several calls on one input give the same bytes."""

    def is_baseline(self, case: Case) -> bool:
        """Return whether the arm runs the baseline's operations and no others."""


class JudgeSide(Protocol):
    """The judge, asked about the arm's outputs."""

    def compare(self, case: Case, output: OutputFacts, flipped: bool = False) -> GateResult:
        """Gate an output on a case."""

    def stress_names(self) -> Sequence[str]:
        """Return the names of the stress inputs."""

    def compare_stressed(self, case: Case, output: OutputFacts) -> TruthCheck | str:
        """Compare an output on a stress input with float64; return why not where that cannot be done."""


@dataclass
class _Bench:
    """What every check of one arm shares."""

    subject: ArmSide
    judge: JudgeSide
    shape: Shape | Problem
    device: str
    seed: int
    deadline: float
    notes: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.masks, self.promises = MASK_NAMES, PROMISES
        if isinstance(self.shape, Problem):
            # It has no mask of ours.
            self.masks, self.promises = (), PROBLEM_PROMISES
            if self.shape.no_truth:
                self.notes.append(f"not compared with float64: {self.shape.no_truth}")

    def case(self, offset: int, kind: str = "drawn", name: str = "") -> Case:
        """Return the case of a running number."""
        padding = self.shape.padding_ratio if kind != "mask" else 0.0
        return Case(self.seed + offset, padding, kind, name)

    def gate(self, case: Case, promise: str = "", judged: Case | None = None, flipped: bool = False) -> GateResult:
        """Have one call compared with the reference."""
        return self.judge.compare(judged or case, self.subject.call(case, promise).output, flipped)

    def late(self, *checks: str) -> bool:
        """Return whether the time for checks is spent, and note each of these checks as missed then."""
        if monotonic() < self.deadline:
            return False
        self.missed += [f"{check}: {SPENT}" for check in checks]
        return True


def verify(
    subject: ArmSide,
    judge: JudgeSide,
    shape: Shape | Problem,
    *,
    device: str = "cpu",
    seed: int,
    trials: int = 5,
    level: Level = "full",
    deadline: float = float("inf"),
) -> Verification:
    """Check one arm and return what was found; nothing the arm does raises, a worker's death does.

    Level "trials" runs the accuracy trials alone; "full" adds ragged masks, stress inputs and the promises to the
    caller. Checks that would start after `deadline` (`time.monotonic()`) are left out and listed in `missed`, each with
    the reason; the first accuracy trial always runs.
    """
    bench = _Bench(subject, judge, shape, device, seed, deadline)
    found: dict[str, Any] = {}
    try:
        before = subject.digest_weights()
        _trials(bench, trials, found)
        if device == "cuda":
            _held_stream(bench)
        if level == "full":
            _masks(bench, found)
            _stress(bench, found)
            _contract(bench, found)
        if subject.digest_weights() != before:
            raise WrongOutput("the weights differ from those before the first call")
    except WrongOutput as error:
        found |= {"status": "incorrect", "reason": str(error)}
    except CallFailed as error:
        found |= {"status": error.status, "reason": str(error)}
    found.setdefault("status", "ok")
    found["contract_class"] = _contract_class(found)
    return Verification(notes=bench.notes, missed=bench.missed, **found)


def require(gate: GateResult, what: str) -> None:
    """Raise when a gate failed, with the figures that say how."""
    if gate.passed:
        return
    if gate.reason:
        why = gate.reason
    elif gate.max_abs == float("inf"):
        why = f"not finite at {gate.worst_index}"
    else:
        why = f"worst at {gate.worst_index}: {gate.out_at_worst:.6g} for {gate.ref_at_worst:.6g}"
    raise WrongOutput(f"{what}: {gate.failed} of {gate.total} elements fail the gate, {why}")


def _contract_class(found: dict[str, Any]) -> str | None:
    """Return how an arm keeps its promises; None where they were not tried."""
    if found["status"] == "incorrect":
        return "incorrect"
    if found["status"] != "ok" or found.get("contract") is None:
        return None
    return "contract-dependent" if found["contract"] else "pure"


def _trials(bench: _Bench, trials: int, found: dict[str, Any]) -> None:
    """Run the accuracy trials."""
    gates = []
    for trial in range(trials):
        if trial and bench.late(*(f"accuracy trial {number + 1}" for number in range(trial, trials))):
            break
        gates.append(bench.gate(bench.case(trial)))
        found |= {"gate": merge_gates(gates), "trials": len(gates)}
    failing = [str(index + 1) for index, gate in enumerate(gates) if not gate.passed]
    require(found["gate"], f"accuracy trial {', '.join(failing)}")


def _held_stream(bench: _Bench) -> None:
    """Check a call whose stream is held until its output's read is queued: a caller on that stream reads no sooner."""
    if bench.late("the call on a held stream"):
        return
    gate = bench.gate(bench.case(HELD_STREAM), HELD)
    require(gate, HELD_CHECK)


def _masks(bench: _Bench, found: dict[str, Any]) -> None:
    """Check ragged and left padding, sequences of one token and of none, masks with holes, and no mask at all."""
    ragged: dict[str, GateResult] = {}
    found["ragged"] = ragged
    for index, name in enumerate(bench.masks):
        if bench.late(*(f"mask check {left!r}" for left in bench.masks[index:])):
            return
        ragged[name] = bench.gate(bench.case(MASKS, "mask", name))
        require(ragged[name], f"mask check {name!r}")


def _stress(bench: _Bench, found: dict[str, Any]) -> None:
    """Run the stress inputs, then one plain trial: the shape's weights are loaded again, and must be seen."""
    checks: list[TruthCheck] = []
    found["truth"] = checks
    names = list(bench.judge.stress_names())
    again = "accuracy trial with the weights loaded again"
    for index, name in enumerate(names):
        if bench.late(*(f"stress input {left!r}" for left in names[index:]), again):
            return
        case = bench.case(STRESSES + index, "stress", name)
        called = bench.subject.call(case)
        if called.not_loaded:
            bench.missed.append(f"stress input {name!r}: its weights cannot be loaded ({called.not_loaded})")
            continue
        check = bench.judge.compare_stressed(case, called.output)
        if isinstance(check, str):
            raise WrongOutput(f"stress input {name!r}: {check}")
        checks.append(check)
        if not check.passed:
            raise WrongOutput(
                f"stress input {name!r}: the worst error against fp64 is {check.gate.max_abs:.3g}, "
                f"eager's own {check.eager_max_abs:.3g}; {check.gate.failed} elements fail the gate"
            )
    if not bench.late(again):
        require(bench.gate(bench.case(LAST_TRIAL)), "after other weights were loaded, and the shape's own again")


def _contract(bench: _Bench, found: dict[str, Any]) -> None:
    """Check the promises to the caller; a broken promise is a finding, not a failure."""
    findings: list[str] = []
    promises = {name: one for name, one in bench.promises.items() if bench.device == "cuda" or not one.cuda_only}
    names = list(promises)
    for index, (name, promise) in enumerate(promises.items()):
        if bench.late(*(f"promise {left!r}" for left in names[index:]), "comparison of repeated calls"):
            break
        found["contract"] = findings
        case = bench.case(LAYOUTS if promise.kind == LAYOUT else CONTRACT + 2 * index)
        try:
            finding = _try_promise(bench, name, promise, case)
        finally:
            # A partly loaded module raises here too; the trial has said so, and the weights are compared at the end.
            with suppress(CallFailed):
                bench.subject.load_weights()
        if finding:
            findings.append(finding)
    else:
        if not bench.subject.repeats(bench.case(REPEATED)):
            bench.notes.append(UNSTABLE)
    with suppress(CallFailed, WrongOutput):  # a forward that cannot be traced is no copy of the baseline
        if bench.subject.is_baseline(bench.case(TRACED)):
            bench.notes.append(IS_BASELINE)
    if findings:
        # What a broken promise left behind must not be met by the timed calls, where it would look like deceit.
        require(bench.gate(bench.case(AFTER_PROMISES)), f"an ordinary call after the promises ({'; '.join(findings)})")


def _try_promise(bench: _Bench, name: str, promise: Promise, case: Case) -> str:
    """Return the finding about one promise, "" where it is kept, refused or missed.

    Raises `WrongOutput` where the input of the promise fails the gate however it comes: that is accuracy.
    """
    judged = case.as_kind(promise.kind)
    try:
        trial = bench.gate(case, name, judged, promise.other_weights)
    except WrongOutput as error:
        return f"{promise.finding}: {error}"
    except CallFailed as error:
        failure = error
    else:
        if not trial.passed and trial.use < NEAR and not promise.other_weights:
            require(bench.gate(judged), f"an ordinary call on the input of promise {name!r}")
        return "" if trial.passed else promise.finding
    # The forward must be none the worse for what it refused: a fault on a GPU breaks every later call.
    try:
        require(bench.gate(bench.case(AFTER_PROMISES)), "an ordinary call after it")
    except (CallFailed, WrongOutput) as after:
        raise WrongOutput(f"{promise.finding}: {failure}; {after}") from None
    if failure.status == "oom":
        bench.missed.append(f"promise {name!r}: out of memory ({failure})")
    elif promise.may_refuse:
        bench.notes.append(f"refused: {name} ({failure})")
    else:
        return f"{promise.finding}: {failure}"
    return ""
