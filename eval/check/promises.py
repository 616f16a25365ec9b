"""The promises to the caller, each as a way to call a forward; the judge compares what comes out.

A trial draws its inputs from a case, does to the caller's objects what an ordinary caller might do, and returns the
output that must equal the reference's on the case named beside it in `PROMISES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.shapes import Shape

    Trial = Callable[["Arm", "Inputs"], tuple[Tensor, Tensor, Tensor | None]]


class Arm(Protocol):
    """A built forward and the module that holds its weights."""

    forward: Callable[[Tensor, Tensor | None], Tensor]
    weights: nn.Module


@dataclass(frozen=True)
class Promise:
    """One promise: the finding when it is broken, the kind of case the output must match, and where it applies."""

    finding: str
    kind: str = "drawn"
    cuda_only: bool = False
    # A call may raise here: an exception is noted and is not a broken promise.
    may_refuse: bool = False


PROMISES: dict[str, Promise] = {
    "kept output": Promise("the next call overwrites the output"),
    "input updated": Promise("an input updated in place is not seen", kind="swapped"),
    "elements updated": Promise("a few elements changed in place are not seen", kind="nudged"),
    "mask updated": Promise("a mask changed in place is not seen", kind="halved"),
    "new address": Promise("an input seen before at another address gives another output"),
    "other strides": Promise("an input of other strides gives another output", may_refuse=True),
    "other stream": Promise("a call on a stream other than the first call's gives another output", cuda_only=True),
    "weights moved": Promise("weights moved to another device or dtype and back are not used"),
    "weights loaded": Promise("weights loaded into the module are not used"),
}
IS_BASELINE = "its operations are the baseline's own, one for one"
UNSTABLE = "three calls on one input give different bytes"


class Inputs:
    """Draws the inputs of one trial."""

    def __init__(self, shape: Shape, device: torch.device, seed: int, padding: float) -> None:
        self.shape = shape
        self.device = device
        self.seed = seed
        self.padding = padding

    def draw(self, kind: str = "drawn") -> tuple[Tensor, Tensor]:
        """Return input and mask of the trial's seed."""
        from rooflane.eval.check.cases import Case, draw_case

        return draw_case(Case(self.seed, self.padding, kind), self.shape, self.device)


def run_trial(name: str, arm: Arm, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what the promise `name` allows a caller to do; return the output and the input and mask it must match."""
    return TRIALS[name](arm, inputs)


def _kept_output(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    other, _ = inputs.draw("swapped")
    first = arm.forward(x, mask)
    arm.forward(other, mask)
    return first, x, mask


def _input_updated(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    other, _ = inputs.draw("swapped")
    arm.forward(x, mask)
    x.copy_(other)
    return arm.forward(x, mask), x, mask


def _elements_updated(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    nudged, _ = inputs.draw("nudged")
    arm.forward(x, mask)
    x.copy_(nudged)
    return arm.forward(x, mask), x, mask


def _mask_updated(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    _, half = inputs.draw("halved")
    arm.forward(x, mask)
    mask.copy_(half)
    return arm.forward(x, mask), x, mask


def _new_address(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    other, _ = inputs.draw("swapped")
    arm.forward(x, mask)
    again, mask_again = x.clone(), mask.clone()
    # The first address gets new contents: an output cached by that address is now wrong.
    x.copy_(other)
    return arm.forward(again, mask_again), again, mask_again


def _other_strides(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    arm.forward(x, mask)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    return arm.forward(turned, mask), turned, mask


def _other_stream(arm: Arm, inputs: Inputs) -> tuple:
    import torch

    x, mask = inputs.draw()
    arm.forward(x, mask)
    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        out = arm.forward(x, mask)
        # The copy runs on the same stream, so it reads what a caller on that stream would read.
        out = out.clone()
    here.wait_stream(stream)
    return out, x, mask


def _weights_moved(arm: Arm, inputs: Inputs) -> tuple:
    import torch

    from rooflane.eval.check.outputs import poison

    x, mask = inputs.draw()
    arm.forward(x, mask)
    # From the state_dict: a class may hold its weights as buffers.
    dtypes = {tensor.dtype for tensor in arm.weights.state_dict().values()}
    with torch.inference_mode(False):
        # A CPU has no second device: conversion to a wider dtype and back also replaces the memory.
        arm.weights.to("cpu" if inputs.device.type == "cuda" else torch.float64)
        for tensor in arm.weights.state_dict().values():
            poison(tensor, blocks=1)
        arm.weights.to(device=inputs.device, dtype=dtypes.pop() if len(dtypes) == 1 else None)
    return arm.forward(x, mask), x, mask


def _weights_loaded(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    return arm.forward(x, mask), x, mask


TRIALS: dict[str, Trial] = {
    "kept output": _kept_output,
    "input updated": _input_updated,
    "elements updated": _elements_updated,
    "mask updated": _mask_updated,
    "new address": _new_address,
    "other strides": _other_strides,
    "other stream": _other_stream,
    "weights moved": _weights_moved,
    "weights loaded": _weights_loaded,
}
