"""Thin blocks of query rows through every layer in one launch, with flags: for small causal batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rooflane.families.resident.config import BLOCK_ROWS, STEP_COLUMNS, Room, padded, row_blocks, too_many_rows
from rooflane.families.resident.triton_config import TYPES, TritonConfig
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

# Shared memory at its widest, as Triton 3.6 compiles it.
SHARED_BYTES = 136 * 1024
# A layer of thin rows is a chain of dependent steps, however few the rows: shapes 2 to 4 on the H200.
LAYER_S = 9e-6


@dataclass(frozen=True)
class FlaggedRows(TritonConfig):
    """A program for every 16 rows of a causal sequence, all heads and the feed-forward in one step each."""

    kernel = "flagged rows"
    CASES = [(128, 4, 128, 128, 1, True)]
    TYPES: ClassVar[dict[str, str]] = TYPES | {
        "kv_ptr": "*fp16", "flag_ptr": "*i32", "layers": "i32", "tokens": "i32",
    }  # fmt: skip

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        if not shape.causal:
            return "attends both ways: a program would wait for those behind it"
        if reason := too_many_rows(shape, room):
            return reason
        columns, ffn = shape.num_heads * padded(shape.head_dim), padded(shape.ffn_dim)
        if not columns == padded(columns) <= STEP_COLUMNS or ffn > STEP_COLUMNS:
            return f"its heads or its feed-forward take more than one step of {STEP_COLUMNS} columns"
        if room.shared_bytes < SHARED_BYTES:
            return (
                f"needs {SHARED_BYTES >> 10} KiB of shared memory a program, the device has {room.shared_bytes >> 10}"
            )
        return cls(shape, BLOCK_ROWS, ffn, 8, 1)

    @staticmethod
    def function() -> Any:
        from rooflane.families.resident.kernels.flagged_rows_kernel import flagged_rows_kernel

        return flagged_rows_kernel

    @property
    def programs(self) -> int:
        return row_blocks(self.shape)

    @property
    def scratch_elements(self) -> int:
        """Operand elements of the keys and values, each layer its own."""
        return self.shape.num_layers * self.shape.tokens * 2 * self.layout.heads_width

    @property
    def flags(self) -> int:
        """int32 flags of a launch: one a block, and as many places for a count of programs done, a sequence."""
        return self.shape.batch_size * 2 * (padded(self.shape.seq_len) // self.rows)

    def constants(self, masked: bool) -> dict[str, Any]:
        return self.shared_constants(masked) | {"NUM_HEADS": self.layout.tiles, "BLOCK_S": padded(self.shape.seq_len)}

    def sizes(self, eps: float) -> tuple[int | float, ...]:
        return self.shape.seq_len, self.shape.num_layers, self.shape.tokens, eps

    def predict_s(self, profile: Limits) -> float:
        return self.shape.num_layers * LAYER_S
