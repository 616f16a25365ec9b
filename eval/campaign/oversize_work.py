"""Shapes whose eager forward does not fit, seen from the parent: which elements are compared, within which time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rooflane.eval.check.gate import merge_gates
from rooflane.eval.check.verify import WrongOutput
from rooflane.eval.record.arm_id import ArmId
from rooflane.eval.record.records import GateResult, Timing, Verification
from rooflane.eval.worker import protocol

if TYPE_CHECKING:
    from rooflane.eval.campaign.arm_row import ArmRow
    from rooflane.eval.campaign.session import ShapeSession

A = TypeVar("A")
CHUNKED_REFERENCE = "chunked_reference"
# Of a causal element left out of the full comparison, these first rows are still checked: they depend on no later one.
PREFIX_ROWS = 2048
RAGGED_PADDING = 0.3
TIMED_CALLS = 3


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
            gates, times, notes = self._compare_all()
        gate = merge_gates(gates)
        reason = (
            "" if gate.passed else f"{gate.failed} of {gate.total} elements fail the gate, worst at {gate.worst_index}"
        )
        status = "ok" if gate.passed else "incorrect"
        row.verification = Verification(
            status=status, reason=gate.reason or reason, trials=1, gate=gate, notes=notes,
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

    def _compare_all(self) -> tuple[list[GateResult], list[int], list[str]]:
        """Gate the output against the chunked reference: results, reference nanoseconds per element, notes."""
        shape, length = self.shape, self.shape.seq_len
        wanted = list(range(shape.batch_size)) if self.every_element else [self.seed % shape.batch_size]
        budget_ns = self.work.settings.reference_budget_s * 1e9
        gates: list[GateResult] = []
        times: list[int] = []
        for element in wanted:
            if times and sum(times) + times[-1] > budget_ns:
                break
            gate, elapsed = self._compare(self.seed, self.padding, element, length)
            gates.append(gate)
            times.append(elapsed)
        full = " in full" if len(times) == shape.batch_size else ""
        notes = [f"compared{full}: {len(times)} of {shape.batch_size} batch elements"]
        left = wanted[len(times) :]
        if left and shape.causal:
            gates += [self._compare(self.seed, self.padding, element, self.prefix)[0] for element in left]
            notes.append(
                f"the first {self.prefix} rows compared of the other {len(left)}: causal rows depend on no later one"
            )
        return gates, times, notes

    def _compare(self, seed: int, padding: float, element: int, rows: int) -> tuple[GateResult, int]:
        """Have the first rows of one element judged; return the result and the reference's nanoseconds."""
        output = self._ask(protocol.ShipPart(element, rows), "verify").output
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
