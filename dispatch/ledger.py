"""The ledger: the eager baseline forward as a list of ops, each with its FLOPs, bytes and device operations.

Every figure is a closed form of the shape. B batch, S sequence, D model, H heads, d = D / H, F feed-forward, T = B S
tokens, E = B H S S score elements, b bytes of an element of the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rooflane.shapes import Shape

INDEX_LIMIT_BYTES = 2**31  # PyTorch's elementwise kernels index bytes with 32 bits
FLOAT32_BYTES = 4  # the softmax runs in float32 whatever the model's dtype
BOOL_BYTES = 1


@dataclass(frozen=True)
class Op:
    """One op of the forward.

    `kind` is matmul, norm, softmax, pointwise, layout (a strided copy made contiguous) or memcpy (a device-to-device
    copy, no kernel). `layer` is None after the last layer. `flops` counts matrix products only, two per
    multiply-add: pointwise arithmetic takes less time than its bytes. `special` counts exp and erf evaluations.
    `bytes` reads each operand once and writes each result once.
    """

    name: str
    part: str
    kind: str
    layer: int | None
    flops: int = 0
    special: int = 0
    bytes: int = 0
    device_ops: int = 1


@dataclass(frozen=True)
class Ledger:
    """The ops of one eager forward, in the order they are submitted."""

    shape: Shape
    ops: tuple[Op, ...]

    @property
    def device_ops(self) -> int:
        """Kernels and device-to-device copies the host submits."""
        return sum(op.device_ops for op in self.ops)

    @property
    def memcpys(self) -> int:
        """Device-to-device copies among the device operations."""
        return sum(op.device_ops for op in self.ops if op.kind == "memcpy")

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, full S x S square."""
        return sum(op.flops for op in self.ops)

    @property
    def bytes(self) -> int:
        """Bytes moved when no op is fused with another."""
        return sum(op.bytes for op in self.ops)


@cache
def ledger(shape: Shape, masked: bool = True) -> Ledger:
    """List the eager baseline forward op by op; `masked` says whether it is given a token mask.

    Matmul FLOPs are 2 M N K over the full square, as torch's FLOP counter has them. A causal fp32 layer with a mask
    is 32 device operations, 28 when not causal, and 4 follow the last layer. Half precision adds two per layer: the
    cast to float32 before the softmax and the cast back. An elementwise op on a tensor over 2 GiB counts once per
    piece that 32-bit indexing splits it into; matrix products, norms, softmax, triu and memcpys are not split.
    """
    ops: list[Op] = []
    for layer in range(shape.num_layers):
        ops += _attention_block(shape, layer, masked)
        ops += _feed_forward_block(shape, layer, masked)
    ops.append(_norm(shape, None, "final_norm"))
    if masked:
        ops += _token_fill(shape, None, "final")
    return Ledger(shape, tuple(ops))


def weight_bytes(shape: Shape) -> int:
    """Return the bytes of all parameters in the model's dtype: 4 D^2 + 2 D F + 9 D + F a layer, and 2 D at the end."""
    d, f = shape.d_model, shape.ffn_dim
    return (shape.num_layers * (4 * d * d + 2 * d * f + 9 * d + f) + 2 * d) * shape.dtype_bytes


@cache
def peak_bytes(shape: Shape) -> int:
    """Return the bytes alive at the worst moment of one eager forward with a mask, weights and input included.

    Tensors alive inside a layer: the caller's input, the layer's input (the same tensor in the first layer), the
    normed input and q, k, v. On top of those come, in attention, two live score tensors and the context (8 bytes a
    score element in float32), or the half scores, their float32 copy and the float32 softmax (10 bytes) in half
    precision, and the S x S causal mask; or, after it, two activations. The feed-forward holds its input and both
    sides of the GELU. Allocator rounding and library workspaces come on top and are not counted.
    """
    b = shape.dtype_bytes
    activation = shape.tokens * shape.d_model * b
    wide = shape.tokens * shape.ffn_dim * b
    scores = _score_elements(shape)
    square = shape.seq_len**2 * BOOL_BYTES if shape.causal else 0
    keys = shape.tokens * BOOL_BYTES
    carried = activation * (2 if shape.num_layers > 1 else 1)

    attend = [
        scores * b + 2 * square,  # the mask is built: ones and triu side by side
        2 * scores * b + square + keys,  # out-of-place fill
        2 * scores * b + square + activation,  # probabilities times v
    ]
    if b < FLOAT32_BYTES:
        attend.append(scores * (b + 2 * FLOAT32_BYTES) + square)
    attention = 4 * activation + max(*attend, 2 * activation + keys)
    feed_forward = activation + max(2 * wide, activation + wide)
    return weight_bytes(shape) + keys + carried + max(attention, feed_forward)


def _score_elements(shape: Shape) -> int:
    return shape.batch_size * shape.num_heads * shape.seq_len**2


def _pieces(largest_bytes: int) -> int:
    """Return how many kernels an elementwise op takes: its tensor is halved until 32 bits can index each part."""
    pieces = 1
    while largest_bytes > pieces * INDEX_LIMIT_BYTES:
        pieces *= 2
    return pieces


def _linear(shape: Shape, layer: int, name: str, part: str, inputs: int, outputs: int) -> Op:
    elements = shape.tokens * (inputs + outputs) + inputs * outputs + outputs
    flops = 2 * shape.tokens * inputs * outputs
    return Op(name, part, "matmul", layer, flops=flops, bytes=elements * shape.dtype_bytes)


def _norm(shape: Shape, layer: int | None, name: str) -> Op:
    elements = 2 * shape.tokens * shape.d_model + 2 * shape.d_model
    return Op(name, "norm", "norm", layer, bytes=elements * shape.dtype_bytes)


def _token_fill(shape: Shape, layer: int | None, name: str) -> list[Op]:
    """Return the zeroing of padded rows: the mask inverted again, then an out-of-place fill."""
    keys = shape.tokens * BOOL_BYTES
    activation = shape.tokens * shape.d_model * shape.dtype_bytes
    return [
        Op(f"{name}_invert", "padding", "pointwise", layer, bytes=2 * keys, device_ops=_pieces(keys)),
        *_masked_fill(f"{name}_fill", "padding", layer, activation, keys),
    ]


def _masked_fill(name: str, part: str, layer: int | None, tensor_bytes: int, mask_bytes: int) -> list[Op]:
    moved = 2 * tensor_bytes
    return [
        Op(f"{name}.copy", part, "memcpy", layer, bytes=moved),
        Op(f"{name}.fill", part, "pointwise", layer, bytes=moved + mask_bytes, device_ops=_pieces(tensor_bytes)),
    ]


def _attention_block(shape: Shape, layer: int, masked: bool) -> list[Op]:
    d = shape.d_model
    activation = shape.tokens * d * shape.dtype_bytes
    ops = [_norm(shape, layer, "norm1")]
    for name in ("q", "k", "v"):
        ops.append(_linear(shape, layer, f"{name}_proj", "projection", d, d))
        ops.append(_layout(layer, f"{name}_split", activation))
    ops += _scores_to_context(shape, layer, masked)
    ops.append(_layout(layer, "head_merge", activation))
    ops.append(_linear(shape, layer, "out_proj", "projection", d, d))
    if masked:
        ops += _token_fill(shape, layer, "output")
    ops.append(_residual(layer, "attention_residual", activation))
    return ops


def _scores_to_context(shape: Shape, layer: int, masked: bool) -> list[Op]:
    """Return what one fused attention replaces: from q k^T to probabilities times v."""
    part = "attention"
    b = shape.dtype_bytes
    elements = _score_elements(shape)
    scores = elements * b
    square = shape.seq_len**2 * BOOL_BYTES
    product = {"flops": 2 * elements * shape.head_dim, "bytes": 2 * shape.tokens * shape.d_model * b + scores}
    split = _pieces(scores)
    ops = [
        Op("scores", part, "matmul", layer, **product),
        Op("scale", part, "pointwise", layer, bytes=2 * scores, device_ops=split),
    ]
    if shape.causal:
        ops.append(Op("causal_ones", part, "pointwise", layer, bytes=square, device_ops=_pieces(square)))
        ops.append(Op("causal_triu", part, "pointwise", layer, bytes=2 * square))
        ops += _masked_fill("causal_fill", part, layer, scores, square)
    if masked:
        keys = shape.tokens * BOOL_BYTES
        ops.append(Op("key_invert", part, "pointwise", layer, bytes=2 * keys, device_ops=_pieces(keys)))
        ops += _masked_fill("key_fill", part, layer, scores, keys)
    wide = elements * FLOAT32_BYTES
    softmax = Op("softmax", part, "softmax", layer, special=elements, bytes=2 * wide)
    if b == FLOAT32_BYTES:
        ops.append(softmax)
    else:
        cast = {"bytes": scores + wide, "device_ops": _pieces(wide)}
        ops.append(Op("softmax_widen", part, "pointwise", layer, **cast))
        ops.append(softmax)
        ops.append(Op("softmax_narrow", part, "pointwise", layer, **cast))
    ops.append(Op("context", part, "matmul", layer, **product))
    return ops


def _feed_forward_block(shape: Shape, layer: int, masked: bool) -> list[Op]:
    d, f = shape.d_model, shape.ffn_dim
    activation = shape.tokens * d * shape.dtype_bytes
    wide = shape.tokens * f
    wide_bytes = wide * shape.dtype_bytes
    part = "feed_forward"
    ops = [
        _norm(shape, layer, "norm2"),
        _linear(shape, layer, "ffn_in", part, d, f),
        Op("gelu", part, "pointwise", layer, special=wide, bytes=2 * wide_bytes, device_ops=_pieces(wide_bytes)),
        _linear(shape, layer, "ffn_out", part, f, d),
        _residual(layer, "feed_forward_residual", activation),
    ]
    if masked:
        ops += _token_fill(shape, layer, "block")
    return ops


def _layout(layer: int, name: str, activation_bytes: int) -> Op:
    return Op(name, "projection", "layout", layer, bytes=2 * activation_bytes, device_ops=_pieces(activation_bytes))


def _residual(layer: int, name: str, activation_bytes: int) -> Op:
    return Op(name, "residual", "pointwise", layer, bytes=3 * activation_bytes, device_ops=_pieces(activation_bytes))
