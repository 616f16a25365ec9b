"""A worker's arms on one shape: built, called on named cases, their outputs written where the judge reads them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rooflane.baseline import BaselineTransformer, torch_dtype
from rooflane.eval.check.cases import Case, draw_case
from rooflane.eval.check.fingerprint import Fingerprinter
from rooflane.eval.check.lent_weights import LentWeights
from rooflane.eval.check.outputs import SharedBytes, describe_output, output_fault, poison
from rooflane.eval.check.promises import Inputs, run_trial
from rooflane.eval.check.signature import is_baseline
from rooflane.eval.check.tamper import ProcessState, child_count, digest, digests, thread_count
from rooflane.eval.check.truth import STRESSES, missing_parameter, stressed
from rooflane.eval.record.records import COPY_PREFIX
from rooflane.eval.worker.arms import Arm, build_arm
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.dispatch import Profile


# Enough for torch to hand the work to its pool.
POOL_ELEMENTS = 1 << 20


# The seed of the input an arm is first called on.
FIRST_INPUT = 0


class WrongKind(Exception):
    """An output that is no plain tensor of the right shape, or a call that changed what it was given."""


class Subject:
    """One worker's arms; every method returns plain values, and nothing a candidate raises escapes it."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        profile: Profile,
        rules: Any,
        template: BaselineTransformer,
        buffer: SharedBytes,
    ) -> None:
        self.shape = shape
        self.device = device
        self.profile = profile
        self.rules = rules
        # The shape's model and weights; every arm is built on a copy of it.
        self.template = template
        self.buffer = buffer
        self.arms: dict[str, Arm] = {}
        self.state = ProcessState()
        self._running: tuple[int, int] | None = None
        self._weights: dict[str, LentWeights] = {}

    def adopt(self, arm: Arm) -> None:
        """Take an arm that was built elsewhere, such as eager itself."""
        self.arms[arm.name] = arm

    def build(self, name: str, *, call: bool = True) -> dict[str, Any]:
        """Build an arm by name and make its first call; return its plan, status, reason and set-up seconds."""
        base = name.removeprefix(COPY_PREFIX)
        arm = build_arm(base, self.template, self.shape, self.device, self.profile, self.rules, FIRST_INPUT, call=call)
        arm.name = name
        self.arms[name] = arm
        return {
            "plan": asdict(arm.plan),
            "status": arm.status,
            "reason": arm.reason,
            "setup_s": arm.setup_s,
        }

    def call(self, arm: str, case: dict[str, Any], promise: str = "") -> dict[str, Any]:
        """Call an arm on a case, or as a promise allows, and write the output's bytes for the judge."""
        held, case = self.arms[arm], Case(**case)
        try:
            stress = next((one for one in STRESSES if case.kind == "stress" and one.name == case.name), None)
            if stress and (part := missing_parameter(held.weights, stress)):
                return {"missing": part}
            with stressed(held.weights, stress) if stress else nullcontext():
                out = self._promised(held, case, promise) if promise else self._plain(held, case)
            self.buffer.write(out)
            return {"output": describe_output(out)}
        except Exception as error:
            return failure(error)

    def repeat(self, arm: str, case: dict[str, Any], times: int = 3) -> dict[str, Any]:
        """Call an arm several times on one input; tell whether the outputs have the same bytes."""
        held = self.arms[arm]
        try:
            x, mask = draw_case(Case(**case), self.shape, self.device)
            with torch.inference_mode():
                digests = {digest(held.forward(x, mask)) for _ in range(times)}
            return {"same": len(digests) == 1}
        except Exception as error:
            return failure(error)

    def signature(self, arm: str, case: dict[str, Any]) -> dict[str, Any]:
        """Tell whether an arm runs the operations of the baseline and no others."""
        try:
            x, mask = draw_case(Case(**case), self.shape, self.device)
            return {"baseline": is_baseline(self.arms[arm].forward, self.template, x, mask)}
        except Exception as error:
            return failure(error)

    def weights_digest(self, arm: str) -> dict[str, Any]:
        """Return a number that depends on every bit of an arm's weights."""
        try:
            tensors = self.arms[arm].weights.state_dict()
            return {"digest": list(zip(tensors, digests(tensors.values()), strict=True))}
        except Exception as error:
            return failure(error)

    def load(self, arm: str, flipped: bool) -> dict[str, Any]:
        """Load the shape's weights into an arm's module, or the same with every tensor's rows in reverse order."""
        try:
            with torch.inference_mode(False):
                weights = flipped_weights(self.template) if flipped else self.template.state_dict()
                self.arms[arm].weights.load_state_dict(weights)
            return {}
        except Exception as error:
            return failure(error)

    def settle(self) -> dict[str, Any]:
        """Note how many threads and processes run now, and the candidate's weights, before anything is timed."""
        # What the harness itself starts later is started now: the fingerprint's compiler, then torch's thread pool.
        tokens, width = self.shape.tokens, self.shape.d_model
        Fingerprinter(tokens * width, tokens, torch_dtype(self.shape.dtype), self.device, 0, 1)
        candidates = [arm for arm in self.arms.values() if arm.kind == "candidate" and arm.weights is not None]
        self._weights = {arm.name: LentWeights(arm.weights) for arm in candidates}
        torch.ones(POOL_ELEMENTS).mul_(2)
        self._running = thread_count(), child_count()
        return {}

    def inspect(self) -> dict[str, Any]:
        """Return what was tampered with since this shape began, and what of the process changed while timing."""
        # Before the digests below take memory of their own.
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        findings = self.state.changes()
        threads, children = 0, 0
        if self._running:
            threads, children = thread_count() - self._running[0], child_count() - self._running[1]
        if threads > 0:
            findings.append(f"{threads} threads were started while the candidate was timed and still run")
        if children > 0:
            findings.append(f"{children} processes were started while the candidate was timed and still run")
        for name, weights in self._weights.items():
            findings += [f"the weights of {name} changed while it was timed: {line}" for line in weights.changes()]
        return {"findings": findings, "peak_bytes": peak}

    def drop(self, arm: str) -> dict[str, Any]:
        """Let go of an arm."""
        self.arms.pop(arm).drop()
        return {}

    def _plain(self, arm: Arm, case: Case) -> Tensor:
        """Call on poisoned memory and check what came back besides the values."""
        x, mask = draw_case(case, self.shape, self.device)
        kept = digest(x), None if mask is None else digest(mask)
        with torch.inference_mode():
            poison(x)  # last, or the work above would take the poisoned blocks
            out = arm.forward(x, mask)
        if fault := output_fault(out, x, mask):
            raise WrongKind(fault)
        if kept != (digest(x), None if mask is None else digest(mask)):
            raise WrongKind("the call changed its input x or its mask")
        return out

    def _promised(self, arm: Arm, case: Case, promise: str) -> Tensor:
        with torch.inference_mode():
            out, x, mask = run_trial(promise, arm, Inputs(self.shape, self.device, case.seed, case.padding))
            if fault := output_fault(out, x, mask):
                raise WrongKind(fault)
            return out


def flipped_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return other weights for a model, the same wherever they are made: its own, every tensor's rows reversed."""
    return {name: tensor.detach().flip(0) for name, tensor in model.state_dict().items()}


def failure(error: Exception) -> dict[str, Any]:
    """Return how a call failed: wrong output, or the status and reason of what it raised."""
    from rooflane.eval.worker.failures import is_oom, told

    if isinstance(error, WrongKind):
        return {"wrong": str(error)}
    return {"failed": "oom" if is_oom(error) else "error", "reason": told(error)}
