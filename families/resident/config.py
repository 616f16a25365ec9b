"""Launch configurations of the resident kernels, chosen by shape and device; nothing tunes at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooflane.families.resident.layout import packable, padded
from rooflane.shapes import Shape

# How a shape is launched: a program a block of whole sequences ("whole"); two programs a sequence, the second awaiting
# the first's flag ("halves"); thin blocks of rows with flags ("flagged rows"); or thin blocks, a launch a layer
# ("layered rows").
Mode = Literal["whole", "halves", "flagged rows", "layered rows"]


@dataclass(frozen=True)
class Room:
    """What a device offers the kernels: multiprocessors, the shared memory one program may take, in bytes, and whether
    it runs the Hopper kernels, which only compute capability 9.0 does.
    """

    units: int
    shared_bytes: int
    warpgroups: bool = False


HOPPER = Room(132, 227 * 1024, True)  # the H200 the configurations were measured on


@dataclass(frozen=True)
class ResidentConfig:
    """How one resident forward is launched: `rows` query rows a program, of `group` sequences.

    `pack` narrow heads share a tile, `heads_a_step` heads stand side by side (layered rows); `ffn_tile` hidden columns
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


ROWS = 16
# Columns of heads side by side, and hidden columns of one tile, up to which thin rows take them in one step.
STEP_COLUMNS = 128
# Shared memory of the flagged rows at their widest, as Triton 3.6 compiles them.
FLAGGED_SHARED_BYTES = 136 * 1024
# Rows of half a sequence: a warpgroup's tensor-core tile. Below, eight warps have less than a tile each.
BLOCK_ROWS = 64
# Columns of a head tile up to which 64 rows of it fit four warps' registers without spilling in the loop (H200, 64
# sequences: 32 columns 57 against 66 us whole, 64 columns 58 against 55, 128 columns 73 against 59).
HALVES_HEAD = 32


# At 32 columns Triton 3.6 makes wrong code for Hopper of a feed-forward in tiles of more than 32: other numbers or an
# illegal access, in halves of four warps and in whole sequences, at any number of stages. At 16 and from 64 on not.
NARROW_COLUMNS = 32


def resident_config(shape: Shape, room: Room = HOPPER) -> ResidentConfig:
    """Return the configuration for a shape the family supports on a device."""
    length, head, ffn = padded(shape.seq_len), padded(shape.head_dim), padded(shape.ffn_dim)
    if shape.seq_len > ROWS and shape.batch_size * -(-shape.seq_len // ROWS) <= room.units:
        if not shape.causal:
            most = max(1, STEP_COLUMNS // head)
            step = next(count for count in (8, 4, 2, 1) if count <= most and shape.num_heads % count == 0)
            return ResidentConfig("layered rows", ROWS, 1, 1, step, min(STEP_COLUMNS, ffn), 4, 1)
        columns = shape.num_heads * head
        one_step = columns == padded(columns) <= STEP_COLUMNS and ffn <= STEP_COLUMNS
        if one_step and room.shared_bytes >= FLAGGED_SHARED_BYTES:
            return ResidentConfig("flagged rows", ROWS, 1, 1, shape.num_heads, ffn, 8, 1)
    # A feed-forward of one tile needs no pipeline for it and leaves the shared memory to a third stage of the heads.
    single = ffn <= STEP_COLUMNS and head < BLOCK_ROWS and room.shared_bytes >= HOPPER.shared_bytes
    # A head over half the width stands alone without a pipeline: its feed-forward takes two steps (see blocks.py).
    ffn_tile, stages = (ffn, 3) if single else (min(64, ffn if head <= BLOCK_ROWS else ffn // 2), 2)
    if padded(shape.d_model) == NARROW_COLUMNS:
        ffn_tile = min(ffn_tile, NARROW_COLUMNS)
    pack = packable(shape)
    if shape.causal and length > BLOCK_ROWS and head <= HALVES_HEAD and 2 * shape.batch_size <= room.units:
        return ResidentConfig("halves", BLOCK_ROWS, 1, pack, 1, ffn_tile, 4, stages)
    # Short sequences share a block once there are blocks enough for every multiprocessor.
    group = max(1, BLOCK_ROWS // length) if shape.batch_size * length > room.units * BLOCK_ROWS else 1
    warps = 8 if length > BLOCK_ROWS else 4
    return ResidentConfig("whole", length * group, group, pack, 1, ffn_tile, warps, stages)
