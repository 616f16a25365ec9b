"""The base class of families, the device figures that they read, and checks of options' values; no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rooflane.families.resources.kernel_case import KernelCase
from rooflane.shapes import PUBLISHED, Form, Shape

if TYPE_CHECKING:
    from torch import Tensor, device, nn

    # A built forward: `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]`.
    Forward = Callable[[Tensor, Tensor | None], Tensor]


class Limits(Protocol):
    """The device figures a family reads, in SI units; `rooflane.dispatch.Profile` provides them."""

    name: str
    kind: str  # "cuda" or "cpu"
    capability: tuple[int, int] | None
    memory_bytes: int
    shared_memory_bytes: int
    cache_bytes: int
    units: int
    copy_bytes_per_s: float
    special_per_s: float
    eager_dispatch_s: float
    graph_node_s: float
    graph_replay_s: float

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
    # Whether a build runs torch.compile.
    compiles: ClassVar[bool] = False

    @abstractmethod
    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason on one line."""

    def refuse_form(self, form: Form) -> str | None:
        """Return None when `build` takes stacks of this form, else the reason on one line."""
        if form == PUBLISHED:
            return None
        differences = ", ".join(form.differences())
        return f"it computes pre-norm layers with exact GELU and a final norm; the model has {differences}"

    @abstractmethod
    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the most device bytes in use during one call, weights, input and output included."""

    @abstractmethod
    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""

    @abstractmethod
    def build(self, model: nn.Module, shape: Shape, device: device, **options: Any) -> Forward:
        """Return a callable `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]` for the model's weights.

        Where the model's form has a bias on the scores, the callable is `(x, mask, bias)`.
        """

    def explain(self, shape: Shape, profile: Limits) -> list[str]:
        """Return how the family would run a shape that it supports, on lines for `rooflane route --details`."""
        return []

    def compile_ahead(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Compile into the caches on the disk what `build` looks for there, without a GPU; return how many kernels."""
        return 0

    def kernel_cases(self) -> Iterable[KernelCase]:
        """Return the family's kernels as they ship, for the resource gate. Two families may return one kernel."""
        return ()


OPERANDS = ("float16", "bfloat16")


def operands(value: Any) -> str | None:
    """Return None for the name of a half-precision type, else what the value must be."""
    return None if value in OPERANDS else " or ".join(OPERANDS)


def true_or_false(value: Any) -> str | None:
    """Return None for a bool, else what the value must be."""
    return None if isinstance(value, bool) else "true or false"


def positive(value: Any) -> str | None:
    """Return None for a finite number above 0, else what the value must be."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if number and math.isfinite(value) and value > 0 else "a number above 0"


def option_fault(spec: FamilySpec, name: str, value: Any) -> str | None:
    """Return None when a family's option may have the value, else what the value must be."""
    check = spec.option_checks.get(name)
    return check(value) if check else None
