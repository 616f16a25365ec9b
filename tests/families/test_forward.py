"""Every family computes the reference's function and keeps the same promises to its caller."""

from __future__ import annotations

import copy

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case
from rooflane.families import get_family, load_families
from rooflane.families.chunked import chunk_plan
from rooflane.families.runtime.call_checks import aligned, check_call
from rooflane.shapes import Shape

# Largest error from float64: float32 rounding on a CPU, one half-precision rounding per operand on CUDA. The output of
# half models rounds values near 4 by 2^-8 and 2^-5.
TOLERANCE = {("cpu", "float32"): 2e-5, ("cuda", "float32"): 8e-3}
HALF_TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-1}
# Every family of this package: a new one is tested without an entry here.
GPU_ONLY = {"resident", "fused"}
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] * spec.compiles + [pytest.mark.gpu] * (name in GPU_ONLY))
    for name, spec in load_families().items()
    if type(spec).__module__.startswith("rooflane.")
]
SHAPES = [
    Shape("ragged", 3, 37, 48, 3, 96, 2, True),
    Shape("full", 2, 20, 32, 2, 32, 1, False),
    Shape("token", 1, 1, 16, 1, 16, 1, True),
]
OPTIONS = {"chunked": {"budget_gib": 1e-5}}


def build(name, model, shape, device):
    return get_family(name).build(model, shape, device, **OPTIONS.get(name, {}))


def tolerance(device, shape):
    return HALF_TOLERANCE.get(shape.dtype) or TOLERANCE[device.type, shape.dtype]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.id)
def test_equals_float64_with_every_kind_of_mask(device, make_case, name, shape):
    # One seed draws one model, whatever the mask: one built forward serves every kind of call.
    forward = build(name, make_case(shape, 5, "none")[0], shape, device)
    for kind in ("none", "full", "prefix", "holes"):
        _, x, mask, expected = make_case(shape, 5, kind)
        with torch.inference_mode():
            out = forward(x, mask)
        assert type(out) is torch.Tensor and out.dtype == x.dtype and out.shape == x.shape
        assert (out.double() - expected).abs().max() <= tolerance(device, shape), kind
        if mask is not None:
            assert not out[~mask].any(), "rows of invalid tokens are exactly 0"


@pytest.mark.parametrize("kind", ["full", "prefix", "holes"])
@pytest.mark.parametrize("causal", [True, False])
def test_chunked_cuts_batch_and_sequence(device, make_case, kind, causal):
    shape = Shape("long", 2, 1100, 16, 2, 16, 2, causal)
    sequences, rows, _ = chunk_plan(shape, 1.0, 4)
    assert sequences == 1 and rows < shape.seq_len, "the smallest budget must cut both ways"
    model, x, mask, expected = make_case(shape, 5, kind)
    with torch.inference_mode():
        out = get_family("chunked").build(model, shape, device, budget_gib=2**-30)(x, mask)
    assert (out.double() - expected).abs().max() <= tolerance(device, shape)


@pytest.mark.parametrize("name", ["sdpa_flash", "gemm_fp16", "chunked"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_models_err_no_more_than_eager(device, make_case, name, dtype):
    shape = Shape("half", 3, 37, 48, 3, 96, 2, True, dtype)
    model, x, mask, expected = make_case(shape, 5, "prefix")
    forward = build(name, model, shape, device)
    with torch.inference_mode():
        own = (forward(x, mask).double() - expected).abs().max()
        eager = (model(x, mask).double() - expected).abs().max()
    assert own <= 1.5 * eager


@pytest.mark.parametrize("name", FAMILIES)
def test_promises_to_the_caller(device, make_case, name):
    shape = SHAPES[0]
    model, x, mask, expected = make_case(shape, 5, "full")
    other, _ = generate_random_case(config_of(shape), device, torch.float32, 6)
    forward = build(name, model, shape, device)
    limit = tolerance(device, shape)
    with torch.inference_mode():
        first = forward(x, mask)
        kept = first.clone()
        second = forward(other, mask)
        assert torch.equal(first, kept), "a later call must not overwrite an output already returned"
        assert not torch.equal(first, second)
        x.copy_(other)
        assert torch.equal(forward(x, mask), second), "the same tensor with new contents is a new input"
        mask[:, 20:] = False
        with_mask = forward(x, mask)
        assert (with_mask.double() - copy.deepcopy(model).double()(x.double(), mask)).abs().max() <= limit
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with torch.inference_mode():
        again = forward(x, mask)
        assert (again.double() - copy.deepcopy(model).double()(x.double(), mask)).abs().max() <= 2 * limit
    model.load_state_dict(build_baseline(shape, device, 77).state_dict())
    with torch.inference_mode():
        reloaded = forward(x, mask)
        assert (reloaded.double() - copy.deepcopy(model).double()(x.double(), mask)).abs().max() <= limit


@pytest.mark.parametrize("name", ["sdpa_flash", "chunked"])
def test_wrong_calls_are_refused(device, name):
    shape = SHAPES[0]
    model = build_baseline(shape, device, 1)
    forward = build(name, model, shape, device)
    with pytest.raises(ValueError, match=r"\(3, 37, 48\)"):
        forward(torch.zeros(3, 38, 48, device=device), None)
    with pytest.raises(ValueError, match="bool mask"):
        forward(torch.zeros(3, 37, 48, device=device), torch.ones(3, 37, device=device))


def test_non_contiguous_and_unaligned_inputs(device, make_case):
    shape = SHAPES[0]
    model, x, mask, expected = make_case(shape, 5, "full")
    forward = build("sdpa_flash", model, shape, device)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    assert aligned(shifted).data_ptr() % 16 == 0
    with torch.inference_mode():
        for given in (strided, shifted):
            assert (forward(given, mask).double() - expected).abs().max() <= tolerance(device, shape)


def test_unknown_options_are_named(device):
    shape = SHAPES[0]
    model = build_baseline(shape, device, 1)
    with pytest.raises(ValueError, match="operand_dtype 'fp8'"):
        get_family("sdpa_flash").build(model, shape, device, operand_dtype="fp8")
    for budget in (0, float("nan"), "much", True):
        with pytest.raises(ValueError, match="budget_gib"):
            get_family("chunked").build(model, shape, device, budget_gib=budget)
    with pytest.raises(ValueError, match="captured is 'maybe'"):
        get_family("sdpa_flash").build(model, shape, device, captured="maybe")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graph_compile", "sdpa_flash", "resident"])
def test_another_stream_sees_its_own_result(device, make_case, name):
    shape = Shape("stream", 8, 128, 128, 4, 128, 4)
    model, x, mask, expected = make_case(shape, 5, "full")
    forward = build(name, model, shape, device)
    side = torch.cuda.Stream()
    with torch.inference_mode():
        for seed in range(20):
            other, _ = generate_random_case(config_of(shape), device, torch.float32, 100 + seed)
            first = forward(other, mask)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second = forward(x, mask)
            torch.cuda.synchronize()
            assert (second.double() - expected).abs().max() <= 8e-3
            assert torch.equal(first, forward(other, mask))


def test_a_mask_on_another_device_is_refused():
    """A bound launch would give the device an address of another device."""
    shape = Shape("a", 2, 4, 16, 2, 16, 1)
    x, mask = torch.zeros(2, 4, 16), torch.ones(2, 4, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match=r"x is on cpu, the mask on meta; move the mask"):
        check_call(x, mask, shape)
