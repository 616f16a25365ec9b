"""torch.nn.TransformerEncoderLayer, alone: a stack of one without a final norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rooflane.baseline import TransformerConfig
from rooflane.dispatch.adapters.checks import check_activation, check_eval, check_hooks, check_same_forward
from rooflane.dispatch.adapters.mapping import BlockMapping, Call, WeightsAt, weights_at
from rooflane.dispatch.adapters.masks import read_causal, read_valid
from rooflane.dispatch.adapters.view import StackView
from rooflane.dispatch.dispatched import Dispatched
from rooflane.dispatch.errors import OptimizeError
from rooflane.dispatch.request import Sizes

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
        check_same_forward(getattr(layer, name), nn.LayerNorm, ("forward",), f"{where}.{name}")
    if layer.activation is not functional.gelu:
        check_activation(layer, layer.activation)


class DispatchedEncoderLayer(Dispatched, nn.TransformerEncoderLayer):
    """An encoder layer whose forward is the routed family's, sharing the given layer's submodules.

    Rows of padded tokens are 0, where PyTorch's own forward leaves whatever it computed.
    """

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the layer's sizes; raises `OptimizeError` when its function is another one."""
        check_layer(model, "the layer")
        check_eval(model)
        check_hooks(model)
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

    def read(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Call:
        """Return the call as the families take it."""
        return read_call(src, src_mask, src_key_padding_mask, is_causal)

    def original(
        self, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Run the layer's own forward."""
        src_mask = own_mask(src, src_mask, is_causal)
        return self._model(src, src_mask, src_key_padding_mask, is_causal)

    def view(self, config: TransformerConfig) -> Any:
        """Return the layer's weights as a baseline's."""
        return StackView(self._model, ENCODER_LAYER, config)


def sizes_of(model: nn.Module, layers: list[nn.Module], *, final_norm: bool) -> Sizes:
    """Return the sizes of a stack of encoder layers, all alike."""
    found = [
        Sizes(layer.self_attn.embed_dim, layer.self_attn.num_heads, layer.linear1.out_features, len(layers), None, True)
        for layer in layers
    ]
    if len(set(found)) > 1:
        raise OptimizeError(f"the layers of {type(model).__name__} differ in size; the families take equal ones")
    return replace(found[0], final_norm=final_norm)


def read_call(src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool | None) -> Call:
    """Return a call of an encoder or a layer as the families take it."""
    return Call(src, read_valid(padding, src), read_causal(mask, is_causal, src))


def own_mask(src: Tensor, mask: Tensor | None, is_causal: bool | None) -> Tensor | None:
    """Return the mask PyTorch's own forward needs: it ignores or refuses `is_causal=True` without one."""
    if mask is None and is_causal:
        return nn.Transformer.generate_square_subsequent_mask(src.shape[1], device=src.device, dtype=src.dtype)
    return mask
