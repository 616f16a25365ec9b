"""resident: the whole forward of short, narrow sequences on the SM, for launch- and bandwidth-bound shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.families.lean_cost import HALF, SINGLE, operand_name, weight_elements
from rooflane.families.resident.config import resident_config
from rooflane.families.resident.layout import layout_of, padded
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward

# (what, limit): a program holds a sequence's residual in registers and its heads' keys in shared memory.
LIMITS = [("seq_len", 128), ("d_model", 128), ("head_dim", 128), ("ffn_dim", 512)]
LEAST_CAPABILITY = (8, 0)
# KiB of shared memory, as Triton 3.6 compiles the widest configuration: 81 before Hopper; 145 of Hopper's 227.
SHARED_KIB = 96
# Share of the tensor and exp rates one program reaches: its steps depend on each other, so units wait. Taken from shape
# 1 before the GELU polynomial (H200, 83 us); the h200-published record lies at 0.76 to 0.91 of what it predicts for the
# one-launch shapes, and at twice that for shape 12, whose 32 rows leave the fixed costs uncovered.
EFFICIENCY = 0.4
# Dependent steps of a layer in the rows kernel, each about 10 us on the H200 (52 us for four layers and a first step).
ROWS_STEP_S = 10e-6


class Resident:
    """Keep every intermediate on the SM: one launch for the forward, or one a layer for small batches."""

    name = "resident"
    summary = "the whole forward in one kernel (small batches: one kernel a layer), activations on the SM"
    contract = ""
    options = {"operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model"}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason."""
        if profile.kind != "cuda":
            return "needs an NVIDIA GPU; on a CPU its kernels are only interpreted, in tests"
        if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
            return f"needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
        for name, limit in LIMITS:
            if getattr(shape, name) > limit:
                return f"{name} {getattr(shape, name)} is over {limit}: one SM cannot hold a sequence"
        if profile.shared_memory_bytes < SHARED_KIB * 1024:
            return (
                f"needs {SHARED_KIB} KiB of shared memory a block, the device has {profile.shared_memory_bytes >> 10}"
            )
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the device bytes of one call: weights, packed weights, input, output; small batches' scratch."""
        config = resident_config(shape)
        layout = layout_of(shape, config.ffn_tile)
        weights = weight_elements(shape) * shape.dtype_bytes + layout.layers * (
            layout.layer_weights * HALF + layout.layer_biases * SINGLE
        )
        ends = 2 * shape.tokens * shape.d_model * shape.dtype_bytes
        if not config.rows:
            return weights + ends
        staged = shape.tokens * shape.d_model * (shape.dtype_bytes + SINGLE)
        return weights + ends + staged + 2 * shape.tokens * 3 * layout.heads_width * HALF

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""
        config = resident_config(shape)
        if config.rows:
            return profile.graph_replay_s + (shape.num_layers + 1) * ROWS_STEP_S
        layout = layout_of(shape, config.ffn_tile)
        rows = padded(shape.seq_len)
        flops = 2 * rows * layout.layer_weights + 4 * rows * rows * layout.heads_width
        specials = layout.heads * rows * rows
        units = profile.units
        seconds = flops * units / profile.matmul_flops(operand_name(shape, "cuda"))
        seconds += specials * units / profile.special_per_s
        waves = -(-shape.batch_size // units)
        return profile.graph_replay_s + waves * shape.num_layers * seconds / EFFICIENCY

    def build(self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None) -> Forward:
        """Return the built forward; its kernels are compiled at the first call."""
        from rooflane.families.resident.build import build

        return build(model, shape, device, operand_dtype)


SPEC = Resident()
