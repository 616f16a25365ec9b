"""Where the blocks of transformers, timm and torchvision keep their weights, and how each is called."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rooflane.dispatch.adapters.known.calls import Calls
from rooflane.dispatch.adapters.mapping import BlockMapping, WeightsAt, weights_at

if TYPE_CHECKING:
    from torch import Tensor, nn


def mapped(calls: Calls, projections: str, norms: str, ffn: str, activation: str, **more: object) -> BlockMapping:
    """Return a mapping from paths of q, k, v, out; of two norms; of two linear layers; of the activation."""
    q, k, v, out = map(weights_at, projections.split())
    ffn_in, ffn_out = map(weights_at, ffn.split())
    norm1, norm2 = norms.split()
    return BlockMapping(
        norm1=norm1,
        norm2=norm2,
        q=q,
        k=k,
        v=v,
        out=out,
        ffn_in=ffn_in,
        ffn_out=ffn_out,
        num_heads=calls.heads,
        activation=activation,
        causal=calls.causal,
        read=calls.read,
        refuse=calls.refuse,
        **more,
    )


BERT = mapped(
    Calls("attention.self.num_attention_heads", "attention.self"),
    "attention.self.query attention.self.key attention.self.value attention.output.dense",
    "attention.output.LayerNorm output.LayerNorm",
    "intermediate.dense output.dense",
    "intermediate.intermediate_act_fn",
    norm_first=False,
)
DISTILBERT = mapped(
    Calls("attention.n_heads", "attention"),
    "attention.q_lin attention.k_lin attention.v_lin attention.out_lin",
    "sa_layer_norm output_layer_norm",
    "ffn.lin1 ffn.lin2",
    "ffn.activation",
    norm_first=False,
)
VIT = mapped(
    Calls("attention.num_attention_heads", "attention"),
    "attention.q_proj attention.k_proj attention.v_proj attention.o_proj",
    "layernorm_before layernorm_after",
    "mlp.fc1 mlp.fc2",
    "mlp.activation_fn",
)
DINOV2 = replace(
    VIT,
    norm1="norm1",
    norm2="norm2",
    out=replace(VIT.out, scale="layer_scale1.lambda1"),
    ffn_out=replace(VIT.ffn_out, scale="layer_scale2.lambda1"),
)
# The block requires the argument attention_mask.
CLIP = mapped(
    Calls("self_attn.num_heads", "self_attn"),
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
    "layer_norm1 layer_norm2",
    "mlp.fc1 mlp.fc2",
    "mlp.activation_fn",
    call={"attention_mask": None},
)
WHISPER = replace(
    CLIP,
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    ffn_in=weights_at("fc1"),
    ffn_out=weights_at("fc2"),
    activation="activation_fn",
)
WAV2VEC2_STABLE = mapped(
    Calls("attention.num_heads", "attention"),
    "attention.q_proj attention.k_proj attention.v_proj attention.out_proj",
    "layer_norm final_layer_norm",
    "feed_forward.intermediate_dense feed_forward.output_dense",
    "feed_forward.intermediate_act_fn",
)
WAV2VEC2 = replace(WAV2VEC2_STABLE, norm_first=False)


def esm_theta(block: nn.Module) -> float | None:
    """Return the base of an ESM block's rotary positions, or None where positions are part of x (ESM-1b)."""
    attention = block.attention.self
    return attention.config.rope_theta if attention.position_embedding_type == "rotary" else None


def esm_call(block: nn.Module, x: Tensor) -> dict[str, object]:
    """Return what the model passes to a block beside x."""
    from rooflane.dispatch.adapters.masks import rotary_tables

    theta = esm_theta(block)
    if theta is None:
        return {}
    tables = rotary_tables(x.shape[1], block.attention.self.attention_head_size, theta, x.dtype, x.device)
    return {"position_embeddings": tuple(table[None] for table in tables)}


ESM = mapped(
    Calls("attention.self.num_attention_heads", "attention.self", theta=esm_theta),
    "attention.self.query attention.self.key attention.self.value attention.output.dense",
    "attention.LayerNorm LayerNorm",
    "intermediate.dense output.dense",
    "",
    rotary_theta=esm_theta,
    call=esm_call,
)

_GPT2 = Calls("attn.num_heads", "attn")


def refuse_gpt2(block: nn.Module) -> str | None:
    """Return why a GPT-2 block does not fit, or None."""
    attention = block.attn
    scaled = attention.scale_attn_weights and not attention.scale_attn_by_inverse_layer_idx
    if not scaled or not math.isclose(attention.scaling, attention.head_dim**-0.5):
        return "scales its scores otherwise than by head_dim ** -0.5; use scale_attn_weights=True alone"
    return _GPT2.refuse(block)


GPT2_BLOCK = BlockMapping(
    norm1="ln_1",
    norm2="ln_2",
    q=weights_at("attn.c_attn", (0, 3), transposed=True),
    k=weights_at("attn.c_attn", (1, 3), transposed=True),
    v=weights_at("attn.c_attn", (2, 3), transposed=True),
    out=weights_at("attn.c_proj", transposed=True),
    ffn_in=weights_at("mlp.c_fc", transposed=True),
    ffn_out=weights_at("mlp.c_proj", transposed=True),
    num_heads="attn.num_heads",
    causal=_GPT2.causal,
    activation="mlp.act",
    read=_GPT2.read,
    refuse=refuse_gpt2,
)

_TIMM = Calls("attn.num_heads", x="x", mask="attn_mask")
TIMM_BLOCK = BlockMapping(
    norm1="norm1",
    norm2="norm2",
    q=weights_at("attn.qkv", (0, 3)),
    k=weights_at("attn.qkv", (1, 3)),
    v=weights_at("attn.qkv", (2, 3)),
    out=WeightsAt("attn.proj.weight", "attn.proj.bias", scale="ls1.gamma"),
    ffn_in=weights_at("mlp.fc1"),
    ffn_out=WeightsAt("mlp.fc2.weight", "mlp.fc2.bias", scale="ls2.gamma"),
    num_heads="attn.num_heads",
    causal=False,
    activation="mlp.act",
    read=_TIMM.read,
    refuse=_TIMM.refuse,
)
_PACKED = ("self_attention.in_proj_weight", "self_attention.in_proj_bias")
TORCHVISION_BLOCK = BlockMapping(
    norm1="ln_1",
    norm2="ln_2",
    q=WeightsAt(*_PACKED, part=(0, 3)),
    k=WeightsAt(*_PACKED, part=(1, 3)),
    v=WeightsAt(*_PACKED, part=(2, 3)),
    out=weights_at("self_attention.out_proj"),
    ffn_in=weights_at("mlp.0"),
    ffn_out=weights_at("mlp.3"),
    num_heads="self_attention.num_heads",
    causal=False,
    activation="mlp.1",
)
