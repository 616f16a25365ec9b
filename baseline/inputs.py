"""Seeded inputs and masks, drawn as in the benchmark."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflane.baseline.reference import TransformerConfig


def generate_random_case(
    config: TransformerConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    padding_ratio: float = 0.0,
    input_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Draw an input `[B, S, D]` and its mask `[B, S]` (bool, True = real token, never None).

    The generator is on the device, so one seed gives different data on CPU and CUDA. With a padding ratio each row's
    length is uniform between `max(1, round(S (1 - padding_ratio)))` and S. Padding is on the right and its rows of x
    are 0. Before that, x equals the unpadded x of the same seed.
    """
    device = torch.device(device)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    batch, length, width = config.batch_size, config.seq_len, config.d_model
    x = torch.randn(batch, length, width, generator=generator, device=device, dtype=dtype) * input_scale
    if padding_ratio <= 0:
        return x, torch.ones(batch, length, dtype=torch.bool, device=device)
    shortest = max(1, round(length * (1 - padding_ratio)))
    lengths = torch.randint(shortest, length + 1, (batch,), generator=generator, device=device)
    mask = torch.arange(length, device=device)[None, :] < lengths[:, None]
    return x.masked_fill(~mask[:, :, None], 0), mask
