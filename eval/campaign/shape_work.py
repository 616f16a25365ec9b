"""Shapes whose eager forward does not fit, seen from the parent: which elements are compared, within which time."""

from __future__ import annotations

from time import monotonic
from typing import TypeVar

from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.session import ArmRow, ShapeSession
from rooflane.eval.campaign.shape_timing import FULL_BUDGET, ShapeTiming
from rooflane.eval.check.gate import merge_gates
from rooflane.eval.check.verify import CallFailed, WrongOutput, verify
from rooflane.eval.record.records import EAGER, EAGER_ARM, REFERENCE, ArmId, GateResult, Timing, Verification
from rooflane.eval.worker import protocol

A = TypeVar("A")
CHUNKED_REFERENCE = "chunked_reference"
# Of a causal element left out of the full comparison, these first rows are still checked: they depend on no later one.
PREFIX_ROWS = 2048
RAGGED_PADDING = 0.3
TIMED_CALLS = 3
OUTPUT_ALONE = "eager does not fit: other masks, stress inputs and promises to the caller were not tried on this shape"


class OversizeWork:
    """One candidate on a shape that eager cannot run."""

    def __init__(self, work: ShapeSession, row: ArmRow) -> None:
        self.work = work
        self.row = row
        self.shape = work.shape
        self.clock = "cuda-events" if work.context.device == "cuda" else "perf-counter"
        # The process that does every element uses the shape's own padding; the others check one of a ragged batch.
        self.every_element = work.context.process == 0
        self.seed = work.seed("oversize")
        self.padding = self.shape.padding_ratio or (0.0 if self.every_element else RAGGED_PADDING)
        self.prefix = min(PREFIX_ROWS, self.shape.seq_len) if self.shape.causal else self.shape.seq_len

    def run(self) -> ArmRow:
        """Verify and time the candidate in its row; return the reference's own row with its time per element."""
        row, shape = self.row, self.shape
        with self.work.team.spending("verification"):
            call = self._ask(protocol.CallWhole(row.arm, self.seed, self.padding), "verify")
            row.setup_s += call.seconds
            row.peak_bytes = call.peak_bytes
            gates, times, notes, missed = self._compare_all(call.seconds)
        gate = merge_gates(gates)
        reason = (
            "" if gate.passed else f"{gate.failed} of {gate.total} elements fail the gate, worst at {gate.worst_index}"
        )
        status = "ok" if gate.passed else "incorrect"
        row.verification = Verification(
            status=status, reason=gate.reason or reason, trials=1, gate=gate, notes=notes,
            missed=missed,
            contract_class=None if gate.passed else "incorrect",
        )  # fmt: skip
        row.status, row.reason = row.verification.status, row.verification.reason
        reference = type(row)(ArmId(CHUNKED_REFERENCE, "reference"))
        reference.timing = Timing(
            clock=self.clock,
            event_ns=[times],
            warmups=0,
            repeats=len(times),
            shrunk=len(times) < shape.batch_size,
            inputs="fresh",
            valid_tokens=call.valid_tokens,
            elements_total=shape.batch_size,
        )
        if row.status == "ok":
            with self.work.team.spending("measurement"):
                row.timing = self._time()
        return reference

    def _compare_all(self, call_s: float) -> tuple[list[GateResult], list[int], list[str], list[str]]:
        """Gate the output against the chunked reference: results, its ns per element, notes, what is missed.

        The first element is always compared in full, others while the reference's budget and the shape's share of the
        run's time last; the timed calls to come, of `call_s` seconds each, have their time first.
        """
        shape, length = self.shape, self.shape.seq_len
        wanted = list(range(shape.batch_size)) if self.every_element else [self.seed % shape.batch_size]
        left_s = self.work.deadline - monotonic() - TIMED_CALLS * call_s
        budget_ns = min(self.work.settings.reference_budget_s, left_s) * 1e9
        gates: list[GateResult] = []
        times: list[int] = []
        for element in wanted:
            if times and sum(times) + times[-1] > budget_ns:
                break
            gate, elapsed = self._compare(self.seed, self.padding, element, length)
            gates.append(gate)
            times.append(elapsed)
        full = " in full" if len(times) == shape.batch_size else ""
        notes = [f"compared{full}: {len(times)} of {shape.batch_size} batch elements", OUTPUT_ALONE]
        left, missed = wanted[len(times) :], []
        if left and shape.causal:
            gates += [self._compare(self.seed, self.padding, element, self.prefix)[0] for element in left]
            notes.append(
                f"the first {self.prefix} rows compared of the other {len(left)}: causal rows depend on no later one"
            )
        elif left:
            missed.append(f"comparison of {len(left)} batch elements: the reference's time was spent")
        return gates, times, notes, missed

    def _compare(self, seed: int, padding: float, element: int, rows: int) -> tuple[GateResult, int]:
        """Have the first rows of one element judged; return the result and the reference's nanoseconds."""
        output = self._ask(protocol.ShipPart(element, rows), "verify")
        found = self.work.judge_of(self.row).compare_element(seed, padding, element, rows, output)
        if found.fault:
            raise WrongOutput(found.fault)
        return found.gate, found.reference_ns

    def _time(self) -> Timing:
        """Time a few calls, each on new contents, and have a part of each output judged that nobody knew of before."""
        events: list[int] = []
        hosts: list[int] = []
        budget_ns = self.work.settings.budget_s * 1e9
        tokens = 0
        for call in range(TIMED_CALLS):
            # Two calls at least, so that a spread is seen, then up to the budget.
            if call >= 2 and sum(events) + events[-1] > budget_ns:
                break
            seed, padding = self.work.seed(f"oversize timing {call}"), self.shape.padding_ratio
            found = self._ask(protocol.TimeWhole(self.row.arm, seed, padding), "time")
            events += found.event_ns
            hosts += found.host_ns
            tokens += found.valid_tokens
            if self.shape.causal or call == 0:
                element = self.work.seed(f"oversize element {call}") % self.shape.batch_size
                gate, _ = self._compare(seed, padding, element, self.prefix)
                if not gate.passed:
                    line = f"timed call {call + 1}: {gate.failed} of {gate.total} elements fail the gate"
                    self.row.integrity.append(f"{line} although the verified output was right")
                    raise WrongOutput(line)
        return Timing(
            clock=self.clock,
            event_ns=[events],
            host_ns=[hosts] if hosts else [],
            warmups=1,
            repeats=len(events),
            shrunk=True,
            inputs="fresh",
            valid_tokens=tokens / len(events),
        )

    def _ask(self, request: protocol.Request[A], what: str) -> A:
        return self.work.ask(self.row.arm.worker, request, what, self.row.arm)


# A first call this many times over the limit stops a shape whose prediction was too kind.
PREDICTION_SLACK = 3
# Of a shape's time, what the verification of its candidates may take together.
VERIFY_SHARE = 0.3
# What an arm's verification may take whatever time is left. All checks are about 60 calls of the candidate, 40 of the
# reference and a second build, so a candidate half as fast as eager still has time for all of them. A compiled forward
# compiles again for some of the calls: 45 s for a small shape on a busy CPU of two cores.
VERIFY_EAGER_CALLS = 250
VERIFY_LEAST_S = 120.0
# An eager call that took longer is timed once more before the time for checks is counted in it.
EAGER_AGAIN_S = 0.1


class ShapeWork(ShapeSession):
    """One shape in one process run."""

    def run(self) -> None:
        """Measure the arms that are still to do and hand over their rows, eager's last."""
        eager = ArmRow(EAGER_ARM)
        with self.team.spending("set-up"):
            self.begin_all()
            try:
                eager.setup_s = self.hold_reference(call=not self.todo.oversize)
            except CallFailed as error:  # most likely memory: the prediction was too kind
                eager.fail(error, "the first call of the eager forward")
                self.emit(eager)
        if eager.status != "ok" and not self.shape.has_elements:
            self.skip_all(f"eager failed, and nothing can be compared with it: {eager.reason}", but=(EAGER,))
            return
        if self.todo.oversize or eager.status != "ok":
            self.run_oversize()
            return
        limit = self.settings.max_call_s * PREDICTION_SLACK
        self.eager_s = eager.setup_s
        if self.eager_s > min(limit, EAGER_AGAIN_S):
            # A first call sets the process up, and other work may have slowed it: the second one decides.
            self.eager_s = min(self.eager_s, self.hold_reference(call=True))
        if self.eager_s > limit:
            self.skip_all(
                f"predicted within the limit, but each of two eager calls took at least {self.eager_s:.3g} s, over "
                f"{limit:g} s; raise --max-call-s to run this shape"
            )
            return
        eager.ready = True
        self.compare_arms(eager)

    def hold_reference(self, *, call: bool) -> float | None:
        """Make the reference worker's model eager and the judge; return the seconds of eager's first call."""
        return self.ask(REFERENCE, protocol.HoldReference(call), "build", EAGER_ARM).setup_s

    def compare_arms(self, eager: ArmRow) -> None:
        """Build and verify every arm, then time those whose outputs stand, interleaved with eager."""
        with self.team.spending("start-up"):
            self.context.before_arms()
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
        expected = self.context.setup_s.get(row.arm, 0.0)
        # The null is what every ratio is held against: it is never left out.
        if row.arm.kind == "control" and name not in FULL_BUDGET and monotonic() + expected > self.deadline:
            row.status = "skipped"
            row.reason = "the run's time budget was spent on the arms before it"
            if expected:
                row.reason = f"the run's time budget leaves no room for its set-up of about {expected:.0f} s"
            return row
        # Its row may be there already: lost with the reference, say.
        if row.arm.kind == "copy" and not (row.arm.name in rows and rows[row.arm.name].ready):
            row.status, row.reason = "skipped", "the candidate it copies is not timed"
            return row
        try:
            self.build(row)
            if row.ready and row.arm.kind not in ("noop", "anchor"):
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
            if row.arm.worker not in self.capacities:
                self.begin(row.arm.worker)
            try:
                built = self.ask(row.arm.worker, protocol.Build(row.arm, call), "build", row.arm)
            except (CallFailed, WrongOutput) as error:
                row.fail(error, "building it")
                return
            finally:
                self.context.setup_s[row.arm] = monotonic() - started
        row.plan, row.status, row.reason = built.plan, built.status, built.reason
        row.setup_s, row.built_note, row.ready = built.setup_s, built.note, built.status == "ok"

    def verify(self, row: ArmRow) -> None:
        """Verify an arm; decide whether it is timed."""
        full = row.arm.kind == "candidate" and self.context.process == 0
        with self.team.spending("verification"):
            row.verification = verify(
                self.subject_of(row),
                self.judge_of(row),
                self.shape,
                device=self.context.device,
                seed=self.seed(f"verify {row.arm}"),
                trials=self._trials(row),
                # Ragged masks, stress and contract depend on the code and not on the process: the first one does them.
                level="full" if full else "trials",
                deadline=monotonic() + self.verify_s(),
            )
        row.note(row.built_note)
        row.status, row.reason = row.verification.status, row.verification.reason
        # A control that fails the gate is what users would get: it is timed and flagged. A candidate is not.
        if row.status != "ok" and (row.arm.kind != "control" or row.status != "incorrect"):
            row.ready = False

    def verify_s(self) -> float:
        """Return the seconds in which one arm's verification may start new checks.

        They begin with the arm's own verification and are the same for every arm, whatever the arms before it took.
        """
        share = VERIFY_SHARE * self.share_s / max(1, len(self.context.candidates))
        return max(share, VERIFY_EAGER_CALLS * self.eager_s, VERIFY_LEAST_S)

    def _trials(self, row: ArmRow) -> int:
        """Return an arm's accuracy trials: one tells whether a copy, or a control again, was built right."""
        once = row.arm.kind == "copy" or (row.arm.kind == "control" and self.context.process > 0)
        return 1 if once else self.settings.trials

    def close(self, row: ArmRow, timing: ShapeTiming | None = None) -> None:
        """Ask a candidate's worker what it can see of tampering, and compare the clocks with each other."""
        if row.arm.kind not in ("candidate", "copy"):
            return
        with self.team.spending("verification"):
            self._close(row, timing)

    def _close(self, row: ArmRow, timing: ShapeTiming | None) -> None:
        found = list(timing.findings(row)) if timing else []
        notes: list[str] = []
        worker = row.arm.worker
        if row.arm.kind == "candidate":
            if worker in self.team:
                try:
                    seen = self.ask(worker, protocol.Inspect(), "check", row.arm)
                    found += seen.findings
                    row.peak_bytes = row.peak_bytes or seen.peak_bytes
                    notes = seen.notes
                except (Crash, CallFailed, WrongOutput) as error:
                    row.fail(error, "the check of its process")
            elif row.status == "ok":
                row.fail(Crash("the worker ended before its process could be checked"), "")
            found += self.team.forged(worker)
        for line in notes:
            row.note(line)
        # A flag or a thread says something only beside what a clock, a fingerprint or a comparison found.
        found += notes if found or row.integrity else []
        row.integrity += [line for line in dict.fromkeys(found) if line not in row.integrity]

    def run_oversize(self) -> None:
        """Measure each candidate alone against the chunked reference: two would not fit beside each other."""
        references = []
        if not self.todo.oversize:
            # Eager fitted by prediction and failed: what it left behind must be free, and its cap lifted.
            self.todo = self.todo.model_copy(update={"oversize": True})
            self.begin(REFERENCE)
            self.hold_reference(call=False)
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
            self._close(row, None)
            self.emit(row)
            # Its memory must be free before the next one's call.
            self.team.end(name)
            self.capacities.pop(name, None)
        # One reference row a process, whichever candidate it was made with.
        self.emit(*references[:1])
