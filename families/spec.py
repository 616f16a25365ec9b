"""What a family states about itself without torch, and what it needs to know of a device to do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor, device, nn

    Forward = Callable[[Tensor, Tensor | None], Tensor]


class Limits(Protocol):
    """The device figures a family's arithmetic reads; `rooflane.dispatch.Profile` provides them, in SI units."""

    name: str
    kind: str  # "cuda" or "cpu"
    capability: tuple[int, int] | None

    @property
    def memory_bytes(self) -> int: ...

    @property
    def shared_memory_bytes(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def units(self) -> int: ...

    @property
    def copy_bytes_per_s(self) -> float: ...

    @property
    def special_per_s(self) -> float: ...

    @property
    def eager_dispatch_s(self) -> float: ...

    @property
    def graph_node_s(self) -> float: ...

    @property
    def graph_replay_s(self) -> float: ...

    def matmul_flops(self, dtype: str) -> float: ...


@runtime_checkable
class FamilySpec(Protocol):
    """One way to build a fast forward. Everything but `build` works without torch.

    `contract` lists the promises of a built forward that this family cannot keep ("" when it keeps them all); the
    evaluator prints and prices it. `options` maps each option `build` takes to its one-line meaning. A family that
    sets `final_norm_optional = True` also builds models whose `final_norm` is None; one that sets `option_checks`, from
    an option's name to a function that returns what a value must be where it is not that, has bad values refused early.
    """

    name: str
    summary: str
    contract: str
    options: dict[str, str]

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason on one line."""

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the device bytes alive at the worst moment of one call, weights, input and output included."""

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""

    def build(self, model: nn.Module, shape: Shape, device: device, **options: Any) -> Forward:
        """Return a callable `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]` for the model's weights."""
