"""Run a forward from a CUDA graph: inputs staged into fixed memory, a fresh output every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rooflane.families.door import check_call
from rooflane.families.weights import PackedWeights
from rooflane.shapes import Shape

WARM_UP_CALLS = 3


@dataclass
class _Capture:
    """One captured graph and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    mask: Tensor | None
    out: Tensor


class CapturedForward:
    """Replay `forward(x, mask)` from a graph captured at the first call, one for calls with a mask, one without.

    The staging copy in and the clone out are what keep the caller's promises: nothing is keyed on the input's
    address, and no later call writes into an output already returned.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor | None], Tensor],
        weights: PackedWeights,
        shape: Shape,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._weights = weights
        self._shape = shape
        self._device = device
        self._captures: dict[bool, _Capture] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, self._shape)
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            # The graph's memory is shared by all callers: a new stream waits for the last one's replay and clone.
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream
        self._weights.refresh()
        capture = self._captures.get(mask is not None) or self._capture(x, mask)
        capture.x.copy_(x)
        if mask is not None:
            capture.mask.copy_(mask)
        capture.graph.replay()
        return capture.out.clone()

    def _capture(self, x: Tensor, mask: Tensor | None) -> _Capture:
        """Warm the forward up on a side stream, then capture it."""
        # Inference tensors could not be written outside inference mode: the staging memory must be ordinary.
        with torch.inference_mode(False), torch.no_grad():
            static_x = torch.zeros(x.shape, dtype=x.dtype, device=self._device)
            static_mask = None if mask is None else torch.ones(mask.shape, dtype=torch.bool, device=self._device)
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_CALLS):
                    self._forward(static_x, static_mask)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self._forward(static_x, static_mask)
        capture = _Capture(graph, static_x, static_mask, out)
        self._captures[mask is not None] = capture
        return capture


class DirectForward:
    """Run `forward(x, mask)` as it is, on weights refreshed before the call."""

    def __init__(
        self, forward: Callable[[Tensor, Tensor | None], Tensor], weights: PackedWeights, shape: Shape
    ) -> None:
        self._forward = forward
        self._weights = weights
        self._shape = shape

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, self._shape)
        self._weights.refresh()
        with torch.no_grad():
            return self._forward(x.contiguous(), mask if mask is None else mask.contiguous())
