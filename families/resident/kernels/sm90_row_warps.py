"""A warp for 16 rows of a narrow sequence, residual and products in its registers: sm90_row_warps.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.config import BLOCK_ROWS, Room, unit_seconds
from rooflane.families.resident.sm90_config import MOST_SHARED_BYTES, NO_SM90, FragmentConfig
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

MOST_WARPS = 8
MOST_STAGES = 32
MOST_SPLIT = 4
BARRIER_BYTES = 8
STEP_COLUMNS = 32  # columns of the heads in one step: narrower products wait for each other
# The widest d_model at which row warps are fastest: each warp reads all weights from shared memory for only 16 rows.
WIDEST = 64
# Seconds of a layer's barriers and waits, and the reached share of the tensor and exp rates. Of thirteen shapes with
# d_model 16 to 64, the prediction is within 15 % on ten and within 30 % on all (H200).
LAYER_S, EFFICIENCY = 2.9e-6, 0.65


@dataclass(frozen=True)
class RowWarps(FragmentConfig):
    """A launch of the row-warp kernel: `warps` a program, `pair` of them (one or two) for a block of 16 rows.

    It reads `span` key blocks in one step.
    """

    kernel = "rowwarps"
    SOURCE, FUNCTION = "sm90_row_warps.cuh", "resident_rowwarps"

    warps: int
    span: int
    pair: int = 1

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        """Return the configuration for a shape the family supports, or why there is none.

        A program takes the fewest row blocks at which all programs run at a time: one, two or four. Paired warps share
        a row block where heads and width allow. A small batch splits a sequence of more than 64 rows over a cluster.
        """
        if not room.sm90:
            return NO_SM90
        if shape.d_model > WIDEST:
            return f"d_model {shape.d_model} is over {WIDEST}: every warp would read all weights for 16 rows"
        if shape.d_model % 16 != 0 or shape.head_dim % 8 != 0:
            return "takes a d_model divisible by 16 and a head_dim divisible by 8"
        pair = 2 if shape.num_heads % 2 == 0 and shape.d_model % 32 == 0 else 1
        blocks = cls(shape, MOST_WARPS, 1).sequence_blocks
        for own in (1, 2, 4):
            split = max(1, blocks // own)
            if split > (MOST_SPLIT if blocks == MOST_WARPS else 1):
                continue
            config = cls(shape, pair * own, min(blocks, 2 * split), pair)
            if config.sequence_groups <= clusters_at_a_time(split, room.units):
                return config
        return cls(shape, MOST_WARPS, min(blocks, 2))

    @classmethod
    def in_pairs(cls, shape: Shape, room: Room) -> bool:
        """Return whether the kernel takes a shape with two warps for each block of rows."""
        planned = cls.try_plan(shape, room)
        return not isinstance(planned, str) and planned.pair == 2

    @property
    def sequence_blocks(self) -> int:
        """Blocks of rows of a sequence, rounded up to a power of two."""
        return 1 << (super().sequence_blocks - 1).bit_length()

    @property
    def together(self) -> int:
        """Heads taken in one step: whole slices of 16 columns."""
        heads, columns, count = self.shape.num_heads // self.pair, self.shape.head_dim, 1
        while heads % (2 * count) == 0 and (count * columns < STEP_COLUMNS or count * columns % 16):
            count *= 2
        return count

    @property
    def kv_bytes(self) -> int:
        """Shared memory of the keys and values a program holds."""
        return 2 * max(self.sequence_blocks, self.warps // self.pair) * BLOCK_ROWS * self.shape.d_model * HALF

    @property
    def exchange_bytes(self) -> int:
        """Shared memory through which paired warps add up their shares of the rows, twice a layer."""
        return 0 if self.pair == 1 else 2 * self.warps * BLOCK_ROWS * self.shape.d_model * SINGLE

    @property
    def stages(self) -> int:
        """Tiles of the ring."""
        left = MOST_SHARED_BYTES - self.kv_bytes - self.exchange_bytes - (MOST_WARPS + 1) * BARRIER_BYTES
        fitting = left // (self.tile_bytes + 2 * BARRIER_BYTES)
        return min(MOST_STAGES, self.shape.num_layers * self.layer_tiles, fitting)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.tile_bytes + self.kv_bytes + self.exchange_bytes

    @property
    def threads(self) -> int:
        """Threads of a program: its warps and a producer warp, or a producer warpgroup that gives registers away."""
        return self.warps * 32 + (128 if self.warps == MOST_WARPS else 32)

    @property
    def split(self) -> int:
        """Programs of a sequence, a cluster; one where a program holds whole sequences."""
        return max(1, self.sequence_blocks * self.pair // self.warps)

    @property
    def sequence_groups(self) -> int:
        """Groups of as many sequences as a program takes together."""
        return -(-self.shape.batch_size // max(1, self.warps // self.pair // self.sequence_blocks))

    def programs(self, units: int) -> int:
        """Return the programs of a launch: what the device holds at a time."""
        return min(self.sequence_groups, clusters_at_a_time(self.split, units)) * self.split

    def sizes(self) -> tuple[int, ...]:
        return self.sequence_groups, self.shape.batch_size, self.shape.seq_len, self.shape.num_layers

    def own_constants(self) -> dict[str, int]:
        return {
            "CAUSAL": int(self.shape.causal), "STAGES": self.stages, "WARPS": self.warps, "SPLIT": self.split,
            "BLOCKS": self.sequence_blocks, "SPAN": self.span, "TOGETHER": self.together, "PAIR": self.pair,
        }  # fmt: skip

    @property
    def case_name(self) -> str:
        reach = "causal" if self.shape.causal else "full"
        return f"{self.warps}w {self.pair}t over {self.split} of {self.sequence_blocks} {reach} r{self.stages}"

    def predict_s(self, profile: Limits) -> float:
        """Return the predicted device seconds: the time of one program's row blocks, times the waves of programs."""
        shape, rows, keys = self.shape, self.warps // self.pair * BLOCK_ROWS, self.sequence_blocks * BLOCK_ROWS
        flops = 2 * rows * self.layer_tiles * shape.d_model**2 + 4 * rows * keys * shape.d_model
        seconds = unit_seconds(shape, profile, flops, shape.num_heads * rows * keys)
        waves = -(-self.sequence_groups // clusters_at_a_time(self.split, profile.units))
        return waves * shape.num_layers * (LAYER_S + seconds / EFFICIENCY)


def clusters_at_a_time(programs: int, units: int) -> int:
    """Return how many clusters of so many programs run at a time.

    A cluster lies within one GPC, and the cluster size may not divide the GPC's multiprocessors. On an H200 with 132
    multiprocessors, 64 clusters of two ran at a time, and fewer than 32 of four.
    """
    return {1: units, 2: max(1, units // 2 - 2), 4: max(1, units * 3 // 16)}[programs]
