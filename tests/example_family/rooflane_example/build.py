"""The built forward of packed_qkv."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape


def build(model: nn.Module, shape: Shape, contiguous: bool):
    """Return a callable `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]`."""
    packed = PackedWeights(model, pack)  # packs again when the model's weights change

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        packed.refresh()
        visible = None
        if mask is not None:
            visible = mask[:, None, None, :]
            if shape.causal:
                ones = torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool, device=x.device)
                visible = visible & ones.tril()
        for index, layer in enumerate(model.layers):
            weight, bias = packed.tensors[f"{index}.weight"], packed.tensors[f"{index}.bias"]
            qkv = linear(layer.norm1(x), weight, bias)
            q, k, v = qkv.view(*x.shape[:2], 3, shape.num_heads, shape.head_dim).permute(2, 0, 3, 1, 4)
            if contiguous:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            causal = shape.causal and mask is None
            out = scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
            x = x + layer.attention.out_proj(out.transpose(1, 2).reshape(x.shape))
            x = x + layer.ffn_out(gelu(layer.ffn_in(layer.norm2(x))))
        x = model.final_norm(x)
        # The mask hides the keys of padding, so its rows affect no real token and are cleared once, at the end.
        return x if mask is None else x.masked_fill(~mask[:, :, None], 0)

    return forward


def pack(model: nn.Module) -> dict[str, Tensor]:
    """Return each layer's q, k and v weights `[3 D, D]` and biases `[3 D]` in one tensor."""
    tensors = {}
    for index, layer in enumerate(model.layers):
        parts = (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
        tensors[f"{index}.weight"] = torch.cat([part.weight for part in parts])
        tensors[f"{index}.bias"] = torch.cat([part.bias for part in parts])
    return tensors
