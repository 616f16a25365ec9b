"""The lean forward: a stack's function in 8 operations a layer, 9 with rotary positions; published eager takes 32.

What it leaves out, and why the output stays correct:
- q, k and v come from one packed GEMM, and attention reads and writes token-major rows, so no head is copied.
- Invalid rows are zeroed once, at the end. Every layer hides their keys, so their values affect no other row.
- GEMM operands are half precision with float32 accumulation. TF32 keeps 10 mantissa bits and fp16 has the same 10.
  The residual stream, LayerNorm and softmax stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooflane.families.lean.attention_config import attention_config
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.families.runtime.weights import LiveWeights, PackedWeights
from rooflane.shapes import PUBLISHED, Form, Shape

# Triton 3.6 compiles for nothing older.
LEAST_CAPABILITY = (8, 0)
NORMS = ("norm1", "norm2")


@dataclass(frozen=True)
class LeanOps:
    """The ops that differ between a compiled, a hand-fused and a CPU lean forward."""

    add_norm: Callable[..., tuple[Tensor | None, Tensor]]
    activate: Callable[[Tensor, str], Tensor]
    rotate: Callable[[Any, Tensor, Tensor], None]
    attention: Callable[[Any, Tensor | None, Tensor | None, int, bool, Tensor | None], Tensor]
    mask_extent: Callable[[Tensor], Tensor | None]


def torch_add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float, out_dtype: torch.dtype,
    residual: bool, mask: Tensor | None = None, rms: bool = False, post_norm: bool = False,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Compute `pointwise.add_norm` in torch ops, for a compiler to fuse or a CPU to run."""
    x = x.float() if update is None else x.float() + update.float()
    weight, bias = weight.float(), bias.float()
    if rms:
        normed = functional.rms_norm(x, x.shape[-1:], weight, eps) + bias
    else:
        normed = functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    out = normed.to(out_dtype)
    if mask is not None:
        out = out.masked_fill(~mask[:, :, None], 0)
    kept = normed if post_norm else x
    return (kept if residual else None), out


def torch_activate(x: Tensor, kind: str) -> Tensor:
    """Compute `pointwise.activate` in torch ops."""
    if kind == "quick_gelu":
        wide = x.float()
        return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
    if kind in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return functional.relu(x) if kind == "relu" else functional.silu(x)


def torch_rotate(qkv: Tensor | tuple[Tensor, Tensor, Tensor], cosine: Tensor, sine: Tensor) -> None:
    """Compute `pointwise.rotate` in torch ops; q, k and v may lie apart."""
    cosine, sine = cosine[:, None], sine[:, None]
    for part in _split(qkv)[:2]:
        first, second = part.unflatten(-1, (-1, 2, cosine.shape[-1])).unbind(-2)
        turned = first * cosine - second * sine, second * cosine + first * sine
        first.copy_(turned[0])
        second.copy_(turned[1])


def torch_attention(
    qkv: Tensor | tuple[Tensor, Tensor, Tensor], mask: Tensor | None, extent: Tensor | None, num_heads: int,
    causal: bool, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `attention.attention` with `scaled_dot_product_attention`; q, k and v may lie apart, `[B, S, H d]`."""
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in _split(qkv))
    batch, length = q.shape[0], q.shape[2]
    added = bias is not None and bias.dtype != torch.bool
    if mask is None and bias is None:
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        visible = torch.ones((), dtype=torch.bool, device=q.device) if mask is None else mask[:, None, None, :]
        if bias is not None:
            visible = visible & (bias > float("-inf") if added else bias)
        if causal:
            visible = visible & torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        allowed = visible
        if added:
            # A narrower type's minimum takes the place of a wider one's, which would become -inf.
            finite = bias.to(q.dtype).clamp_min(torch.finfo(q.dtype).min)
            # SDPA's kernels on a GPU take a bias whose last dimension is contiguous.
            allowed = torch.where(visible, finite, float("-inf")).contiguous()
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        # 0 in place of the NaN of a row that sees no key protects later keys and values.
        context = torch.where(visible.any(-1, keepdim=True), context, 0.0)
    return context.transpose(1, 2).reshape(batch, length, -1)


def _split(qkv: Tensor | tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return q, k and v, which lie apart or packed in one tensor."""
    return qkv.chunk(3, dim=-1) if isinstance(qkv, Tensor) else qkv


TORCH_OPS = LeanOps(torch_add_norm, torch_activate, torch_rotate, torch_attention, lambda mask: None)


def form_of(model: nn.Module) -> Form:
    """Return how a stack's layers compute; one that does not say is the published baseline."""
    return getattr(model, "form", PUBLISHED)


def kernels_run(shape: Shape, form: Form, device: torch.device) -> bool:
    """Return whether the Triton kernels can run the shape on the device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    with suppress(ValueError):
        return bool(attention_config(form.head_width(shape), shape.seq_len, shared, biased=form.score_bias))
    return False


def choose_ops(shape: Shape, form: Form, device: torch.device, *, compiled: bool = False) -> LeanOps:
    """Return the ops for a device; with `compiled` the compiler fuses all of them but attention."""
    if not kernels_run(shape, form, device):
        return TORCH_OPS
    # These import Triton.
    from rooflane.families.lean.attention import attention, mask_extent
    from rooflane.families.lean.pointwise import activate, add_norm, rotate

    if compiled:
        # SDPA's flash kernels take no key mask and its masked kernel builds [B, S, S]; our kernel takes any mask.
        return replace(TORCH_OPS, attention=attention, mask_extent=mask_extent)
    return LeanOps(add_norm, activate, rotate, attention, mask_extent)


@dataclass(frozen=True)
class Stack:
    """What a lean forward knows of a stack besides its weights. `rotary` holds the cosines and sines `[S, d / 2]`."""

    shape: Shape
    form: Form
    ops: LeanOps
    eps: float
    rotary: tuple[Tensor, Tensor] | None

    def norm(
        self, weights: dict[str, Tensor], name: str, x: Tensor, update: Tensor | None, out_dtype: torch.dtype,
        *, residual: bool = False, mask: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """Return what the next sum adds to, in float32, or None without `residual`; and the norm of `x + update`."""
        return self.ops.add_norm(
            x, update, weights[f"{name}.weight"], weights[f"{name}.bias"], eps=self.eps, out_dtype=out_dtype,
            residual=residual, mask=mask, rms=self.form.norm == "rms", post_norm=not self.form.norm_first,
        )  # fmt: skip


def lean_stack(model: nn.Module, shape: Shape, ops: LeanOps) -> Stack:
    """Return a model's stack for a shape and ops."""
    form = form_of(model)
    device = next(iter(model.parameters())).device
    rotary = None if form.rotary_theta is None else rotary_tables(shape, form, device)
    return Stack(shape, form, ops, model.layers[0].norm1.eps, rotary)


def rotary_tables(shape: Shape, form: Form, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary positions, float32 `[S, d / 2]` each.

    Raises `ValueError` for heads of an odd width, whose elements have no pairs.
    """
    width = form.head_width(shape)
    if width % 2:
        raise ValueError(f"heads of {width} columns take no rotary positions; the width must be even")
    # In float64: in float32 the angle of position 100,000 is wrong by 4e-3.
    turns = form.rotary_theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angles = torch.arange(shape.seq_len, dtype=torch.float64, device=device)[:, None] * turns
    return angles.cos().float(), angles.sin().float()


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a stack's norms by their lean names; "norm" is the one whose output is the stack's, where there is one."""
    named = {f"{index}.{name}": getattr(layer, name) for index, layer in enumerate(model.layers) for name in NORMS}
    if model.final_norm is not None:
        named["norm"] = model.final_norm
    elif not form_of(model).norm_first:
        named["norm"] = named.pop(f"{len(model.layers) - 1}.norm2")
    return named


def pack_lean(model: nn.Module, operand_dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy a baseline-shaped model's weights into the lean layout, GEMM weights `[out, in]` in `operand_dtype`."""
    packed: dict[str, Tensor] = {}

    def keep(name: str, source: nn.Linear | nn.LayerNorm, dtype: torch.dtype) -> None:
        packed[f"{name}.weight"] = source.weight.detach().to(dtype, copy=True)
        packed[f"{name}.bias"] = source.bias.detach().to(dtype, copy=True)

    for index, layer in enumerate(model.layers):
        attention = layer.attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        for part in ("weight", "bias"):
            together = torch.cat([getattr(linear, part).detach() for linear in projections])
            packed[f"{index}.qkv.{part}"] = together.to(operand_dtype)
        for name, linear in (("out", attention.out_proj), ("ffn_in", layer.ffn_in), ("ffn_out", layer.ffn_out)):
            keep(f"{index}.{name}", linear, operand_dtype)
    for name, norm in norms_of(model).items():
        keep(name, norm, torch.float32)
    return packed


def view_lean(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of `pack_lean` as views of the model's own memory, in its own number type.

    Where q, k and v do not lie behind each other, they stand under names of their own.
    """
    views: dict[str, Tensor] = {}
    for index, layer in enumerate(model.layers):
        attention = layer.attention
        projections = {name: getattr(attention, f"{name}_proj") for name in "qkv"}
        together = {
            part: _one_view([getattr(linear, part).detach() for linear in projections.values()])
            for part in ("weight", "bias")
        }
        if all(view is not None for view in together.values()):
            views |= {f"{index}.qkv.{part}": view for part, view in together.items()}
        others = {"out": attention.out_proj, "ffn_in": layer.ffn_in, "ffn_out": layer.ffn_out}
        apart = {} if f"{index}.qkv.weight" in views else projections
        for name, source in {**apart, **others}.items():
            views |= {f"{index}.{name}.{part}": getattr(source, part).detach() for part in ("weight", "bias")}
    for name, norm in norms_of(model).items():
        views |= {f"{name}.{part}": getattr(norm, part).detach() for part in ("weight", "bias")}
    return views


def _one_view(parts: list[Tensor]) -> Tensor | None:
    """Return contiguous tensors that lie behind each other in one memory as one, None where they do not."""
    first = parts[0]
    step = first.numel() * first.element_size()
    for place, part in enumerate(parts):
        if not part.is_contiguous() or part.shape != first.shape or part.data_ptr() != first.data_ptr() + place * step:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def project(value: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor | tuple[Tensor, ...]:
    """Return q, k and v of a layer, packed `[.., 3 H d]`, or one by one where their weights lie apart."""
    names = [f"{layer}.qkv"] if f"{layer}.qkv.weight" in weights else [f"{layer}.{name}" for name in "qkv"]
    found = tuple(functional.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names)
    return found if len(found) > 1 else found[0]


def lean_body(
    stack: Stack, weights: dict[str, Tensor], x: Tensor, mask: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return `(residual, update)` of the stack, both `[B, S, D]`. The last norm's input is their sum.

    `mask [B, S]` bool and `bias` of the scores (4 dimensions that broadcast to `[B, H, S, S]`) hide keys.
    """
    shape, form, ops = stack.shape, stack.form, stack.ops
    operand_dtype = weights["0.out.weight"].dtype
    extent = None if mask is None else ops.mask_extent(mask)

    def linear(value: Tensor, name: str) -> Tensor:
        return functional.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(value: Tensor, update: Tensor | None, name: str) -> tuple[Tensor | None, Tensor]:
        return stack.norm(weights, name, value, update, operand_dtype, residual=update is not None)

    residual, update = x, None
    normed = None if form.norm_first else x.to(operand_dtype)
    between = "norm2" if form.norm_first else "norm1"
    for layer in range(shape.num_layers):
        if form.norm_first:
            kept, normed = norm(residual, update, f"{layer}.norm1")
            residual = residual if kept is None else kept
        qkv = project(normed, weights, layer)
        if stack.rotary is not None:
            ops.rotate(qkv, *stack.rotary)
        context = ops.attention(qkv, mask, extent, shape.num_heads, shape.causal, bias)
        residual, normed = norm(residual, linear(context, f"{layer}.out"), f"{layer}.{between}")
        update = linear(ops.activate(linear(normed, f"{layer}.ffn_in"), form.activation), f"{layer}.ffn_out")
        if not form.norm_first and f"{layer}.norm2.weight" in weights:
            residual, normed = norm(residual, update, f"{layer}.norm2")
            update = None
    return residual, update


def lean_finish(
    stack: Stack, weights: dict[str, Tensor], residual: Tensor, update: Tensor | None, mask: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the last norm `[B, S, D]` in `out_dtype`, or its input without one; rows of invalid tokens are 0."""
    if "norm.weight" not in weights:
        return lean_sum(residual, update, mask, torch.empty_like(residual, dtype=out_dtype))
    return stack.norm(weights, "norm", residual, update, out_dtype, mask=mask)[1]


def lean_sum(residual: Tensor, update: Tensor, mask: Tensor | None, out: Tensor) -> Tensor:
    """Write the stack's output without a final norm into `out [B, S, D]`; rows of invalid tokens are 0."""
    torch.add(residual, update, out=out)
    return out if mask is None else out.masked_fill_(~mask[:, :, None], 0)


def lean_weights(model: nn.Module, operand_dtype: torch.dtype, ops: LeanOps) -> PackedWeights | LiveWeights:
    """Return the model's lean weights, which follow the originals.

    Torch's ops read the model's own memory where the operands have its number type and no weight is computed from
    others (`model.folded`). Everything else reads packed copies. Forwards of several shapes share them through
    `model.packed`, a dictionary, where the model has one.
    """
    own = next(iter(model.parameters())).dtype
    if ops is TORCH_OPS and operand_dtype == own and not getattr(model, "folded", False):
        return LiveWeights(model, view_lean)
    shared: dict[torch.dtype, PackedWeights] = getattr(model, "packed", {})
    if operand_dtype not in shared:
        # A float16 model has float16's range itself.
        narrow = operand_dtype == torch.float16 != own
        shared[operand_dtype] = PackedWeights(
            model, lambda source: pack_lean(source, operand_dtype), half_obstacle if narrow else lambda source: None
        )
    return shared[operand_dtype]
