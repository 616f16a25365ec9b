"""The judge: holds the reference, reads outputs from raw bytes, and never imports a candidate.

It lives in the worker that also times eager and the controls. The candidate's worker has written an output into
shared memory; the judge draws the same input, computes the reference's answer, and compares.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.eval.check import fingerprint
from rooflane.eval.check.cases import Case, OutputFacts
from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.outputs import SharedBytes
from rooflane.eval.check.promises import other_weights
from rooflane.eval.check.truth import HALF_FACTOR, STRESS_FACTOR, Truth, judge, stressed
from rooflane.eval.record.records import GateResult
from rooflane.eval.worker import protocol
from rooflane.eval.worker.workload import Given, workload_of
from rooflane.shapes import Shape

# A reference output is kept for the next question about the same input up to this size.
CACHE_BYTES = 64 << 20


class Judge:
    """Compares outputs of one shape with the reference; a method a request."""

    def __init__(self, reference: nn.Module, shape: Shape, device: torch.device, buffers: list[SharedBytes]) -> None:
        self.reference = reference
        self.workload = workload_of(shape, device)
        self.device = device
        self.buffers = buffers
        self._truth: Truth | None = None
        self._cached: tuple[Any, Tensor] | None = None

    def handlers(self) -> protocol.Handlers:
        """Return what this answers, by request."""
        return {
            protocol.Compare: self.compare,
            protocol.ListStresses: self.list_stresses,
            protocol.CompareStressed: self.compare_stressed,
            protocol.CompareMarks: self.compare_marks,
            protocol.CompareKept: self.compare_kept,
        }

    def compare(self, request: protocol.Compare) -> protocol.Gated:
        """Gate an output on a case; `flipped` says that the rows of every weight were reversed for it."""
        out, fault = self._read(request.output, request.buffer)
        return protocol.Gated(fault or self._compare(out, request.case, request.flipped))

    def list_stresses(self, request: protocol.ListStresses) -> protocol.Names:
        """Return the names of the stress inputs."""
        return protocol.Names([stress.name for stress in self.workload.stresses])

    def compare_stressed(self, request: protocol.CompareStressed) -> protocol.Stressed:
        """Judge an output on a stress input: it and eager are both compared with float64."""
        out, fault = self._read(request.output, request.buffer)
        if fault:
            return protocol.Stressed(None, fault.reason)
        stress = next(one for one in self.workload.stresses if one.name == request.case.name)
        truth = self._need_truth()
        inputs = self.workload.draw(request.case)
        with stressed(self.reference, stress), stressed(truth.model, stress), torch.inference_mode():
            eager = self.workload.pack(self.reference(*inputs))[truth.rows]
            true = truth(*inputs)
        gate = self.workload.truth_gate
        return protocol.Stressed(judge(stress.name, out[truth.rows], eager, true, STRESS_FACTOR, truth.label, gate))

    def compare_marks(self, request: protocol.CompareMarks) -> protocol.MarksCompared:
        """Compare a timed call's fingerprint with that of the reference's answer; above 1 is a wrong answer."""
        workload = self.workload
        with torch.inference_mode():
            ref = self._answer(request.case, workload.draw(request.case))
            expected = fingerprint.of_output(ref, workload.rows, request.mark_seed)
            allowed = workload.mark_limits(ref)
        return protocol.MarksCompared(*fingerprint.worst_row(_decode(request.marks), expected, allowed))

    def compare_kept(self, request: protocol.CompareKept) -> protocol.Gated:
        """Gate a kept output of a timed call, and check its bytes against the fingerprint taken behind the call."""
        out, fault = self._read(request.output, request.buffer)
        if fault:
            return protocol.Gated(fault, same=False)
        gate = self._compare(out, request.case, flipped=False)
        now = fingerprint.of_output(out, self.workload.rows, request.mark_seed)
        # Bit for bit on one device; sums of another thread count or layout may round differently.
        scale = out.float().abs().max().item() * math.sqrt(out.numel()) + 1e-30
        return protocol.Gated(gate, same=bool((now - _decode(request.marks)).abs().max() <= 1e-5 * scale))

    def _compare(self, out: Tensor, case: Case, flipped: bool) -> GateResult:
        with self._loaded(flipped), torch.inference_mode():
            inputs = self.workload.draw(case)
            return self._gate(out, self._answer(case, inputs, flipped), inputs, flipped)

    def _read(self, output: OutputFacts, buffer: int) -> tuple[Tensor | None, GateResult | None]:
        """Return an output from its bytes; a failing result where it is not of the reference's kind."""
        shape, dtype = tuple(self.workload.size), self.workload.dtype
        name = str(dtype).removeprefix("torch.")
        found = output.shape, output.dtype, output.device, output.bytes
        if found != (shape, name, self.device.type, self.workload.output_bytes):
            empty = torch.zeros(0, dtype=dtype)
            gate = check_gate(empty, torch.zeros(1, dtype=dtype))
            reason = f"the output is of shape {output.shape}, {output.dtype}, on {output.device}"
            return None, gate.model_copy(update={"reason": reason})
        return self.buffers[buffer].read(shape, dtype, self.device), None

    def _answer(self, case: Case, inputs: Given, flipped: bool = False) -> Tensor:
        """Return the reference's output, from the last question where it was the same."""
        key = (case, flipped)
        if self._cached and self._cached[0] == key:
            return self._cached[1]
        self._cached = None
        ref = self.workload.pack(self.reference(*inputs))
        if ref.numel() * ref.element_size() <= CACHE_BYTES:
            self._cached = key, ref
        return ref

    def _gate(self, out: Tensor, ref: Tensor, inputs: Given, flipped: bool) -> GateResult:
        """Gate an output; for half precision, where eager itself fails the gate, judge both sides against fp64."""
        if not self.workload.half:
            return self.workload.gate(out, ref)
        truth = self._make_truth() if flipped else self._need_truth()
        check = judge(
            "", out[truth.rows], ref[truth.rows], truth(*inputs), HALF_FACTOR, truth.label, self.workload.truth_gate
        )
        finite = bool(torch.isfinite(out).all())
        # Stated in the units of the limit that holds here, so that above 1 fails for every dtype.
        use = min(check.gate.use, check.gate.max_abs / (HALF_FACTOR * check.eager_max_abs or 1e-300))
        passed = check.passed and finite
        failed = 0 if passed else max(1, check.gate.failed)
        use = use if finite else math.inf
        return check.gate.model_copy(update={"passed": passed, "failed": failed, "use": use})

    def _need_truth(self) -> Truth:
        if self._truth is None:
            self._truth = self._make_truth()
        return self._truth

    def _make_truth(self) -> Truth:
        # Not in inference mode: a stress changes the float64 weights in place.
        with torch.inference_mode(False):
            return self.workload.truth(self.reference)

    @contextmanager
    def _loaded(self, flipped: bool) -> Iterator[None]:
        """Hold the other weights for a moment."""
        if not flipped:
            yield
            return
        kept = {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}
        self.reference.load_state_dict(other_weights(self.reference))
        try:
            yield
        finally:
            self.reference.load_state_dict(kept)


def _decode(marks: str) -> Tensor:
    """Return a fingerprint from its text."""
    return torch.frombuffer(bytearray(base64.b64decode(marks)), dtype=torch.float32)
