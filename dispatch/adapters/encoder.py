"""torch.nn.TransformerEncoder and TransformerEncoderLayer: a stack of encoder layers, or one alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import TransformerConfig
from rooflane.dispatch.adapters.blocks import StackView
from rooflane.dispatch.adapters.checks import (
    InPlace,
    activation_of,
    check_eval,
    check_hooks,
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
    """Raise `OptimizeError` unless the families compute the layer's function."""
    kind = nn.TransformerEncoderLayer
    check_same_forward(layer, kind, ("forward", "_sa_block", "_ff_block"), where)
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


class _EncoderCalls(Dispatched):
    """Calls of an encoder or of one layer: `(src, mask, src_key_padding_mask, is_causal)`, in this order."""

    def read(
        self, src: Tensor, mask: Tensor | None = None, padding: Tensor | None = None, is_causal: bool | None = None
    ) -> Call:
        """Return the call as the families take it."""
        causal, bias = read_causal(mask, is_causal, src, self._sizes.num_heads)
        valid, hiding = read_valid(padding, src)
        if hiding is not None:
            bias = hiding if bias is None else _added(bias, src.dtype) + hiding
        return Call(src, valid, causal, bias)

    def original(self, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool | None) -> Tensor:
        """Run the module's own forward, which ignores or refuses `is_causal=True` without a mask."""
        if mask is None and is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], device=src.device, dtype=src.dtype)
        if isinstance(vars(self._model).get("forward"), InPlace):
            return type(self._model).forward(self._model, src, mask, padding, is_causal)
        return self._model(src, mask, padding, is_causal)


class EncoderForward(InPlace):
    """The forward of an encoder inside a model that is served in place."""

    def __init__(self, stack: DispatchedEncoder) -> None:
        self.stack = stack

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the encoder's output."""
        return self.stack.forward(*args, **kwargs)


class DispatchedEncoderLayer(_EncoderCalls, nn.TransformerEncoderLayer):
    """An encoder layer whose forward is the routed family's, sharing the given layer's submodules.

    Rows of padded tokens are 0, where PyTorch's own forward leaves whatever it computed.
    """

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the layer's sizes; raises `OptimizeError` when its function is another one."""
        return describe_layers(model, {"": model}, None)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the layer's output `[B, S, D]`; the arguments are `nn.TransformerEncoderLayer.forward`'s."""
        return self._serve(src, src_mask, src_key_padding_mask, is_causal)

    def view(self, config: TransformerConfig, form: Form) -> Any:
        """Return the layer's weights as a baseline's."""
        return StackView(self._model, ENCODER_LAYER, config, form)


class DispatchedEncoder(_EncoderCalls, nn.TransformerEncoder):
    """An encoder whose forward is the routed family's, sharing the given encoder's submodules.

    Rows of padded tokens are 0, where PyTorch's own forward leaves whatever it computed.
    """

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the encoder's sizes; raises `OptimizeError` when its function is another one."""
        check_same_forward(model, nn.TransformerEncoder, ("forward",), "the module")
        if not len(model.layers):
            raise OptimizeError("the TransformerEncoder has no layers; there is nothing to optimise")
        return describe_layers(model, {f"layers.{i}": layer for i, layer in enumerate(model.layers)}, model.norm)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return the encoder's output `[B, S, D]`; the arguments are `nn.TransformerEncoder.forward`'s."""
        return self._serve(src, mask, src_key_padding_mask, is_causal)

    def view(self, config: TransformerConfig, form: Form) -> Any:
        """Return the encoder's weights as a baseline's."""
        mapping = replace(ENCODER_LAYER, layers="layers", final_norm="norm" if form.final_norm else "")
        return StackView(self._model, mapping, config, form)


def describe_layers(model: nn.Module, layers: dict[str, nn.Module], final_norm: nn.Module | None) -> Sizes:
    """Return the sizes and the form of encoder layers, all alike; refuse what no family computes."""
    norms: dict[str, nn.Module] = {}
    found = []
    for name, layer in layers.items():
        check_layer(layer, name or "the layer")
        norms |= {f"{name}.{part}".lstrip("."): getattr(layer, part) for part in ("norm1", "norm2")}
        form = Form(layer.norm_first, activation_of(layer, layer.activation))
        attention = layer.self_attn
        found.append(
            Sizes(attention.embed_dim, attention.num_heads, layer.linear1.out_features, len(layers), None, form)
        )
    if len(set(found)) > 1:
        raise OptimizeError(
            f"the layers of {type(model).__name__} differ in size or form; the families take equal ones"
        )
    sizes = found[0]
    norm = check_norms(norms | ({} if final_norm is None else {"norm": final_norm}), sizes.d_model)
    check_eval(model)
    check_hooks(model)
    check_parameters(model)
    return replace(sizes, form=replace(sizes.form, norm=norm, final_norm=final_norm is not None))


def read_causal(mask: Tensor | None, is_causal: bool | None, x: Tensor, heads: int) -> tuple[bool, Tensor | None]:
    """Return whether a call attends causally, and any other attention mask as a bias of the scores.

    `mask` is `[S, S]` or `[B H, S, S]`, bool (True = hidden) or added to the scores. `is_causal=True` is taken at its
    word, with a mask or without one; otherwise the values of an `[S, S]` mask decide, which waits for the device once a
    call. Raises `Unserved` for a mask of another shape.
    """
    if mask is None or (is_causal and mask.dim() == 2):
        return bool(is_causal), None
    batch, length = x.shape[:2] if x.dim() == 3 else (-1, -1)
    if mask.shape not in ((length, length), (batch * heads, length, length)):
        raise Unserved(
            "mask",
            f"the attention mask is {tuple(mask.shape)}; served: [{length}, {length}] and [{batch * heads}, {length}, "
            f"{length}]",
        )
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise Unserved("mask", f"the attention mask is {mask.dtype}; PyTorch takes bool and floating-point masks")
    if mask.device != x.device:
        raise Unserved("mask", f"x is on {x.device}, the attention mask on {mask.device}")
    bias = ~mask if mask.dtype == torch.bool else mask
    if mask.dim() == 3:
        return False, bias.unflatten(0, (batch, heads))
    if not (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        visible = bias if bias.dtype == torch.bool else bias == 0
        past = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        strange = (~visible & (bias > float("-inf"))).any() if bias is mask else visible.new_zeros(())
        strange, causal, full = torch.stack([strange, (visible == past).all(), visible.all()]).tolist()
        if not strange and (causal or full):
            return not full or length == 1, None
    return False, bias[None, None]


def read_valid(padding: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return `[B, S]` bool, True = real token, from a key padding mask (True or -inf = padding).

    One of other numbers is returned as a bias of the scores `[B, 1, 1, S]`.
    """
    if padding is None:
        return None, None
    if padding.dtype == torch.bool:
        return ~padding, None
    hidden = padding == float("-inf")
    if bool((hidden | (padding == 0)).all()):
        return ~hidden, None
    return None, padding[:, None, None, :]


def _added(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias as numbers to add to the scores."""
    if bias.dtype != torch.bool:
        return bias
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, float("-inf"))
