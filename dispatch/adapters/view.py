"""A module's weights seen as a baseline's: what a family reads of a model, on the module's own storage.

Every access reads the module anew, so a replaced, moved or changed parameter is seen; what is watched for changes are
the module's own parameters, of which these are parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rooflane.baseline import BaselineTransformer, TransformerConfig
from rooflane.dispatch.adapters.mapping import BlockMapping, WeightsAt

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class LinearView:
    """A projection `[out, in]` with its bias `[out]`, zeros where the module has none."""

    def __init__(self, block: nn.Module, where: WeightsAt) -> None:
        self._block, self._where = block, where

    @property
    def weight(self) -> Tensor:
        """The projection's rows of the stored weight."""
        stored = attrgetter(self._where.weight)(self._block)
        # Packers take contiguous weights, as every nn.Linear's are; they run when weights change, not at every call.
        return self._part(stored.t() if self._where.transposed else stored).contiguous()

    @property
    def bias(self) -> Tensor:
        """The projection's part of the stored bias."""
        try:
            stored = attrgetter(self._where.bias)(self._block)
        except AttributeError:
            stored = None
        weight = self.weight
        return weight.new_zeros(weight.shape[0]) if stored is None else self._part(stored)

    def _part(self, stored: Tensor) -> Tensor:
        index, count = self._where.part
        return stored.chunk(count)[index]


class NormView:
    """A LayerNorm's scale and shift `[D]`: ones and zeros where the module has none."""

    def __init__(self, owner: nn.Module, path: str) -> None:
        self._owner, self._path = owner, path

    @property
    def norm(self) -> nn.LayerNorm:
        """The module's own LayerNorm."""
        return attrgetter(self._path)(self._owner)

    @property
    def eps(self) -> float:
        """The number added to the variance."""
        return self.norm.eps

    @property
    def weight(self) -> Tensor:
        """The scale."""
        return self.norm.weight if self.norm.weight is not None else self._filled(1.0)

    @property
    def bias(self) -> Tensor:
        """The shift."""
        return self.norm.bias if self.norm.bias is not None else self._filled(0.0)

    def _filled(self, value: float) -> Tensor:
        like = next(self._owner.parameters())
        return like.new_full(self.norm.normalized_shape, value)


class AttentionView:
    """The four projections of a block's attention."""

    def __init__(self, block: nn.Module, mapping: BlockMapping) -> None:
        self.q_proj = LinearView(block, mapping.q)
        self.k_proj = LinearView(block, mapping.k)
        self.v_proj = LinearView(block, mapping.v)
        self.out_proj = LinearView(block, mapping.out)
        self.num_heads: int = attrgetter(mapping.num_heads)(block)
        self.head_dim = self.q_proj.weight.shape[0] // self.num_heads
        self.scale = self.head_dim**-0.5


class LayerView:
    """One block as a baseline layer."""

    def __init__(self, block: nn.Module, mapping: BlockMapping) -> None:
        self.norm1 = NormView(block, mapping.norm1)
        self.attention = AttentionView(block, mapping)
        self.norm2 = NormView(block, mapping.norm2)
        self.ffn_in = LinearView(block, mapping.ffn_in)
        self.ffn_out = LinearView(block, mapping.ffn_out)


class StackView:
    """A whole module as a baseline: `layers`, `final_norm` (None where it has none), `config` and `parameters()`.

    Called, it computes the baseline's function on the module's weights.
    """

    def __init__(self, module: nn.Module, mapping: BlockMapping, config: TransformerConfig) -> None:
        self.config = config
        self._module = module
        self.layers = [LayerView(block, mapping) for block in blocks_of(module, mapping)]
        self.final_norm = NormView(module, mapping.final_norm) if mapping.final_norm else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the module's own parameters: what a packed copy must watch."""
        return self._module.parameters()

    def state(self) -> dict[str, Tensor]:
        """Return every tensor under the baseline's own name."""
        found = {}
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            parts = {
                "norm1": layer.norm1,
                **{f"attention.{name}": getattr(attention, name) for name in PROJECTIONS},
                "norm2": layer.norm2,
                "ffn_in": layer.ffn_in,
                "ffn_out": layer.ffn_out,
            }
            for name, part in parts.items():
                found |= {f"layers.{index}.{name}.{kind}": getattr(part, kind) for kind in ("weight", "bias")}
        if self.final_norm is not None:
            found |= {f"final_norm.{kind}": getattr(self.final_norm, kind) for kind in ("weight", "bias")}
        return found

    def __call__(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """Return the reference output `[B, S, D]` of the viewed weights."""
        with torch.device("meta"):
            skeleton = BaselineTransformer(self.config)
        for norm in (module for module in skeleton.modules() if isinstance(module, nn.LayerNorm)):
            norm.eps = self.layers[0].norm1.eps
        if self.final_norm is None:
            skeleton.final_norm = nn.Identity()
        return functional_call(skeleton, self.state(), (x, valid_token_mask), strict=True)


def blocks_of(module: nn.Module, mapping: BlockMapping) -> list[nn.Module]:
    """Return the module's blocks in order."""
    return list(attrgetter(mapping.layers)(module)) if mapping.layers else [module]
