"""Build a lean forward, direct or captured; importing it loads torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor, nn

from rooflane.families.lean.device_ops import choose_ops, kernels_run
from rooflane.families.lean.lean import LeanOps, lean_body, lean_finish, packed_weights
from rooflane.families.runtime.call_checks import check_call, operand_dtype
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape

Body = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


class DirectLean:
    """Run the lean forward op by op, on weights refreshed before the call."""

    def __init__(self, body: Body, ops: LeanOps, weights: PackedWeights, shape: Shape, eps: float) -> None:
        self._body, self._ops, self._weights, self._shape, self._eps = body, ops, weights, shape, eps

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, self._shape)
        self._weights.refresh()
        # The grad modes stand inside: a compiled body would otherwise be compiled once for each mode it is called in.
        with torch.inference_mode(False), torch.no_grad():
            x, mask = x.contiguous(), mask if mask is None else mask.contiguous()
            residual, update = self._body(x, mask)
            return lean_finish(residual, update, mask, self._weights.tensors, self._ops, x.dtype, self._eps)


def build_lean(
    model: nn.Module,
    shape: Shape,
    device: torch.device | str,
    operands: str | None,
    *,
    captured: bool,
    compiled: bool = False,
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`.

    `captured` replays a CUDA graph (not on a CPU, nor on a GPU older than Triton takes); `compiled` lets torch.compile
    fuse the ops between GEMMs.
    """
    if not isinstance(captured, bool):
        raise ValueError(f"captured is {captured!r}; accepted: true, false")
    device = torch.device(device)
    weights = packed_weights(model, operand_dtype(operands, shape, device.type))
    ops = choose_ops(shape, device, compiled=compiled)
    eps = model.layers[0].norm1.eps

    def forward(x: Tensor, mask: Tensor | None, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return lean_body(x, mask, tensors, shape, ops, eps)

    forward = torch.compile(_own_code(forward), dynamic=False) if compiled else forward

    def body(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return forward(x, mask, weights.tensors)

    if captured and kernels_run(shape, device):
        from rooflane.families.lean.captured import capture_lean

        return capture_lean(body, weights, shape, device, eps)
    return DirectLean(body, ops, weights, shape, eps)


def _own_code(function: FunctionType) -> FunctionType:
    """Return the function with a code object of its own.

    torch.compile keeps its results per code object and runs eagerly past eight of them without a word: the ninth shape
    built in a process would silently not be compiled.
    """
    return FunctionType(
        function.__code__.replace(co_name="lean"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
