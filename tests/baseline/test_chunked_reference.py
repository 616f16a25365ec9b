"""The chunked reference equals the eager forward wherever both fit, whatever the budget cuts it into."""

from __future__ import annotations

import pytest
import torch

from rooflane.baseline import build_baseline, chunked_reference, config_of, generate_random_case, torch_dtype
from rooflane.shapes import Shape

# A GEMM over fewer rows may sum in another order: float32 differs in its last bits, half types in their last one.
TOLERANCE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3.2e-2}
ONE_ROW, SOME_ROWS, EVERYTHING = 1, 60_000, 1 << 30


@pytest.mark.parametrize("budget", [ONE_ROW, SOME_ROWS, EVERYTHING])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [0.0, 0.6])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_equals_eager(budget, causal, padding, dtype):
    shape = Shape("a", 3, 19, 24, 3, 40, 2, causal, dtype)
    model = build_baseline(shape, "cpu", seed=1)
    x, mask = generate_random_case(config_of(shape), "cpu", torch_dtype(dtype), 2, padding)
    with torch.inference_mode():
        for given in (mask, None):
            out = chunked_reference(model, x, given, budget_bytes=budget)
            torch.testing.assert_close(out, model(x, given), atol=TOLERANCE[dtype], rtol=0)


def test_float64_models_stay_in_float64():
    shape = Shape("a", 2, 9, 16, 2, 16, 2)
    model = build_baseline(shape, "cpu", seed=1).double()
    x, mask = generate_random_case(config_of(shape), "cpu", torch.float64, 2)
    with torch.inference_mode():
        difference = (chunked_reference(model, x, mask, budget_bytes=ONE_ROW) - model(x, mask)).abs().max()
    assert difference < 1e-14


@pytest.mark.parametrize("budget", [200_000, 2_000_000])
def test_scratch_stays_within_the_budget(budget):
    shape = Shape("a", 4, 300, 16, 2, 16, 1)
    model = build_baseline(shape, "cpu", seed=1)
    x, mask = generate_random_case(config_of(shape), "cpu", torch.float32, 2)
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
        chunked_reference(model, x, mask, budget_bytes=budget)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    # The output, and one batch block's hidden states of two layers, keys and values, add to the scratch.
    assert x.nbytes < peak <= 1.2 * budget + 5 * x.nbytes
    eager_scores = 8 * shape.batch_size * shape.num_heads * shape.seq_len**2
    assert peak < eager_scores
