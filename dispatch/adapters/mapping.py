"""BlockMapping: where a pre-norm block keeps the sixteen tensors of a layer, and how its call is read. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rooflane.dispatch.errors import Unserved

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class WeightsAt:
    """Where a projection's weight and bias lie: dotted paths from the block.

    `part = (index, count)` takes one of `count` equal parts of the output features (packed q, k, v); `transposed` is
    for weights stored `[in, out]`, as transformers' Conv1D does. A bias that is None or missing counts as zeros.
    """

    weight: str
    bias: str
    part: tuple[int, int] = (0, 1)
    transposed: bool = False


def weights_at(path: str, part: tuple[int, int] = (0, 1), *, transposed: bool = False) -> WeightsAt:
    """Return where a submodule with a `weight` and a `bias` keeps them."""
    return WeightsAt(f"{path}.weight", f"{path}.bias", part, transposed)


class Call(NamedTuple):
    """One call as every family takes it: `x [B, S, D]`, `valid [B, S]` bool (True = real token) or None, causality."""

    x: Tensor
    valid: Tensor | None
    causal: bool


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
    """Describe blocks that compute `x + attention(norm1(x))`, then `x + ffn_out(gelu(ffn_in(norm2(x))))`.

    `norm1` and `norm2` are paths of LayerNorm modules, `num_heads` the path of a number, `activation` that of the
    exact (erf) GELU where the block keeps one. `layers` is the path of the blocks inside the module, "" when the
    module is itself one block; `final_norm` that of the LayerNorm behind them, "" when there is none. `causal` says
    whether a call without a mask is causal, or asks the module. `read(module, causal, *args, **kwargs)` turns a call
    into a `Call` or raises `Unserved`; `refuse(block)` returns why a block does not fit, or None.

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
    layers: str = ""
    final_norm: str = ""
    read: Callable[..., Call] = read_x
    refuse: Callable[[nn.Module], str | None] = refuse_nothing
