"""What a call's mask or rotary positions become, against softmax attention over the mask itself."""

from __future__ import annotations

import pytest
import torch

from rooflane.dispatch.adapters import masks
from rooflane.dispatch.adapters.mapping import Unserved
from rooflane.dispatch.adapters.masks import check_rotary, read_mask, rotary_tables

B, H, S, D = 3, 2, 7, 8
REAL = torch.arange(S) < torch.tensor([[S], [4], [1]])
TRIL = torch.ones(S, S, dtype=torch.bool).tril()
WINDOW = TRIL & ~torch.ones(S, S, dtype=torch.bool).tril(-3)
MOST_NEGATIVE = torch.finfo(torch.float32).min


@pytest.fixture
def x():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))


def additive(visible, hidden=MOST_NEGATIVE):
    return torch.zeros(visible.shape).masked_fill(~visible, hidden)


def weights(scores, mask):
    """Return the weights of attention `[B, H, S, S]` under a mask, 0 where a row sees nothing."""
    hidden = ~mask if mask.dtype == torch.bool else torch.zeros_like(mask, dtype=torch.bool)
    return (scores + (0 if mask.dtype == torch.bool else mask)).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (REAL[:, None, None], "padding"),
        (REAL[:, None, None].expand(B, 1, S, S), "padding"),
        (REAL[:, None, None].expand(B, 1, S, S).contiguous(), "padding"),
        (REAL.flip(1)[:, None, None] & TRIL, "padding, causal"),
        (REAL[:, None, None] & TRIL, "padding, causal"),
        (TRIL, "causal"),
        (TRIL.expand(B, H, S, S), "bias"),
        (TRIL[None, None], "causal"),
        (torch.ones(B, 1, S, S, dtype=torch.bool), "nothing"),
        (torch.ones(S, S, dtype=torch.bool), "nothing"),
        (WINDOW, "bias"),
        (WINDOW & REAL[:, None, None], "bias"),
        (torch.eye(S, dtype=torch.bool), "bias"),
        # Two sequences packed into one: the last row sees the second alone, and the rows of the first are real.
        (TRIL & (torch.arange(S)[:, None] // 4 == torch.arange(S) // 4), "bias"),
        (additive(REAL[:, None, None]), "padding"),
        (additive(REAL[:, None, None].expand(B, 1, S, S), -torch.inf), "padding"),
        (additive(REAL.flip(1)[:, None, None] & TRIL), "padding, causal"),
        (additive(TRIL, -65504.0).half(), "causal"),
        (additive(TRIL, -torch.inf).half(), "causal"),
        (additive(TRIL, -9.0), "bias"),
        (additive(WINDOW), "bias"),
        (torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(2)), "bias"),
        (torch.zeros(B, 1, S, S), "nothing"),
    ],
)
def test_a_mask_is_read_as_what_it_hides(mask, kind, x):
    call = read_mask(x, mask, H, padding=True)
    found = {"padding": call.valid is not None, "causal": call.causal, "bias": call.bias is not None}
    assert ", ".join(name for name, there in found.items() if there) == (kind if kind != "nothing" else "")
    assert call.x is x
    # Real tokens attend as under the mask itself; rows of padding are not promised.
    real = torch.ones(B, S, dtype=torch.bool) if call.valid is None else call.valid
    if call.bias is None:
        own = real[:, None, None] & (TRIL if call.causal else torch.ones(S, S, dtype=torch.bool))
    else:
        own = call.bias
        assert own.data_ptr() == mask.data_ptr(), "a bias is not copied"
    scores = torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(1))
    difference = (weights(scores, own) - weights(scores, mask)).abs().amax((1, 3))
    assert float(difference[real].max()) < 1e-6


def test_a_mask_of_keys_alone_is_known_without_its_values(x, monkeypatch):
    monkeypatch.setattr(masks, "_kind", None)
    for mask in (REAL[:, None, None], REAL[:1, None, None], REAL[:, None, None].expand(B, 1, S, S)):
        assert torch.equal(read_mask(x, mask, H, padding=True).valid, REAL[: mask.shape[0]].expand(B, S))


def test_keys_that_nothing_says_are_padding_stay_a_bias(x):
    for mask in (REAL[:, None, None], TRIL):
        call = read_mask(x, mask, H, padding=False)
        assert call.valid is None and not call.causal and call.bias.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("shape", [(0, S), (1, 1), (2, 0)])
def test_sizes_at_the_edges(shape):
    batch, length = shape
    x = torch.zeros(batch, length, D)
    call = read_mask(x, torch.ones(batch, 1, length, length, dtype=torch.bool), H, padding=True)
    assert (call.valid is None or call.valid.all()) and not call.causal


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (
            torch.zeros(B, 1, S, S + 1),
            r"the attention mask is \(3, 1, 7, 8\) of torch.float32; served: .* \(3, 2, 7, 7\)",
        ),
        (torch.zeros(B, 1, S, 1), "served"),
        (torch.zeros(B, 3, S, S), "served"),
        (torch.zeros(2, 1, S, S), "served"),
        (torch.zeros(B, 1, 1, S, S), "served"),
        (torch.ones(B, 1, S, S, dtype=torch.int64), "of torch.int64"),
        (torch.zeros(B, 1, S, S, device="meta"), "on cpu, the attention mask on meta"),
    ],
)
def test_other_masks_are_left_to_the_block(mask, reason, x):
    with pytest.raises(Unserved, match=reason):
        read_mask(x, mask, H, padding=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("first", "theta", "served"), [(0, 10000.0, True), (1, 10000.0, False), (0, 500.0, False)])
def test_rotary_positions_are_known_by_their_values(dtype, first, theta, served):
    length, width = 300, 16
    x = torch.zeros(1, length, D, dtype=dtype)
    # As models compute them: in float32, and then cast.
    frequencies = 1 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(first, first + length).float(), frequencies).repeat(1, 2)
    given = angles.cos()[None].to(dtype), angles.sin()[None].to(dtype)
    if served:
        check_rotary(x, given, 10000.0)
        assert rotary_tables(length, width, theta, dtype, x.device).shape == (2, length, width)
        return
    with pytest.raises(Unserved, match="its rotary positions are not 0 to 299 at base 10000"):
        check_rotary(x, given, 10000.0)


def test_rotary_positions_of_another_length_are_left_to_the_block():
    with pytest.raises(Unserved, match="not 0 to 6"):
        check_rotary(torch.zeros(1, 7, D), (torch.ones(1, 8, 4), torch.zeros(1, 8, 4)), 10000.0)
