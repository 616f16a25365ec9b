"""The attention kernel against float64, at every head width class, mask kind and ragged tile edge."""

from __future__ import annotations

import math

import pytest
import torch

from rooflane.families.lean.attention import attention, mask_extent
from rooflane.families.lean.attention_config import (
    BIASED,
    LADDER,
    AttentionConfig,
    attention_config,
    padded_head_dim,
)
from rooflane.families.lean.lean import torch_attention

# Probabilities and context are rounded to fp16 once each: 2^-11 relative on values up to about 3.
TOLERANCE = 3e-3
# batch, sequence, heads, head width: one token, under a tile, over a tile edge, padded widths 8 and 48, wide 256.
SIZES = [
    (2, 1, 1, 16),
    (2, 37, 3, 16),
    (1, 130, 2, 32),
    (2, 70, 2, 8),
    (1, 20, 1, 48),
    (1, 33, 1, 128),
    (1, 17, 1, 256),
]


def masks(batch: int, length: int, device) -> dict[str, torch.Tensor | None]:
    """Return one mask of each kind; every sequence keeps its last token so that none is empty, but `empty`."""
    generator = torch.Generator().manual_seed(length)
    holes = torch.rand(batch, length, generator=generator) > 0.4
    holes[:, 0], holes[:, -1] = False, True
    prefix = torch.arange(length)[None, :] < torch.tensor([max(1, length // 2)] * batch)[:, None]
    empty = torch.zeros(batch, length, dtype=torch.bool)
    kinds = {"full": torch.ones(batch, length, dtype=torch.bool), "prefix": prefix, "holes": holes, "empty": empty}
    return {"none": None, **{name: mask.to(device) for name, mask in kinds.items()}}


def expected(
    qkv: torch.Tensor, mask: torch.Tensor | None, heads: int, causal: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    batch, length, packed = qkv.shape
    q, k, v = qkv.double().view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.double()
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, device=qkv.device).triu(1).bool(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, packed // 3)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["none", "full", "prefix", "holes"])
def test_equals_float64_on_valid_rows(device, size, causal, kind):
    batch, length, heads, width = size
    qkv = torch.randn(batch, length, 3 * heads * width, device=device, dtype=torch.float16)
    mask = masks(batch, length, device)[kind]
    extent = None if mask is None else mask_extent(mask)
    out = attention(qkv, mask, extent, heads, causal)
    rows = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    error = (out.double() - expected(qkv, mask, heads, causal))[rows].abs().max()
    assert error <= TOLERANCE
    assert torch.isfinite(out).all(), "rows of invalid tokens feed later layers: they may be anything but NaN"


def test_a_sequence_with_no_valid_token_gives_zeros(device):
    qkv = torch.randn(2, 9, 48, device=device, dtype=torch.float16)
    mask = masks(2, 9, device)["empty"]
    assert not attention(qkv, mask, mask_extent(mask), 1, False).any()


def biases(batch: int, heads: int, length: int, device) -> dict[str, torch.Tensor]:
    """Return one bias of each kind and layout; the least number and -inf hide some keys, and all of the third row."""
    generator = torch.Generator().manual_seed(length)
    drawn = torch.randn(batch, heads, length, length, generator=generator)
    shown = torch.rand(1, heads, length, length, generator=generator) > 0.3
    shown[..., 0] = True
    hidden = ~shown[:, :1]
    hidden[:, :, 2:3] = True
    kinds = {
        "bool": shown,
        "bool, one row of keys": shown[:, :1, :1],
        "float": drawn,
        "half, transposed": drawn[:1].half().transpose(2, 3),
        "one head, every second key": torch.randn(1, 1, length, 2 * length, generator=generator)[..., ::2],
        "one column": drawn[..., :1],
        "-inf": drawn[:, :1].masked_fill(hidden, -math.inf),
        "least": drawn[:, :1].masked_fill(hidden, torch.finfo(torch.float32).min),
    }
    return {name: bias.to(device) for name, bias in kinds.items()}


# The exponent of a least number is -inf, of which numpy warns where the kernel is interpreted.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [(2, 37, 3, 16), (1, 70, 2, 48)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["none", "prefix", "holes"])
def test_every_bias_equals_float64_for_the_kernel_and_torchs_ops(device, size, causal, kind):
    batch, length, heads, width = size
    qkv = torch.randn(batch, length, 3 * heads * width, device=device, dtype=torch.float16)
    mask = masks(batch, length, device)[kind]
    extent = None if mask is None else mask_extent(mask)
    rows = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    for name, bias in biases(batch, heads, length, device).items():
        want = expected(qkv, mask, heads, causal, bias).nan_to_num(0.0)
        found = {
            "kernel": attention(qkv, mask, extent, heads, causal, bias),
            "torch": torch_attention(qkv.float(), mask, None, heads, causal, bias),
        }
        for by, out in found.items():
            assert torch.isfinite(out).all(), (name, by)
            wrong = (out.double() - want).abs()
            if (name, by, device.type) == ("least", "torch", "cuda"):
                wrong[:, 2] = 0  # SDPA's own kernels make something else of a row of least numbers
            assert wrong[rows].max() <= TOLERANCE, (name, by)


@pytest.mark.parametrize("attend", [attention, torch_attention])
def test_a_row_whose_keys_are_all_hidden_is_0_and_one_of_least_numbers_is_their_mean(device, attend):
    qkv = torch.randn(1, 40, 48, device=device, dtype=torch.float16)
    for hidden in (torch.zeros(40, 40, dtype=torch.bool), torch.full((40, 40), -math.inf)):
        assert not attend(qkv, None, None, 1, False, hidden[None, None].to(device)).any()
    least = torch.full((1, 1, 1, 1), torch.finfo(torch.float32).min, device=device)
    out = attend(qkv if attend is attention else qkv.float(), None, None, 1, False, least)
    assert torch.isfinite(out).all()
    if attend is torch_attention and device.type == "cuda":
        return  # SDPA's own kernels make something else of such a row
    mean = qkv[..., 32:].double().mean(1, keepdim=True)
    assert (out.double() - mean).abs().max() <= TOLERANCE, "the scores vanish beside the least number"


def test_extent_is_negative_exactly_when_there_are_holes(device):
    rows = {"1111": 4, "1100": 2, "0000": 0, "1010": -3, "0111": -4, "0001": -4}
    mask = torch.tensor([[c == "1" for c in row] for row in rows], device=device)
    assert mask_extent(mask).tolist() == list(rows.values())


def test_sharp_scores_do_not_overflow(device):
    qkv = 100 * torch.randn(1, 40, 48, device=device, dtype=torch.float16)
    out = attention(qkv, None, None, 1, True)
    assert torch.isfinite(out).all()
    assert (out.double() - expected(qkv, None, 1, True)).abs().max() <= 0.3, "2^-11 of values near 300"


def test_softmax_is_shift_invariant_in_the_keys(device):
    qkv = torch.randn(1, 24, 48, device=device, dtype=torch.float16)
    shifted = qkv.clone()
    shifted[..., 16:32] += 2.0
    difference = attention(qkv, None, None, 1, True) - attention(shifted, None, None, 1, True)
    assert difference.abs().max() <= 2e-2, "adding one vector to every key adds one number to a row of scores"


def test_every_configuration_of_the_ladder_is_right(device):
    for width, length, _, config in LADDER + BIASED:
        sequence = min(length or 70, 70)
        qkv = torch.randn(1, sequence, 3 * width, device=device, dtype=torch.float16)
        out = attention(qkv, None, None, 1, True, config=config)
        assert (out.double() - expected(qkv, None, 1, True)).abs().max() <= TOLERANCE, config


def test_configuration_follows_width_length_and_shared_memory():
    assert padded_head_dim(8) == 16 and padded_head_dim(48) == 64 and padded_head_dim(256) == 256
    assert attention_config(256, 128, 227 * 1024) == AttentionConfig(128, 32, 8, 2)
    assert attention_config(256, 128, 99 * 1024) == AttentionConfig(64, 32, 8, 1)
    assert attention_config(64, 512, 99 * 1024, biased=True) == AttentionConfig(64, 32, 4, 3)
    assert attention_config(80, 512, 99 * 1024, biased=True) == AttentionConfig(64, 32, 8, 1)
    with pytest.raises(ValueError, match="head_dim 257"):
        attention_config(257, 128, 227 * 1024)
    with pytest.raises(ValueError, match="65536 bytes"):
        attention_config(256, 128, 64 * 1024)


def test_refuses_strided_input(device):
    with pytest.raises(ValueError, match="contiguous"):
        attention(torch.zeros(2, 4, 96, device=device, dtype=torch.float16)[..., ::2], None, None, 1, True)
