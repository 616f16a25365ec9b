"""Free controls compute the reference's function, and SDPA alone changes nothing else."""

from __future__ import annotations

import pytest
import torch

from rooflane.baseline import CONTROLS, build_baseline, config_of, generate_random_case
from rooflane.shapes import Shape

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["identity", "sdpa", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_control_equals_eager(name, causal, padding):
    shape = Shape("a", 2, 9, 16, 2, 24, 2, causal)
    eager = build_baseline(shape, CPU, seed=1)
    forward = CONTROLS[name].build(build_baseline(shape, CPU, seed=1), shape, CPU)
    x, mask = generate_random_case(config_of(shape), CPU, torch.float32, 3, padding)
    with torch.inference_mode():
        torch.testing.assert_close(forward(x, mask), eager(x, mask), atol=2e-6, rtol=0)
        torch.testing.assert_close(forward(x, None), eager(x, None), atol=2e-6, rtol=0)


def test_sdpa_control_builds_no_explicit_scores(monkeypatch):
    shape = Shape("a", 1, 4, 16, 2, 16, 1)
    forward = CONTROLS["sdpa"].build(build_baseline(shape, CPU, seed=1), shape, CPU)
    monkeypatch.setattr(torch, "softmax", None)
    x, mask = generate_random_case(config_of(shape), CPU, torch.float32, 3)
    with torch.inference_mode():
        forward(x, mask)


def test_reduce_overhead_gives_the_reason_not_to_run_on_a_cpu():
    assert "CUDA graphs" in CONTROLS["compiled_reduce_overhead"].supports("cpu")
    assert CONTROLS["compiled_reduce_overhead"].supports("cuda") is None
    assert CONTROLS["compiled_reduce_overhead"].contract != ""
