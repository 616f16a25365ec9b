"""Which resident kernel takes a shape on a device. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.resident.config import ResidentConfig, Room
from rooflane.families.resident.kernels.flagged_rows import FlaggedRows
from rooflane.families.resident.kernels.layered_rows import LayeredRows
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_row_warps import RowWarps
from rooflane.families.resident.kernels.sm90_warpgroups import Warpgroups
from rooflane.families.resident.kernels.whole import Halves, Whole
from rooflane.shapes import Shape

# The kernels in order of preference: the first that can plan a shape takes it. briefs/resident.md has the timings.
LADDER: list[type[ResidentConfig]] = [
    RowBlocks,
    RowWarps,
    FlaggedRows,
    Warpgroups,
    LayeredRows,
    Halves,
    Whole,
]


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
    for kernel in LADDER:
        planned = kernel.try_plan(shape, room)
        if not isinstance(planned, str):
            return Choice(planned, tuple(passed_over))
        passed_over.append((kernel.kernel, planned))
    raise ValueError(f"no resident kernel takes {shape.label()}: {passed_over}")
