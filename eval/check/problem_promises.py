"""The promises of a problem's candidate to its caller: those of a transformer's that hold for any module.

Inputs are a tuple of tensors and plain values. A trial does to the tensors what an ordinary caller might do, and
returns the output with the inputs it must match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rooflane.eval.check.promises import HELD, KEPT_CALLS, KEPT_SEEDS, PROMISES, OutputChanged, Promise, other_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Given = tuple[Any, ...]

_SHARED = (
    "kept output", "kept outputs", "input updated", "elements updated", "new address", "reused address", "other stream",
    "weights moved",
)  # fmt: skip
# What a caller may do, but what a module may refuse: weights that were matched by a seed have other names, so that
# loading them raises; the report notes it.
_MAY_REFUSE = ("weights loaded", "weights updated", "beside a second model", "second model")
PROBLEM_PROMISES: dict[str, Promise] = {
    **{name: PROMISES[name] for name in _SHARED},
    "other strides": Promise("an input of other strides gives another output", may_refuse=True),
    "odd offset": Promise("an input at an odd storage offset gives another output", may_refuse=True),
    **{name: replace(PROMISES[name], may_refuse=True) for name in _MAY_REFUSE},
}


@dataclass(frozen=True)
class Trial:
    """What a trial may use: an arm, inputs by kind and number, and the reference.

    `pack` makes one tensor of an output. `second` returns the arm built a second time with other weights.
    """

    arm: Any
    draw: Callable[..., Given]
    device: torch.device
    template: nn.Module
    second: Callable[[], Any]
    pack: Callable[[Any], Tensor]

    def call(self, inputs: Given) -> Any:
        """Call the arm."""
        return self.arm.forward(*inputs)


def run_problem_trial(name: str, trial: Trial) -> tuple[Any, Given]:
    """Do what the promise `name` allows a caller to do; return the output and the inputs it must match.

    Raises `OutputChanged` for an output that did not stay as it was returned.
    """
    return _TRIALS[name](trial)


@contextmanager
def _as_a_caller() -> Iterator[None]:
    """Make tensors as a caller does: ordinary ones, which have a version, unlike inference tensors."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield


def _map(change: Callable[[Tensor], Tensor], inputs: Given) -> Given:
    """Return inputs with every tensor changed."""
    import torch

    with _as_a_caller():
        return tuple(change(part) if isinstance(part, torch.Tensor) else part for part in inputs)


def _write(into: Given, values: Given) -> None:
    """Copy the contents of inputs into others, in place."""
    import torch

    for target, source in zip(into, values, strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source)


def _kept_output(trial: Trial) -> tuple[Any, Given]:
    inputs = trial.draw()
    first = trial.call(inputs)
    trial.call(trial.draw("swapped"))
    return first, inputs


def _kept_outputs(trial: Trial) -> tuple[Any, Given]:
    from rooflane.eval.check.tamper import digest

    inputs = trial.draw()
    kept = [trial.call(inputs)]
    marks = [digest(trial.pack(kept[0]))]
    for call in range(1, KEPT_CALLS):
        # Other inputs for every call: equal outputs would hide that they share memory.
        kept.append(trial.call(trial.draw(further=KEPT_SEEDS * call)))
        marks.append(digest(trial.pack(kept[-1])))
    changed = [str(call + 1) for call in range(KEPT_CALLS) if digest(trial.pack(kept[call])) != marks[call]]
    if changed:
        raise OutputChanged(f"after call {KEPT_CALLS}, the output of call {', '.join(changed)} was no longer the same")
    return kept[0], inputs


def _updated(kind: str) -> Callable[[Trial], tuple[Any, Given]]:
    def run(trial: Trial) -> tuple[Any, Given]:
        inputs = trial.draw()
        trial.call(inputs)
        _write(inputs, values := trial.draw(kind))
        # Plain values cannot be changed in place: a caller passes others.
        inputs = tuple(
            held if hasattr(held, "copy_") else value for held, value in zip(inputs, values, strict=True)
        )  # fmt: skip
        return trial.call(inputs), inputs

    return run


def _new_address(trial: Trial) -> tuple[Any, Given]:
    inputs = trial.draw()
    trial.call(inputs)
    again = _map(lambda part: part.clone(), inputs)
    # The first address gets new contents: an output cached by that address is now wrong.
    _write(inputs, trial.draw("swapped"))
    return trial.call(again), again


def _reused_address(trial: Trial) -> tuple[Any, Given]:
    import torch

    first, other = trial.draw(), trial.draw("swapped")

    def place(part: Tensor) -> Tensor:
        """Return a new tensor, with a version of its own, in the memory of another."""
        held = torch.empty(0, dtype=part.dtype, device=part.device)
        return held.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())

    inputs = _map(place, first)
    trial.call(inputs)
    # What an allocator does with freed memory, made certain: the same address, other tensors, other contents.
    del inputs
    with _as_a_caller():
        _write(first, other)
    inputs = tuple(
        held if hasattr(held, "copy_") else value for held, value in zip(_map(place, first), other, strict=True)
    )
    return trial.call(inputs), inputs


def _other_strides(trial: Trial) -> tuple[Any, Given]:
    import torch

    def turn(part: Tensor) -> Tensor:
        if part.dim() > 1:
            return part.transpose(-2, -1).contiguous().transpose(-2, -1)
        # Between two elements lies another one.
        return torch.stack([part, part.flip(0)], dim=-1)[..., 0] if part.dim() else part

    inputs = _map(turn, trial.draw())
    return trial.call(inputs), inputs


def _odd_offset(trial: Trial) -> tuple[Any, Given]:
    def shift(part: Tensor) -> Tensor:
        memory = part.new_zeros(part.numel() + 1)
        return memory[1:].view(part.shape).copy_(part)

    inputs = _map(shift, trial.draw())
    return trial.call(inputs), inputs


def _other_stream(trial: Trial) -> tuple[Any, Given]:
    import torch

    inputs = trial.draw()
    trial.call(inputs)
    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        out = trial.call(inputs)
        # The copies run on the same stream, so they read what a caller on that stream would read.
        out = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, out)
    here.wait_stream(stream)
    return out, inputs


def _weights_moved(trial: Trial) -> tuple[Any, Given]:
    import torch

    from rooflane.eval.check.outputs import poison

    inputs, weights = trial.draw(), trial.arm.weights
    trial.call(inputs)
    floats = [tensor for tensor in (*weights.parameters(), *weights.buffers()) if tensor.is_floating_point()]
    dtypes = {tensor.dtype for tensor in floats}
    with torch.inference_mode(False):
        if trial.device.type == "cuda":
            weights.to("cpu")
        elif len(dtypes) == 1:
            # A CPU has no second device: conversion to a wider dtype and back also replaces the memory.
            weights.to(torch.float64)
        for tensor in floats:
            poison(tensor.detach(), blocks=1)
        weights.to(device=trial.device, dtype=dtypes.pop() if len(dtypes) == 1 else None)
    return trial.call(inputs), inputs


def _weights_loaded(trial: Trial) -> tuple[Any, Given]:
    inputs = trial.draw()
    with _as_a_caller():
        trial.arm.weights.load_state_dict(other_weights(trial.template))
    return trial.call(inputs), inputs


def _weights_updated(trial: Trial) -> tuple[Any, Given]:
    inputs, weights = trial.draw(), trial.arm.weights
    with _as_a_caller():
        # In the module's own tensors, whatever they are called: loaded once, read out, put in place one by one.
        held = [*weights.parameters(), *weights.buffers()]
        weights.load_state_dict(other_weights(trial.template))
        wanted = [tensor.detach().clone() for tensor in held]
        weights.load_state_dict(trial.template.state_dict())
    trial.call(inputs)
    with _as_a_caller():
        for tensor, values in zip(held, wanted, strict=True):
            tensor.copy_(values)
    return trial.call(inputs), inputs


def _beside_a_second_model(trial: Trial) -> tuple[Any, Given]:
    inputs, other = trial.draw(), trial.second()
    trial.call(inputs)
    other.forward(*inputs)
    return trial.call(inputs), inputs


def _second_model(trial: Trial) -> tuple[Any, Given]:
    inputs, other = trial.draw(), trial.second()
    other.forward(*inputs)
    trial.call(inputs)
    return other.forward(*inputs), inputs


def _held_stream(trial: Trial) -> tuple[Any, Given]:
    import torch

    from rooflane.eval.check.held_stream import call_held

    inputs, other = trial.draw(), trial.draw("swapped")
    kept: list[Tensor] = []

    def draw(attempt: int) -> Given:
        # Where an earlier attempt left the answer in memory, two calls on other inputs overwrite it.
        for _ in range(2 * (attempt > 0)):
            trial.call(other)
        return inputs

    _, out = call_held(trial.arm.forward, draw, lambda out: kept.append(trial.pack(out).clone()))
    if not torch.equal(kept[-1], trial.pack(out)):
        raise OutputChanged("the output changed after its stream had passed it: work was left on another stream")
    return out, inputs


_TRIALS: dict[str, Callable[[Trial], tuple[Any, Given]]] = {
    "kept output": _kept_output,
    "kept outputs": _kept_outputs,
    "input updated": _updated("swapped"),
    "elements updated": _updated("nudged"),
    "new address": _new_address,
    "reused address": _reused_address,
    "other strides": _other_strides,
    "odd offset": _odd_offset,
    "other stream": _other_stream,
    HELD: _held_stream,
    "weights moved": _weights_moved,
    "weights loaded": _weights_loaded,
    "weights updated": _weights_updated,
    "beside a second model": _beside_a_second_model,
    "second model": _second_model,
}
