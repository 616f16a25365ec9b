"""The fused ops between GEMMs against float64."""

from __future__ import annotations

import math

import pytest
import torch

from rooflane.families.lean.pointwise import activate, add_norm

# fp16 output of normalised values up to about 5: half a unit in the last place is 2^-9.
TOLERANCE = 2e-3


@pytest.mark.parametrize("width", [1, 16, 48, 128, 1000])
@pytest.mark.parametrize("with_update", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_add_norm_equals_float64(device, width, with_update, masked):
    x = 3 + torch.randn(2, 19, width, device=device)
    update = torch.randn(2, 19, width, device=device, dtype=torch.float16) if with_update else None
    weight, bias = torch.randn(2, width, device=device).unbind(0)
    mask = torch.rand(2, 19, device=device) > 0.5 if masked else None
    kept, out = add_norm(x, update, weight, bias, eps=1e-5, out_dtype=torch.float16, residual=True, mask=mask)
    total = x.double() + (update.double() if with_update else 0)
    torch.testing.assert_close(kept.double(), total, atol=1e-6, rtol=1e-6)
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight.double() + bias.double()
    if masked:
        normed = normed * mask[:, :, None]
        assert not out[~mask].any()
    assert (out.double() - normed).abs().max() <= TOLERANCE * max(1.0, normed.abs().max().item() / 4)


def test_add_norm_of_nothing_is_nothing(device):
    kept, out = add_norm(
        torch.empty(0, 4, 16, device=device), None, torch.ones(16, device=device), torch.zeros(16, device=device),
        eps=1e-5, out_dtype=torch.float16, residual=True,
    )  # fmt: skip
    assert kept.shape == out.shape == (0, 4, 16)


@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_gelu_is_the_exact_erf_form(device, size):
    x = torch.linspace(-6, 6, size, device=device)
    expected = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.double().tolist()]
    error = (activate(x, "gelu").double().cpu() - torch.tensor(expected, dtype=torch.float64)).abs().max()
    assert error <= 1e-6, "the tanh form differs by up to 5e-4"
