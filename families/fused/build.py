"""Build a fused forward; importing it loads torch and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rooflane.families.fused.attention import bind_attention, plan_attention
from rooflane.families.fused.ends_kernel import finish_kernel, split_kernel
from rooflane.families.fused.products import HIDDEN, QKV, RESIDUAL, moment_tiles
from rooflane.families.ladder.launch import bind
from rooflane.families.lean.attention import attention, mask_extent
from rooflane.families.lean.build import wide_forward
from rooflane.families.lean.lean import form_of, norms_of, rotary_tables
from rooflane.families.lean.pointwise import rotate, row_sizes
from rooflane.families.runtime.bound import bound_forward
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.families.runtime.launch import BoundKernel, CapturedGraph
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.families.ladder.gemm.tensor import PersistentRung
    from rooflane.families.runtime.bound import Launch
    from rooflane.families.spec import Forward


# Launches on the current stream.
Step = Callable[[], None]


def pack_fused(model: nn.Module) -> dict[str, Tensor]:
    """Copy a stack's weights for the fused products.

    A norm's scale goes into the weights behind it, its shift into their bias: norm(x) W^T + b is
    rstd (x - mean) (W scale)^T + (b + W shift). Weights `[out, in]` are float16, biases and the sums of the scaled
    weights `[out]` float32.
    """
    packed: dict[str, Tensor] = {}

    def keep(name: str, linears: list[nn.Linear], norm: nn.LayerNorm | None) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears]).double()
        bias = torch.cat([linear.bias.detach() for linear in linears]).double()
        if norm is not None:
            bias = bias + weight @ norm.bias.detach().double()
            weight = weight * norm.weight.detach().double()
        packed[f"{name}.weight"] = weight.half()
        packed[f"{name}.bias"] = bias.float()
        if norm is not None:
            packed[f"{name}.sums"] = packed[f"{name}.weight"].double().sum(1).float()

    for index, layer in enumerate(model.layers):
        heads = layer.attention
        keep(f"{index}.qkv", [heads.q_proj, heads.k_proj, heads.v_proj], layer.norm1)
        keep(f"{index}.out", [heads.out_proj], None)
        keep(f"{index}.ffn_in", [layer.ffn_in], layer.norm2)
        keep(f"{index}.ffn_out", [layer.ffn_out], None)
    norm = norms_of(model)["norm"]
    for part in ("weight", "bias"):
        packed[f"norm.{part}"] = getattr(norm, part).detach().float().clone()
    return packed


def build_fused(model: nn.Module, shape: Shape, device: torch.device | str) -> Forward:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`."""
    device = torch.device(device)
    shared: dict[object, PackedWeights] = getattr(model, "packed", {})
    if "fused" not in shared:
        shared["fused"] = PackedWeights(model, pack_fused, lambda source: half_obstacle(source, summed=True))
    weights = shared["fused"]
    form = form_of(model)
    rotary = None if form.rotary_theta is None else rotary_tables(shape, form, device)
    eps = model.layers[0].norm1.eps

    def bind_call(x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        tensors = weights.tensors
        memory = Memory(shape, shape.num_heads * form.head_width(shape), mask is not None, x.device)
        split, finish = bind_ends(memory, tensors, x, mask, out, eps)
        layers = bind_layers(memory, tensors, shape, form.activation, rotary, eps)
        graph = CapturedGraph(layers, x.device)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            pointer = None if mask is None else mask.data_ptr()
            split(stream, x.data_ptr(), pointer)
            graph.run()
            finish(stream, pointer, out.data_ptr())

        return launch

    return bound_forward(bind_call, weights, shape, device, wide_forward(model, shape))


class Memory:
    """The fixed device memory of a forward's calls, which its kernels are bound to.

    The stream goes from one of two places `[2, T, D]` to the other at each sum.
    """

    def __init__(self, shape: Shape, head_columns: int, has_mask: bool, device: torch.device) -> None:
        tokens, width = shape.tokens, shape.d_model

        def half(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.float16, device=device)

        self.streams = [half(2, tokens, width) for _ in range(2)]
        self.qkv, self.context = half(tokens, 3 * head_columns), half(tokens, head_columns)
        self.hidden = half(tokens, shape.ffn_dim)
        self.inverses = torch.ones(tokens, device=device)
        # Of the rows of the input, and of the stream behind a sum.
        self.input_moments = torch.zeros(1, tokens, 2, device=device)
        self.moments = torch.zeros(moment_tiles(width), tokens, 2, device=device)
        self.mask = self.extent = None
        if has_mask:
            self.mask = torch.ones(shape.batch_size, shape.seq_len, dtype=torch.bool, device=device)
            self.extent = torch.zeros(shape.batch_size, dtype=torch.int32, device=device)

    def normed(
        self, rung: PersistentRung, weights: dict[str, Tensor], name: str, place: int, moments: Tensor, out: Tensor,
        eps: float,
    ) -> Step:  # fmt: skip
        """Bind a product of the norm of a stream."""
        weight, bias, sums = (weights[f"{name}.{part}"] for part in ("weight", "bias", "sums"))
        inputs = [self.streams[place][0], weight, bias, moments, sums, self.inverses]
        return bind(replace(rung, moment_tiles=len(moments), epsilon=eps), inputs, out)

    def summed(self, weights: dict[str, Tensor], name: str, value: Tensor, place: int) -> Step:
        """Bind a product that is added to a stream; the sum stands in the other place."""
        weight, bias = (weights[f"{name}.{part}"] for part in ("weight", "bias"))
        inputs = [value, weight, bias, self.inverses, self.streams[place], self.moments]
        return bind(RESIDUAL, inputs, self.streams[1 - place])


def bind_layers(
    memory: Memory, weights: dict[str, Tensor], shape: Shape, activation: str,
    rotary: tuple[Tensor, Tensor] | None, eps: float,
) -> Step:  # fmt: skip
    """Return a function that launches all layers on the current stream."""
    hidden = HIDDEN[activation]
    layers = []
    for layer in range(shape.num_layers):
        moments = memory.moments if layer else memory.input_moments
        project = memory.normed(QKV, weights, f"{layer}.qkv", 0, moments, memory.qkv, eps)
        behind = (
            memory.summed(weights, f"{layer}.out", memory.context, 0),
            memory.normed(hidden, weights, f"{layer}.ffn_in", 1, memory.moments, memory.hidden, eps),
            memory.summed(weights, f"{layer}.ffn_out", memory.hidden, 1),
        )
        layers.append((project, behind))
    qkv = memory.qkv.view(shape.batch_size, shape.seq_len, -1)
    attend = bind_heads(memory, qkv, shape)

    def launch() -> None:
        if memory.mask is not None:
            mask_extent(memory.mask, memory.extent)
        for project, behind in layers:
            project()
            if rotary is not None:
                rotate(qkv, *rotary)
            attend()
            for step in behind:
                step()

    return launch


def bind_heads(memory: Memory, qkv: Tensor, shape: Shape) -> Step:
    """Return a launch of attention: by our kernel for the head widths that it has, else by the lean one."""
    heads, (mask, extent) = shape.num_heads, (memory.mask, memory.extent)
    context = memory.context.view(shape.batch_size, shape.seq_len, -1)
    plan = plan_attention(context.shape[-1] // heads, heads, shape.causal)
    if plan is not None:
        return bind_attention(plan, qkv, mask, extent, context)
    return lambda: attention(qkv, mask, extent, heads, shape.causal, out=context)


def bind_ends(
    memory: Memory, weights: dict[str, Tensor], x: Tensor, mask: Tensor | None, out: Tensor, eps: float
) -> tuple[Callable[[int, int, int | None], None], Callable[[int, int | None, int], None]]:
    """Return the launches `(stream, x, mask)`, which splits the input, and `(stream, mask, out)`, which norms."""
    tokens, elements = memory.inverses.numel(), x.numel()
    grid, tiles, warps = row_sizes(tokens, x.shape[-1])
    constants = tiles | {"HAS_MASK": mask is not None}
    first, kept = memory.streams[0], memory.mask
    split_to = (first, memory.inverses, memory.input_moments, kept)
    finish_from = (first, memory.inverses, weights["norm.weight"], weights["norm.bias"])
    split = BoundKernel(split_kernel, grid, (x, mask, *split_to, tokens, elements), constants, warps, stages=1)
    finish = BoundKernel(
        finish_kernel, grid, (*finish_from, mask, out, tokens, elements, eps), constants, warps, stages=1
    )
    split_pointers = [None if tensor is None else tensor.data_ptr() for tensor in split_to]
    finish_pointers = [tensor.data_ptr() for tensor in finish_from]

    def launch_split(stream: int, x: int, mask: int | None) -> None:
        split(stream, x, mask, *split_pointers, tokens, elements)

    def launch_finish(stream: int, mask: int | None, out: int) -> None:
        finish(stream, *finish_pointers, mask, out, tokens, elements, eps)

    return launch_split, launch_finish
