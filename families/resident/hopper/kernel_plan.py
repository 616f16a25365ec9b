"""What every Hopper kernel is told of a shape, and the memory they share; no torch."""

from __future__ import annotations

from dataclasses import dataclass

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
