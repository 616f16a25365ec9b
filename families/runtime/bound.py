"""The call path of forwards whose launches are bound once: check, allocate, launch, then look at the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooflane.families.runtime.call_checks import DTYPES, aligned, check_call
from rooflane.families.runtime.host import host_module
from rooflane.families.runtime.launch import current_device, raw_stream
from rooflane.families.runtime.staged import StreamGuard
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape

# (stream, x, mask, out): submit one call's work on a raw stream.
Launch = Callable[[int, Tensor, Tensor | None, Tensor], None]


def bound_forward(
    bind: Callable[[Tensor, Tensor | None, Tensor], Launch],
    weights: PackedWeights,
    shape: Shape,
    device: torch.device,
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`, its common calls in C++ where that can be compiled."""
    forward = BoundForward(bind, weights, shape, device)
    module = host_module()
    return forward if module is None else forward.in_cpp(module)


class BoundForward:
    """Run what `bind(x, mask, out)` returns, bound once for calls with a mask and once for calls without."""

    def __init__(
        self,
        bind: Callable[[Tensor, Tensor | None, Tensor], Launch],
        weights: PackedWeights,
        shape: Shape,
        device: torch.device,
    ) -> None:
        self._bind = bind
        self._weights = weights
        self._shape = shape
        # Where the weights lie: "cuda" without a number names whatever device is current.
        self._index = next(iter(weights.tensors.values())).device.index or 0
        self._guard = StreamGuard(device)
        self._launches: dict[bool, Launch] = {}

    def in_cpp(self, module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return this forward behind a call in C++, which hands on what is not bound yet and what is no plain call."""
        weight, shape = next(iter(self._weights.tensors.values())), self._shape
        return module.Call(
            self,
            self._launches,
            current_device,
            raw_stream,
            self._guard.enter,
            self._weights.refresh,
            weight.device,
            self._index,
            DTYPES[shape.dtype],
            (shape.batch_size, shape.seq_len, shape.d_model),
        )

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if current_device() != self._index:
            # A bound launch goes to the device that is current, wherever its tensors lie.
            with torch.cuda.device(self._index):
                return self(x, mask)
        check_call(x, mask, self._shape)
        x = aligned(x)
        mask = None if mask is None else aligned(mask)
        stream = raw_stream(self._index)
        self._guard.enter(stream)
        out = torch.empty_like(x)
        launch = self._launches.get(mask is not None)
        if launch is None:
            launch = self._launches[mask is not None] = self._first(x, mask, out)
        # The look at the weights' versions takes the host several us: the device works meanwhile, and in the rare call
        # that finds them changed it works again, behind the fresh weights.
        launch(stream, x, mask, out)
        if self._weights.refresh():
            launch(stream, x, mask, out)
        return out

    def _first(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Bind the first call of a kind, which compiles and loads."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first call of a built forward compiles it: call it once before capturing a graph")
        return self._bind(x, mask, out)
