"""The request of optimize(), and the errors of a module, shape or call that does not fit. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooflane.dispatch.profile import Profile
from rooflane.dispatch.rules import RuleTable

if TYPE_CHECKING:
    import torch


class OptimizeError(ValueError):
    """A module, shape or call that cannot be dispatched; the text says what differs and how to fix it."""


class Unserved(Exception):
    """A call that no built forward takes; `about` names the kind of obstacle, which is warned of once."""

    def __init__(self, about: str, reason: str) -> None:
        super().__init__(reason)
        self.about = about


@dataclass(frozen=True)
class Sizes:
    """What a module fixes of every shape it can be called with; `causal` is None where each call says."""

    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool | None
    final_norm: bool


@dataclass(frozen=True)
class Request:
    """What optimize() was asked beside the module: rules, profile, device, and what unseen shapes get."""

    rules: RuleTable
    profile: Profile | None
    device: torch.device
    on_unseen: str
    cache_size: int
