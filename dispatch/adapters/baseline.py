"""The baseline model, or any module with its submodules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rooflane.baseline import BaselineTransformer
from rooflane.dispatch.adapters.checks import check_eps, check_hooks
from rooflane.dispatch.adapters.mapping import Call
from rooflane.dispatch.dispatched import Dispatched
from rooflane.dispatch.request import Sizes


def is_baseline(model: nn.Module) -> bool:
    """Tell whether a module has the baseline's parts."""
    return all(hasattr(model, name) for name in ("config", "layers", "final_norm"))


class DispatchedTransformer(Dispatched, BaselineTransformer):
    """A baseline whose forward is the routed family's, sharing the given model's submodules."""

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the model's sizes; raises `OptimizeError` when its parts do not make the baseline's function."""
        check_hooks(model)
        norms = {f"layers.{i}.{n}": getattr(part, n) for i, part in enumerate(model.layers) for n in ("norm1", "norm2")}
        check_eps(norms | {"final_norm": model.final_norm})
        config = model.config
        return Sizes(config.d_model, config.num_heads, config.ffn_dim, config.num_layers, config.causal, True)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """Return the stack's output `[B, S, D]` for `x [B, S, D]` and `valid_token_mask [B, S]` bool or None."""
        return self._serve(x, valid_token_mask)

    def read(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Call:
        """Return the call as the families take it."""
        return Call(x, valid_token_mask, self._sizes.causal)

    def view(self, config: Any) -> nn.Module:
        """Return the model itself: families read it as it is."""
        return self._model
