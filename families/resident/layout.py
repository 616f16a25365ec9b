"""Padded sizes of the resident kernels' packed weights; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.families.resident.config import Room
from rooflane.shapes import Shape

# Rows of a thin block: the least a tensor-core tile takes.
BLOCK_ROWS = 16
# Columns of heads side by side, and hidden columns of one tile, up to which a kernel takes them in one step.
STEP_COLUMNS = 128
# Columns of a tile of narrow heads: the fewest a tensor core takes. Every head of a tile pays the tile's width.
PACKED_COLUMNS = 16


@dataclass(frozen=True)
class Layout:
    """Padded sizes of the packed buffers, in elements; powers of two where Triton's tiles need them."""

    width: int  # d_model padded to a power of two, 16 at least
    tiles: int  # head tiles: one head each, or `pack` narrow heads side by side
    head: int  # columns of a tile: head_dim padded likewise, or pack x head_dim
    pack: int
    ffn: int  # ffn_dim padded to a multiple of the feed-forward tile
    layers: int

    @property
    def heads_width(self) -> int:
        """Columns of all tiles side by side."""
        return self.tiles * self.head

    @property
    def layer_weights(self) -> int:
        """Operand elements of one layer."""
        return self.width * (4 * self.heads_width + 2 * self.ffn)

    @property
    def layer_biases(self) -> int:
        """Float32 elements of one layer: q bias, output bias, ffn_out bias, ffn_in bias."""
        return self.heads_width + 2 * self.width + self.ffn


def padded(size: int) -> int:
    """Return the next power of two, 16 at least: the least a tensor-core tile takes."""
    return max(16, 1 << (size - 1).bit_length())


def packable(shape: Shape) -> int:
    """Return how many adjacent heads a tile can take without padding, 1 where padding is needed anyway."""
    pack, rest = divmod(PACKED_COLUMNS, shape.head_dim)
    return pack if pack > 1 and rest == 0 and shape.num_heads % pack == 0 else 1


def layout_of(shape: Shape, ffn_tile: int, pack: int = 1) -> Layout:
    """Return the packed layout of a shape."""
    return Layout(
        width=padded(shape.d_model),
        tiles=shape.num_heads // pack,
        head=padded(shape.head_dim * pack),
        pack=pack,
        ffn=-(-shape.ffn_dim // ffn_tile) * ffn_tile,
        layers=shape.num_layers,
    )


def row_blocks(shape: Shape) -> int:
    """Return the blocks of 16 query rows of a batch."""
    return shape.batch_size * -(-shape.seq_len // BLOCK_ROWS)


def too_many_rows(shape: Shape, room: Room) -> str:
    """Return why thin blocks of rows do not pay, "" where a multiprocessor has at most one."""
    if shape.seq_len <= BLOCK_ROWS:
        return f"a sequence of {shape.seq_len} is one block of {BLOCK_ROWS} rows: nothing to split"
    if row_blocks(shape) > room.units:
        return f"{row_blocks(shape)} blocks of {BLOCK_ROWS} rows are more than {room.units} multiprocessors"
    return ""
