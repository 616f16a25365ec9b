"""A model's weights as a family reads them: packed copies that follow the originals, or the originals themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rooflane.families.runtime.watch import ModelWatch

# What a refresh found: the same weights, others, or weights that the packed number type cannot hold.
UNCHANGED, CHANGED, UNFIT = 0, 1, 2


class PackedWeights:
    """Hold what `pack(model)` returns, updated in place because captured graphs read the same memory.

    `obstacle(model)` returns why the packed number type cannot hold the weights or what they compute, or None. A
    forward must then use another path; `refresh` says so and a warning tells the user, once for each obstacle.
    """

    def __init__(
        self,
        model: nn.Module,
        pack: Callable[[nn.Module], dict[str, Tensor]],
        obstacle: Callable[[nn.Module], str | None] = lambda model: None,
    ) -> None:
        self._model = model
        self._pack = pack
        self._obstacle = obstacle
        self._watch = ModelWatch(model)
        self._unfit: str | None = None
        with torch.no_grad():
            self.tensors = pack(model)
            self._judge()

    def refresh(self) -> int:
        """Pack again if the model's weights may have changed since the last check; return what was found.

        Raises `StructureChanged` when the model computes another function now, `RuntimeError` when the weights changed
        and a CUDA graph is being captured.
        """
        if self._watch.changed():
            if next(iter(self.tensors.values())).is_cuda and torch.cuda.is_current_stream_capturing():
                self._watch.repeat()
                raise RuntimeError(
                    "the weights were changed after the last call of this forward: call it once before capturing it "
                    "into a graph, so that it packs them"
                )
            with torch.no_grad():
                for name, fresh in self._pack(self._model).items():
                    self.tensors[name].copy_(fresh)
                self._judge()
            return UNFIT if self._unfit else CHANGED
        return UNFIT if self._unfit else UNCHANGED

    def _judge(self) -> None:
        before, self._unfit = self._unfit, self._obstacle(self._model)
        if self._unfit and not before:
            warnings.warn(f"{self._unfit}; calls take a slower path in the model's own number type", stacklevel=2)


class LiveWeights:
    """Hold what `view(model)` returns, views of the model's own memory, so that every write to it is seen."""

    def __init__(self, model: nn.Module, view: Callable[[nn.Module], dict[str, Tensor]]) -> None:
        self._model = model
        self._view = view
        self._watch = ModelWatch(model)
        with torch.no_grad():
            self.tensors = view(model)

    def refresh(self) -> int:
        """Take the views again if a tensor may be another one; raises `StructureChanged`."""
        if not self._watch.changed():
            return UNCHANGED
        with torch.no_grad():
            self.tensors = self._view(self._model)
        return CHANGED
