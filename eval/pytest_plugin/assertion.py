"""The gate in a test, and the message of a failing comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.eval.check.gate import ATOL, RTOL, TILE, GateResult, check_gate
from rooflane.eval.pytest_plugin.markers import Tolerance


@dataclass(frozen=True)
class Gate:
    """A gate with a test's tolerance; calling it asserts."""

    tolerance: Tolerance
    assertion: Callable[..., None]

    @property
    def atol(self) -> float:
        """The absolute error that passes."""
        return _limits(self.tolerance)[0]

    @property
    def rtol(self) -> float:
        """The error that passes, relative to the reference."""
        return _limits(self.tolerance)[1]

    def __call__(self, out: Tensor, ref: Tensor, atol: float | None = None, rtol: float | None = None) -> None:
        """Fail unless the output passes; see `assert_close_gate`."""
        __tracebackhide__ = True
        merged = self.tolerance.overridden(atol, rtol)
        self.assertion(out, ref, merged.atol, merged.rtol)

    def check(self, out: Tensor, ref: Tensor, atol: float | None = None, rtol: float | None = None) -> GateResult:
        """Return the figures of the comparison without failing."""
        return check_gate(out, ref, *_limits(self.tolerance.overridden(atol, rtol)))


def explain_failure(out: Any, ref: Any, tolerance: Tolerance) -> str | None:
    """Return None when the output passes, else what failed: counts, the worst element, the worst tile."""
    for name, value in (("output", out), ("reference", ref)):
        if not isinstance(value, Tensor):
            return f"the gate compares tensors; the {name} is a {type(value).__name__}"
    if ref.numel() == 0:
        return f"the gate has nothing to compare: the reference has shape {tuple(ref.shape)}"
    if out.device != ref.device:
        return f"the output is on {out.device}, the reference on {ref.device}; bring them to one device"
    atol, rtol = _limits(tolerance)
    result = check_gate(out, ref, atol, rtol)
    if result.passed:
        return None
    rule = f"|err| <= {atol:g} or |err| <= {rtol:g} |ref|, both finite"
    if result.reason:
        return f"gate: {result.reason} ({rule})"
    index, got, expected, use = result.worst_index, result.out_at_worst, result.ref_at_worst, result.use
    row, column = result.worst_tile
    width = ref.shape[-1] if ref.dim() else 1
    rows = ref.numel() // width
    last = min((row + 1) * TILE, rows) - 1, min((column + 1) * TILE, width) - 1
    shown = f"{use:.3g} times the tolerance" if use < float("inf") else "not within any tolerance"
    return (
        f"gate: {result.failed} of {result.total} elements fail ({rule})\n"
        f"  worst element {index}: got {got:.6g}, expected {expected:.6g}, error {abs(got - expected):.3g}, {shown}\n"
        f"  worst tile: rows {row * TILE}-{last[0]}, columns {column * TILE}-{last[1]}: "
        f"{result.worst_tile_failed_share:.1%} of it fails, mean error {result.worst_tile_mean_abs:.3g}\n"
        f"  {result.dtype} {tuple(out.shape)} on {result.device}; a row is one position of all axes but the last"
    )


def run_in_fp64(forward: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the forward's result with module and floating-point inputs cast to float64, under no_grad.

    A module is copied first; a function must itself compute in the dtype of its inputs.
    """
    if isinstance(forward, nn.Module):
        forward = copy.deepcopy(forward).double()
    with torch.no_grad():
        return forward(*map(_double, inputs), **{name: _double(value) for name, value in named.items()})


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _limits(tolerance: Tolerance) -> tuple[float, float]:
    atol = ATOL if tolerance.atol is None else tolerance.atol
    return atol, RTOL if tolerance.rtol is None else tolerance.rtol
