"""graph_compile: the lean forward compiled once and captured into one CUDA graph, for launch-bound shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.families.lean_cost import lean_peak_bytes, lean_predict_s
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward


class GraphCompile:
    """Turn 132 host launches into one graph replay; on a CPU, into one compiled call."""

    name = "graph_compile"
    summary = "torch.compile of the lean forward, captured into one CUDA graph"
    contract = ""
    options = {"operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model and device"}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason."""
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the device bytes at the worst moment of one call."""
        return lean_peak_bytes(shape, captured=profile.kind == "cuda")

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""
        return lean_predict_s(shape, profile, captured=profile.kind == "cuda")

    def build(self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None) -> Forward:
        """Return the built forward; the graph is captured at its first call."""
        from rooflane.families.lean_build import build_lean

        return build_lean(model, shape, device, operand_dtype, captured=True, compiled=True)


SPEC = GraphCompile()
