"""Launch configurations of the resident kernels, chosen by shape; nothing tunes at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooflane.families.resident.layout import packable, padded
from rooflane.shapes import Shape

# How a shape is launched. blocks.py: "one" program a block of whole sequences, two blocks of a sequence in "turns", or
# two programs a sequence with "flags". rows.py: thin blocks with flags ("flagged rows"), or a launch a layer
# ("layered rows").
Mode = Literal["one", "turns", "flags", "flagged rows", "layered rows"]


@dataclass(frozen=True)
class ResidentConfig:
    """How one resident forward is launched: `rows` query rows a program, of `group` sequences.

    `pack` narrow heads share a tile (blocks), `heads_a_step` heads stand side by side (rows); `ffn_tile` hidden columns
    are live at a time.
    """

    mode: Mode
    rows: int
    group: int
    pack: int
    heads_a_step: int
    ffn_tile: int
    num_warps: int
    num_stages: int


# Multiprocessors the configurations were measured on: an H200.
UNITS = 132
ROWS = 16
# Columns of the heads that stand side by side: 128 keeps the batched scores of 16 rows in registers.
STEP_COLUMNS = 128
# Rows of a block: a warpgroup's tensor-core tile.
BLOCK_ROWS = 64
# NOTE: the block kernels never run with one pipeline stage: Triton 3.6 then emits out-of-range shared accesses.
BLOCK_STAGES = 2


def resident_config(shape: Shape, units: int = UNITS) -> ResidentConfig:
    """Return the configuration for a shape the family supports, on a device of so many multiprocessors."""
    length = padded(shape.seq_len)
    if shape.batch_size * -(-shape.seq_len // ROWS) <= units and shape.seq_len > ROWS:
        most = max(1, STEP_COLUMNS // padded(shape.head_dim))
        step = next(count for count in (8, 4, 2, 1) if count <= most and shape.num_heads % count == 0)
        mode = "flagged rows" if shape.causal else "layered rows"
        return ResidentConfig(mode, ROWS, 1, 1, step, min(128, padded(shape.ffn_dim)), 4, 1)
    ffn_tile = min(64, padded(shape.ffn_dim))
    pack = packable(shape)
    if length > BLOCK_ROWS and shape.causal:
        mode = "flags" if 2 * shape.batch_size <= 2 * units else "turns"
        return ResidentConfig(mode, BLOCK_ROWS, 1, pack, 1, ffn_tile, 4, BLOCK_STAGES)
    # Short sequences share a block once there are blocks enough for every multiprocessor.
    group = max(1, BLOCK_ROWS // length) if shape.batch_size * length > units * BLOCK_ROWS else 1
    return ResidentConfig("one", length * group, group, pack, 1, ffn_tile, 8 if length > BLOCK_ROWS else 4, BLOCK_STAGES)
