"""Ablations do what their names say: a fault where it should show, and the reference's own function where not."""

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case
from rooflane.eval.check.ablations import ablations
from rooflane.shapes import Shape

SHAPE = Shape("small", 2, 24, 16, 2, 24, 2, causal=True)
ALL = {ablation.name: ablation for ablation in ablations(window=8)}


@pytest.fixture(scope="module")
def model():
    return build_baseline(SHAPE, "cpu", 3).double()


@pytest.fixture(scope="module")
def case():
    x, mask = generate_random_case(config_of(SHAPE), "cpu", torch.float64, 4, 0.4)
    mask[1, 3] = False  # a hole, which a causal mask does not hide from the later rows
    return x, mask


def error(name, model, x, mask):
    with torch.no_grad():
        return float((ALL[name].build(model)(x, mask) - model(x, mask)).abs().max())


# A key's bias adds the same to every score of a row; fresh norms have weight 1 and bias 0.
@pytest.mark.parametrize("name", ["no k_proj bias", "no norm bias", "no norm weight"])
def test_what_changes_nothing_is_seen_to_change_nothing(name, model, case):
    assert error(name, model, *case) < 1e-12


@pytest.mark.parametrize("name", sorted(set(ALL) - {"no k_proj bias", "no norm bias", "no norm weight"}))
def test_every_other_ablation_is_another_function(name, model, case):
    assert error(name, model, *case) > 1e-6


@pytest.mark.parametrize("name", ["stale mask", "no mask", "no key mask"])
def test_mask_faults_hide_where_every_token_is_valid(name, model, case):
    x = case[0]
    assert error(name, model, x, torch.ones(x.shape[:2], dtype=torch.bool)) < 1e-12


def test_the_model_itself_is_left_alone(model, case):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        right = model(*case)
        for ablation in ALL.values():
            ablation.build(model)(*case)
        assert torch.equal(model(*case), right)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_polynomial_of_high_degree_is_the_exponential(model, case):
    from functools import partial

    from rooflane.eval.check.ablations import Ablation, _attend, _polynomial

    exact = Ablation("exp", "", partial(_attend, _polynomial(30)))
    with torch.no_grad():
        assert torch.allclose(exact.build(model)(*case), model(*case), atol=1e-10)


def test_uniform_attention_is_the_running_mean_of_the_values(model):
    # One sequence, causal: row i of the context is the mean of values 0..i.
    x = torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    single = build_baseline(Shape("one", 1, 24, 16, 2, 24, 1, causal=True), "cpu", 3).double()
    layer = single.layers[0]
    with torch.no_grad():
        values = layer.attention.v_proj(layer.norm1(x))
        mean = values.cumsum(1) / torch.arange(1, 25, dtype=torch.float64)[None, :, None]
        hidden = x + layer.attention.out_proj(mean)
        hidden = hidden + layer.ffn_out(torch.nn.functional.gelu(layer.ffn_in(layer.norm2(hidden))))
        assert torch.allclose(ALL["uniform attention"].build(single)(x, None), single.final_norm(hidden), atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_as_wide_as_the_sequence_sees_every_key(causal, case):
    model = build_baseline(Shape("one", 2, 24, 16, 2, 24, 2, causal=causal), "cpu", 3).double()
    wide = {ablation.name: ablation for ablation in ablations(window=48)}["window 48"]
    with torch.no_grad():
        assert torch.allclose(wide.build(model)(*case), model(*case), atol=1e-12)


def test_a_causal_window_reads_the_nearest_keys_alone():
    # With one layer, token 20 must not feel what stands at token 3 when the window is 8 wide, and feel token 15.
    model = build_baseline(Shape("one", 1, 24, 16, 2, 24, 1, causal=True), "cpu", 3).double()
    x = torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for place, felt in ((3, False), (12, False), (13, True), (15, True)):
        moved = x.clone()
        moved[0, place, 0] += 1
        with torch.no_grad():
            change = ALL["window 8"].build(model)(moved, None)[0, 20] - ALL["window 8"].build(model)(x, None)[0, 20]
        assert bool(change.abs().max() > 1e-9) is felt, place
