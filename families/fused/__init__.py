"""fused: a layer in five kernels, everything between two products done where the product ends."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from rooflane.families.fused.attention import PLANS, plan_attention
from rooflane.families.fused.cost import fused_peak_bytes, fused_predict_s
from rooflane.families.fused.products import HIDDEN, PRODUCTS
from rooflane.families.lean.attention_config import MAX_HEAD_DIM
from rooflane.families.spec import FamilySpec, Limits
from rooflane.shapes import Form, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import device, nn

    from rooflane.families.resources.kernel_case import KernelCase
    from rooflane.families.spec import Forward

CAPABILITY = (9, 0)
MULTIPLE = 8  # columns that the copy engine moves together


class Fused(FamilySpec):
    """Do norms, biases, activations and residual sums in the products, which read and write a stream of two float16."""

    name = "fused"
    summary = "fp16 products that end with bias, activation, residual and the next norm's sums (sm_90)"

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        if profile.kind != "cuda" or profile.capability not in (None, CAPABILITY):
            return "its kernels are for compute capability 9.0"
        if shape.dtype == "bfloat16":
            return "its residual stream is of float16"
        for name in ("d_model", "ffn_dim"):
            if getattr(shape, name) % MULTIPLE:
                return f"{name} {getattr(shape, name)} is no multiple of {MULTIPLE}"
        if shape.head_dim > MAX_HEAD_DIM:
            return f"head_dim {shape.head_dim} is over {MAX_HEAD_DIM}"
        return None

    def refuse_form(self, form: Form) -> str | None:
        missing = [
            (not form.norm_first, "post-norm layers"),
            (form.norm != "layer", "RMSNorm"),
            (not form.final_norm, "stacks without a final norm"),
            (form.activation not in HIDDEN, form.activation),
            (form.score_bias, "a bias on the scores"),
        ]
        named = [name for lacks, name in missing if lacks]
        return f"it has no kernels for {' and '.join(named)}" if named else None

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        return fused_peak_bytes(shape)

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        return fused_predict_s(shape, profile)

    def kernel_cases(self) -> Iterator[KernelCase]:
        """Yield the products of a layer and attention of each head width, for the resource gate."""
        yield from (rung.case() for rung in PRODUCTS)
        for head_dim in PLANS:
            for causal in (True, False):
                plan = plan_attention(head_dim, 4, causal)
                assert plan is not None
                yield plan.case()

    def build(self, model: nn.Module, shape: Shape, device: device) -> Forward:
        """Return the built forward; its kernels are compiled at the first call.

        Where the kernels cannot be used, a warning says why and the lean forward of `gemm_fp16` takes the calls.
        """
        if obstacle := _obstacle(model, shape):
            from rooflane.families.lean.build import build_lean

            warnings.warn(f"fused: {obstacle}; the slower lean forward takes its place", stacklevel=2)
            return build_lean(model, shape, device, None, captured=True)
        from rooflane.families.fused.build import build_fused

        return build_fused(model, shape, device)


def _obstacle(model: nn.Module, shape: Shape) -> str:
    """Return why the kernels cannot compute a stack here, "" when they can: what no shape and no device tells."""
    from rooflane.families.lean.lean import form_of
    from rooflane.families.runtime.host import missing_compiler

    width = form_of(model).head_width(shape)
    if width > MAX_HEAD_DIM or shape.num_heads * width % MULTIPLE:
        return (
            f"{shape.num_heads} heads of {width} columns are over {MAX_HEAD_DIM} or together no multiple of {MULTIPLE}"
        )
    missing = missing_compiler()
    return f"it needs NVRTC ({missing})" if missing else ""


SPEC = Fused()
