"""resident: short, narrow sequences, all on the SM, and which of the kernels takes a shape. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rooflane.families.lean.cost import weight_elements
from rooflane.families.resident.config import CAPABILITY, LIMITS, ResidentConfig, Room
from rooflane.families.resources.kernel_case import KernelCase
from rooflane.families.spec import FamilySpec, Limits, operands
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward

LEAST_CAPABILITY = (8, 0)
# KiB of shared memory a program takes where the device has no more than a consumer card's 99 (resources.json).
SHARED_KIB = 99

# The kernels in order of preference: the first that can plan a shape takes it. briefs/resident.md has the timings.
LADDER = (
    "rooflane.families.resident.kernels.sm90_row_blocks:RowBlocks",
    "rooflane.families.resident.kernels.sm90_row_warps:RowWarps",
    "rooflane.families.resident.kernels.flagged_rows:FlaggedRows",
    "rooflane.families.resident.kernels.sm90_warpgroups:Warpgroups",
    "rooflane.families.resident.kernels.layered_rows:LayeredRows",
    "rooflane.families.resident.kernels.whole:Halves",
    "rooflane.families.resident.kernels.whole:Whole",
)


@cache
def ladder() -> tuple[type[ResidentConfig], ...]:
    """Return the kernels in order of preference."""
    return tuple(map(resolve_name, LADDER))


@dataclass(frozen=True)
class Choice:
    """The configuration that takes a shape, and why each kernel before it in the ladder does not."""

    config: ResidentConfig
    passed_over: tuple[tuple[str, str], ...]

    def explain(self) -> list[str]:
        """Return one line for each kernel of the ladder up to the chosen one."""
        lines = [f"{kernel}: {reason}" for kernel, reason in self.passed_over]
        return [*lines, f"{self.config.kernel}: takes the shape"]


def choose(shape: Shape, room: Room) -> Choice:
    """Return the first configuration of the ladder for a shape the family supports."""
    passed_over = []
    for kernel in ladder():
        planned = kernel.try_plan(shape, room)
        if not isinstance(planned, str):
            return Choice(planned, tuple(passed_over))
        passed_over.append((kernel.kernel, planned))
    raise ValueError(f"no resident kernel takes {shape.label()}: {passed_over}")


class Resident(FamilySpec):
    """Keep every intermediate on the SM: one launch for the forward (small non-causal batches: one a layer)."""

    name = "resident"
    summary = "the whole forward in one kernel, activations on the SM"
    options = {"operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model"}
    option_checks = {"operand_dtype": operands}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        if profile.kind != "cuda":
            return "needs an NVIDIA GPU; on a CPU its kernels are only interpreted, in tests"
        if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
            return f"needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
        for name, limit in LIMITS:
            if getattr(shape, name) > limit:
                return f"{name} {getattr(shape, name)} is over {limit}: one SM cannot hold a sequence"
        if shape.head_dim > 64 and shape.ffn_dim <= 16:
            return f"ffn_dim {shape.ffn_dim} is under 17 with a head_dim over 64: too little for the kernel's two steps"
        if profile.shared_memory_bytes < SHARED_KIB * 1024:
            return (
                f"needs {SHARED_KIB} KiB of shared memory a block, the device has {profile.shared_memory_bytes >> 10}"
            )
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the device bytes of one call: weights, packed weights, input, output; small batches' scratch."""
        ends = 2 * shape.tokens * shape.d_model * shape.dtype_bytes
        held = choose(shape, _room(profile)).config.held_bytes
        return weight_elements(shape) * shape.dtype_bytes + ends + held

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        return profile.graph_replay_s + choose(shape, _room(profile)).config.predict_s(profile)

    def explain(self, shape: Shape, profile: Limits) -> list[str]:
        """Return which kernel takes a shape that the family supports, and why those before it in the ladder do not."""
        return choose(shape, _room(profile)).explain()

    def kernel_cases(self) -> Iterator[KernelCase]:
        """Yield the configurations that the kernels name cases for, once each."""
        seen: set[str] = set()
        for kernel in ladder():
            for shape, architecture, room in kernel.cases():
                case = choose(shape, room).config.case(architecture)
                if case.key not in seen:
                    seen.add(case.key)
                    yield case

    def compile_ahead(self, shape: Shape, profile: Limits, operand_dtype: str | None = None, **options: Any) -> int:
        """Compile a CUDA C++ kernel for the device of the profile, with a mask and without."""
        from rooflane.families.runtime.call_checks import operand_dtype as dtype_of

        return choose(shape, _room(profile)).config.compile_ahead(dtype_of(operand_dtype, shape, profile.kind))

    def build(self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None) -> Forward:
        """Return the built forward; its kernels are compiled at the first call."""
        import torch

        from rooflane.families.resident.build import build_configured, room_of
        from rooflane.families.runtime.call_checks import operand_dtype as dtype_of

        device = torch.device(device)
        dtype, room = dtype_of(operand_dtype, shape, device.type), room_of(device)
        return build_configured(model, device, dtype, choose(shape, room).config, room.units)


def _room(profile: Limits) -> Room:
    return Room(profile.units, profile.shared_memory_bytes, profile.capability == CAPABILITY)


SPEC = Resident()
