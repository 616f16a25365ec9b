"""The fused ops between GEMMs against float64."""

from __future__ import annotations

import math

import pytest
import torch

from rooflane.families.lean.lean import torch_activate, torch_add_norm, torch_rotate
from rooflane.families.lean.pointwise import activate, add_norm, rotate
from rooflane.shapes import ACTIVATIONS

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


@pytest.mark.parametrize("width", [16, 48, 1000])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("op", [add_norm, torch_add_norm])
def test_the_norm_of_every_form_equals_float64_and_post_norm_keeps_it(device, width, rms, post_norm, op):
    x = 3 + torch.randn(2, 19, width, device=device)
    update = torch.randn(2, 19, width, device=device, dtype=torch.float16)
    weight, bias = torch.randn(2, width, device=device).unbind(0)
    flags = {"eps": 1e-3, "out_dtype": torch.float16, "residual": True, "rms": rms, "post_norm": post_norm}
    kept, out = op(x, update, weight, bias, **flags)
    total = x.double() + update.double()
    centred = total if rms else total - total.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-3) * weight.double() + bias.double()
    assert kept.dtype == torch.float32 and out.dtype == torch.float16
    torch.testing.assert_close(kept.double(), normed if post_norm else total, atol=1e-5, rtol=1e-5)
    assert torch.equal(out, kept.half()) or not post_norm
    assert (out.double() - normed).abs().max() <= TOLERANCE * max(1.0, normed.abs().max().item() / 4)
    assert op(x, update, weight, bias, **flags | {"residual": False})[0] is None


FORMULAS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the sigmoid of -65504 is 1 / inf
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("op", [activate, torch_activate])
def test_every_activation_equals_its_formula_and_keeps_nan(device, kind, op):
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([-65504.0, 65504.0, 0.0])]).to(device)
    exact = FORMULAS[kind](x.double())
    torch.testing.assert_close(op(x, kind).double(), exact, atol=2e-6, rtol=2e-6)
    half = op(x.half(), kind).double() - FORMULAS[kind](x.half().double())
    assert (half.abs() <= 2**-11 * exact.abs() + 1e-6).all(), "one rounding to float16"
    assert op(torch.tensor([math.nan], device=device), kind).isnan().all()


@pytest.mark.parametrize(("heads", "width"), [(3, 8), (2, 48), (1, 80)])
@pytest.mark.parametrize("op", [rotate, torch_rotate])
def test_rotary_positions_turn_q_and_k_as_complex_numbers_and_leave_v(device, heads, width, op):
    qkv = torch.randn(2, 37, 3 * heads * width, device=device, dtype=torch.float16)
    angle = 3 * torch.randn(37, width // 2, device=device, dtype=torch.float64)
    pairs = qkv.double().view(2, 37, 3, heads, 2, width // 2)
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None, None]
    turned = torch.complex(pairs[..., 0, :], pairs[..., 1, :])[:, :, :2] * turn
    before = qkv.clone()
    op(qkv, angle.cos().float(), angle.sin().float())
    after = qkv.double().view(2, 37, 3, heads, 2, width // 2)[:, :, :2]
    exact = torch.stack([turned.real, turned.imag], -2)
    assert ((after - exact).abs() <= 2**-11 * exact.abs() + 1e-6).all(), "one rounding to float16"
    assert torch.equal(qkv[..., 2 * heads * width :], before[..., 2 * heads * width :])


@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_gelu_is_the_exact_erf_form(device, size):
    x = torch.linspace(-6, 6, size, device=device)
    expected = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.double().tolist()]
    error = (activate(x, "gelu").double().cpu() - torch.tensor(expected, dtype=torch.float64)).abs().max()
    assert error <= 1e-6, "the tanh form differs by up to 5e-4"
