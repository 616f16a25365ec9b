"""The promises to the caller, each as a way to call a forward; the judge compares what comes out.

A trial draws its inputs from a case, does to the caller's objects what an ordinary caller might do, and returns the
output that must equal the reference's on the case named beside it in `PROMISES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class OutputChanged(Exception):
    """An output whose bytes changed while the caller held it; the text says after which call."""


@dataclass(frozen=True)
class Promise:
    """One promise: the finding when it is broken, the kind of case the output must match, and where it applies."""

    finding: str
    kind: str = "drawn"
    cuda_only: bool = False
    # A call may raise here: an exception is noted and is not a broken promise.
    may_refuse: bool = False
    # The trial may build the arm a second time, which may compile.
    builds: bool = False
    # The output must match the reference under other weights.
    other_weights: bool = False


# How many outputs a caller keeps: more than any small ring of buffers holds.
KEPT_CALLS = 9
# Between the seeds of their inputs: more than all promises together take.
KEPT_SEEDS = 100
# The promises about a layout share one case, so that the reference answers once for all of them.
LAYOUT = "ragged"

PROMISES: dict[str, Promise] = {
    "kept output": Promise("the next call overwrites the output"),
    "kept outputs": Promise(f"a later call overwrites one of {KEPT_CALLS} kept outputs"),
    "input updated": Promise("an input updated in place is not seen", kind="swapped"),
    "elements updated": Promise("a few elements changed in place are not seen", kind="nudged"),
    "mask updated": Promise("a mask changed in place is not seen", kind="halved"),
    "new address": Promise("an input seen before at another address gives another output"),
    "reused address": Promise("a new input at the address of a freed one is not seen", kind="swapped"),
    "other strides": Promise("an input of other strides gives another output", LAYOUT, may_refuse=True),
    "odd offset": Promise("an input at an odd storage offset gives another output", LAYOUT, may_refuse=True),
    "sliced input": Promise("a slice of a longer sequence gives another output", LAYOUT, may_refuse=True),
    "strided mask": Promise("a mask of other strides gives another output", LAYOUT, may_refuse=True),
    "expanded mask": Promise("one mask expanded over the batch gives another output", "one mask", may_refuse=True),
    "other stream": Promise("a call on a stream other than the first call's gives another output", cuda_only=True),
    "weights moved": Promise("weights moved to another device or dtype and back are not used"),
    "weights loaded": Promise("weights loaded into the module are not used", other_weights=True),
    "weights updated": Promise("weights changed in place are not used", other_weights=True),
    "beside a second model": Promise("a second model of the shape changes the first one's output", builds=True),
    "second model": Promise(
        "a second model of the shape does not use its own weights", builds=True, other_weights=True
    ),
}
IS_BASELINE = "its operations are the baseline's own, one for one"
UNSTABLE = "three calls on one input give different bytes"


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return other weights for a model, the same wherever they are made: its own, every parameter's rows reversed."""
    # Not buffers: a table of positions is no weight. Tied weights stand under each of their names.
    weights = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.dim()}
    return {
        name: tensor.detach().flip(0) if name in weights else tensor.detach()
        for name, tensor in model.state_dict().items()
    }


class Inputs:
    """Draws the inputs of one trial.

    `template` is the shape's own model. `second` returns another model of the shape, built like the arm but with
    `other_weights`; every trial of an arm gets the same one.
    """

    def __init__(
        self, shape: Shape, device: torch.device, seed: int, padding: float, template: nn.Module,
        second: Callable[[], Arm],
    ) -> None:  # fmt: skip
        self.shape = shape
        self.device = device
        self.seed = seed
        self.padding = padding
        self.template = template
        self.second = second

    def draw(self, kind: str = "drawn", further: int = 0) -> tuple[Tensor, Tensor]:
        """Return input and mask of the trial's seed, or of the seed so many further on."""
        from rooflane.eval.check.cases import Case, draw_case

        return draw_case(Case(self.seed + further, self.padding, kind), self.shape, self.device)


def run_trial(name: str, arm: Arm, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what the promise `name` allows a caller to do; return the output and the input and mask it must match.

    Raises `OutputChanged` for an output that did not stay as it was returned.
    """
    return TRIALS[name](arm, inputs)


@contextmanager
def _as_a_caller() -> Iterator[None]:
    """Make tensors as a caller does: ordinary ones, which have a version, unlike inference tensors."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield


def _kept_output(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    other, _ = inputs.draw("swapped")
    first = arm.forward(x, mask)
    arm.forward(other, mask)
    return first, x, mask


def _kept_outputs(arm: Arm, inputs: Inputs) -> tuple:
    from rooflane.eval.check.tamper import digest

    x, mask = inputs.draw()
    kept = [arm.forward(x, mask)]
    marks = [digest(kept[0])]
    for call in range(1, KEPT_CALLS):
        # Another input for every call: equal outputs would hide that they share memory.
        kept.append(arm.forward(*inputs.draw(further=KEPT_SEEDS * call)))
        marks.append(digest(kept[-1]))
    changed = [str(call + 1) for call in range(KEPT_CALLS) if digest(kept[call]) != marks[call]]
    if changed:
        raise OutputChanged(f"after call {KEPT_CALLS}, the output of call {', '.join(changed)} was no longer the same")
    return kept[0], x, mask


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
    with _as_a_caller():
        again, mask_again = x.clone(), mask.clone()
    # The first address gets new contents: an output cached by that address is now wrong.
    x.copy_(other)
    return arm.forward(again, mask_again), again, mask_again


def _reused_address(arm: Arm, inputs: Inputs) -> tuple:
    import torch

    first, mask = inputs.draw()
    other, _ = inputs.draw("swapped")
    memory = first.untyped_storage()

    def place() -> Tensor:
        """Return a new tensor, with a version of its own, in the memory of the first."""
        return torch.empty(0, dtype=other.dtype, device=other.device).set_(memory, 0, other.shape, other.stride())

    with _as_a_caller():
        x = place()
    arm.forward(x, mask)
    with _as_a_caller():
        # What an allocator does with freed memory, made certain: the same address, another tensor, other contents.
        del x
        first.copy_(other)
        x = place()
    return arm.forward(x, mask), x, mask


def _other_strides(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw(LAYOUT)
    with _as_a_caller():
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return arm.forward(x, mask), x, mask


def _odd_offset(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw(LAYOUT)
    with _as_a_caller():
        memory = x.new_full((x.numel() + 1,), float("nan"))
        x = memory[1:].view(x.shape).copy_(x)
    return arm.forward(x, mask), x, mask


def _sliced_input(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw(LAYOUT)
    batch, length, width = x.shape
    with _as_a_caller():
        # What lies behind each sequence is no part of it: NaN shows whoever reads on.
        longer = x.new_full((batch, length + 1, width), float("nan"))
        x = longer[:, :length].copy_(x)
    return arm.forward(x, mask), x, mask


def _strided_mask(arm: Arm, inputs: Inputs) -> tuple:
    import torch

    x, mask = inputs.draw(LAYOUT)
    with _as_a_caller():
        # Between two elements lies what would be wrong in their place.
        mask = torch.stack([mask, ~mask], dim=2)[:, :, 0]
    return arm.forward(x, mask), x, mask


def _expanded_mask(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw("one mask")
    with _as_a_caller():
        # Behind the one row lies what would be wrong for the other sequences.
        memory = ~mask
        memory[0] = mask[0]
        mask = memory[:1].expand(mask.shape)
    return arm.forward(x, mask), x, mask


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


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return a module's parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def _weights_moved(arm: Arm, inputs: Inputs) -> tuple:
    import torch

    from rooflane.eval.check.outputs import poison

    x, mask = inputs.draw()
    arm.forward(x, mask)
    with torch.inference_mode(False):
        held = [tensor for tensor in _tensors(arm.weights) if tensor.is_floating_point()]
        dtypes = {tensor.dtype for tensor in held}
        # Of the same sizes as the weights, without keeping their memory.
        sizes = [tensor.detach().new_empty([1] * tensor.dim()).expand(tensor.shape) for tensor in held]
        del held
        # A CPU has no second device: conversion to a wider dtype and back also replaces the memory.
        arm.weights.to("cpu" if inputs.device.type == "cuda" else torch.float64)
        for size in sizes:
            poison(size, blocks=1)
        arm.weights.to(device=inputs.device, dtype=dtypes.pop() if len(dtypes) == 1 else None)
    return arm.forward(x, mask), x, mask


def _weights_loaded(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    with _as_a_caller():
        arm.weights.load_state_dict(other_weights(inputs.template))
    return arm.forward(x, mask), x, mask


def _weights_updated(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    with _as_a_caller():
        # In the module's own tensors, whatever they are called: loaded once, read out, put in place one by one.
        held = _tensors(arm.weights)
        arm.weights.load_state_dict(other_weights(inputs.template))
        wanted = [tensor.detach().clone() for tensor in held]
        arm.weights.load_state_dict(inputs.template.state_dict())
    # On another input: whether an answer is kept by its input is what other promises ask.
    arm.forward(*inputs.draw("swapped"))
    with _as_a_caller():
        for tensor, values in zip(held, wanted, strict=True):
            tensor.copy_(values)
    return arm.forward(x, mask), x, mask


def _beside_a_second_model(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    other = inputs.second()
    arm.forward(x, mask)
    other.forward(x, mask)
    return arm.forward(x, mask), x, mask


def _second_model(arm: Arm, inputs: Inputs) -> tuple:
    x, mask = inputs.draw()
    other = inputs.second()
    other.forward(x, mask)
    arm.forward(x, mask)
    return other.forward(x, mask), x, mask


TRIALS: dict[str, Trial] = {
    "kept output": _kept_output,
    "kept outputs": _kept_outputs,
    "input updated": _input_updated,
    "elements updated": _elements_updated,
    "mask updated": _mask_updated,
    "new address": _new_address,
    "reused address": _reused_address,
    "other strides": _other_strides,
    "odd offset": _odd_offset,
    "sliced input": _sliced_input,
    "strided mask": _strided_mask,
    "expanded mask": _expanded_mask,
    "other stream": _other_stream,
    "weights moved": _weights_moved,
    "weights loaded": _weights_loaded,
    "weights updated": _weights_updated,
    "beside a second model": _beside_a_second_model,
    "second model": _second_model,
}
