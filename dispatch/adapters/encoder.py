"""torch.nn.TransformerEncoder and TransformerEncoderLayer: a stack of encoder layers, or one alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooflane.baseline import TransformerConfig
from rooflane.dispatch.adapters.blocks import StackView
from rooflane.dispatch.adapters.checks import (
    check_activation,
    check_eval,
    check_hooks,
    check_norm,
    check_norms,
    check_parameters,
    check_same_forward,
)
from rooflane.dispatch.adapters.mapping import BlockMapping, Call, OptimizeError, Sizes, Unserved, WeightsAt, weights_at
from rooflane.dispatch.dispatched import Dispatched
from rooflane.shapes import Form

_PACKED = ("self_attn.in_proj_weight", "self_attn.in_proj_bias")
ENCODER_LAYER = BlockMapping(
    norm1="norm1",
    norm2="norm2",
    q=WeightsAt(*_PACKED, part=(0, 3)),
    k=WeightsAt(*_PACKED, part=(1, 3)),
    v=WeightsAt(*_PACKED, part=(2, 3)),
    out=weights_at("self_attn.out_proj"),
    ffn_in=weights_at("linear1"),
    ffn_out=weights_at("linear2"),
    num_heads="self_attn.num_heads",
    causal=False,
)


def check_layer(layer: nn.Module, where: str) -> None:
    """Raise `OptimizeError` unless the layer's function is a baseline layer's."""
    kind = nn.TransformerEncoderLayer
    check_same_forward(layer, kind, ("forward", "_sa_block", "_ff_block"), where)
    if not layer.norm_first:
        raise OptimizeError(
            f"{where} is post-norm (norm_first=False); every family computes pre-norm layers: use norm_first=True"
        )
    attention = layer.self_attn
    check_same_forward(attention, nn.MultiheadAttention, ("forward",), f"{where}.self_attn")
    if not attention.batch_first:
        raise OptimizeError(f"{where} has batch_first=False; the families take [batch, sequence, width]: use True")
    if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
        raise OptimizeError(
            f"{where}.self_attn has kdim, vdim, add_bias_kv or add_zero_attn set; the families compute plain "
            "self-attention with one packed projection"
        )
    for name in ("linear1", "linear2"):
        check_same_forward(getattr(layer, name), nn.Linear, ("forward",), f"{where}.{name}")
    check_same_forward(attention.out_proj, nn.Linear, ("forward",), f"{where}.self_attn.out_proj")
    for name in ("norm1", "norm2"):
        check_norm(getattr(layer, name), attention.embed_dim, f"{where}.{name}")
    if layer.activation is not functional.gelu:
        check_activation(layer, layer.activation)


class _EncoderCalls(Dispatched):
    """Calls of an encoder or of one layer: `(src, mask, src_key_padding_mask, is_causal)`, in this order."""

    def read(
        self, src: Tensor, mask: Tensor | None = None, padding: Tensor | None = None, is_causal: bool | None = None
    ) -> Call:
        """Return the call as the families take it."""
        return Call(src, read_valid(padding, src), read_causal(mask, is_causal, src))

    def original(self, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool | None) -> Tensor:
        """Run the module's own forward, which ignores or refuses `is_causal=True` without a mask."""
        if mask is None and is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], device=src.device, dtype=src.dtype)
        return self._model(src, mask, padding, is_causal)


class DispatchedEncoderLayer(_EncoderCalls, nn.TransformerEncoderLayer):
    """An encoder layer whose forward is the routed family's, sharing the given layer's submodules.

    Rows of padded tokens are 0, where PyTorch's own forward leaves whatever it computed.
    """

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the layer's sizes; raises `OptimizeError` when its function is another one."""
        check_layer(model, "the layer")
        check_eval(model)
        check_hooks(model)
        check_parameters(model)
        return sizes_of(model, [model], final_norm=False)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the layer's output `[B, S, D]`; the arguments are `nn.TransformerEncoderLayer.forward`'s."""
        return self._serve(src, src_mask, src_key_padding_mask, is_causal)

    def view(self, config: TransformerConfig) -> Any:
        """Return the layer's weights as a baseline's."""
        return StackView(self._model, ENCODER_LAYER, config)


class DispatchedEncoder(_EncoderCalls, nn.TransformerEncoder):
    """An encoder whose forward is the routed family's, sharing the given encoder's submodules.

    Rows of padded tokens are 0, where PyTorch's own forward leaves whatever it computed.
    """

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the encoder's sizes; raises `OptimizeError` when its function is another one."""
        check_same_forward(model, nn.TransformerEncoder, ("forward",), "the module")
        layers = list(model.layers)
        if not layers:
            raise OptimizeError("the TransformerEncoder has no layers; there is nothing to optimise")
        for index, layer in enumerate(layers):
            check_layer(layer, f"layers.{index}")
        norms = {
            f"layers.{i}.{name}": getattr(part, name) for i, part in enumerate(layers) for name in ("norm1", "norm2")
        }
        if model.norm is not None:
            norms["norm"] = model.norm
        check_norms(norms, layers[0].self_attn.embed_dim)
        check_eval(model)
        check_hooks(model)
        check_parameters(model)
        return sizes_of(model, layers, final_norm=model.norm is not None)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return the encoder's output `[B, S, D]`; the arguments are `nn.TransformerEncoder.forward`'s."""
        return self._serve(src, mask, src_key_padding_mask, is_causal)

    def view(self, config: TransformerConfig) -> Any:
        """Return the encoder's weights as a baseline's."""
        mapping = replace(ENCODER_LAYER, layers="layers", final_norm="norm" if self._sizes.form.final_norm else "")
        return StackView(self._model, mapping, config)


def sizes_of(model: nn.Module, layers: list[nn.Module], *, final_norm: bool) -> Sizes:
    """Return the sizes of a stack of encoder layers, all alike."""
    found = [
        Sizes(layer.self_attn.embed_dim, layer.self_attn.num_heads, layer.linear1.out_features, len(layers), None)
        for layer in layers
    ]
    if len(set(found)) > 1:
        raise OptimizeError(f"the layers of {type(model).__name__} differ in size; the families take equal ones")
    return replace(found[0], form=Form(final_norm=final_norm))


def read_causal(mask: Tensor | None, is_causal: bool | None, x: Tensor) -> bool:
    """Return whether a call attends causally; raises `Unserved` for any other mask.

    `is_causal=True` is taken at its word, with a mask or without one; otherwise the values of the mask decide, which
    waits for the device once a call.
    """
    if mask is None:
        return bool(is_causal)
    length = x.shape[1] if x.dim() == 3 else -1
    if mask.shape != (length, length):
        raise Unserved("mask", f"the attention mask is {tuple(mask.shape)}; served: a causal one, [{length}, {length}]")
    if is_causal:
        return True
    hidden = _hidden(mask)
    future = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(diagonal=1)
    known = torch.ones((), dtype=torch.bool, device=mask.device) if hidden is mask else (hidden | (mask == 0)).all()
    known, causal, hides = torch.stack([known, (hidden == future).all(), hidden.any()]).tolist()
    if not known or (hides and not causal):
        raise Unserved("mask", "the attention mask is neither causal nor empty, the kinds the families compute")
    return hides or length == 1


def read_valid(padding: Tensor | None, x: Tensor) -> Tensor | None:
    """Return `[B, S]` bool, True = real token, from a key padding mask (True or -inf = padding)."""
    if padding is None:
        return None
    if padding.dtype == torch.bool:
        return ~padding
    hidden = _hidden(padding)
    if not bool((hidden | (padding == 0)).all()):
        raise Unserved("padding", "src_key_padding_mask holds numbers other than 0 and -inf, which the families ignore")
    return ~hidden


def _hidden(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise Unserved("mask", f"a mask is {mask.dtype}; PyTorch takes bool and floating-point masks")
    return mask == float("-inf")
