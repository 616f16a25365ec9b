"""Launch configurations of the resident kernels, chosen by shape; nothing tunes at run time."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.resident.layout import padded
from rooflane.shapes import Shape


@dataclass(frozen=True)
class ResidentConfig:
    """How one resident forward is launched.

    `rows` 0 means the whole kernel with `group` sequences a program; else the rows kernel with that many query rows a
    program and `heads_a_step` heads side by side. `ffn_tile` hidden columns are live at a time.
    """

    rows: int
    group: int
    heads_a_step: int
    ffn_tile: int
    num_warps: int
    num_stages: int


# Blocks of the rows kernel that one wave of 132 SMs takes: with more, whole sequences are faster (H200: 16 sequences of
# 128 tokens 56 against 80 us of device time, 64 sequences 198 against 83).
ROWS_PROGRAMS = 132
ROWS = 16
# Columns of the heads that stand side by side: 128 keeps the batched scores of 16 rows in registers.
STEP_COLUMNS = 128
# NOTE: the whole kernel never runs with one pipeline stage: Triton 3.6 then emits out-of-range shared accesses.
WHOLE_STAGES = 2
# Rows of a program below which 8 warps have less than a tensor-core tile each.
NARROW_ROWS = 64


def resident_config(shape: Shape) -> ResidentConfig:
    """Return the configuration for a shape the family supports."""
    ffn_tile = min(64, padded(shape.ffn_dim))
    rows = padded(shape.seq_len)
    # Short sequences finish sooner whole than the split's extra launches take (H200, 64 sequences of 32 tokens: 55
    # against 116 us of event time).
    if rows > NARROW_ROWS and shape.batch_size * -(-shape.seq_len // ROWS) <= ROWS_PROGRAMS:
        most = max(1, STEP_COLUMNS // padded(shape.head_dim))
        step = next(count for count in (8, 4, 2, 1) if count <= most and shape.num_heads % count == 0)
        return ResidentConfig(ROWS, 1, step, min(128, padded(shape.ffn_dim)), 4, 1)
    return ResidentConfig(0, 1, 1, ffn_tile, 8 if rows > NARROW_ROWS else 4, WHOLE_STAGES)
