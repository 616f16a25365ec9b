"""packed_qkv: one product for q, k and v. This file loads no torch, because routing works on machines without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.families import FamilySpec, Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward

MAX_HEAD_DIM = 256  # what torch's fused attention takes on every device
OPERATIONS = 12  # a layer: 2 norms, 4 products, attention, its mask, GELU, 2 adds, one copy


class PackedQkv(FamilySpec):
    """What rooflane knows of the family. FamilySpec describes each part and has the defaults of the others."""

    name = "packed_qkv"
    summary = "the baseline with q, k and v in one product and fused attention"
    options = {"contiguous": "true copies q, k and v apart before attention; false (default) leaves them as views"}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built, else the reason."""
        if shape.head_dim > MAX_HEAD_DIM:
            return f"head_dim {shape.head_dim} is over the {MAX_HEAD_DIM} that fused attention takes"
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return weights, the packed copy of q, k and v, and the widest moment of a layer."""
        width, ffn = shape.d_model, shape.ffn_dim
        weights = shape.num_layers * (4 * width * width + 2 * width * ffn)
        packed = shape.num_layers * 3 * width * width
        alive = shape.tokens * (6 * width + max(ffn, 2 * width)) + shape.batch_size * shape.seq_len**2
        return (weights + packed + alive) * shape.dtype_bytes

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the larger of the host's time for the operations and the products' time on the device."""
        width, ffn, tokens = shape.d_model, shape.ffn_dim, shape.tokens
        products = 2 * tokens * (4 * width * width + 2 * width * ffn) + 4 * tokens * shape.seq_len * width
        host = shape.num_layers * OPERATIONS * profile.eager_dispatch_s
        return max(host, shape.num_layers * products / profile.matmul_flops(shape.dtype))

    def build(self, model: nn.Module, shape: Shape, device: device, contiguous: bool = False) -> Forward:
        """Return the forward; only here is torch needed."""
        from rooflane_example.build import build

        return build(model, shape, contiguous)


SPEC = PackedQkv()
