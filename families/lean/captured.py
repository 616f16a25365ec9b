"""The lean forward from a CUDA graph, its last norm launched outside so that it writes the fresh output itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooflane.families.lean.lean import lean_sum
from rooflane.families.lean.pointwise.pointwise import bind_add_norm
from rooflane.families.runtime.bound import Launch, bound_forward
from rooflane.families.runtime.staged import StagedGraph
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape


def capture_lean(
    body: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
    weights: PackedWeights,
    shape: Shape,
    device: torch.device,
    eps: float,
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return a forward that replays `body` from a graph captured at the first call."""

    def bind(x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        graph = StagedGraph(body, x, mask, device)
        residual, update = graph.result
        tensors = weights.tensors
        if "norm.weight" not in tensors:

            def launch_sum(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
                graph.run(stream, x, mask)
                lean_sum(residual, update, mask, out)

            return launch_sum
        finish = bind_add_norm(residual, update, tensors["norm.weight"], tensors["norm.bias"], mask, out, eps)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            graph.run(stream, x, mask)
            finish(stream, None if mask is None else mask.data_ptr(), out.data_ptr())

        return launch

    return bound_forward(bind, weights, shape, device)
