"""The lean forward from a CUDA graph, its last norm launched outside so that it writes the fresh output itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooflane.families.door import aligned, check_call
from rooflane.families.launch import raw_stream
from rooflane.families.pointwise.pointwise import bind_add_norm
from rooflane.families.staged import StagedGraph, StreamGuard
from rooflane.families.weights import PackedWeights
from rooflane.shapes import Shape


class CapturedLean:
    """Replay the body from a graph captured at the first call, one for calls with a mask, one without."""

    def __init__(
        self,
        body: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
        weights: PackedWeights,
        shape: Shape,
        device: torch.device,
        eps: float,
    ) -> None:
        self._body = body
        self._weights = weights
        self._shape = shape
        self._device = device
        self._eps = eps
        self._guard = StreamGuard(device)
        self._launches: dict[bool, Callable[[int, Tensor, Tensor | None, Tensor], None]] = {}

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, self._shape)
        x = aligned(x)
        mask = None if mask is None else aligned(mask)
        stream = raw_stream(self._device.index or 0)
        self._guard.enter(stream)
        self._weights.refresh()
        out = torch.empty_like(x)
        launch = self._launches.get(mask is not None)
        if launch is None:
            launch = self._launches[mask is not None] = self._bind(x, mask, out)
        launch(stream, x, mask, out)
        return out

    def _bind(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Callable[..., None]:
        """Capture the body and bind the last norm behind it."""
        graph = StagedGraph(self._body, x, mask, self._device)
        residual, update = graph.result
        tensors = self._weights.tensors
        finish = bind_add_norm(residual, update, tensors["norm.weight"], tensors["norm.bias"], mask, out, self._eps)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            graph.run(stream, x, mask)
            finish(stream, None if mask is None else mask.data_ptr(), out.data_ptr())

        return launch
