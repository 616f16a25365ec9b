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

from rooflane.baseline import (
    CONTROLS,
    PROBES,
    BaselineTransformer,
    build_baseline,
    config_of,
    generate_random_case,
    torch_dtype,
)
from rooflane.eval.record.records import ArmId, Status
from rooflane.eval.worker.candidates import (
    NoLoadableWeights,
    Plan,
    build_candidate,
    describe_error,
    is_oom,
    parse_candidate,
    plan_candidate,
)
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.dispatch import Profile

    Forward = Callable[[Tensor, Tensor | None], Tensor]


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
    reference: BaselineTransformer | None,
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
    control = None if wanted.kind in ("candidate", "copy") else CONTROLS.get(name) or PROBES[name]
    try:
        if control:
            arm.plan = Plan(contract=control.contract, unsupported=control.supports(device.type))
        else:
            candidate = parse_candidate(name)
            arm.plan = plan_candidate(candidate, shape, profile, rules)
        if arm.plan.unsupported:
            arm.status, arm.reason = "unsupported", arm.plan.unsupported
            return arm
        # A copy on the device is quick; drawing the weights of a large model on the CPU takes seconds.
        model = build_baseline(shape, device, seed) if reference is None else copy.deepcopy(reference)
        before = perf_counter()
        if control:
            arm.forward, arm.weights = control.build(model, shape, device), model
        else:
            arm.forward, arm.weights = build_candidate(candidate, arm.plan, model, shape, device)
            arm.make = partial(build_candidate, candidate, arm.plan, shape=shape, device=device, again=True)
        if call:
            first_call(arm.forward, shape, device, seed)
        arm.setup_s = perf_counter() - before
        if wanted.kind == "candidate":
            weights = (build_baseline(shape, device, seed) if reference is None else reference).state_dict()
            require_weights(arm, weights, shape, device, call=call)
    except Exception as error:  # a candidate may raise anything; its row says what
        arm.fail(error, "building it and calling it once")
    return arm


def require_weights(arm: Arm, weights: dict[str, Tensor], shape: Shape, device: torch.device, *, call: bool) -> None:
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
    case = generate_random_case(config_of(shape), device, torch_dtype(shape.dtype), 0, shape.padding_ratio)
    outputs = []
    for loaded in ({name: tensor.flip(0) for name, tensor in weights.items()}, weights):
        try:
            with torch.inference_mode(False):
                arm.weights.load_state_dict(loaded)
        except Exception as error:  # what a module of the user's raises
            raise NoLoadableWeights(f"{what}, and load_state_dict raises {describe_error(error)}") from None
        if call:
            with torch.inference_mode():
                outputs.append(arm.forward(*case).clone())
    if call and torch.equal(*outputs):
        raise NoLoadableWeights(f"{what}, and its output stays the same whatever load_state_dict loads")


def first_call(forward: Forward, shape: Shape, device: torch.device, seed: int) -> float:
    """Call a forward once on an ordinary input and return the seconds until the device was done."""
    case = generate_random_case(config_of(shape), device, torch_dtype(shape.dtype), seed, shape.padding_ratio)
    before = perf_counter()
    with torch.inference_mode():
        forward(*case)
    if device.type == "cuda":
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
