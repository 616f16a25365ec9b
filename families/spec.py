"""The base class of families, and the device figures that they read; no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rooflane.families.resources.kernel_case import KernelCase
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor, device, nn

    # A built forward: `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]`.
    Forward = Callable[[Tensor, Tensor | None], Tensor]


class Limits(Protocol):
    """The device figures a family reads, in SI units; `rooflane.dispatch.Profile` provides them."""

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


class FamilySpec(ABC):
    """One way to build a fast forward. Everything but `build` works without torch.

    A subclass sets `name` and `summary` and defines the four abstract methods. Everything else has a default.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    # The promises to its caller that a built forward breaks, on one line; "" when it keeps all of them.
    contract: ClassVar[str] = ""
    # Each keyword option of `build` and its meaning on one line.
    options: ClassVar[Mapping[str, str]] = {}
    # For an option, a function that returns None for a valid value, else what the value must be.
    option_checks: ClassVar[Mapping[str, Callable[[Any], str | None]]] = {}
    # Whether `build` takes models whose `final_norm` is None.
    final_norm_optional: ClassVar[bool] = False
    # Whether a build runs torch.compile.
    compiles: ClassVar[bool] = False

    @abstractmethod
    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason on one line."""

    @abstractmethod
    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the most device bytes in use during one call, weights, input and output included."""

    @abstractmethod
    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""

    @abstractmethod
    def build(self, model: nn.Module, shape: Shape, device: device, **options: Any) -> Forward:
        """Return a callable `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]` for the model's weights."""

    def explain(self, shape: Shape, profile: Limits) -> list[str]:
        """Return how the family would run a shape that it supports, on lines for `rooflane route --details`."""
        return []

    def kernel_cases(self) -> Iterable[KernelCase]:
        """Return the family's kernels as they ship, for the resource gate. Two families may return one kernel."""
        return ()
