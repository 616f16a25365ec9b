"""Every model of the table, taken whole. What counts is its own function in float64, and that its blocks do not run."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from rooflane.dispatch import optimize

# Largest error of a float32 model of two layers, in units of its largest output, where that is over 1.
TOLERANCE = 1e-4
BATCH = 3
# An output's own rounding, in the same units.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture
def model(case):
    torch.manual_seed(0)
    model = case.build().eval()
    # Norms and biases start as 1 and 0, which would hide one that is not read.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture
def fast(model):
    return optimize(copy.deepcopy(model))


def run(case, model, inputs):
    """Return the output that counts; a warning, such as that of a fallback, fails the test."""
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return case.output(model(**inputs))


def expected(case, model, inputs):
    """Return the output of a float64 copy."""
    return run(case, copy.deepcopy(model).double(), inputs)


def error(out, wanted):
    """Return the largest difference, in units of the largest output, where that is over 1."""
    return float((out.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1))


def padded(case, model, batch):
    """Return inputs whose sequences end, or begin, at different places, and which outputs are of real tokens."""
    inputs = case.inputs(batch)
    length = next(iter(inputs.values())).shape[1]
    real = torch.arange(length) < torch.tensor([length, length - length // 3, length // 2])[:batch, None]
    real = real.flip(1) if case.padding == "left" else real
    inputs["attention_mask"] = real.long()
    if case.padding == "samples":
        frames = int(model._get_feat_extract_output_lengths(torch.tensor(length)))
        real = model._get_feature_vector_attention_mask(frames, inputs["attention_mask"]).bool()
    return inputs, real


def served(model):
    """Return the shapes and families of every built forward of a model, found where it was swapped."""
    raise NotImplementedError


@pytest.mark.parametrize("batch", [BATCH, 1, 0])
def test_float32(case, model, fast, batch):
    inputs = case.inputs(batch)
    if batch == 0 and not case.takes_empty:
        return
    assert error(run(case, fast, inputs), expected(case, model, inputs)) < TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_half_precision(case, model, dtype):
    model = model.to(dtype)
    inputs = case.inputs(BATCH)
    wanted = expected(case, model, inputs)
    own = error(run(case, model, inputs), wanted)
    assert error(run(case, optimize(model), inputs), wanted) <= 2 * own + ROUNDING[dtype]
