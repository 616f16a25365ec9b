"""Weights that float16 cannot hold: the bound, and the right answer from every family that packs half precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case
from rooflane.eval.check.truth import STRESSES, Truth
from rooflane.families import get_family
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.shapes import Shape

SHAPE = Shape("wide", 2, 16, 32, 2, 48, 2)
LENIENT = {"atol": 2e-3, "rtol": 2e-2}


def scale(model, **factors):
    with torch.no_grad():
        for layer in model.layers:
            parts = {"norm1": layer.norm1, "norm2": layer.norm2, "ffn_in": layer.ffn_in, "ffn_out": layer.ffn_out}
            parts |= {name: getattr(layer.attention, f"{name}_proj") for name in ("q", "k", "v", "out")}
            for name, factor in factors.items():
                parts[name].weight.mul_(factor)
                if (name == "ffn_in" and "ffn_out" in factors) or (name == "v" and "out" in factors):
                    parts[name].bias.mul_(factor)


# What the model computes changes little; what stands between its products passes 65504 or falls below 6e-5.
UNFIT = {
    "a hidden row of 1e5": {"ffn_in": 1e5, "ffn_out": 1e-5},
    "values of 1e6": {"v": 1e6, "out": 1e-6},
    "a norm of 1e5": {"norm2": 1e5, "ffn_in": 1e-5},
    "a norm of 1e-5": {"norm1": 1e-5, "q": 1e5, "k": 1e5, "v": 1e5},
    "a folded product": {"norm1": 3e3, "q": 1e-3, "k": 1e-3, "v": 1e2, "out": 1e-5},
    "a hidden row of 1e-6": {"ffn_in": 1e-6, "ffn_out": 1e5},
    "an update of 1e5": {"out": 1e5},
}
FIT = {"as drawn": {}, "sharper": {"q": 8.0}, "larger": {"ffn_in": 30.0, "ffn_out": 0.1}, "a dead part": {"v": 0.0}}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_out_of_range_are_found_and_computed_in_the_models_own_type(case):
    model = build_baseline(SHAPE, "cpu", 3)
    scale(model, **UNFIT[case])
    assert half_obstacle(model)
    x, mask = generate_random_case(config_of(SHAPE), "cpu", torch.float32, 4, 0.3)
    for family in ("sdpa_flash", "chunked"):
        with pytest.warns(UserWarning, match="float16.*calls take a slower path"):
            forward = get_family(family).build(model, SHAPE, torch.device("cpu"), operand_dtype="float16")
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(x.double(), mask).float()
            torch.testing.assert_close(forward(x, mask), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", FIT)
def test_weights_in_range_take_half_precision(case):
    model = build_baseline(SHAPE, "cpu", 3)
    scale(model, **FIT[case])
    assert half_obstacle(model) is None
    x, mask = generate_random_case(config_of(SHAPE), "cpu", torch.float32, 4, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward = get_family("sdpa_flash").build(model, SHAPE, torch.device("cpu"), operand_dtype="float16")
        with torch.no_grad():
            torch.testing.assert_close(forward(x, mask), model(x, mask), **LENIENT)


# resident runs on a GPU alone; there the evaluator's own test gives it this stress.
@pytest.mark.parametrize(
    "name", [pytest.param("graph_compile", marks=pytest.mark.slow), "gemm_fp16", "sdpa_flash", "chunked"]
)
def test_a_family_takes_the_wide_path_by_itself_under_the_stress(name, run_stress):
    wide, cpu = next(stress for stress in STRESSES if stress.wide), torch.device("cpu")
    model, reference = build_baseline(SHAPE, cpu, 1), build_baseline(SHAPE, cpu, 1)
    forward = get_family(name).build(model, SHAPE, cpu, operand_dtype="float16")
    with pytest.warns(UserWarning, match="layers.0.ffn_in may reach"):
        found = run_stress(wide, forward, model, reference, Truth(reference, SHAPE, cpu), SHAPE, cpu, 5)
    # In the model's own type the error is eager's own: roundings of float32.
    assert found.passed and found.gate.max_abs < 1e-5


def test_weights_that_leave_the_range_and_come_back():
    model = build_baseline(SHAPE, "cpu", 3)
    x = torch.randn(2, 16, 32)
    forward = get_family("sdpa_flash").build(model, SHAPE, torch.device("cpu"), operand_dtype="float16")
    with torch.no_grad():
        exact = forward(x, None)
        scale(model, ffn_in=1e5, ffn_out=1e-5)
        with pytest.warns(UserWarning, match="layers.0.ffn_in may reach"):
            torch.testing.assert_close(forward(x, None), model(x), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(forward(x, None), model(x), atol=1e-4, rtol=1e-4)
        model.load_state_dict(build_baseline(SHAPE, "cpu", 3).state_dict())
        assert torch.equal(forward(x, None), exact)


def test_the_bound_holds_for_the_input_that_reaches_it():
    model = build_baseline(Shape("one", 1, 1, 32, 1, 8, 1), "cpu", 0).double()
    layer = model.layers[0]
    # The normalised row that lies along a row of the weight gives the largest product.
    row, bias = layer.ffn_in.weight[3].detach(), layer.ffn_in.bias[3].detach().abs()
    z = (row - row.mean()) / (row - row.mean()).norm() * 32**0.5
    reached = float((row * z).sum() + bias)
    bound = float(row.norm() * 32**0.5 + bias)
    assert 0.9 * bound < reached <= bound
    with torch.no_grad():
        layer.ffn_in.weight.mul_(40000 / bound)
    assert "layers.0.ffn_in may reach" in half_obstacle(model)
