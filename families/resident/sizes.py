"""What a resident launch is given for a shape: compile-time parameters, programs, scratch; no torch."""

from __future__ import annotations

from typing import Any

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.config import ResidentConfig
from rooflane.families.resident.layout import Layout, padded
from rooflane.shapes import Shape


def constants(shape: Shape, layout: Layout, config: ResidentConfig, masked: bool) -> dict[str, Any]:
    """Return the compile-time parameters of the configuration's kernel, those of one launch a layer left out."""
    common = {
        "WIDTH": shape.d_model,
        "HEAD": layout.head,
        "FFN": layout.ffn,
        "HAS_MASK": masked,
        "ROWS": config.rows,
        "BLOCK_D": layout.width,
    }
    if config.mode in ("flagged rows", "layered rows"):
        common |= {"NUM_HEADS": layout.tiles, "BLOCK_S": padded(shape.seq_len)}
        if config.mode == "flagged rows":
            return common
        tiles = {"BLOCK_F": config.ffn_tile, "STAGES": config.num_stages, "HEADS_A_STEP": config.heads_a_step}
        return common | tiles | {"CAUSAL": shape.causal}
    blocks = {"HEADS_WIDTH": layout.heads_width, "PACK": layout.pack, "CAUSAL": shape.causal, "GROUP": config.group}
    blocks |= {"BLOCK_F": config.ffn_tile, "STAGES": config.num_stages}
    return common | blocks | {"HALVES": config.mode == "halves"}


def programs(shape: Shape, config: ResidentConfig) -> int:
    """Return the programs of a launch."""
    if config.mode in ("flagged rows", "layered rows"):
        return shape.batch_size * -(-shape.seq_len // config.rows)
    if config.mode == "halves":
        return 2 * shape.batch_size
    return -(-shape.batch_size // config.group)


def scratch_elements(shape: Shape, layout: Layout, config: ResidentConfig) -> int:
    """Return the operand elements that pass between programs through device memory.

    Only batches that leave the device empty have any: at most 16 rows a multiprocessor, or 64 for halves, times the
    layers where each keeps a scratch of its own.
    """
    if config.mode == "whole":
        return 0
    if config.mode == "layered rows":
        return 2 * shape.tokens * 3 * layout.heads_width
    rows = shape.tokens if config.mode == "flagged rows" else shape.batch_size * config.rows
    return shape.num_layers * rows * 2 * layout.heads_width


def flag_count(shape: Shape, config: ResidentConfig) -> int:
    """Return the int32 flags of a launch, all zero between launches."""
    if config.mode == "flagged rows":
        return shape.batch_size * 2 * (padded(shape.seq_len) // config.rows)
    return shape.batch_size if config.mode == "halves" else 0


def scratch_bytes(shape: Shape, layout: Layout, config: ResidentConfig) -> int:
    """Return the device bytes a forward holds besides its packed weights."""
    held = scratch_elements(shape, layout, config) * HALF + flag_count(shape, config) * SINGLE
    if config.mode == "layered rows":
        held += shape.tokens * shape.d_model * (shape.dtype_bytes + SINGLE)  # staged input, residual
    return held
