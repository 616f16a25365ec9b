"""The call path of forwards whose launches are bound once: check, allocate, launch, then check the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooflane.families.runtime.call_checks import DTYPES, aligned, check_call
from rooflane.families.runtime.host import host_module
from rooflane.families.runtime.launch import current_device, raw_stream
from rooflane.families.runtime.weights import CHANGED, UNFIT, PackedWeights
from rooflane.shapes import Shape

# A bound launch: `(stream, x, mask, out)` submits one call's work on a raw stream.
Launch = Callable[[int, Tensor, Tensor | None, Tensor], None]
# Binds the launch of calls like a sample `(x, mask, out)`.
Bind = Callable[[Tensor, Tensor | None, Tensor], Launch]
# A forward in the model's own number type.
Wide = Callable[[Tensor, Tensor | None], Tensor]


def bound_forward(
    bind: Bind, weights: PackedWeights, shape: Shape, device: torch.device, wide: Wide | None = None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`, its common calls in C++ where that is built.

    `wide` computes the calls while the weights do not fit the packed number type.
    """
    forward = BoundForward(bind, weights, shape, device, wide)
    module = host_module()
    return forward if module is None else forward.in_cpp(module)


class BoundForward:
    """Run the launch that `bind(x, mask, out)` returns: one for calls with a mask, one for calls without."""

    def __init__(
        self, bind: Bind, weights: PackedWeights, shape: Shape, device: torch.device, wide: Wide | None = None
    ) -> None:
        self._bind = bind
        self._wide = wide
        self._weights = weights
        self._shape = shape
        # The weights' device: "cuda" without a number means the current device, which changes.
        self._index = next(iter(weights.tensors.values())).device.index or 0
        self._guard = StreamGuard(device)
        self._launches: dict[bool, Launch] = {}

    def in_cpp(self, module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return this forward behind a call in C++, which passes on calls of other kinds and those not bound yet."""
        weight, shape = next(iter(self._weights.tensors.values())), self._shape
        return module.Call(
            self, self._launches, current_device, raw_stream, self._guard.enter, self._weights.refresh, weight.device,
            self._index, DTYPES[shape.dtype], (shape.batch_size, shape.seq_len, shape.d_model),
        )  # fmt: skip

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if current_device() != self._index:
            # A bound launch runs on the current device, not on that of its tensors.
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
        # The check of the weights' versions takes the host several us, during which the device works. In the rare case
        # of a change the call is launched again, with the new weights.
        launch(stream, x, mask, out)
        found = self._weights.refresh()
        if found == UNFIT and self._wide is not None:
            return self._wide(x, mask)
        if found == CHANGED:
            launch(stream, x, mask, out)
        return out

    def _first(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Bind the first call of a kind, which compiles and loads its kernels."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first call of a built forward compiles it: call it once before capturing a graph")
        return self._bind(x, mask, out)


class StreamGuard:
    """Order calls on different streams that share fixed memory: a new stream waits for the one before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: int | None = None

    def enter(self, stream: int) -> bool:
        """Note that the shared memory is now used on `stream`; return whether the note was made."""
        if stream != self._last:
            if torch.cuda.is_current_stream_capturing():
                # A graph under capture may wait for nothing outside it. Whoever captures it has waited.
                return False
            if self._last is not None:
                last = torch.cuda.ExternalStream(self._last, device=self._device)
                torch.cuda.current_stream(self._device).wait_stream(last)
            self._last = stream
        return True
