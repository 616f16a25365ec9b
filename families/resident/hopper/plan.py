"""Which shapes the Hopper kernels take and how they are launched for one; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.hopper.kernel_plan import (
    MULTIPROCESSOR_BYTES,
    PROGRAM_BYTES,
    ROWS,
    KernelPlan,
    TiledPlan,
)
from rooflane.families.resident.hopper.rowwarp_plan import RowwarpPlan
from rooflane.shapes import Shape

BAND = 64  # rows of a warpgroup, keys taken together
MOST_STAGES, LEAST_STAGES = 4, 2
MOST_BLOCKS = 8  # of a sequence
MOST_TILES = 6  # of the row-block kernel's ring: a layer's without a second pass of the feed-forward


@dataclass(frozen=True)
class WarpgroupPlan(KernelPlan):
    """Sizes of one warpgroup forward: a program holds two bands of 64 rows.

    A sequence of more than 64 tokens spans both; of shorter ones each band holds `group`.
    """

    group: int

    @property
    def spans(self) -> bool:
        """Whether a sequence takes both bands."""
        return self.shape.seq_len > BAND

    @property
    def tile_bytes(self) -> int:
        """Bytes of a weight tile: half of a product's columns."""
        return self.shape.d_model // 2 * self.shape.d_model * HALF

    @property
    def layer_tiles(self) -> int:
        """Weight tiles of a layer."""
        return 2 * (4 + 2 * self.ffn // self.shape.d_model)

    @property
    def packed_bytes(self) -> int:
        """Device bytes of the packed weights, biases and final norm."""
        biases = self.shape.num_layers * (3 * self.shape.d_model + self.ffn) + 2 * self.shape.d_model
        return self.shape.num_layers * self.layer_tiles * self.tile_bytes + biases * SINGLE

    @property
    def operand_bytes(self) -> int:
        """Shared memory of eight operands: keys, values, rows, queries, of two bands each."""
        return 8 * BAND * self.shape.d_model * HALF

    @property
    def stages(self) -> int:
        """Tiles of each half's ring."""
        own = 2 * BAND * 2 * 2 * SINGLE + 4 * MOST_STAGES * 8
        room = MULTIPROCESSOR_BYTES - PROGRAM_BYTES - own - self.operand_bytes - self.zero_bytes
        return min(MOST_STAGES, room // (2 * self.tile_bytes))

    @property
    def zero_bytes(self) -> int:
        """Shared memory of the zeros that stand beside a head's last eight columns."""
        return BAND * 16 if self.shape.head_dim % 16 else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program that is asked for at launch: operands, two rings, zeros."""
        return self.operand_bytes + 2 * self.stages * self.tile_bytes + self.zero_bytes

    @property
    def blocks(self) -> int:
        """Blocks of rows, two bands each; a program takes one after another."""
        return self.shape.batch_size if self.spans else -(-self.shape.batch_size // (2 * self.group))

    @property
    def threads(self) -> int:
        """Threads of a program: two warpgroups a band."""
        return 512

    def programs(self, units: int) -> int:
        """Return the programs of a launch: what the device holds at a time."""
        return min(self.blocks, units)

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        spans, causal = int(self.spans), int(self.shape.causal)
        own = {"SPANS": spans, "GROUP": self.group, "CAUSAL": causal, "STAGES": self.stages}
        return self.sizes(masked, bfloat16) | own


@dataclass(frozen=True)
class RowblockPlan(TiledPlan):
    """Sizes of one row-block forward: a program for every 16 rows of a sequence."""

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
        return self.shape.num_layers * self.shape.batch_size * self.blocks * ROWS * self.shape.d_model

    @property
    def flags(self) -> int:
        """int32 flags of a launch: one a block and a count of programs done, with room, for each sequence."""
        return self.shape.batch_size * 2 * MOST_BLOCKS

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        return self.sizes(masked, bfloat16) | {"STAGES": self.stages}


HopperPlan = WarpgroupPlan | RowblockPlan | RowwarpPlan


def warpgroup_plan(shape: Shape, units: int) -> WarpgroupPlan | None:
    """Return the plan for a shape within the family's limits, None where it does not fit the kernel."""
    if shape.d_model % 16 != 0 or shape.head_dim % 8 != 0:
        return None
    group = 1
    if shape.seq_len <= BAND and shape.batch_size > 2 * units:
        # Short sequences share a band once there are bands enough for every place on the device.
        group = BAND // max(16, 1 << (shape.seq_len - 1).bit_length())
    plan = WarpgroupPlan(shape, group)
    return plan if plan.stages >= LEAST_STAGES else None


def rowblock_plan(shape: Shape, units: int) -> RowblockPlan | None:
    """Return the plan for a causal shape of at most a block of rows a multiprocessor, None for others."""
    plan = RowblockPlan(shape)
    if plan.blocks > MOST_BLOCKS:
        return None
    fits = shape.causal and shape.head_dim in (16, 32, 64) and shape.seq_len > ROWS and plan.programs(units) <= units
    return plan if fits else None
