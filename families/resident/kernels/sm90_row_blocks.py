"""A program for every 16 rows of a causal sequence, warps side by side in the width: sm90_row_blocks.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.config import BLOCK_ROWS, Room, row_blocks, too_many_rows
from rooflane.families.resident.kernels.sm90_row_warps import RowWarps
from rooflane.families.resident.sm90_config import MOST_SHARED_BYTES, NO_SM90, FragmentConfig
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

HEADS = (16, 32, 64)  # columns of a head: of one, two or four warps
MOST_BLOCKS = 8  # of a sequence
MOST_TILES = 6  # of the ring: a layer's without a second pass of the feed-forward
THIN = 32  # columns, or tokens, up to which row warps in pairs are ahead
LAYER_S = 7.5e-6  # 7.6 us on shape 2, 6.5 on 12 (H200)


@dataclass(frozen=True)
class RowBlocks(FragmentConfig):
    """A launch of the row-block kernel."""

    kernel = "rowblocks"
    SOURCE, FUNCTION = "sm90_row_blocks.cuh", "resident_rowblocks"
    case_name = ""

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        if not room.sm90:
            return NO_SM90
        if not shape.causal:
            return "attends both ways: a program would wait for those behind it"
        if shape.head_dim not in HEADS:
            return f"takes heads of {', '.join(map(str, HEADS))} columns, not {shape.head_dim}"
        if reason := too_many_rows(shape, room):
            return reason
        if min(shape.d_model, shape.seq_len) <= THIN and RowWarps.in_pairs(shape, room):
            return f"row warps in pairs are faster up to {THIN} columns or tokens"
        return cls(shape)

    @property
    def passed_bytes(self) -> int:
        """Shared memory the warps pass rows through: three operands, partial contexts."""
        width, head = self.shape.d_model, self.shape.head_dim
        return 3 * BLOCK_ROWS * (width + 8) * HALF + width * (head + 8) * SINGLE

    @property
    def stages(self) -> int:
        """Tiles of the ring."""
        moments = 2 * self.shape.d_model * 2 * SINGLE  # the kernel's own arrays: moments, tops
        return min(MOST_TILES, (MOST_SHARED_BYTES - moments - self.passed_bytes) // self.tile_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.tile_bytes + self.passed_bytes

    @property
    def threads(self) -> int:
        """Threads of a program: a warp for 16 columns of the width, and the producer warp."""
        return 2 * self.shape.d_model + 32

    def programs(self, units: int) -> int:
        return row_blocks(self.shape)

    @property
    def scratch_words(self) -> int:
        """32-bit words of keys and values that pass between programs, each layer its own."""
        return self.shape.num_layers * row_blocks(self.shape) * BLOCK_ROWS * self.shape.d_model

    @property
    def flags(self) -> int:
        """int32 flags of a launch: one a block and a count of programs done, with room, for each sequence."""
        return self.shape.batch_size * 2 * MOST_BLOCKS

    def sizes(self) -> tuple[int, ...]:
        return self.sequence_blocks, self.shape.seq_len, self.shape.num_layers

    def own_constants(self) -> dict[str, int]:
        return {"STAGES": self.stages}

    def predict_s(self, profile: Limits) -> float:
        """Return the predicted device seconds: one chain of dependent steps."""
        return self.shape.num_layers * LAYER_S
