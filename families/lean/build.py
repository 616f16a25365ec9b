"""Build a lean forward, direct or captured; importing it loads torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rooflane.families.lean.lean import (
    TORCH_OPS,
    Stack,
    choose_ops,
    form_of,
    kernels_run,
    lean_body,
    lean_finish,
    lean_stack,
    lean_sum,
    lean_weights,
)
from rooflane.families.runtime.call_checks import DTYPES, check_bias, check_call, operand_dtype
from rooflane.families.runtime.weights import UNFIT, LiveWeights, PackedWeights
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.families.runtime.bound import Launch
    from rooflane.families.spec import Forward

# `(x, mask, bias) -> (residual, update)`, the stack before its last norm; graphs call it without a bias.
Body = Callable[..., tuple[Tensor, Tensor | None]]


def build_lean(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None, *, captured: bool,
    compiled: bool = False,
) -> Forward:  # fmt: skip
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`.

    Where the model's form has a bias on the scores, the forward is `(x, mask, bias)`: `bias` broadcasts to
    `[B, H, S, S]`, bool (True is visible) or floating (added to the scaled scores). `captured` replays a CUDA graph
    (not on a CPU, nor on a GPU older than Triton takes, nor with a bias, which may lie elsewhere at each call);
    `compiled` lets torch.compile fuse the ops between GEMMs.
    """
    if not isinstance(captured, bool):
        raise ValueError(f"captured is {captured!r}; accepted: true, false")
    device = torch.device(device)
    form = form_of(model)
    stack = lean_stack(model, shape, choose_ops(shape, form, device, compiled=compiled))
    weights = lean_weights(model, operand_dtype(operands, shape, device.type), stack.ops)

    def run(
        x: Tensor, mask: Tensor | None, bias: Tensor | None, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        return lean_body(stack, tensors, x, mask, bias)

    run = torch.compile(_own_code(run), dynamic=False) if compiled else run

    def body(x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return run(x, mask, bias, weights.tensors)

    wide = wide_forward(model, shape)
    if captured and not form.score_bias and kernels_run(shape, form, device):
        return _capture(body, weights, stack, device, wide)
    return _direct(body, weights, stack, wide)


def wide_forward(model: nn.Module, shape: Shape) -> Forward:
    """Return a forward in the model's own number type by torch's ops, for weights that do not fit float16.

    It is built at its first call.
    """
    built: list[Forward] = []

    def forward(x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if not built:
            stack = lean_stack(model, shape, TORCH_OPS)
            weights = lean_weights(model, DTYPES[shape.dtype], TORCH_OPS)

            def body(x: Tensor, mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
                return lean_body(stack, weights.tensors, x, mask, bias)

            built.append(_direct(body, weights, stack, None))
        return built[0](x, mask, bias)

    return forward


def _direct(body: Body, weights: PackedWeights | LiveWeights, stack: Stack, wide: Forward | None) -> Forward:
    """Return a forward that launches op by op."""

    def forward(x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        check_call(x, mask, stack.shape)
        bias = None if bias is None else check_bias(bias, x, stack.shape)
        if weights.refresh() == UNFIT and wide is not None:
            return wide(x, mask, bias)
        # The grad modes are set here because a compiled body is compiled once for each mode that it is called in.
        with torch.inference_mode(False), torch.no_grad():
            x, mask = x.contiguous(), mask if mask is None else mask.contiguous()
            residual, update = body(x, mask, bias)
            return lean_finish(stack, weights.tensors, residual, update, mask, x.dtype)

    return forward


def _own_code(function: FunctionType) -> FunctionType:
    """Return the function with a code object of its own.

    torch.compile keeps its results per code object. Past eight results it runs eagerly without a warning, so the ninth
    shape built in a process would not be compiled.
    """
    code = function.__code__.replace(co_name="lean")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _capture(body: Body, weights: PackedWeights, stack: Stack, device: torch.device, wide: Forward) -> Forward:
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
        weight, bias, rms = tensors["norm.weight"], tensors["norm.bias"], stack.form.norm == "rms"
        finish = bind_add_norm(residual, update, weight, bias, mask, out, stack.eps, rms)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            found = graph.run(stream, x, mask)
            if found is not graph.result:
                out.copy_(lean_finish(stack, tensors, *found, mask, out.dtype))
                return
            finish(stream, None if mask is None else mask.data_ptr(), out.data_ptr())

        return launch

    return bound_forward(bind, weights, stack.shape, device, wide)
