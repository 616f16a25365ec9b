"""The built forwards of one module: one for each shape it is called with, the least recently used let go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rooflane.dispatch.route import Route

if TYPE_CHECKING:
    from rooflane.families.spec import Forward

# (batch_size, seq_len, causal)
Key = tuple[int, int, bool]


@dataclass(frozen=True)
class Built:
    """A forward and the route that chose it; or, with `forward` None, the reason why there is none."""

    forward: Forward | None
    route: Route | None = None
    reason: str = ""


class BuiltForwards:
    """Hold at most `size` forwards; each keeps packed weights and, on CUDA, graphs of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Key, Built] = OrderedDict()

    def get(self, key: Key) -> Built | None:
        """Return the entry and note its use."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Key, entry: Built) -> None:
        """Add an entry; what is pushed out may still run on the device, so that is awaited before its memory goes."""
        self._entries[key] = entry
        if len(self._entries) > self.size:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._entries.popitem(last=False)

    def keys(self) -> list[Key]:
        """Return the keys, least recently used first."""
        return list(self._entries)

    def __getstate__(self) -> dict[str, object]:
        """Leave the forwards out of copies and pickles: they hold graphs and device memory of their own."""
        return {"size": self.size, "_entries": OrderedDict()}
