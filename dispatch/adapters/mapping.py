"""What optimize() is asked, and how it reads a module: request, call, BlockMapping, their errors. No torch.

A BlockMapping says where a block keeps the sixteen tensors of a layer, and how its call is read. Those of other
libraries' blocks are in known/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rooflane.dispatch.profile import Profile
from rooflane.dispatch.rules import RuleTable
from rooflane.shapes import PUBLISHED, Form

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class OptimizeError(ValueError):
    """A module, shape or call that cannot be dispatched; the text says what differs and how to fix it."""


class Unserved(Exception):
    """A call that no built forward takes; `about` names the kind of obstacle, which is warned of once."""

    def __init__(self, about: str, reason: str) -> None:
        super().__init__(reason)
        self.about = about


@dataclass(frozen=True)
class Sizes:
    """What a module fixes of every call: sizes, the form of its layers; `causal` is None where each call says."""

    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool | None
    form: Form = PUBLISHED


@dataclass(frozen=True)
class Request:
    """What optimize() was asked beside the module: rules, profile, device, and what unseen shapes get.

    `may_compile` is False where shapes come as they are met: torch.compile takes seconds for each.
    """

    rules: RuleTable
    profile: Profile | None
    device: torch.device
    on_unseen: str
    cache_size: int
    may_compile: bool


@dataclass(frozen=True)
class WeightsAt:
    """Where a projection's weight and bias lie: dotted paths from the block.

    `part = (index, count)` takes one of `count` equal parts of the output features (packed q, k, v); `transposed` is
    for weights stored `[in, out]`, as transformers' Conv1D does. `scale` is the path of a factor `[out]` on the output
    features (LayerScale), "" where there is none. A bias or factor that is None or missing counts as zeros or ones.
    """

    weight: str
    bias: str
    part: tuple[int, int] = (0, 1)
    transposed: bool = False
    scale: str = ""


def weights_at(path: str, part: tuple[int, int] = (0, 1), *, transposed: bool = False) -> WeightsAt:
    """Return where a submodule with a `weight` and a `bias` keeps them."""
    return WeightsAt(f"{path}.weight", f"{path}.bias", part, transposed)


class Call(NamedTuple):
    """One call as every family takes it: `x [B, S, D]`, `valid [B, S]` bool (True = real token) or None, causality.

    `bias` has 4 dimensions that broadcast to `[B, H, S, S]`: bool (True = visible), or added to the scaled scores.
    """

    x: Tensor
    valid: Tensor | None
    causal: bool
    bias: Tensor | None = None


def read_x(module: nn.Module, causal: bool, *args: Any, **kwargs: Any) -> Call:
    """Read a call `module(x)`; anything more is not understood, and raises `Unserved`."""
    if len(args) != 1 or kwargs:
        extra = [f"{len(args)} positional arguments"] * (len(args) != 1) + sorted(kwargs)
        raise Unserved("arguments", f"it passes {', '.join(extra)}; this mapping reads module(x) alone")
    return Call(args[0], None, causal)


def refuse_nothing(block: nn.Module) -> None:
    """Accept any block."""


@dataclass(frozen=True)
class BlockMapping:
    """Describe blocks that compute `x + attention(norm1(x))`, then `x + ffn_out(activation(ffn_in(norm2(x))))`.

    Blocks that are not `norm_first` compute `norm1(x + attention(x))`, then `norm2(x + ffn(x))`. `norm1` and `norm2`
    are paths of LayerNorm or RMSNorm modules, `num_heads` the path of a number. `activation` is the path of a callable,
    which is recognised by its values; "" stands for the exact (erf) GELU. `rotary_theta` is the base of rotary
    positions on q and k, as in `Form`. `layers` is the path of the blocks inside the module, "" when the module is
    itself one block; `final_norm` that of the norm after them, "" when there is none. `causal` says whether a call
    without a mask is causal, or asks the module. `read(module, causal, *args, **kwargs)` turns a call into a `Call` or
    raises `Unserved`; `refuse(block)` returns why a block does not fit, or None. `call` is what a trial passes beside
    x, or a function of block and x that returns it.

    A mapping is tried before it is used: the module's own output on a small input must be that of the mapped weights.
    """

    norm1: str
    norm2: str
    q: WeightsAt
    k: WeightsAt
    v: WeightsAt
    out: WeightsAt
    ffn_in: WeightsAt
    ffn_out: WeightsAt
    num_heads: str
    causal: bool | Callable[[nn.Module], bool]
    activation: str = ""
    norm_first: bool | Callable[[nn.Module], bool] = True
    rotary_theta: float | None | Callable[[nn.Module], float | None] = None
    call: Mapping[str, Any] | Callable[[nn.Module, Tensor], Mapping[str, Any]] = field(default_factory=dict)
    layers: str = ""
    final_norm: str = ""
    read: Callable[..., Call] = read_x
    refuse: Callable[[nn.Module], str | None] = refuse_nothing
