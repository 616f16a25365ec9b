"""What every resident kernel states about itself, and what a device offers it. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from rooflane.families.lean.cost import operand_name
from rooflane.families.resources.kernel_case import Architecture, KernelCase
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.families.runtime.bound import Launch

    # Binds the launch of calls like a sample `(x, mask, out)`.
    Bind = Callable[[Tensor, Tensor | None, Tensor], Launch]

# What the family takes: a program holds a sequence's residual in registers and its heads' keys in shared memory.
LIMITS = [("seq_len", 128), ("d_model", 128), ("head_dim", 128), ("ffn_dim", 512)]


@dataclass(frozen=True)
class Room:
    """What a device offers the kernels.

    `units` is its multiprocessors, `shared_bytes` the shared memory one program may take. `sm90` says whether it runs
    the CUDA C++ kernels: only compute capability 9.0 does, where their compiler is installed.
    """

    units: int
    shared_bytes: int
    sm90: bool = False


H200 = Room(132, 227 * 1024, True)  # the device the configurations were measured on


@dataclass(frozen=True)
class ResidentConfig(ABC):
    """How one kernel runs one shape. A subclass is a kernel, an instance is a launch configuration of it."""

    kernel: ClassVar[str]  # the kernel's name, as reasons and records print it
    shape: Shape

    @classmethod
    @abstractmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        """Return the configuration for a shape the family supports, or one line that says why there is none."""

    @abstractmethod
    def predict_s(self, profile: Limits) -> float:
        """Return the predicted device seconds of one call, without the launch."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Device bytes a built forward holds: packed weights, scratch, flags."""

    @abstractmethod
    def pack(self, model: nn.Module, operands: torch.dtype) -> dict[str, Tensor]:
        """Return the model's weights as the kernel reads them."""

    @abstractmethod
    def binder(self, weights: dict[str, Tensor], operands: torch.dtype, eps: float, units: int) -> Bind:
        """Return what binds the launch for packed weights on a device of so many multiprocessors."""

    @classmethod
    @abstractmethod
    def cases(cls) -> Iterable[tuple[Shape, Architecture, Room]]:
        """Return shapes and devices for the resource gate: one for each configuration that differs in code.

        The gate compiles whichever kernel takes such a shape there.
        """

    @abstractmethod
    def case(self, architecture: Architecture) -> KernelCase:
        """Return this configuration as the resource gate compiles it."""


def unit_seconds(shape: Shape, profile: Limits, flops: int, specials: int) -> float:
    """Return the seconds one multiprocessor takes for tensor-core FLOP and exponentials at its full rates."""
    seconds = flops * profile.units / profile.matmul_flops(operand_name(shape, "cuda"))
    return seconds + specials * profile.units / profile.special_per_s
