"""The plain reference of every form, against torch's own modules and functions in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from rooflane.dispatch.adapters.blocks import layer_view
from rooflane.dispatch.adapters.encoder import ENCODER_LAYER
from rooflane.dispatch.adapters.reference import ACTIVATIONS, reference_stack
from rooflane.shapes import ACTIVATIONS as NAMES
from rooflane.shapes import Form

B, S, D, H, F = 2, 6, 12, 3, 20
VALID = torch.arange(S) < torch.tensor([[S], [4]])
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture
def x():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def op_by_op():
    # PyTorch's fast path leaves what it likes in padded rows, and has fewer activations.
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def layer_of(**changes) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, F, batch_first=True, dtype=torch.float64, **changes).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def view_of(layer: nn.TransformerEncoderLayer, form: Form) -> SimpleNamespace:
    return SimpleNamespace(layers=[layer_view(layer, ENCODER_LAYER)], final_norm=None, form=form)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", NAMES)
def test_pytorchs_layer_with_each_activation_and_order_of_norms(x, norm_first, activation):
    layer = layer_of(activation=ACTIVATIONS[activation], norm_first=norm_first)
    form = Form(norm_first, activation, final_norm=False)
    with torch.no_grad():
        found = reference_stack(view_of(layer, form), x, VALID, causal=False)
        expected = layer(x, src_key_padding_mask=~VALID)
    torch.testing.assert_close(found[VALID], expected[VALID], **CLOSE)
    assert not found[~VALID].any()


def test_activations_by_their_formulas():
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    cubic = 0.7978845608028654 * (x + 0.044715 * x**3)
    expected = {
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(cubic)),
        "quick_gelu": x / (1 + torch.exp(-1.702 * x)),
        "relu": x.clamp_min(0),
        "silu": x / (1 + torch.exp(-x)),
    }
    assert expected.keys() == ACTIVATIONS.keys() == set(NAMES)
    for name, values in expected.items():
        torch.testing.assert_close(ACTIVATIONS[name](x), values, **CLOSE)


@pytest.mark.parametrize("additive", [False, True])
def test_a_bias_of_the_scores(x, additive):
    layer = layer_of(norm_first=True, activation="gelu")
    hidden = (torch.arange(S)[:, None] - torch.arange(S)).abs() > 1
    added = torch.randn(B * H, S, S, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask, bias = (added, added.unflatten(0, (B, H))) if additive else (hidden, ~hidden[None, None])
    with torch.no_grad():
        found = reference_stack(view_of(layer, Form(final_norm=False)), x, None, bias, causal=False)
        torch.testing.assert_close(found, layer(x, mask), **CLOSE)


def test_rms_norms_of_which_the_last_ends_the_stack(x):
    norms = [nn.RMSNorm(D, eps=1e-3, dtype=torch.float64) for _ in range(3)]
    layer = layer_of(norm_first=True, activation="gelu")
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    layer.norm1, layer.norm2 = norms[:2]
    view = view_of(layer, Form(norm="rms"))
    view.final_norm = SimpleNamespace(weight=norms[2].weight, bias=torch.zeros(D), eps=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(reference_stack(view, x, causal=False), norms[2](layer(x)), **CLOSE)


def test_rotary_positions_are_turns_of_complex_numbers(x):
    width, theta = 8, 100.0
    generator = torch.Generator().manual_seed(3)

    def linear(rows, columns):
        return SimpleNamespace(
            weight=torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5,
            bias=torch.randn(rows, generator=generator, dtype=torch.float64),
        )

    # Heads of 8 columns in a stack of 12: q, k and v have 24 rows.
    q, k, v, out = linear(H * width, D), linear(H * width, D), linear(H * width, D), linear(D, H * width)
    attention = SimpleNamespace(
        q_proj=q, k_proj=k, v_proj=v, out_proj=out, num_heads=H, head_dim=width, scale=width**-0.5
    )
    zero = SimpleNamespace(weight=torch.zeros(F, D, dtype=torch.float64), bias=torch.zeros(F, dtype=torch.float64))
    nothing = SimpleNamespace(weight=torch.zeros(D, F, dtype=torch.float64), bias=torch.zeros(D, dtype=torch.float64))
    norm = SimpleNamespace(
        weight=torch.ones(D, dtype=torch.float64), bias=torch.zeros(D, dtype=torch.float64), eps=1e-5
    )
    layer = SimpleNamespace(norm1=norm, attention=attention, norm2=norm, ffn_in=zero, ffn_out=nothing)
    view = SimpleNamespace(
        layers=[layer], final_norm=None, form=Form(final_norm=False, head_dim=width, rotary_theta=theta)
    )

    normed = functional.layer_norm(x, (D,))
    heads = [functional.linear(normed, one.weight, one.bias).view(B, S, H, width).transpose(1, 2) for one in (q, k, v)]
    turn = torch.polar(
        torch.ones(S, width // 2, dtype=torch.float64),
        torch.arange(S)[:, None] * theta ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width),
    )
    turned = []
    for one in heads[:2]:
        product = torch.complex(one[..., : width // 2], one[..., width // 2 :]) * turn
        turned.append(torch.cat([product.real, product.imag], dim=-1))
    context = functional.scaled_dot_product_attention(*turned, heads[2], is_causal=True)
    expected = x + functional.linear(context.transpose(1, 2).flatten(2), out.weight, out.bias)
    torch.testing.assert_close(reference_stack(view, x, causal=True), expected, **CLOSE)
