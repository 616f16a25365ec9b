"""Every model of the table, taken whole. What counts is its own function in float64, and that its blocks do not run."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from rooflane.dispatch import optimize, served

# Largest error of a float32 model of two layers on a CPU, in units of its largest output, where that is over 1.
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
    own = next(model.parameters())
    inputs = {
        name: value.to(own.device, own.dtype if value.is_floating_point() else None) for name, value in inputs.items()
    }
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return case.output(model(**inputs)).cpu()


def expected(case, model, inputs):
    """Return the output of a float64 copy on the CPU."""
    return run(case, copy.deepcopy(model).cpu().double(), inputs)


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


GPU = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, *ROUNDING)]


@pytest.mark.parametrize(("device", "dtype"), [*(("cpu", dtype) for dtype in ROUNDING), *GPU], ids=str)
def test_half_precision(case, model, device, dtype):
    """Be as right as the model's own half-precision self, within its own error and the output's rounding.

    A float32 model is held to that on a GPU, where its matrix products take float16 operands.
    """
    model = model.to(device, dtype)
    half = dtype if dtype in ROUNDING else torch.float16
    fast = take(model)
    inputs, real = padded(case, model) if case.padding else (case.inputs(BATCH), ...)
    for given, rows in ((case.inputs(BATCH), ...), (inputs, real)):
        wanted = expected(case, model, given)[rows]
        own = error(run(case, copy.deepcopy(model).to(half), given)[rows], wanted)
        assert error(run(case, fast, given)[rows], wanted) <= 2 * own + ROUNDING[half]


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
