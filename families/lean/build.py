"""Build a lean forward, direct or captured; importing it loads torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rooflane.families.lean.lean import (
    TORCH_OPS,
    LeanOps,
    choose_ops,
    kernels_run,
    lean_body,
    lean_finish,
    lean_sum,
    lean_weights,
)
from rooflane.families.runtime.call_checks import DTYPES, check_call, operand_dtype
from rooflane.families.runtime.weights import UNFIT, LiveWeights, PackedWeights
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.families.runtime.bound import Launch
    from rooflane.families.spec import Forward

# `(x, mask) -> (residual, update)`, the stack before its final norm.
Body = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def build_lean(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None, *, captured: bool,
    compiled: bool = False,
) -> Forward:  # fmt: skip
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`.

    `captured` replays a CUDA graph (not on a CPU, nor on a GPU older than Triton takes); `compiled` lets torch.compile
    fuse the ops between GEMMs.
    """
    if not isinstance(captured, bool):
        raise ValueError(f"captured is {captured!r}; accepted: true, false")
    device = torch.device(device)
    ops = choose_ops(shape, device, compiled=compiled)
    weights = lean_weights(model, operand_dtype(operands, shape, device.type), ops)
    eps = model.layers[0].norm1.eps

    def stack(x: Tensor, mask: Tensor | None, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return lean_body(x, mask, tensors, shape, ops, eps)

    stack = torch.compile(_own_code(stack), dynamic=False) if compiled else stack

    def body(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return stack(x, mask, weights.tensors)

    wide = wide_forward(model, shape)
    if captured and kernels_run(shape, device):
        return _capture(body, weights, shape, device, ops, eps, wide)
    return _direct(body, weights, shape, ops, eps, wide)


def wide_forward(model: nn.Module, shape: Shape) -> Forward:
    """Return a forward in the model's own number type by torch's ops, for weights that do not fit float16.

    It is built at its first call.
    """
    built: list[Forward] = []

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not built:
            eps = model.layers[0].norm1.eps
            weights = lean_weights(model, DTYPES[shape.dtype], TORCH_OPS)

            def body(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
                return lean_body(x, mask, weights.tensors, shape, TORCH_OPS, eps)

            built.append(_direct(body, weights, shape, TORCH_OPS, eps, None))
        return built[0](x, mask)

    return forward


def _direct(
    body: Body, weights: PackedWeights | LiveWeights, shape: Shape, ops: LeanOps, eps: float, wide: Forward | None
) -> Forward:
    """Return a forward that launches op by op."""

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, shape)
        if weights.refresh() == UNFIT and wide is not None:
            return wide(x, mask)
        # The grad modes are set here because a compiled body is compiled once for each mode that it is called in.
        with torch.inference_mode(False), torch.no_grad():
            x, mask = x.contiguous(), mask if mask is None else mask.contiguous()
            residual, update = body(x, mask)
            return lean_finish(residual, update, mask, weights.tensors, ops, x.dtype, eps)

    return forward


def _own_code(function: FunctionType) -> FunctionType:
    """Return the function with a code object of its own.

    torch.compile keeps its results per code object. Past eight results it runs eagerly without a warning, so the ninth
    shape built in a process would not be compiled.
    """
    code = function.__code__.replace(co_name="lean")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _capture(
    body: Body, weights: PackedWeights, shape: Shape, device: torch.device, ops: LeanOps, eps: float, wide: Forward
) -> Forward:
    """Return a forward that replays `body` from a graph captured at its first call.

    The last norm is launched outside the graph, so that it writes the fresh output itself. A graph cannot be replayed
    while another is captured: there the ops of `body` themselves become a part of the caller's graph.
    """
    # These import Triton.
    from rooflane.families.lean.pointwise import bind_add_norm
    from rooflane.families.runtime.bound import bound_forward
    from rooflane.families.runtime.launch import StagedGraph

    def bind(x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        graph = StagedGraph(body, x, mask, device)
        residual, update = graph.result
        tensors = weights.tensors
        if "norm.weight" not in tensors:

            def launch_sum(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
                residual, update = graph.run(stream, x, mask)
                lean_sum(residual, update, mask, out)

            return launch_sum
        finish = bind_add_norm(residual, update, tensors["norm.weight"], tensors["norm.bias"], mask, out, eps)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            found = graph.run(stream, x, mask)
            if found is not graph.result:
                out.copy_(lean_finish(*found, mask, tensors, ops, out.dtype, eps))
                return
            finish(stream, None if mask is None else mask.data_ptr(), out.data_ptr())

        return launch

    return bound_forward(bind, weights, shape, device, wide)
