"""GPT2_BLOCK: transformers' GPT-2 block, packed Conv1D projections and all. No torch at import."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rooflane.dispatch.adapters.mapping import BlockMapping, Call, weights_at
from rooflane.dispatch.errors import Unserved

if TYPE_CHECKING:
    from torch import Tensor, nn


def read_gpt2(block: nn.Module, causal: bool, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Call:
    """Read a call of the block: no cache, no cross attention; a 4-D attention mask must be causal with padding."""
    mask = kwargs.get("attention_mask")
    extra = [name for name, value in kwargs.items() if name != "attention_mask" and _asks(value)]
    if any(map(_asks, args)) or extra:
        passed = ", ".join(extra) or "positional arguments behind hidden_states"
        raise Unserved("arguments", f"it passes {passed}; only hidden_states and attention_mask= are served")
    if mask is None:
        return Call(hidden_states, None, causal)
    return Call(hidden_states, _valid_keys(mask, hidden_states), True)


def _asks(value: Any) -> bool:
    """Tell whether an argument asks for anything: None and False are what every optional one defaults to."""
    return value is not None and value is not False


def _valid_keys(mask: Tensor, x: Tensor) -> Tensor:
    """Return `[B, S]` from a causal mask with padding `[B or 1, 1, S, S]`: bool (True = visible) or additive.

    Rows of invalid tokens are not compared. Looking at the values waits for the device, once a call.
    """
    import torch

    batch, length = x.shape[:2]
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, length, length):
        raise Unserved("mask", f"attention_mask is {tuple(mask.shape)}; served: [{batch} or 1, 1, {length}, {length}]")
    # Additive masks hide with -inf or with their dtype's most negative number.
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~visible if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
    visible, hidden = visible[:, 0], hidden[:, 0]
    valid = visible[:, -1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    wanted = causal & valid[:, None, :]
    fits = ((visible == wanted) & (visible | hidden)) | ~valid[:, :, None]
    if not bool(fits.all()):
        raise Unserved(
            "mask", "attention_mask is not a causal mask with padded keys, the one kind the families compute"
        )
    return valid.expand(batch, length)


def _is_causal(block: nn.Module) -> bool:
    """Tell whether the block, called without a mask, is causal: eager attention without a `bias` buffer is not."""
    implementation = getattr(block.attn.config, "_attn_implementation", "eager")
    return implementation != "eager" or hasattr(block.attn, "bias")


def _refuse(block: nn.Module) -> str | None:
    """Return what sets a block apart from a plain one."""
    if hasattr(block, "crossattention"):
        return "has cross attention, which no family computes"
    attention = block.attn
    scale = getattr(attention, "scaling", attention.head_dim**-0.5)
    unscaled = not attention.scale_attn_weights or attention.scale_attn_by_inverse_layer_idx
    if unscaled or not math.isclose(scale, attention.head_dim**-0.5):
        return "scales its scores otherwise than by head_dim ** -0.5; use scale_attn_weights=True alone"
    return None


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
    causal=_is_causal,
    activation="mlp.act",
    read=read_gpt2,
    refuse=_refuse,
)
