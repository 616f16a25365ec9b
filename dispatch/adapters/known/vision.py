"""The blocks of timm's and torchvision's vision transformers."""

from __future__ import annotations

from rooflane.dispatch.adapters.known.calls import Calls
from rooflane.dispatch.adapters.mapping import BlockMapping, WeightsAt, weights_at

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
