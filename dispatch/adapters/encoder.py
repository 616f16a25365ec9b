"""torch.nn.TransformerEncoder: a stack of encoder layers, with a final LayerNorm or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rooflane.baseline import TransformerConfig
from rooflane.dispatch.adapters.checks import check_eps, check_eval, check_hooks, check_same_forward
from rooflane.dispatch.adapters.encoder_layer import ENCODER_LAYER, check_layer, own_mask, read_call, sizes_of
from rooflane.dispatch.adapters.mapping import Call
from rooflane.dispatch.adapters.view import StackView
from rooflane.dispatch.dispatched import Dispatched
from rooflane.dispatch.errors import OptimizeError
from rooflane.dispatch.request import Sizes


class DispatchedEncoder(Dispatched, nn.TransformerEncoder):
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
            check_same_forward(model.norm, nn.LayerNorm, ("forward",), "norm")
            norms["norm"] = model.norm
        check_eps(norms)
        check_eval(model)
        check_hooks(model)
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

    def read(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Call:
        """Return the call as the families take it."""
        return read_call(src, mask, src_key_padding_mask, is_causal)

    def original(
        self, src: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool | None
    ) -> Tensor:
        """Run the encoder's own forward."""
        return self._model(src, own_mask(src, mask, is_causal), src_key_padding_mask, is_causal)

    def view(self, config: TransformerConfig) -> Any:
        """Return the encoder's weights as a baseline's."""
        mapping = replace(ENCODER_LAYER, layers="layers", final_norm="norm" if self._sizes.final_norm else "")
        return StackView(self._model, mapping, config)
