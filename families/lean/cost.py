"""The bytes and the time of a lean forward in closed form, for stacks of the published form; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.spec import Limits
from rooflane.shapes import Shape

HALF = 2
SINGLE = 4


@dataclass(frozen=True)
class LeanOp:
    """One op of the lean forward, its work and its memory traffic."""

    name: str
    flops: float
    bytes: float
    specials: float = 0.0


def operand_name(shape: Shape, kind: str) -> str:
    """Return the dtype name of the GEMM operands on a device kind, as `call_checks.operand_dtype` picks it."""
    if kind == "cpu":
        return shape.dtype
    return "bfloat16" if shape.dtype == "bfloat16" else "float16"


def lean_ops(shape: Shape, operand_bytes: int = HALF) -> list[LeanOp]:
    """List the ops of one lean forward in order. Attention counts the keys it must read, half of them when causal."""
    tokens, width, ffn = shape.tokens, shape.d_model, shape.ffn_dim

    def gemm(name: str, inputs: int, outputs: int) -> LeanOp:
        moved = operand_bytes * (tokens * (inputs + outputs) + inputs * outputs)
        return LeanOp(name, 2.0 * tokens * inputs * outputs, moved)

    pairs = shape.batch_size * shape.num_heads * shape.seq_len * (shape.seq_len + 1) / 2
    if not shape.causal:
        pairs = shape.batch_size * shape.num_heads * shape.seq_len**2
    norm_bytes = tokens * width * (2 * SINGLE + 2 * operand_bytes)
    layer = [
        LeanOp("norm1", 0.0, norm_bytes),
        gemm("qkv", width, 3 * width),
        LeanOp("attention", 4.0 * pairs * shape.head_dim, operand_bytes * tokens * 4 * width, pairs),
        gemm("out", width, width),
        LeanOp("norm2", 0.0, norm_bytes),
        gemm("ffn_in", width, ffn),
        LeanOp("activation", 0.0, 2 * operand_bytes * tokens * ffn),
        gemm("ffn_out", ffn, width),
    ]
    return layer * shape.num_layers + [LeanOp("norm", 0.0, norm_bytes)]


def lean_predict_s(shape: Shape, profile: Limits, *, captured: bool) -> float:
    """Return the predicted event seconds. Each op takes the largest of its tensor, memory, exp and launch times.

    A captured forward pays the graph's replay and node times and copies its input and output once more. A direct one
    is at least as slow as the host's launches.
    """
    operands = operand_name(shape, profile.kind)
    operand_bytes = SINGLE if operands == "float32" else HALF
    rate = profile.matmul_flops(operands)
    ops = lean_ops(shape, operand_bytes)
    times = [
        max(op.flops / rate, op.bytes / profile.copy_bytes_per_s, op.specials / profile.special_per_s) for op in ops
    ]
    if not captured:
        return max(sum(times), len(ops) * profile.eager_dispatch_s)
    staging = 4 * shape.tokens * shape.d_model * shape.dtype_bytes / profile.copy_bytes_per_s
    return profile.graph_replay_s + staging + sum(max(time, profile.graph_node_s) for time in times)


def weight_elements(shape: Shape) -> int:
    """Return the number of weights of the stack: 16 tensors a layer and the final norm's 2."""
    width, ffn = shape.d_model, shape.ffn_dim
    layer = 4 * (width * width + width) + (width * ffn + ffn) + (ffn * width + width) + 4 * width
    return shape.num_layers * layer + 2 * width


def lean_peak_bytes(shape: Shape, *, captured: bool) -> int:
    """Return the most device bytes in use during a call: weights twice, input, output, and a layer's scratch.

    Scratch is largest either after the QKV GEMM (residual, normed, qkv, context) or in the feed-forward (residual,
    normed, hidden twice).
    """
    weights = weight_elements(shape) * (shape.dtype_bytes + HALF)
    token = shape.d_model * shape.dtype_bytes
    ends = shape.tokens * token * (4 if captured else 2)
    widest = max(4 * shape.d_model, 2 * shape.ffn_dim)
    scratch = shape.tokens * (shape.d_model * (SINGLE + HALF) + widest * HALF)
    return weights + ends + scratch
