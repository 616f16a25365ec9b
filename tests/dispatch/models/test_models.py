"""Every model of the table, taken whole. What counts is its own function in float64, and that its blocks do not run."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from rooflane.dispatch import optimize, served

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


def take(model):
    """Return a copy of the model, taken whole."""
    model = copy.deepcopy(model)
    assert optimize(model) is model
    return model


def run(case, model, inputs):
    """Return the output that counts. A warning, such as that of a call that is not served, fails the test."""
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


def padded(case, model):
    """Return inputs whose sequences end, or begin, at different places, and which outputs are of real tokens."""
    inputs = case.inputs(BATCH)
    length = next(iter(inputs.values())).shape[1]
    real = torch.arange(length) < torch.tensor([[length], [length - length // 3], [length // 2]])
    real = real.flip(1) if case.padding == "left" else real
    inputs["attention_mask"] = real.long()
    if case.padding == "samples":
        frames = int(model._get_feat_extract_output_lengths(torch.tensor(length)))
        real = model._get_feature_vector_attention_mask(frames, inputs["attention_mask"]).bool()
    return inputs, real


def test_float32(case, model):
    fast = take(model)
    for batch in (BATCH, 1):
        inputs = case.inputs(batch)
        assert error(run(case, fast, inputs), expected(case, model, inputs)) < TOLERANCE
    (stack,) = served(fast)
    assert stack.blocks == 2 and [route.shape.batch_size for route in stack.stack.routes] == [BATCH, 1]
    # What was built is what ran: with it gone there is no answer, for no block runs its own code.
    stack.stack._compute = None
    with pytest.raises(TypeError, match="NoneType"):
        run(case, fast, case.inputs(BATCH))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_half_precision(case, model, dtype):
    model = model.to(dtype)
    inputs = case.inputs(BATCH)
    wanted = expected(case, model, inputs)
    own = error(run(case, model, inputs), wanted)
    assert error(run(case, take(model), inputs), wanted) <= 2 * own + ROUNDING[dtype]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_and_ragged_batches(case, model, attention):
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(attention)
    fast = take(model)
    inputs, real = padded(case, model) if case.padding else (case.inputs(BATCH), ...)
    assert error(run(case, fast, inputs)[real], expected(case, model, inputs)[real]) < TOLERANCE
    # The same forwards without a mask again.
    inputs = case.inputs(BATCH)
    assert error(run(case, fast, inputs), expected(case, model, inputs)) < TOLERANCE


def test_an_empty_batch_gives_an_empty_output(case, model):
    """transformers' own blocks cannot reshape one; those of the other libraries can."""
    sizes = run(case, model, case.inputs(1)).shape[1:]
    assert run(case, take(model), case.inputs(0)).shape == (0, *sizes)


def test_changed_weights_and_the_round_trip_of_the_state(case, model):
    fast, inputs = take(model), case.inputs(BATCH)
    before = run(case, fast, inputs)
    # A step of a training loop through the taken model's own parameters.
    optimizer = torch.optim.AdamW(fast.parameters(), lr=0.02)
    for parameter in fast.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    stepped = run(case, fast, inputs)
    assert error(stepped, before.double()) > 100 * TOLERANCE
    # The state is the model's own: it loads into a fresh model, strictly.
    assert list(fast.state_dict()) == list(model.state_dict())
    original = copy.deepcopy(model)
    model.load_state_dict(fast.state_dict())
    assert error(stepped, expected(case, model, inputs)) < TOLERANCE
    fast.load_state_dict(original.state_dict())
    assert error(run(case, fast, inputs), before.double()) < 1e-6
