"""The fused family without a GPU: what it takes, its folded weights, and the two ends of its stream."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch

from rooflane.baseline import build_baseline
from rooflane.dispatch import load_profile
from rooflane.eval import open_run
from rooflane.families import get_family
from rooflane.families.fused.attention import PLANS, Attention, plan_attention
from rooflane.families.fused.build import pack_fused
from rooflane.families.fused.cost import fused_peak_bytes
from rooflane.families.fused.ends_kernel import finish_kernel, split_kernel
from rooflane.families.fused.products import HIDDEN, PRODUCTS, moment_tiles
from rooflane.families.lean.pointwise import row_sizes
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.shapes import Form, Shape

FUSED = get_family("fused")
SHAPE = Shape("a", 3, 37, 48, 3, 96, 2, True)
EPS = 1e-5


def split(x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the stream [2, T, D], the inverses [T], the moments [T, 2] and the kept mask of rows x [T, D]."""
    tokens, width = x.shape
    grid, tiles, _ = row_sizes(tokens, width)
    stream = torch.full((2, tokens, width), torch.nan, dtype=torch.float16, device=x.device)
    inverses = torch.full((tokens,), torch.nan, device=x.device)
    moments = torch.full((tokens, 2), torch.nan, device=x.device)
    kept = None if mask is None else torch.zeros_like(mask)
    split_kernel[(grid,)](
        x, mask, stream, inverses, moments, kept, tokens, x.numel(), **tiles, HAS_MASK=mask is not None
    )
    return stream, inverses, moments, kept


def finish(stream, inverses, weight, bias, mask=None):
    _, tokens, width = stream.shape
    grid, tiles, _ = row_sizes(tokens, width)
    out = torch.full((tokens, width), torch.nan, device=stream.device)
    finish_kernel[(grid,)](
        stream, inverses, weight, bias, mask, out, tokens, tokens * width, EPS, **tiles, HAS_MASK=mask is not None
    )
    return out


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (19, 48), (5, 1000)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e30])
def test_a_stream_is_the_centred_input_times_a_power_of_two_to_22_bits(device, tokens, width, scale):
    x = scale * (3 + torch.randn(tokens, width, device=device))
    stream, inverses, moments, _ = split(x)
    assert torch.equal(torch.frexp(inverses).mantissa, torch.full_like(inverses, 0.5)), "powers of two"
    assert (inverses <= 1).all() and stream.isfinite().all() and (stream[0].abs() <= 16).all()
    stored = stream.double().sum(0)
    centred = (x.double() - x.double().mean(1, keepdim=True)) * inverses[:, None].double()
    # 22 bits of elements up to 16, and the mean in float32 of an input whose mean is 3 times its deviation.
    bound = 2.0**-22 * centred.abs() + 6e-8 + 1e-6 * centred.abs().amax(1, keepdim=True)
    assert ((stored - centred).abs() <= bound).all()
    if scale <= 1:
        assert (inverses == 1).all()
    wanted = torch.stack([stored.sum(1), stored.square().sum(1)], 1)
    # The sum of centred elements is near 0, so its error is that of the elements; 6e-8 is float16's smallest step.
    assert ((moments.double() - wanted).abs() <= 1e-4 * wanted[:, 1:] + 6e-8 * width).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_the_last_norm_of_a_stream_is_the_norm_of_the_input(device, scale):
    """A norm sees neither the mean that the stream lacks nor, with its epsilon scaled, the inverse."""
    x = scale * torch.randn(19, 48, device=device)
    weight, bias = torch.randn(2, 48, device=device).unbind(0)
    mask = torch.arange(19, device=device) % 3 > 0
    stream, inverses, _, kept = split(x, mask)
    assert torch.equal(kept, mask)
    out = finish(stream, inverses, weight, bias, mask)
    wanted = torch.nn.functional.layer_norm(x.double(), (48,), weight.double(), bias.double(), EPS)
    assert not out[~mask].any()
    # Elements of 1e-3 are stored in steps of 6e-8.
    assert (out.double() - wanted)[mask].abs().max() <= 1e-4


def test_a_row_of_nan_stays_in_its_row(device):
    x = torch.randn(4, 16, device=device)
    x[1, 3] = torch.nan
    stream, inverses, _, _ = split(x)
    out = finish(stream, inverses, torch.ones(16, device=device), torch.zeros(16, device=device))
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("kind", ["none", "prefix"])
def test_the_folded_weights_compute_the_stack(device, make_case, kind):
    """The layers as the products compute them, in float64 from the packed weights, against the reference."""
    model, x, mask, expected = make_case(SHAPE, 5, kind)
    weights = {name: tensor.double() for name, tensor in pack_fused(model).items()}
    stream, inverses, _, _ = split(x.flatten(0, 1))
    rows, inverse = stream.double().sum(0), inverses.double()[:, None]

    def product(value, name):
        return value @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normed(value, name):
        mean, variance = value.mean(1, keepdim=True), value.var(1, unbiased=False, keepdim=True)
        scale = (variance + EPS * inverse.square()).rsqrt()
        centred = value @ weights[f"{name}.weight"].T - mean * weights[f"{name}.sums"]
        return scale * centred + weights[f"{name}.bias"]

    seen = torch.ones(SHAPE.seq_len, SHAPE.seq_len, dtype=torch.bool, device=device).tril()
    visible = seen if mask is None else seen & mask[:, None, None, :]
    for layer in range(SHAPE.num_layers):
        qkv = normed(rows, f"{layer}.qkv").view(SHAPE.batch_size, SHAPE.seq_len, 3, SHAPE.num_heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        rows = rows + inverse * product(context.nan_to_num().transpose(1, 2).flatten(0, 1).flatten(1), f"{layer}.out")
        hidden = torch.nn.functional.gelu(normed(rows, f"{layer}.ffn_in"))
        rows = rows + inverse * product(hidden, f"{layer}.ffn_out")
    out = torch.nn.functional.layer_norm(
        rows / inverse, (SHAPE.d_model,), weights["norm.weight"], weights["norm.bias"], EPS
    ).view_as(x)
    out = out if mask is None else out * mask[:, :, None]
    # Weights are rounded to float16, 2^-11 of each.
    assert (out - expected).abs().max() <= 4e-3


def test_what_it_takes_and_refuses():
    h200, other = load_profile("h200"), load_profile("rtx5090")
    assert FUSED.supports(SHAPE, h200) is None
    assert "compute capability 9.0" in FUSED.supports(SHAPE, other)
    assert "compute capability 9.0" in FUSED.supports(SHAPE, load_profile("cpu"))
    for change, reason in (
        ({"dtype": "bfloat16"}, "float16"), ({"ffn_dim": 100}, "ffn_dim 100 is no multiple of 8"),
        ({"d_model": 36}, "d_model 36"), ({"d_model": 512, "num_heads": 1}, "head_dim 512 is over 256"),
    ):  # fmt: skip
        assert reason in FUSED.supports(dataclasses.replace(SHAPE, **change), h200)
    for form, reason in (
        (Form(norm_first=False), "post-norm"), (Form(norm="rms"), "RMSNorm"), (Form(activation="silu"), "silu"),
        (Form(final_norm=False), "final norm"), (Form(score_bias=True), "bias on the scores"),
    ):  # fmt: skip
        assert reason in FUSED.refuse_form(form)
    for form in (Form(), Form(activation="relu"), Form(activation="gelu_tanh"), Form(rotary_theta=1e4)):
        assert FUSED.refuse_form(form) is None
    assert set(HIDDEN) <= {"gelu", "gelu_tanh", "relu"}


@pytest.mark.parametrize(("head_dim", "missing", "said"), [(12, "", "3 heads of 12"), (None, "no library", "NVRTC")])
def test_what_the_kernels_cannot_compute_goes_to_the_lean_forward(monkeypatch, head_dim, missing, said):
    monkeypatch.setattr("rooflane.families.runtime.host.missing_compiler", lambda: missing)
    model = build_baseline(SHAPE, "cpu", 1)
    model.form = Form(head_dim=head_dim)
    built = []
    monkeypatch.setattr("rooflane.families.lean.build.build_lean", lambda *given, **more: built.append(given))
    with pytest.warns(UserWarning, match=said):
        FUSED.build(model, SHAPE, torch.device("cpu"))
    assert built[0][:2] == (model, SHAPE)


def test_predictions_are_within_a_quarter_of_what_was_measured(root):
    """The constants were fitted to this record: the test holds the fit, on seven shapes."""
    h200, measured = load_profile("h200"), {}
    for row in open_run(root / "briefs" / "records" / "h200-fused").records():
        if row.family == "fused" and row.timing:
            event_ns = [time for block in row.timing.event_ns for time in block]
            measured.setdefault(Shape(**row.shape), []).append(statistics.median(event_ns))
    assert len(measured) == 7
    for shape, times in measured.items():
        assert 0.75 < FUSED.predict_s(shape, h200) / (statistics.median(times) * 1e-9) < 1.25, shape.id


def test_bytes_count_the_fixed_memory():
    """Two places of the stream, q, k, v, context and hidden row, in half precision; both ends; weights twice."""
    shape = Shape("8", 64, 128, 1024, 4, 1024, 4, True)
    rows = shape.tokens * (2 * 2 * 1024 + 4 * 1024 + 1024) * 2
    weights = 4 * (6 * 1024 * 1024 + 10 * 1024) + 2 * 1024
    assert fused_peak_bytes(shape) == rows + 2 * shape.tokens * 1024 * 4 + weights * 6
    assert moment_tiles(1024) == 8 and moment_tiles(129) == 2


def test_a_fused_stack_needs_room_for_the_sum_of_its_updates(device, make_case):
    model, *_ = make_case(SHAPE, 5, "none")
    assert half_obstacle(model, summed=True) is None
    with torch.no_grad():
        for layer in model.layers:
            layer.ffn_out.bias.fill_(2e4)
    assert half_obstacle(model) is None
    assert "the sum of all updates may reach 4e+04" in half_obstacle(model, summed=True)


@pytest.mark.parametrize("head_dim", PLANS)
def test_a_plan_fits_its_blocks_into_an_sm(head_dim):
    plan = plan_attention(head_dim, 4, True)
    assert plan.shared_bytes * plan.blocks <= 227 * 1024
    # What its threads hold from the start is what they share out.
    start = 65536 // (plan.threads * plan.blocks) // 8 * 8
    assert plan.registers * plan.groups * 128 + 24 * 128 <= start * plan.threads
    assert plan.registers % 8 == 0 and plan.registers <= 240


def test_other_widths_have_no_plan():
    assert plan_attention(24, 4, True) is None and plan_attention(8, 4, False) is None


def test_each_kernel_has_a_name_of_its_own():
    cases = list(FUSED.kernel_cases())
    assert len({case.key for case in cases}) == len(cases) == len(PRODUCTS) + 2 * len(PLANS)
    source = Attention(32, 4, True, 64, 4, 4, 1).source()
    assert '#define CONTEXT_N "32"' in source and "fused_attention(" in source
