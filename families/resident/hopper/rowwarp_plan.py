"""Which shapes the row-warp kernel takes and how it is launched for one; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.lean_cost import HALF, SINGLE
from rooflane.families.resident.hopper.kernel_plan import MULTIPROCESSOR_BYTES, PROGRAM_BYTES, ROWS, KernelPlan
from rooflane.shapes import Shape

MOST_WARPS = 8
MOST_STAGES = 32
BARRIER_BYTES = 8
STEP_COLUMNS = 32  # of the heads taken in one step: products of fewer wait for one another


@dataclass(frozen=True)
class RowwarpPlan(KernelPlan):
    """Sizes of one row-warp forward: `warps` of a program, `cluster` programs that share weight tiles.

    A block of 16 rows is the work of one warp, or of two `twins`; `span` blocks of keys are taken together.
    """

    warps: int
    cluster: int
    span: int
    twins: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of rows of a sequence, rounded up to a power of two."""
        return 1 << (-(-self.shape.seq_len // ROWS) - 1).bit_length()

    @property
    def together(self) -> int:
        """Heads taken in one step: whole slices of 16 columns."""
        head, count = self.shape.head_dim, 1
        while self.shape.num_heads // self.twins % (2 * count) == 0 and (count * head < STEP_COLUMNS or count * head % 16):
            count *= 2
        return count

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
        room = MULTIPROCESSOR_BYTES - PROGRAM_BYTES - self.held_bytes - self.exchange_bytes - (MOST_WARPS + 1) * BARRIER_BYTES
        fitting = room // (self.tile_bytes + 2 * BARRIER_BYTES)
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
        """Programs of a sequence."""
        return max(1, self.blocks * self.twins // self.warps)

    @property
    def units(self) -> int:
        """Sequences, as many together as a cluster takes."""
        return -(-self.shape.batch_size // (self.cluster * self.warps // self.twins // self.blocks))

    @property
    def scratch_words(self) -> int:
        """32-bit words that pass between programs through device memory: none."""
        return 0

    @property
    def flags(self) -> int:
        """Flags of a launch: none."""
        return 0

    def programs(self, units: int) -> int:
        """Return the programs of a launch: what the device holds at a time."""
        return min(self.units, units // self.cluster) * self.cluster

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        own = {
            "CAUSAL": int(self.shape.causal), "STAGES": self.stages, "WARPS": self.warps, "CLUSTER": self.cluster,
            "BLOCKS": self.blocks, "SPAN": self.span, "TOGETHER": self.together, "TWINS": self.twins,
        }  # fmt: skip
        return self.sizes(masked, bfloat16) | own
