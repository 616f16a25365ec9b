"""gemm_fp16: half-precision GEMMs with fused ops between them, for compute-bound shapes."""

from __future__ import annotations

from rooflane.families.lean.spec import LeanSpec
from rooflane.families.spec import Limits
from rooflane.shapes import Shape


class GemmFp16(LeanSpec):
    """Use fp16 operands with fp32 accumulation, a packed QKV, and one pass of memory between GEMMs."""

    name = "gemm_fp16"
    summary = "fp16 GEMMs with fp32 accumulation, packed QKV, fused norms and activations"

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        if profile.kind == "cpu":
            return "no fast half-precision GEMM on a CPU: fp16 operands are slower than fp32 there"
        return None


SPEC = GemmFp16()
