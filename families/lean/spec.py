"""The base class of the families built on the lean forward; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rooflane.families.lean.cases import lean_cases
from rooflane.families.lean.cost import lean_peak_bytes, lean_predict_s
from rooflane.families.option_values import operands, true_or_false
from rooflane.families.resources.kernel_case import KernelCase
from rooflane.families.spec import FamilySpec, Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward


class LeanSpec(FamilySpec):
    """A family whose forward is the lean one. A subclass sets its name and summary, and what it supports."""

    final_norm_optional = True
    options = {
        "operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model and device",
        "captured": "true (default) replays a CUDA graph, false launches op by op; no effect on a CPU",
    }
    option_checks = {"operand_dtype": operands, "captured": true_or_false}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason."""
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, *, captured: bool = True, **options: Any) -> int:
        """Return the most device bytes in use during one call."""
        return lean_peak_bytes(shape, captured=captured and profile.kind == "cuda")

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""
        return lean_predict_s(shape, profile, captured=profile.kind == "cuda")

    def kernel_cases(self) -> Iterator[KernelCase]:
        """Return the kernels that ship with the lean forward, for the resource gate."""
        return lean_cases()

    def build(
        self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None, captured: bool = True
    ) -> Forward:
        """Return the built forward; compilation and capture happen at its first call."""
        from rooflane.families.lean.build import build_lean

        return build_lean(model, shape, device, operand_dtype, captured=captured, compiled=self.compiles)
