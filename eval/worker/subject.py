"""A worker's arms on one shape: built, called on named cases, their outputs written where the judge reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from rooflane.eval.check.cases import Called, Case
from rooflane.eval.check.outputs import SharedBytes, describe_output
from rooflane.eval.check.promises import OutputChanged, other_weights
from rooflane.eval.check.running import RunningState
from rooflane.eval.check.tamper import GivenWeights, ProcessState, digest, digests
from rooflane.eval.check.truth import PLAIN, STRESSES, stressed
from rooflane.eval.record.records import ArmId
from rooflane.eval.worker import protocol
from rooflane.eval.worker.arms import Arm, build_arm
from rooflane.eval.worker.candidates import describe_error, is_oom
from rooflane.eval.worker.workload import workload_of
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.dispatch import Profile
    from rooflane.eval.check.stresses import Stress

    Forward = Callable[..., Any]

# Enough for torch to hand the work to its pool.
POOL_ELEMENTS = 1 << 20
# Calls on one input whose outputs must have the same bytes.
REPEATS = 3
# The seed of the input an arm is first called on.
FIRST_INPUT = 0


class WrongKind(Exception):
    """An output that is no plain tensor of the right shape, or a call that changed what it was given."""


class Subject:
    """One worker's arms; a method a request, which may raise whatever a candidate raises."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        profile: Profile,
        rules: Any,
        template: nn.Module,
        buffer: SharedBytes,
        state: ProcessState | None = None,
    ) -> None:
        self.shape = shape
        self.device = device
        self.workload = workload_of(shape, device)
        self.profile = profile
        self.rules = rules
        # The shape's model and weights; every arm is built on a copy of it.
        self.template = template
        self.buffer = buffer
        self.arms: dict[ArmId, Arm] = {}
        # The worker's, of before the first candidate: one taken here would hold what an earlier shape's left.
        self.state = state or ProcessState()
        self.running = RunningState()
        self._weights: dict[ArmId, GivenWeights] = {}

    def adopt(self, arm: Arm) -> None:
        """Take an arm that was built elsewhere, such as eager itself."""
        self.arms[arm.id] = arm

    def handlers(self) -> protocol.Handlers:
        """Return what this answers, by request."""
        return {
            protocol.Build: self.build,
            protocol.Call: self.call,
            protocol.Repeat: self.repeat,
            protocol.CompareOperations: self.compare_operations,
            protocol.DigestWeights: self.digest_weights,
            protocol.LoadWeights: self.load_weights,
            protocol.Settle: self.settle,
            protocol.Inspect: self.inspect,
        }

    def build(self, request: protocol.Build) -> protocol.Built:
        """Build an arm and make its first call."""
        leftovers = self.state.leftovers
        with leftovers.building():
            arm = build_arm(
                request.arm, self.template, self.shape, self.device, self.profile, self.rules, FIRST_INPUT,
                call=request.call,
            )  # fmt: skip
        if arm.forward is not None:
            arm.forward = leftovers.wrap(arm.forward)
        self.arms[arm.id] = arm
        return protocol.Built(arm.plan, arm.status, arm.reason, arm.setup_s, arm.note)

    def call(self, request: protocol.Call) -> Called:
        """Call an arm on a case, or as a promise allows, and write the output's bytes for the judge."""
        held, case = self.arms[request.arm], request.case
        stress = next((one for one in STRESSES if case.kind == "stress" and one.name == case.name), PLAIN)
        with self._stress_loaded(held.weights, stress) as problem:
            if problem:
                return Called(None, problem)
            out = self._promised(held, case, request.promise) if request.promise else self._plain(held, case)
        packed = self.workload.pack(out)
        self.buffer.write(packed)
        return Called(describe_output(packed))

    def repeat(self, request: protocol.Repeat) -> protocol.Compared:
        """Call an arm several times on one input; return whether the outputs have the same bytes."""
        inputs, pack = self.workload.draw(request.case), self.workload.pack
        with torch.inference_mode():
            found = {digest(pack(self.arms[request.arm].forward(*inputs))) for _ in range(REPEATS)}
        return protocol.Compared(len(found) == 1)

    def compare_operations(self, request: protocol.CompareOperations) -> protocol.Compared:
        """Return whether an arm runs the operations of the baseline and no others."""
        inputs = self.workload.draw(request.case)
        return protocol.Compared(is_baseline(self.arms[request.arm].forward, self.template, *inputs))

    def digest_weights(self, request: protocol.DigestWeights) -> protocol.Digests:
        """Return numbers that depend on every bit of an arm's weights."""
        tensors = self.arms[request.arm].weights.state_dict()
        return protocol.Digests(tuple(zip(tensors, digests(tensors.values()), strict=True)))

    def load_weights(self, request: protocol.LoadWeights) -> protocol.Done:
        """Load the shape's weights into an arm's module."""
        with torch.inference_mode(False):
            self.arms[request.arm].weights.load_state_dict(self.template.state_dict())
        return protocol.Done()

    def settle(self, request: protocol.Settle) -> protocol.Done:
        """Note which threads and processes run now, and the candidate's weights, before anything is timed."""
        for arm in self.arms.values():
            arm.second = None  # it was needed for the promises alone
        # What the harness itself starts later is started now: the fingerprint's compiler, then torch's thread pool.
        self.workload.fingerprinter(seed=0, slots=1)
        candidates = [arm for arm in self.arms.values() if arm.id.kind == "candidate" and arm.weights is not None]
        self._weights = {arm.id: GivenWeights(arm.weights) for arm in candidates}
        torch.ones(POOL_ELEMENTS).mul_(2)
        self.running.settle()
        return protocol.Done()

    def inspect(self, request: protocol.Inspect) -> protocol.Inspected:
        """Return what was tampered with since this shape began, and what else changed in the process."""
        # Before the digests below take memory of their own.
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        findings = self.state.changes()
        for name, weights in self._weights.items():
            findings += [f"the weights of {name} changed while it was timed: {line}" for line in weights.changes()]
        return protocol.Inspected(findings, [*self.running.changes(), *self.state.leftovers.notes], peak)

    @contextmanager
    def _stress_loaded(self, weights: nn.Module | None, stress: Stress) -> Iterator[str]:
        """Hold a stress's weights in an arm's module; yields why they cannot be loaded, "" where they are.

        They pass through `load_state_dict`, as a user's checkpoint does: how a candidate names and keeps its weights is
        its own affair.
        """
        if not stress.touches:
            yield ""
            return
        problem = ""
        with torch.inference_mode(False), stressed(self.template, stress):
            try:
                weights.load_state_dict(self.template.state_dict())
            except Exception as error:
                problem = describe_error(error)
        try:
            yield problem
        finally:
            with torch.inference_mode(False):
                try:
                    weights.load_state_dict(self.template.state_dict())
                except Exception:
                    # A module that took some of the weights before it raised takes the same ones back.
                    if not problem:
                        raise

    def _plain(self, arm: Arm, case: Case) -> Any:
        """Call on poisoned memory and check what came back besides the values."""
        inputs = self.workload.draw(case)
        kept = _digests(inputs)
        with torch.inference_mode():
            self.workload.poison(inputs)  # last, or the work above would take the poisoned blocks
            out = arm.forward(*inputs)
        if fault := self.workload.fault(out, inputs):
            raise WrongKind(fault)
        if kept != _digests(inputs):
            raise WrongKind(f"the call changed {self.workload.input_names}")
        return out

    def _promised(self, arm: Arm, case: Case, promise: str) -> Any:
        def second() -> Arm:
            return self._second_of(arm)

        with torch.inference_mode():
            try:
                out, inputs = self.workload.trial(promise, arm, case, self.template, second)
            except OutputChanged as error:
                raise WrongKind(str(error)) from None
            if fault := self.workload.fault(out, inputs):
                raise WrongKind(fault)
            return out

    def _second_of(self, arm: Arm) -> Arm:
        """Return a second model of the shape, built once as the arm was, with other weights; both stay alive."""
        if arm.second is None:
            with torch.inference_mode(False), torch.no_grad():
                model = copy.deepcopy(self.template)
                model.load_state_dict(other_weights(self.template))
                forward, weights = arm.make(model)
            arm.second = Arm(arm.id, forward=forward, weights=weights)
        return arm.second


def answer_to(handler: protocol.Handler, request: protocol.Request) -> protocol.Message | Called:
    """Return what a handler answers; what it raises becomes an answer too."""
    try:
        return handler(request)
    except WrongKind as error:
        return protocol.Wrong(str(error))
    except Exception as error:
        return protocol.Failed("oom" if is_oom(error) else "error", describe_error(error))


def operation_signature(forward: Forward, *inputs: Any) -> tuple[tuple[str, str], ...]:
    """Return the name and input shapes of every torch operation of one call, in order.

    A kernel launched without torch's dispatcher leaves nothing here, so a signature describes a forward only
    where it equals another's.
    """
    # Without kineto, whose start takes seconds; the names of host operations need none of it.
    with torch.inference_mode(), profile(use_kineto=False, record_shapes=True) as profiled:
        forward(*inputs)
    events = sorted(profiled.function_events, key=lambda event: event.time_range.start)
    return tuple((event.name, str(event.input_shapes)) for event in events if event.name.startswith("aten::"))


def is_baseline(forward: Forward, baseline: Forward, *inputs: Any) -> bool:
    """Return whether a forward runs the baseline's operations and no others, in the baseline's order.

    Such a candidate cannot be faster than what it is compared with; the report names it as what it is.
    """
    return operation_signature(forward, *inputs) == operation_signature(baseline, *inputs)


def _digests(inputs: tuple[Any, ...]) -> list[int]:
    return [digest(part) for part in inputs if isinstance(part, Tensor)]
