"""Arms: eager, controls and candidates of one shape, each on a model of its own with the same weights."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rooflane.eval.record.records import ArmId, Status
from rooflane.eval.worker.candidates import NoLoadableWeights, Plan, describe_error, is_oom
from rooflane.eval.worker.problem_candidates import Unsupported
from rooflane.eval.worker.workload import Workload, workload_of
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.dispatch import Profile

    Forward = Callable[..., Any]


@dataclass
class Arm:
    """One thing that is timed, as its worker holds it."""

    id: ArmId
    plan: Plan = field(default_factory=Plan)
    forward: Forward | None = None
    weights: nn.Module | None = None
    status: Status = "ok"
    reason: str = ""
    setup_s: float | None = None
    note: str = ""
    # Builds on another model as the arm was built; candidates have it, for the second model of a shape.
    make: Callable[[nn.Module], tuple[Forward, nn.Module]] | None = None
    second: Arm | None = None

    def fail(self, error: Exception, doing: str) -> None:
        """Record that the arm raised, and release what it holds."""
        if isinstance(error, NoLoadableWeights):
            self.status, self.reason = "refused", str(error)
        else:
            self.status = "oom" if is_oom(error) else "error"
            self.reason = f"{doing}: {describe_error(error)}"
        self.drop()

    def drop(self) -> None:
        """Release the built forward and its model."""
        self.forward = self.weights = self.make = self.second = None


def build_arm(
    wanted: ArmId,
    reference: nn.Module | None,
    shape: Shape,
    device: torch.device,
    profile: Profile,
    rules: Any,
    seed: int,
    *,
    call: bool = True,
) -> Arm:
    """Build a control or candidate on a model of its own and make its first call; raises nothing.

    The model is drawn from `seed`, or is a copy of `reference` where one is given. `setup_s` runs from the build to
    the end of the first call, which is where compilation and capture happen; `call=False` leaves that call out.
    """
    arm, name = Arm(wanted), wanted.name
    workload = workload_of(shape, device)
    control = None if wanted.kind in ("candidate", "copy") else workload.control(name)
    try:
        if control:
            arm.plan = Plan(contract=control.contract, unsupported=control.supports(device.type))
        else:
            arm.plan = workload.plan(name, profile, rules)
        if arm.plan.unsupported:
            arm.status, arm.reason = "unsupported", arm.plan.unsupported
            return arm
        # A copy on the device is quick; drawing the weights of a large model on the CPU takes seconds.
        model = workload.model(seed) if reference is None else copy.deepcopy(reference)
        before = perf_counter()
        if control:
            arm.forward, arm.weights = control.build(model, shape, device), model
        else:
            arm.forward, arm.weights = workload.build(name, arm.plan, model)
            arm.note = workload.note
            arm.make = partial(workload.build, name, arm.plan, again=True)
        if call:
            first_call(arm.forward, workload, seed)
        arm.setup_s = perf_counter() - before
        if wanted.kind == "candidate" and workload.shares_weights:
            weights = (workload.model(seed) if reference is None else reference).state_dict()
            require_weights(arm, weights, workload, call=call)
    except Unsupported as error:
        arm.status, arm.reason = "unsupported", str(error)
    except Exception as error:  # a candidate may raise anything; its row says what
        arm.fail(error, "building it and calling it once")
    return arm


def require_weights(arm: Arm, weights: dict[str, Tensor], workload: Workload, *, call: bool) -> None:
    """Raise `NoLoadableWeights` where a built candidate no longer takes the baseline's `weights`.

    A module that holds each of them by name and shape takes them: whether it then uses them is a promise, checked with
    the others. One that holds something else must load them, and with `call` its output must follow what is loaded.
    """
    held = {name: tensor.shape for name, tensor in arm.weights.state_dict().items()}
    lost = [name for name, tensor in weights.items() if held.get(name) != tensor.shape]
    if not lost:
        return
    more = f", and {len(lost) - 1} others are gone" if len(lost) > 1 else ""
    what = f"once built, its state_dict has no {lost[0]} of shape {list(weights[lost[0]].shape)}{more}"
    inputs = workload.draw(workload.timed_case(0))
    outputs = []
    for loaded in ({name: tensor.flip(0) for name, tensor in weights.items()}, weights):
        try:
            with torch.inference_mode(False):
                arm.weights.load_state_dict(loaded)
        except Exception as error:  # what a module of the user's raises
            raise NoLoadableWeights(f"{what}, and load_state_dict raises {describe_error(error)}") from None
        if call:
            with torch.inference_mode():
                outputs.append(workload.pack(arm.forward(*inputs)).clone())
    if call and torch.equal(*outputs):
        raise NoLoadableWeights(f"{what}, and its output stays the same whatever load_state_dict loads")


def first_call(forward: Forward, workload: Workload, seed: int) -> float:
    """Call a forward once on an ordinary input and return the seconds until the device was done."""
    inputs = workload.draw(workload.timed_case(seed))
    before = perf_counter()
    with torch.inference_mode():
        forward(*inputs)
    if workload.device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - before


def free_memory(device: torch.device) -> None:
    """Drop compiled code, captured graphs and cached blocks of arms that are no longer held."""
    # Without the reset, compiling the next shape counts against one recompile limit and ends in a fallback to eager.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
