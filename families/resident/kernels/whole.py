"""Sequences through every layer in one launch: whole ones a program, or causal ones in two halves.

Whole: a program holds all rows of a sequence, or of several short ones.
Halves: two programs of 64 rows and four warps share a causal sequence, for batches that leave the device half empty.
The second program waits for the first one's keys and values, a flag a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rooflane.families.resident.config import (
    H200,
    STEP_COLUMNS,
    Layout,
    Room,
    layout_of,
    packable,
    padded,
    unit_seconds,
)
from rooflane.families.resident.triton_config import TYPES, TritonConfig
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

# Rows of half a sequence: a warpgroup's tensor-core tile. Below, eight warps have less than a tile each.
HALF_ROWS = 64
# Columns of a head tile up to which 64 rows of it fit four warps' registers without spilling in the loop.
HALVES_HEAD = 32
# At 32 columns Triton 3.6 miscompiles feed-forward tiles wider than 32 for Hopper, in halves and in whole sequences, at
# any number of stages: other numbers or an illegal access. At 16 and from 64 on it does not.
NARROW_COLUMNS = 32


@dataclass(frozen=True)
class _Blocks(TritonConfig):
    """A launch of the block kernel: `group` sequences a program, `pack` narrow heads to a tile."""

    TYPES: ClassVar[dict[str, str]] = TYPES | {
        "kv_ptr": "*fp16", "flag_ptr": "*i32", "batch": "i32", "layers": "i32", "tiles": "i32",
    }  # fmt: skip
    # Share of the tensor and exp rates a program reaches: its steps depend on each other, so units wait.
    EFFICIENCY: ClassVar[float]
    HALVES: ClassVar[bool]

    group: int
    pack_heads: int

    @staticmethod
    def function() -> Any:
        from rooflane.families.resident.kernels.whole_kernel import blocks_kernel

        return blocks_kernel

    @property
    def layout(self) -> Layout:
        return layout_of(self.shape, self.ffn_tile, self.pack_heads)

    def constants(self, masked: bool) -> dict[str, Any]:
        layout = self.layout
        own = {"HEADS_WIDTH": layout.heads_width, "PACK": layout.pack, "CAUSAL": self.shape.causal, "GROUP": self.group}
        own |= {"BLOCK_F": self.ffn_tile, "STAGES": self.num_stages, "HALVES": self.HALVES}
        return self.shared_constants(masked) | own

    def sizes(self, eps: float) -> tuple[int | float, ...]:
        return self.shape.batch_size, self.shape.seq_len, self.shape.num_layers, self.layout.tiles, eps

    def predict_s(self, profile: Limits) -> float:
        """Return the predicted device seconds: waves of programs, each at its share of the full rates."""
        layout, keys = self.layout, padded(self.shape.seq_len)
        flops = 2 * self.rows * layout.layer_weights + 4 * self.rows * keys * layout.heads_width * layout.pack
        seconds = unit_seconds(self.shape, profile, flops, self.shape.num_heads * self.rows * keys)
        waves = -(-self.programs // profile.units)
        return waves * self.shape.num_layers * seconds / self.EFFICIENCY


class Halves(_Blocks):
    """Two programs a causal sequence of more than 64 rows."""

    kernel = "halves"
    HALVES = True
    EFFICIENCY = 0.36  # shapes 1, 7, 11 on the H200
    CASES = [
        (128, 4, 128, 128, 64, True), (32, 4, 32, 128, 64, True), (32, 4, 128, 128, 64, True),
        (128, 16, 128, 128, 64, True), (96, 3, 384, 100, 64, True),
    ]  # fmt: skip

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        if not shape.causal:
            return "attends both ways: the first half would wait for the second"
        if padded(shape.seq_len) <= HALF_ROWS:
            return f"a sequence of {shape.seq_len} has no second half of {HALF_ROWS} rows"
        if padded(shape.head_dim) > HALVES_HEAD:
            return f"heads over {HALVES_HEAD} columns spill from four warps' registers"
        if 2 * shape.batch_size > room.units:
            return "whole sequences already fill the device"
        ffn_tile, stages = _feed_forward(shape, room)
        return cls(shape, HALF_ROWS, ffn_tile, 4, stages, 1, packable(shape))

    @property
    def programs(self) -> int:
        return 2 * self.shape.batch_size

    @property
    def scratch_elements(self) -> int:
        """Operand elements of the first halves' keys and values, each layer its own."""
        return self.shape.num_layers * self.shape.batch_size * self.rows * 2 * self.layout.heads_width

    @property
    def flags(self) -> int:
        """int32 flags of a launch: one a sequence."""
        return self.shape.batch_size


class Whole(_Blocks):
    """A program a sequence, or a group of short ones: it takes every shape of the family."""

    kernel = "whole"
    HALVES = False
    EFFICIENCY = 0.58  # shapes 5, 6, 9 on the H200
    CASES = [
        (128, 4, 128, 128, 128, True), (128, 1, 128, 128, 64, True), (128, 2, 128, 128, 64, True),
        (128, 4, 128, 32, 64, True), (128, 4, 512, 128, 256, True), (48, 3, 96, 31, 64, True),
        (128, 4, 128, 16, 500, False),
    ]  # fmt: skip

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        length = padded(shape.seq_len)
        ffn_tile, stages = _feed_forward(shape, room)
        # Short sequences share a block once there are blocks enough for every multiprocessor.
        crowded = shape.batch_size * length > room.units * HALF_ROWS
        group = max(1, HALF_ROWS // length) if crowded else 1
        warps = 8 if length > HALF_ROWS else 4
        return cls(shape, length * group, ffn_tile, warps, stages, group, packable(shape))

    @property
    def programs(self) -> int:
        return -(-self.shape.batch_size // self.group)


def _feed_forward(shape: Shape, room: Room) -> tuple[int, int]:
    """Return the hidden columns of a tile, and the stages of the loops over tiles."""
    head, ffn = padded(shape.head_dim), padded(shape.ffn_dim)
    # A feed-forward of one tile needs no pipeline for it and leaves the shared memory to a third stage of the heads.
    single = ffn <= STEP_COLUMNS and head < HALF_ROWS and room.shared_bytes >= H200.shared_bytes
    # A head over half the width stands alone without a pipeline: its feed-forward takes two steps (whole_kernel.py).
    tile, stages = (ffn, 3) if single else (min(64, ffn if head <= HALF_ROWS else ffn // 2), 2)
    return (min(tile, NARROW_COLUMNS) if padded(shape.d_model) == NARROW_COLUMNS else tile), stages
