"""The class that replaces the script's model: it builds at the first call, after the weights were copied and moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline.reference import TORCH_DTYPES, BaselineTransformer
from rooflane.shapes.shape import Shape


class PlacedTransformer(BaselineTransformer):
    """A baseline stack with the organiser's constructor, signature and keys, whose forward a subclass chooses.

    The organiser constructs it, then loads the weights, then moves it: nothing is packed before the first call.
    """

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        plain = BaselineTransformer(config)
        self.config = plain.config
        self.layers = plain.layers
        self.final_norm = plain.final_norm
        # The same submodules without this class's forward: what families pack from, and what other calls run.
        self.__dict__["_plain"] = plain
        self.__dict__["_built"] = {}

    def choose(self, plain: BaselineTransformer, shape: Shape, device: torch.device) -> Callable[..., Tensor] | None:
        """Return the forward for a shape on a device, built on `plain`'s weights, or None for the plain one."""
        raise NotImplementedError

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """Return the stack's output `[B, S, D]` for `x [B, S, D]` and `valid_token_mask [B, S]` bool or None."""
        if torch.compiler.is_compiling():
            # Nothing here is worth tracing; as a decorator this would import the compiler in every process (3 s).
            return torch.compiler.disable(self._run)(x, valid_token_mask)
        return self._run(x, valid_token_mask)

    def _run(self, x: Tensor, valid_token_mask: Tensor | None) -> Tensor:
        """Run the built forward, building it at the first call; calls that need gradients run plain torch."""
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return self._plain(x, valid_token_mask)
        forward = self._built.get((x.shape, x.dtype))
        if forward is None:
            forward = self._built[x.shape, x.dtype] = self._build(x)
        return forward(x, valid_token_mask)

    def _build(self, x: Tensor) -> Callable[..., Tensor]:
        """Return the forward for inputs like `x`; the plain one, with a warning, where there is no other."""
        config = self.config
        dtype = next((name for name, value in TORCH_DTYPES.items() if value == x.dtype), None)
        if dtype is None or x.dim() != 3 or not x.numel() or x.shape[-1] != config.d_model:
            return self._plain
        shape = Shape(
            "placed", x.shape[0], x.shape[1], config.d_model, config.num_heads, config.ffn_dim, config.num_layers,
            config.causal, dtype,
        )  # fmt: skip
        # The first call comes in inference mode: packed weights made there could not be renewed outside it.
        with torch.inference_mode(False), torch.no_grad():
            forward = self.choose(self._plain, shape, x.device)
        if forward is None:
            warnings.warn(f"no fast forward for {shape.label()} on {x.device.type}: plain torch runs", stacklevel=5)
        return forward or self._plain

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move or cast the weights as any module does, and drop what was built from the old ones."""
        self._built.clear()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the built forwards out of copies: they hold graphs and device memory of their own."""
        return self.__dict__ | {"_built": {}}
