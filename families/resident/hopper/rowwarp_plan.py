"""Which shapes the row-warp kernel takes and how it is launched for one; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.hopper.kernel_plan import MULTIPROCESSOR_BYTES, PROGRAM_BYTES, ROWS, TiledPlan
from rooflane.shapes import Shape

MOST_WARPS = 8
MOST_STAGES = 32
BARRIER_BYTES = 8
STEP_COLUMNS = 32  # of the heads taken in one step: products of fewer wait for one another
# Columns up to which row warps are ahead. At 128, shape 1 takes them 64 us with one warp a scheduler and 75 with two,
# warpgroups 53 (H200): every warp reads all weights from shared memory for 16 rows alone.
WIDEST = 64
MOST_SPLIT = 4


@dataclass(frozen=True)
class RowwarpPlan(TiledPlan):
    """Sizes of one row-warp forward: `warps` of a program, one for a block of 16 rows, or two `twins`.

    `span` blocks of keys are taken together.
    """

    warps: int
    span: int
    twins: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of rows of a sequence, rounded up to a power of two."""
        return 1 << (-(-self.shape.seq_len // ROWS) - 1).bit_length()

    @property
    def together(self) -> int:
        """Heads taken in one step: whole slices of 16 columns."""
        heads, columns, count = self.shape.num_heads // self.twins, self.shape.head_dim, 1
        while heads % (2 * count) == 0 and (count * columns < STEP_COLUMNS or count * columns % 16):
            count *= 2
        return count

    @property
    def held_bytes(self) -> int:
        """Shared memory of the keys and values a program holds."""
        return 2 * max(self.blocks, self.warps // self.twins) * ROWS * self.shape.d_model * HALF

    @property
    def exchange_bytes(self) -> int:
        """Shared memory through which twins add up their shares of the rows, twice a layer."""
        return 0 if self.twins == 1 else 2 * self.warps * ROWS * self.shape.d_model * SINGLE

    @property
    def stages(self) -> int:
        """Tiles of the ring."""
        taken = PROGRAM_BYTES + self.held_bytes + self.exchange_bytes + (MOST_WARPS + 1) * BARRIER_BYTES
        fitting = (MULTIPROCESSOR_BYTES - taken) // (self.tile_bytes + 2 * BARRIER_BYTES)
        return min(MOST_STAGES, self.shape.num_layers * self.layer_tiles, fitting)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program that is asked for at launch: the ring, keys and values."""
        return self.stages * self.tile_bytes + self.held_bytes + self.exchange_bytes

    @property
    def threads(self) -> int:
        """Threads of a program: a warp a block of rows, and the courier, a warpgroup where it hands over registers."""
        return self.warps * 32 + (128 if self.warps == MOST_WARPS else 32)

    @property
    def split(self) -> int:
        """Programs of a sequence, a cluster; one where a program holds whole sequences."""
        return max(1, self.blocks * self.twins // self.warps)

    @property
    def units(self) -> int:
        """Sequences, as many together as a program takes."""
        return -(-self.shape.batch_size // max(1, self.warps // self.twins // self.blocks))

    def programs(self, units: int) -> int:
        """Return the programs of a launch: what the device holds at a time."""
        return min(self.units, clusters_at_a_time(self.split, units)) * self.split

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        own = {
            "CAUSAL": int(self.shape.causal), "STAGES": self.stages, "WARPS": self.warps, "SPLIT": self.split,
            "BLOCKS": self.blocks, "SPAN": self.span, "TOGETHER": self.together, "TWINS": self.twins,
        }  # fmt: skip
        return self.sizes(masked, bfloat16) | own


def clusters_at_a_time(programs: int, units: int) -> int:
    """Return how many clusters of so many programs run at a time.

    A cluster lies within one GPC, whose multiprocessors it may not divide: of an H200's 132, 64 clusters of two were
    seen to run at a time, and fewer than 32 of four.
    """
    return {1: units, 2: max(1, units // 2 - 2), 4: max(1, units * 3 // 16)}[programs]


def rowwarp_plan(shape: Shape, units: int) -> RowwarpPlan | None:
    """Return the plan for a narrow shape, None for others: as few blocks of rows a program as the device has room for.

    Up to four take twins; a sequence of more than 64 rows is split over a cluster.
    """
    if shape.d_model % 16 != 0 or shape.head_dim % 8 != 0 or shape.d_model > WIDEST:
        return None
    twins = 2 if shape.num_heads % 2 == 0 and shape.d_model % 32 == 0 else 1
    blocks = RowwarpPlan(shape, MOST_WARPS, 1).blocks
    for own in (1, 2, 4):
        split = max(1, blocks // own)
        if split > (MOST_SPLIT if blocks == MOST_WARPS else 1):
            continue
        plan = RowwarpPlan(shape, twins * own, min(blocks, 2 * split), twins)
        if plan.units <= clusters_at_a_time(split, units):
            return plan
    return RowwarpPlan(shape, MOST_WARPS, min(blocks, 2))
