"""The bytes and the time of a fused forward in closed form; no torch.

A product goes by tiles of 128 x 128: two warpgroups of an SM take them in turn, so a tile costs the longer of its
products and of half of its products and its end. The cycles are fitted to a trace and a record of an H200
(briefs/ladder.md, briefs/fused.md).
"""

from __future__ import annotations

from rooflane.families.lean.cost import HALF, lean_ops, weight_elements
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

STREAM = 2 * HALF  # bytes of an element of the residual stream
TILE = 128
# Cycles: before a tile's first product, of its products for an element of K, and of its end under other products.
START, DEPTH = 4500, 8.3
NORM_END, GELU_END, SUM_END = 5000, 7500, 8000
# Results of the special-function units that an SM gives a cycle, which tells the clock; a loaded H200 holds 0.9 of it.
SPECIALS, LOADED = 16, 0.9
# Attention at its best takes twice the longer of exponentials and products, and starts and ends in 4 us.
ATTENTION, ATTENTION_S = 2.0, 4e-6


def fused_predict_s(shape: Shape, profile: Limits) -> float:
    """Return the predicted event seconds of the layers' kernels and of both ends.

    The first kernel splits the input into the stream, the last one norms the stream.
    """
    tokens, width, ffn = shape.tokens, shape.d_model, shape.ffn_dim
    element = tokens * width
    ends = 2 * element * (shape.dtype_bytes + STREAM) / profile.copy_bytes_per_s
    layer = (
        product_s(tokens, 3 * width, width, NORM_END, 0, profile)
        + attention_s(shape, profile)
        + product_s(tokens, width, width, SUM_END, 2 * STREAM * element, profile)
        + product_s(tokens, ffn, width, GELU_END, 0, profile)
        + product_s(tokens, width, ffn, SUM_END, 2 * STREAM * element, profile)
    )
    return profile.graph_replay_s + ends + shape.num_layers * layer


def product_s(rows: int, columns: int, depth: int, end: int, stream_bytes: int, profile: Limits) -> float:
    """Return the seconds of a product with its end, or of its bytes where they take longer.

    `stream_bytes` are read and written beside the operands, in place of an output in half precision.
    """
    tiles = -(-rows // TILE) * -(-columns // TILE)
    products = DEPTH * depth
    cycles = START + -(-tiles // profile.units) * max(products, (products + end) / 2) + end
    clock = profile.special_per_s / (SPECIALS * profile.units) * LOADED
    moved = HALF * (rows * depth + columns * depth) + (stream_bytes or HALF * rows * columns)
    return max(cycles / clock, moved / profile.copy_bytes_per_s)


def attention_s(shape: Shape, profile: Limits) -> float:
    """Return the seconds of attention."""
    op = next(op for op in lean_ops(shape) if op.name == "attention")
    busy = max(op.flops / profile.matmul_flops("float16"), op.specials / profile.special_per_s)
    return ATTENTION_S + max(ATTENTION * busy, op.bytes / profile.copy_bytes_per_s)


def fused_peak_bytes(shape: Shape) -> int:
    """Return the most device bytes in use during a call: weights twice, both ends, and the layers' fixed memory."""
    weights = weight_elements(shape) * (shape.dtype_bytes + HALF)
    ends = 2 * shape.tokens * shape.d_model * shape.dtype_bytes
    return weights + ends + shape.tokens * (2 * STREAM * shape.d_model + HALF * (4 * shape.d_model + shape.ffn_dim))
