"""What a candidate is lent: inputs, masks and weights, noted before its timed calls and looked at again behind them.

Verification sees what a call changes while it is watched; this sees what changes once the checks are over. On the
timed path nothing is added: all of it happens before a window's first call and after its last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rooflane.eval.check.tamper import digests

Lent = tuple[Tensor, Tensor | None]

# Bound here, before any candidate is imported.
_data_ptr = torch.Tensor.data_ptr
_equal = torch.equal


class LentInputs:
    """The inputs and masks of a window's calls, and the seed that each was drawn from."""

    def __init__(self, cases: Sequence[Lent], seeds: Sequence[int]) -> None:
        self._cases = cases
        self._seeds = seeds
        self._places = [_places(case) for case in cases]

    def change(self, draw: Callable[[int], Lent], chosen: int) -> str:
        """Return how a call changed what it was given, "" where nothing shows it.

        Every input's dtype, strides and address are compared, and the contents of one that `chosen` decides with a
        new draw of it.
        """
        for case, before in zip(self._cases, self._places, strict=True):
            if _places(case) != before:
                return "an input or mask has another dtype, shape or place in memory than before its call"
        number = random.Random(f"inputs {chosen}").randrange(len(self._cases))
        pairs = zip(self._cases[number], draw(self._seeds[number]), strict=True)
        if all(held is None or _equal(held, drawn) for held, drawn in pairs):
            return ""
        return "an input or mask has other contents than before its call"


class LentWeights:
    """A module's parameters and buffers at one moment: contents, dtype and place of each."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = self._look()

    def changes(self) -> list[str]:
        """Return how the module's weights differ from these, a line for each way with the first tensor it shows in."""
        now, found = self._look(), {}
        if now.keys() != self._held.keys():
            return ["names have come or gone"]
        for name, (contents, place) in self._held.items():
            if now[name][1][0] != place[0]:
                found.setdefault("dtype", f"{name} is {now[name][1][0]}, was {place[0]}")
            elif now[name][0] != contents:
                found.setdefault("contents", f"{name} holds other values")
            elif now[name][1] != place:
                found.setdefault("place", f"{name} lies elsewhere in memory")
        return list(found.values())

    def _look(self) -> dict[str, tuple[int, tuple]]:
        held = self._module.state_dict()
        marks = zip(held.items(), digests(held.values()), strict=True)
        return {name: (mark, _place(tensor)) for (name, tensor), mark in marks}


def _places(case: Lent) -> tuple:
    return tuple(None if part is None else _place(part) for part in case)


def _place(tensor: Tensor) -> tuple:
    """Return a tensor's dtype, shape, strides and address."""
    return tensor.dtype, tensor.shape, tensor.stride(), _data_ptr(tensor)
