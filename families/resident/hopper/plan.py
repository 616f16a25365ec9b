"""Which shapes the Hopper kernels take and how they are launched for one; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rooflane.families.lean_cost import HALF, SINGLE
from rooflane.shapes import Shape

STEP = 64  # columns of a weight tile; rows of a warpgroup
HEAD_COLUMNS = (16, 32, 64, 128)  # what a head is padded to: parts or multiples of a step
MOST_STAGES = 9
LEAST_STAGES = 3
# Bytes of a multiprocessor's shared memory, less what the system takes of each program and the barriers.
MULTIPROCESSOR_BYTES, PROGRAM_BYTES = 228 * 1024, 1024 + 256
ROWS = 16  # of a block of query rows
MOST_BLOCKS = 8  # of a sequence
MOST_TILES = 6  # of the row-block kernel's ring: a layer's without a second pass of the feed-forward
IO_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True)
class WarpgroupPlan:
    """Sizes of one warpgroup forward: `group` sequences on `warpgroups` x 64 rows, a ring of `stages` weight tiles."""

    shape: Shape
    warpgroups: int
    group: int
    stages: int

    @cached_property
    def head(self) -> int:
        """Columns of a head, zeros behind head_dim."""
        return head_columns(self.shape)

    @cached_property
    def heads(self) -> int:
        """Heads, zero ones at the end until they fill whole steps."""
        return padded_heads(self.shape)

    @cached_property
    def ffn(self) -> int:
        """Hidden columns, zeros behind ffn_dim."""
        return -(-self.shape.ffn_dim // STEP) * STEP

    @property
    def bias_floats(self) -> int:
        """Floats behind the operands of a tile."""
        return max(self.shape.d_model, STEP)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a weight tile with its bias."""
        return STEP * self.shape.d_model * HALF + self.bias_floats * SINGLE

    @property
    def layer_tiles(self) -> int:
        """Weight tiles of a layer."""
        return (4 * self.heads * self.head + 2 * self.ffn) // STEP

    @property
    def packed_bytes(self) -> int:
        """Device bytes of the packed weights, the final norm included."""
        return self.shape.num_layers * self.layer_tiles * self.tile_bytes + 2 * self.shape.d_model * SINGLE

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program that is asked for at launch: keys, values, the ring."""
        return key_bytes(self.shape, self.warpgroups) + self.stages * self.tile_bytes

    @property
    def blocks(self) -> int:
        """Blocks of sequences; a program takes one after another."""
        return -(-self.shape.batch_size // self.group)

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 2 * STEP * self.warpgroups

    @property
    def scratch_words(self) -> int:
        """32-bit words that pass between programs: none."""
        return 0

    @property
    def flags(self) -> int:
        """Flags of a launch: none."""
        return 0

    def programs(self, units: int) -> int:
        """Return the programs of a launch: what the device holds at a time."""
        return min(self.blocks, units * (2 if self.warpgroups == 1 else 1))

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        return {
            "D": self.shape.d_model,
            "HEADS": self.heads,
            "HD": self.head,
            "FFN": self.ffn,
            "WGS": self.warpgroups,
            "GROUP": self.group,
            "CAUSAL": int(self.shape.causal),
            "MASKED": int(masked),
            "STAGES": self.stages,
            "BF16": int(bfloat16),
            "IO": IO_KINDS[self.shape.dtype],
        }


@dataclass(frozen=True)
class RowblockPlan:
    """Sizes of one row-block forward: a program for every 16 rows of a sequence."""

    shape: Shape

    @property
    def ffn(self) -> int:
        """Hidden columns, zeros behind ffn_dim."""
        return -(-self.shape.ffn_dim // self.shape.d_model) * self.shape.d_model

    @property
    def bias_floats(self) -> int:
        """Floats behind the operands of a tile."""
        return self.shape.d_model

    @property
    def tile_bytes(self) -> int:
        """Bytes of a weight tile with its bias."""
        return self.shape.d_model * (self.shape.d_model * HALF + SINGLE)

    @property
    def layer_tiles(self) -> int:
        """Weight tiles of a layer."""
        return 4 + 2 * self.ffn // self.shape.d_model

    @property
    def packed_bytes(self) -> int:
        """Device bytes of the packed weights, the final norm included."""
        return self.shape.num_layers * self.layer_tiles * self.tile_bytes + 2 * self.shape.d_model * SINGLE

    @property
    def passed_bytes(self) -> int:
        """Shared memory the warps pass rows through: three operands, partial contexts."""
        width, head = self.shape.d_model, self.shape.head_dim
        return 3 * ROWS * (width + 8) * HALF + width * (head + 8) * SINGLE

    @property
    def stages(self) -> int:
        """Tiles of the ring."""
        moments = 2 * self.shape.d_model * 2 * SINGLE  # the kernel's own arrays: moments, tops
        room = MULTIPROCESSOR_BYTES - PROGRAM_BYTES - moments - self.passed_bytes
        return min(MOST_TILES, room // self.tile_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program that is asked for at launch."""
        return self.stages * self.tile_bytes + self.passed_bytes

    @property
    def threads(self) -> int:
        """Threads of a program: a warp for 16 columns of the width, and the courier."""
        return 2 * self.shape.d_model + 32

    @property
    def blocks(self) -> int:
        """Blocks of rows of a sequence."""
        return -(-self.shape.seq_len // ROWS)

    def programs(self, units: int) -> int:
        """Return the programs of a launch."""
        return self.shape.batch_size * self.blocks

    @property
    def scratch_words(self) -> int:
        """32-bit words of keys and values that pass between programs, each layer its own."""
        return self.shape.num_layers * self.programs(0) * ROWS * self.shape.d_model

    @property
    def flags(self) -> int:
        """int32 flags of a launch: one a block and a count of programs done, with room, for each sequence."""
        return self.shape.batch_size * 2 * MOST_BLOCKS

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        return {
            "D": self.shape.d_model,
            "HEADS": self.shape.num_heads,
            "HD": self.shape.head_dim,
            "FFN": self.ffn,
            "MASKED": int(masked),
            "STAGES": self.stages,
            "BF16": int(bfloat16),
            "IO": IO_KINDS[self.shape.dtype],
        }


HopperPlan = WarpgroupPlan | RowblockPlan


def head_columns(shape: Shape) -> int:
    """Return what the heads of a shape are padded to."""
    return next(columns for columns in HEAD_COLUMNS if columns >= shape.head_dim)


def padded_heads(shape: Shape) -> int:
    """Return the heads of a shape, rounded up to whole steps of columns."""
    a_step = max(1, STEP // head_columns(shape))
    return -(-shape.num_heads // a_step) * a_step


def key_bytes(shape: Shape, warpgroups: int) -> int:
    """Return the shared memory of one layer's keys and values."""
    return 2 * warpgroups * STEP * padded_heads(shape) * head_columns(shape) * HALF


def warpgroup_plan(shape: Shape, units: int) -> WarpgroupPlan | None:
    """Return the plan for a shape within the family's limits, None where it does not fit the kernel."""
    if shape.d_model % 16 != 0:
        return None
    warpgroups = 1 if shape.seq_len <= STEP else 2
    group = 1
    if warpgroups == 1 and shape.batch_size > 2 * units:
        # Short sequences share a block once there are blocks enough for every place on the device.
        group = STEP // max(16, 1 << (shape.seq_len - 1).bit_length())
    shared = MULTIPROCESSOR_BYTES
    if warpgroups == 1 and shape.batch_size > units:
        shared //= 2
    tile_bytes = WarpgroupPlan(shape, warpgroups, group, 1).tile_bytes
    stages = min(MOST_STAGES, (shared - PROGRAM_BYTES - key_bytes(shape, warpgroups)) // tile_bytes)
    return WarpgroupPlan(shape, warpgroups, group, stages) if stages >= LEAST_STAGES else None


def rowblock_plan(shape: Shape, units: int) -> RowblockPlan | None:
    """Return the plan for a causal shape of at most a block of rows a multiprocessor, None for others."""
    plan = RowblockPlan(shape)
    fits = shape.causal and shape.head_dim in HEAD_COLUMNS[:3] and ROWS < shape.seq_len and plan.programs(units) <= units
    return plan if fits else None
