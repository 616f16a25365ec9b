"""The lean forward: the reference's function in 8 operations a layer instead of 32.

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

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooflane.families.lean.attention_config import attention_config
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.families.runtime.weights import LiveWeights, PackedWeights
from rooflane.shapes import Shape

# Triton 3.6 compiles for nothing older.
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class LeanOps:
    """The ops that differ between a compiled, a hand-fused and a CPU lean forward."""

    add_norm: Callable[..., tuple[Tensor | None, Tensor]]
    gelu: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor | None, Tensor | None, int, bool], Tensor]
    mask_extent: Callable[[Tensor], Tensor | None]


def torch_add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float, out_dtype: torch.dtype,
    residual: bool, mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Compute `pointwise.add_norm` in torch ops, for a compiler to fuse or a CPU to run."""
    x = x.float() if update is None else x.float() + update.float()
    out = functional.layer_norm(x, x.shape[-1:], weight.float(), bias.float(), eps).to(out_dtype)
    if mask is not None:
        out = out.masked_fill(~mask[:, :, None], 0)
    return (x if residual else None), out


def torch_attention(
    qkv: Tensor | tuple[Tensor, Tensor, Tensor], mask: Tensor | None, extent: Tensor | None, num_heads: int,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Compute `attention.attention` with `scaled_dot_product_attention`; q, k and v may lie apart, `[B, S, D]` each."""
    parts = qkv.chunk(3, dim=-1) if isinstance(qkv, Tensor) else qkv
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
    batch, length = q.shape[0], q.shape[2]
    if mask is None:
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        visible = mask[:, None, None, :]
        if causal:
            visible = visible & torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        # A row that sees no key is an invalid token. 0 in place of its NaN protects later keys and values.
        context = torch.where(visible.any(-1, keepdim=True), context, 0.0)
    return context.transpose(1, 2).reshape(batch, length, -1)


TORCH_OPS = LeanOps(torch_add_norm, functional.gelu, torch_attention, lambda mask: None)


def kernels_run(shape: Shape, device: torch.device) -> bool:
    """Return whether the Triton kernels can run the shape on the device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    with suppress(ValueError):
        return bool(attention_config(shape.head_dim, shape.seq_len, shared))
    return False


def choose_ops(shape: Shape, device: torch.device, *, compiled: bool = False) -> LeanOps:
    """Return the ops for a device; with `compiled` the compiler fuses all of them but attention."""
    if not kernels_run(shape, device):
        return TORCH_OPS
    # These import Triton.
    from rooflane.families.lean.attention import attention, mask_extent
    from rooflane.families.lean.pointwise import add_norm, gelu

    if compiled:
        # SDPA's flash kernels take no key mask and its masked kernel builds [B, S, S]; our kernel takes any mask.
        return replace(TORCH_OPS, attention=attention, mask_extent=mask_extent)
    return LeanOps(add_norm, gelu, attention, mask_extent)


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
        for name in ("norm1", "norm2"):
            keep(f"{index}.{name}", getattr(layer, name), torch.float32)
    if model.final_norm is not None:
        keep("norm", model.final_norm, torch.float32)
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
        for name, source in {**apart, **others, "norm1": layer.norm1, "norm2": layer.norm2}.items():
            views |= {f"{index}.{name}.{part}": getattr(source, part).detach() for part in ("weight", "bias")}
    if model.final_norm is not None:
        views |= {f"norm.{part}": getattr(model.final_norm, part).detach() for part in ("weight", "bias")}
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
    """Return q, k and v of a layer, packed `[.., 3 D]`, or one by one where their weights lie apart."""
    names = [f"{layer}.qkv"] if f"{layer}.qkv.weight" in weights else [f"{layer}.{name}" for name in "qkv"]
    found = tuple(functional.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names)
    return found if len(found) > 1 else found[0]


def lean_body(
    x: Tensor, mask: Tensor | None, weights: dict[str, Tensor], shape: Shape, ops: LeanOps, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `(residual, update)` of the stack, both `[B, S, D]`. The final norm's input is their sum."""
    operand_dtype = weights["0.out.weight"].dtype
    extent = None if mask is None else ops.mask_extent(mask)

    def linear(value: Tensor, name: str) -> Tensor:
        return functional.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(value: Tensor, update: Tensor | None, name: str) -> tuple[Tensor | None, Tensor]:
        weight, bias, keep = weights[f"{name}.weight"], weights[f"{name}.bias"], update is not None
        return ops.add_norm(value, update, weight, bias, eps=eps, out_dtype=operand_dtype, residual=keep)

    residual, update = x, None
    for layer in range(shape.num_layers):
        kept, normed = norm(residual, update, f"{layer}.norm1")
        residual = residual if kept is None else kept
        context = ops.attention(project(normed, weights, layer), mask, extent, shape.num_heads, shape.causal)
        residual, normed = norm(residual, linear(context, f"{layer}.out"), f"{layer}.norm2")
        update = linear(ops.gelu(linear(normed, f"{layer}.ffn_in")), f"{layer}.ffn_out")
    return residual, update


def lean_finish(
    residual: Tensor, update: Tensor, mask: Tensor | None, weights: dict[str, Tensor], ops: LeanOps,
    out_dtype: torch.dtype, eps: float,
) -> Tensor:  # fmt: skip
    """Return the final norm `[B, S, D]` in `out_dtype`, or its input without one; rows of invalid tokens are 0."""
    if "norm.weight" not in weights:
        return lean_sum(residual, update, mask, torch.empty_like(residual, dtype=out_dtype))
    weight, bias = weights["norm.weight"], weights["norm.bias"]
    return ops.add_norm(residual, update, weight, bias, eps=eps, out_dtype=out_dtype, residual=False, mask=mask)[1]


def lean_sum(residual: Tensor, update: Tensor, mask: Tensor | None, out: Tensor) -> Tensor:
    """Write the stack's output without a final norm into `out [B, S, D]`; rows of invalid tokens are 0."""
    torch.add(residual, update, out=out)
    return out if mask is None else out.masked_fill_(~mask[:, :, None], 0)


def lean_weights(model: nn.Module, operand_dtype: torch.dtype, ops: LeanOps) -> PackedWeights | LiveWeights:
    """Return the model's lean weights, which follow the originals.

    Torch's ops read the model's own memory where the operands have its number type. Everything else reads packed
    copies.
    """
    own = next(iter(model.parameters())).dtype
    if ops is TORCH_OPS and operand_dtype == own:
        return LiveWeights(model, view_lean)
    # A float16 model has float16's range itself.
    narrow = operand_dtype == torch.float16 != own
    return PackedWeights(
        model, lambda source: pack_lean(source, operand_dtype), half_obstacle if narrow else lambda source: None
    )
