"""The bytes and the time of a fused forward in closed form; no torch."""

from __future__ import annotations

from rooflane.families.lean.cost import HALF, lean_ops, weight_elements
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

STREAM = 2 * HALF  # bytes of an element of the residual stream
# The pieces of a lean layer that the products of a fused one do.
INSIDE = ("norm1", "norm2", "activation", "norm")
SUMS = ("out", "ffn_out")


def fused_predict_s(shape: Shape, profile: Limits) -> float:
    """Return the predicted event seconds: each kernel takes the largest of its tensor, memory and exp times.

    The first kernel splits the input into the stream, the last one norms the stream.
    """
    rate, memory = profile.matmul_flops("float16"), profile.copy_bytes_per_s
    element = shape.tokens * shape.d_model
    ends = 2 * element * (shape.dtype_bytes + STREAM) / memory
    total = profile.graph_replay_s + ends
    for op in lean_ops(shape):
        if op.name in INSIDE:
            continue
        # A sum reads a stream, and writes one where a lean product writes half precision.
        moved = op.bytes + element * (2 * STREAM - HALF) * (op.name in SUMS)
        total += max(op.flops / rate, moved / memory, op.specials / profile.special_per_s, profile.graph_node_s)
    return total


def fused_peak_bytes(shape: Shape) -> int:
    """Return the most device bytes in use during a call: weights twice, both ends, and the layers' fixed memory."""
    weights = weight_elements(shape) * (shape.dtype_bytes + HALF)
    ends = 2 * shape.tokens * shape.d_model * shape.dtype_bytes
    return weights + ends + shape.tokens * (2 * STREAM * shape.d_model + HALF * (4 * shape.d_model + shape.ffn_dim))
