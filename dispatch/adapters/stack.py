"""The blocks of a model in a row, served in place: the first block's call runs all of them."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.dispatch.adapters.blocks import DispatchedBlocks
from rooflane.dispatch.adapters.checks import InPlace
from rooflane.dispatch.adapters.mapping import BlockMapping, Call, OptimizeError, Request, Sizes, Unserved

# transformers' record of what the call in progress collects from every block.
CAPTURING = "transformers.utils.output_capturing"


class Blocks(nn.Module):
    """Hold a model's own list of blocks, so that what is changed in the one shows in the other."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.training = layers.training

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks' own code in a row."""
        out: Any = x
        for block in self.layers:
            out = own_forward(block, out[0] if isinstance(out, tuple) else out, *args, **kwargs)
        return out


def own_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the code of a block's class, whatever stands in its place."""
    return type(block).forward(block, *args, **kwargs)


class Passing(threading.local):
    """What the first block of a stack returned in this thread, on its way through the later ones.

    `out` is the output, None where the blocks run their own code; `result` is how the first block returned it, `given`
    what it was given.
    """

    out: Tensor | None = None
    result: Any = None
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def clear(self) -> None:
        """Hold nothing: the memory of an output is its caller's."""
        self.__dict__.clear()

    def __reduce__(self) -> tuple[type[Passing], tuple[()]]:
        """Copy nothing: a copy serves calls of its own."""
        return Passing, ()


class DispatchedStack(DispatchedBlocks):
    """A stack of blocks inside a model; each block's `forward` is replaced by a `Step` of it."""

    def __init__(self, layers: nn.Module, request: Request, mapping: BlockMapping) -> None:
        self.__dict__["_passing"] = Passing()
        super().__init__(Blocks(layers), request, mapping=replace(mapping, layers="layers"))

    def describe(self, model: nn.Module) -> Sizes:
        """Return the stack's sizes; raises `OptimizeError` when the mapping or the function does not fit."""
        for index, block in enumerate(model.layers):
            own = vars(block).get("forward")
            if own is not None and not isinstance(own, InPlace):
                raise OptimizeError(f"block {index} has a forward of its own in the place of its class's")
        return super().describe(model)

    def confirm(self) -> None:
        """Try the mapping, and put a step of this stack on every block."""
        super().confirm()
        for index, block in enumerate(self._model.layers):
            own = vars(block).get("forward")
            if own is None or (own.stack, own.block, own.index) != (self, block, index):
                block.forward = Step(self, block, index)

    def sample(self) -> nn.Module:
        """Return the first and the last block: describe() has found all of one class, size and form."""
        layers = self._model.layers
        return Blocks(nn.ModuleList([layers[0], layers[-1]]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the first block must return, so that the model gets the whole stack's output in the end."""
        passing = self._passing
        passing.clear()
        result = self._serve(*args, **kwargs)
        if passing.out is None or self._sizes.num_layers == 1:
            passing.clear()
        else:
            passing.result, passing.given = result, (args, kwargs)
        return result

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """Return the call as the families take it."""
        capturing = sys.modules.get(CAPTURING)
        if capturing is not None and capturing._active_collector.get():
            raise Unserved("outputs", "it collects hidden states or attentions of every block")
        return self._mapping.read(self._block, self._causal_alone(), *args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first block's own code; the later ones run theirs."""
        return own_forward(self._block, *args, **kwargs)

    def wrap(self, out: Tensor) -> Any:
        """Return the output the way a block does, and let the later blocks pass it on."""
        self._passing.out = out
        return super().wrap(out)

    def later(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the stack's output on, or run the block's own code where the first block did so."""
        passing = self._passing
        if passing.out is None:
            return own_forward(block, *args, **kwargs)
        first_args, first_kwargs = passing.given
        same = len(args) == len(first_args) and kwargs.keys() == first_kwargs.keys()
        pairs = [*zip(args, first_args, strict=False), *((kwargs[name], first_kwargs.get(name)) for name in kwargs)]
        passed = [now for now, before in pairs if now is not before]
        if not same or len(passed) != 1 or passed[0] is not passing.out:
            passing.clear()
            raise OptimizeError(
                f"block {index} got another input than the output of the block before it, or other arguments than the "
                "first block. The whole stack was computed in the first block's call, so this call cannot be right: "
                "undo with rooflane.dispatch.restore(model), or run each call of a model to its end"
            )
        result = passing.result
        if index == self._sizes.num_layers - 1:
            passing.clear()
        return result

    @property
    def _block(self) -> nn.Module:
        return self._model.layers[0]

    def _causal_alone(self) -> bool:
        causal = self._mapping.causal
        return causal(self._block) if callable(causal) else causal


class Step(InPlace):
    """A block's forward inside a served stack."""

    def __init__(self, stack: DispatchedStack, block: nn.Module, index: int) -> None:
        self.stack, self.block, self.index = stack, block, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stack in the first block's call, and pass its output on in the later ones."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return own_forward(self.block, *args, **kwargs)
        if self.index == 0:
            return self.stack.forward(*args, **kwargs)
        return self.stack.later(self.index, self.block, args, kwargs)
