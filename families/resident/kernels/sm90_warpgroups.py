"""Two bands of 64 rows a program, multiplied by warpgroups: sm90_warpgroups.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.config import Room, unit_seconds
from rooflane.families.resident.sm90_config import MOST_SHARED_BYTES, NO_SM90, Sm90Config
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BAND = 64  # rows of a warpgroup, keys taken together
MOST_STAGES, LEAST_STAGES = 4, 2
# A layer's barriers and waits, and the share of the tensor and exp rates reached beside them: within 12 % of shapes 1,
# 5, 6, 9 to 11, and of 7 and 12, were it to take them (H200).
LAYER_S, EFFICIENCY = 4e-6, 0.9


@dataclass(frozen=True)
class Warpgroups(Sm90Config):
    """A launch of the warpgroup kernel: a program holds two bands of 64 rows.

    A sequence of more than 64 tokens spans both; of shorter ones each band holds `group`.
    """

    kernel = "warpgroups"
    SOURCE, FUNCTION = "sm90_warpgroups.cuh", "resident_warpgroups"
    threads = 512  # two warpgroups a band

    group: int

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        if not room.sm90:
            return NO_SM90
        if shape.d_model % 16 != 0 or shape.head_dim % 8 != 0:
            return "takes a d_model divisible by 16 and a head_dim divisible by 8"
        group = 1
        if shape.seq_len <= BAND and shape.batch_size > 2 * room.units:
            # Short sequences share a band once there are bands enough for every place on the device.
            group = BAND // max(16, 1 << (shape.seq_len - 1).bit_length())
        config = cls(shape, group)
        return config if config.stages >= LEAST_STAGES else f"has no shared memory for a ring of {LEAST_STAGES} tiles"

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
        biases = self.shape.num_layers * (3 * self.shape.d_model + self.ffn) + 2 * self.shape.d_model
        return self.shape.num_layers * self.layer_tiles * self.tile_bytes + biases * SINGLE

    @property
    def operand_bytes(self) -> int:
        """Shared memory of eight operands: keys, values, rows, queries, of two bands each."""
        return 8 * BAND * self.shape.d_model * HALF

    @property
    def zero_bytes(self) -> int:
        """Shared memory of the zeros that stand beside a head's last eight columns."""
        return BAND * 16 if self.shape.head_dim % 16 else 0

    @property
    def stages(self) -> int:
        """Tiles of each half's ring."""
        own = 2 * BAND * 2 * 2 * SINGLE + 4 * MOST_STAGES * 8  # the kernel's own arrays: moments, barriers
        left = MOST_SHARED_BYTES - own - self.operand_bytes - self.zero_bytes
        return min(MOST_STAGES, left // (2 * self.tile_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.operand_bytes + 2 * self.stages * self.tile_bytes + self.zero_bytes

    @property
    def row_blocks(self) -> int:
        """Blocks of rows, two bands each; a program takes one after another."""
        return self.shape.batch_size if self.spans else -(-self.shape.batch_size // (2 * self.group))

    def programs(self, units: int) -> int:
        """Return the programs of a launch: what the device holds at a time."""
        return min(self.row_blocks, units)

    def sizes(self) -> tuple[int, ...]:
        return self.row_blocks, self.shape.batch_size, self.shape.seq_len, self.shape.num_layers

    def own_constants(self) -> dict[str, int]:
        spans, causal = int(self.spans), int(self.shape.causal)
        return {"SPANS": spans, "GROUP": self.group, "CAUSAL": causal, "STAGES": self.stages}

    @property
    def case_name(self) -> str:
        reach = "causal" if self.shape.causal else "full"
        return f"{'spanning' if self.spans else f'g{self.group}'} {reach} r{self.stages}"

    def predict_s(self, profile: Limits) -> float:
        """Return the predicted device seconds: a multiprocessor takes two bands through a layer at a time."""
        shape, rows, keys = self.shape, 2 * BAND, BAND * (2 if self.spans else 1)
        flops = 2 * rows * self.layer_tiles * self.tile_bytes // HALF + 4 * rows * keys * shape.d_model
        seconds = unit_seconds(shape, profile, flops, shape.num_heads * rows * keys)
        waves = -(-self.row_blocks // profile.units)
        return waves * shape.num_layers * (LAYER_S + seconds / EFFICIENCY)

    def pack(self, model: nn.Module, operands: torch.dtype) -> dict[str, Tensor]:
        """Return `tiles` (uint8) and `floats` (float32): biases, then the final norm."""
        from rooflane.families.resident.pack import pack_core_matrices

        return pack_core_matrices(model, self.ffn, operands)
