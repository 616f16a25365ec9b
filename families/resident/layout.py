"""Padded sizes of the resident kernels' packed weights; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rooflane.shapes import Shape


@dataclass(frozen=True)
class Layout:
    """Padded sizes of the packed buffers, in elements; powers of two where Triton's tiles need them."""

    width: int  # d_model padded to a power of two, 16 at least
    heads: int
    head: int  # head_dim padded likewise
    ffn: int  # ffn_dim padded to a multiple of the feed-forward tile
    layers: int

    @property
    def heads_width(self) -> int:
        """Columns of all padded heads side by side."""
        return self.heads * self.head

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


def layout_of(shape: Shape, ffn_tile: int) -> Layout:
    """Return the packed layout of a shape."""
    return Layout(
        width=padded(shape.d_model),
        heads=shape.num_heads,
        head=padded(shape.head_dim),
        ffn=-(-shape.ffn_dim // ffn_tile) * ffn_tile,
        layers=shape.num_layers,
    )
