"""The precision ladder: what it rounds, how costs order, and which shapes are one or left out."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from rooflane.baseline import build_baseline, generate_random_case
from rooflane.eval.check.formats import FORMATS
from rooflane.eval.check.precision import ATTENTION, CASES, EAGER, SEQUENCES, SIX, measure_precision
from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Shape

TINY = Shape("tiny", 3, 16, 32, 2, 48, 2)


@pytest.fixture(scope="module")
def costs():
    return by_case(measure_precision([TINY]))


def by_case(precision):
    return {(cost.products, cost.format): cost for cost in precision.costs}


def test_every_case_has_a_cost_and_attention_has_no_row_of_weights(costs):
    assert len(costs) == len(CASES) == 2 + len(FORMATS) + 6
    assert (ATTENTION, "INT4 weights") not in costs and (ATTENTION, "INT8 smooth") not in costs
    for cost in costs.values():
        assert cost.passed == all(use <= 1 for use in cost.use.values()) == (not any(cost.failing.values()))
    assert costs[SIX, "fp16"].passed and not costs[SIX, "INT8 per row"].passed


@pytest.mark.parametrize("products", [SIX, ATTENTION])
def test_errors_grow_as_the_formats_round(costs, products):
    errors = {name: cost.error for (of, name), cost in costs.items() if of == products}
    # Nothing here passes fp16's range, and it has TF32's mantissa; bf16 has three bits less, e4m3 seven.
    assert errors["fp16"] == pytest.approx(errors["TF32"], rel=0.01)
    assert 4 < errors["bf16"] / errors["fp16"] < 16
    assert 64 < errors["FP8 e4m3 per row"] / errors["fp16"] < 256
    assert errors["fp16"] < errors["bf16"] < errors["INT8 per row"] < errors["FP8 e4m3 per row"]


def test_eager_in_tf32_is_both_kinds_of_product_in_tf32(costs):
    plain, rounded = costs[EAGER, "float32"], costs[EAGER, "TF32"]
    assert plain.error < 1e-6
    parts = [costs[products, "TF32"].error for products in (SIX, ATTENTION)]
    # Independent errors add by their squares.
    assert rounded.error == pytest.approx((parts[0] ** 2 + parts[1] ** 2) ** 0.5, rel=0.15)
    assert plain.use["float32"] == rounded.use["TF32"] == 0
    assert plain.use["TF32"] == pytest.approx(rounded.use["float32"], rel=0.01) and rounded.use["float32"] > 0.05


def test_int4_weights_are_those_of_a_model_with_rounded_weights(costs):
    model = build_baseline(TINY, "cpu", 1)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
            step = layer.weight.abs().amax(1, keepdim=True) / 7  # every row is shorter than a group of 128
            layer.weight.copy_((layer.weight / step).round() * step)
        config = replace(model.config, batch_size=SEQUENCES)
        x, mask = generate_random_case(config, "cpu", torch.float32, 1000)
        truth = exact(x.double(), mask)
        error = ((model(x, mask).double() - truth).norm() / truth.norm()).item()
    assert costs[SIX, "INT4 weights"].error == pytest.approx(error, rel=1e-5)


def test_shapes_that_differ_in_their_batch_are_one_and_others_are_left_out_with_a_reason():
    half = Shape("half", 1, 8, 8, 2, 8, 1, dtype="float16")
    huge = Shape("huge", 1, 1_000_000, 1024, 16, 1024, 4)
    pair = [Shape(name, batch, 8, 8, 2, 8, 1) for name, batch in (("one", 1), ("many", 999))]
    seen = []
    found = measure_precision([pair[0], half, huge, pair[1]], seeds=2, on_stage=lambda *stage: seen.append(stage))
    assert found.shapes == {"one, many": "8x8x8 h2 f8 l1 causal"}
    assert set(found.left_out) == {"half", "huge"}
    assert "float16" in found.left_out["half"] and "scores need" in found.left_out["huge"]
    assert [stage[0] for stage in seen] == list(range(2 * len(CASES))) and seen[0][1] == len(seen)
    # The worst of the seeds counts.
    first = by_case(measure_precision(pair[:1]))
    for case, cost in by_case(found).items():
        assert cost.error >= first[case].error
        assert all(cost.use[eager] >= use for eager, use in first[case].use.items())
    with pytest.raises(EvaluationError, match="shape huge"):
        measure_precision([huge])
    with pytest.raises(EvaluationError, match="seeds must be a whole number above 0; got 0"):
        measure_precision(pair, seeds=0)
