"""What every Hopper kernel is told of a shape, and the memory they share; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.shapes import Shape

# Bytes of a multiprocessor's shared memory, less what the system takes of each program.
MULTIPROCESSOR_BYTES, PROGRAM_BYTES = 228 * 1024, 1024
ROWS = 16  # of a block of query rows
IO_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True)
class KernelPlan:
    """What the kernels are told of a shape."""

    shape: Shape

    @property
    def ffn(self) -> int:
        """Hidden columns, zeros behind ffn_dim."""
        return -(-self.shape.ffn_dim // self.shape.d_model) * self.shape.d_model

    @property
    def scratch_words(self) -> int:
        """32-bit words that pass between programs through device memory: none where a kernel does not say."""
        return 0

    @property
    def flags(self) -> int:
        """int32 flags of a launch, likewise."""
        return 0

    def sizes(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the compile-time sizes that all kernels have."""
        return {
            "D": self.shape.d_model,
            "HEADS": self.shape.num_heads,
            "HD": self.shape.head_dim,
            "FFN": self.ffn,
            "MASKED": int(masked),
            "BF16": int(bfloat16),
            "IO": IO_KINDS[self.shape.dtype],
        }


@dataclass(frozen=True)
class TiledPlan(KernelPlan):
    """Sizes of a kernel whose warps read tiles of `mma.sync` fragments, a product's weights and its bias each."""

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
