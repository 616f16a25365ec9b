"""Launch configurations of the attention kernel by head width and sequence length; nothing tunes at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes (query rows, keys), warps and pipeline stages of one launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (largest padded head width, largest sequence or None, configuration)
LADDER: list[tuple[int, int | None, AttentionConfig]] = [
    (32, 64, AttentionConfig(64, 64, 4, 2)),
    (64, None, AttentionConfig(128, 64, 4, 3)),
    (128, None, AttentionConfig(128, 64, 8, 2)),
    (256, None, AttentionConfig(64, 64, 8, 2)),  # wider tiles exceed the registers: the context alone is 64 KB in fp32
]
MAX_HEAD_DIM = LADDER[-1][0]


def padded_head_dim(head_dim: int) -> int:
    """Return the head width the tensor cores work on: the next power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def attention_config(head_dim: int, seq_len: int) -> AttentionConfig:
    """Return the configuration for a head width and sequence length; raises `ValueError` over `MAX_HEAD_DIM`."""
    width = padded_head_dim(head_dim)
    for largest_width, largest_length, config in LADDER:
        if width <= largest_width and (largest_length is None or seq_len <= largest_length):
            return config
    raise ValueError(f"attention: head_dim {head_dim} is over {MAX_HEAD_DIM}")
