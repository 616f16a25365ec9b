"""Launch configurations of the attention kernel by head width and sequence length; nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes (query rows, keys), warps and pipeline stages of one launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (largest padded head width, largest sequence or None, KiB of shared memory, configuration); the first fit is taken.
# Shared memory as Triton 3.6 compiles it for sm_90; sm_80 and sm_89 need less. Times: H200, November 2026.
LADDER: list[tuple[int, int | None, int, AttentionConfig]] = [
    (32, 64, 44, AttentionConfig(64, 32, 4, 3)),
    (32, 128, 28, AttentionConfig(128, 32, 4, 3)),  # 944 us on 10000x128, h4 d32; 64x64 tiles: 1045 us
    (32, None, 44, AttentionConfig(64, 64, 4, 3)),  # 121 us on 64x1024, h4 d32; 128x64 tiles: 130 us
    (64, None, 80, AttentionConfig(128, 64, 4, 3)),  # 49.1 ms on 1x100000, h16 d64; flash 66.5, cuDNN 45.2
    (128, None, 96, AttentionConfig(128, 32, 8, 2)),  # no spill; 64-key tiles spill and need 160 KiB
    (256, None, 192, AttentionConfig(128, 32, 8, 2)),  # 68 us on 64x128, h4 d256; 64x32 tiles: 92 us
    (256, None, 96, AttentionConfig(64, 32, 8, 1)),  # cards with 99 KiB
]
# With a bias, whose float32 tile lies beside the keys and values: 128 x 64 tiles would spill and need 144 KiB.
BIASED: list[tuple[int, int | None, int, AttentionConfig]] = [
    (64, None, 64, AttentionConfig(64, 32, 4, 3)),
    (256, None, 96, AttentionConfig(64, 32, 8, 1)),
]
MAX_HEAD_DIM = LADDER[-1][0]


def padded_head_dim(head_dim: int) -> int:
    """Return the head width the tensor cores work on: the next power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def attention_config(head_dim: int, seq_len: int, shared_memory_bytes: int, *, biased: bool = False) -> AttentionConfig:
    """Return the configuration for a head width, a sequence length, a block's shared memory, and a bias or none.

    Raises `ValueError` when the head is over `MAX_HEAD_DIM` or no configuration fits the shared memory.
    """
    width = padded_head_dim(head_dim)
    for largest_width, largest_length, kibibytes, config in BIASED if biased else LADDER:
        fits = width <= largest_width and kibibytes * 1024 <= shared_memory_bytes
        if fits and (largest_length is None or seq_len <= largest_length):
            return config
    raise ValueError(
        f"attention: no configuration for head_dim {head_dim} within {shared_memory_bytes} bytes of shared memory; "
        f"the widest head is {MAX_HEAD_DIM}"
    )
