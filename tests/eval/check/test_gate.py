"""The gate is the organiser's: inclusive, absolute or relative, and never passed by a value that is not finite."""

import math

import pytest
import torch

from rooflane.eval.check import gate
from rooflane.eval.check.gate import ATOL, RTOL, check_gate, merge_gates


def test_tolerances_are_the_organisers():
    assert (ATOL, RTOL) == (0.002, 0.02)


@pytest.mark.parametrize(
    ("ref", "error", "passes"),
    [
        (0.0, ATOL, True),  # the absolute bound is inclusive
        (0.0, ATOL * 1.001, False),
        (1.0, 0.02, True),  # the relative bound is inclusive
        (1.0, 0.0201, False),
        (0.05, 0.0019, True),  # the absolute one carries small references: 2% of 0.05 is 0.001
        (100.0, -1.99, True),
        (-100.0, -2.01, False),
    ],
)
def test_an_element_passes_on_either_bound(ref, error, passes):
    out = torch.tensor([[ref + error]], dtype=torch.float64)
    result = check_gate(out, torch.tensor([[ref]], dtype=torch.float64), rtol=RTOL + 1e-12)
    assert result.passed is passes
    assert (result.use <= 1 + 1e-9) is passes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["out", "ref", "both"])
def test_what_is_not_finite_fails_even_where_both_sides_agree(bad, where):
    out, ref = torch.ones(4, 4), torch.ones(4, 4)
    if where != "ref":
        out[1, 2] = bad
    if where != "out":
        ref[1, 2] = bad
    result = check_gate(out, ref)
    assert not result.passed
    assert result.failed == 1
    assert result.use == math.inf
    assert result.worst_index == (1, 2)


def test_counts_worst_element_and_use():
    ref = torch.full((2, 3, 5), 1.0)
    out = ref.clone()
    out[1, 2, 3] += 0.5
    out[0, 0, 0] += 0.01
    result = check_gate(out, ref)
    assert (result.failed, result.total, result.worst_index) == (1, 30, (1, 2, 3))
    assert result.max_abs == pytest.approx(0.5)
    assert result.use == pytest.approx(0.5 / 0.02)
    assert (result.out_at_worst, result.ref_at_worst) == (1.5, 1.0)
    assert check_gate(ref, ref).use == 0


def test_another_shape_fails_every_element():
    result = check_gate(torch.zeros(2, 3), torch.zeros(3, 2))
    assert not result.passed
    assert result.failed == 6
    assert "(2, 3)" in result.reason


def test_the_worst_element_is_one_that_fails():
    ref = torch.tensor([[1000.0, 0.0, 1.0, 2.0]])
    out = ref + torch.tensor([[15.0, 0.01, 0.03, 0.0]])  # 15 is within 2 %; 0.01 is 5 times the tolerance, 0.03 1.5
    result = check_gate(out, ref)
    assert (result.worst_index, result.max_abs, result.failed) == ((0, 1), 15.0, 2)
    assert result.ref_at_worst == 0.0
    out[0, 2] = math.nan
    assert check_gate(out, ref).worst_index == (0, 2), "what is not finite comes first"
    assert check_gate(ref + torch.tensor([[15.0, 0.0, 0.0, 0.0]]), ref).worst_index == (0, 0), "none fails"


def test_the_worst_failing_element_is_found_over_chunks(monkeypatch):
    monkeypatch.setattr(gate, "CHUNK_ELEMENTS", 1)
    ref = torch.zeros(3 * gate.TILE, 1)
    ref[0], out = 1000.0, ref.clone()
    out[0] = 1010.0
    out[gate.TILE + 5] += 0.01
    out[2 * gate.TILE + 7] += 0.02
    assert check_gate(out, ref).worst_index == (2 * gate.TILE + 7, 0)


KINDS = [torch.complex64, torch.int64, torch.bool, torch.uint8]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("side", ["output", "reference"])
def test_another_kind_of_number_fails_every_element(kind, side):
    ones, others = torch.ones(2, 3), torch.ones(2, 3).to(kind)
    result = check_gate(others, ones) if side == "output" else check_gate(ones, others)
    assert not result.passed and result.failed == 6 and str(kind) in result.reason


def test_integers_are_compared_exactly():
    ref = torch.full((2, 2), 2**40)
    assert check_gate(ref, ref).passed and check_gate(ref, ref + 1, rtol=0.0).failed == 4
    assert not check_gate(ref.to(torch.complex64), ref.to(torch.complex64)).passed, "no complex ones"
    assert check_gate(torch.ones(2, 2).bfloat16(), torch.ones(2, 2)).passed, "floating-point types mix"


def test_one_bad_tile_of_many_is_named():
    ref = torch.ones(512, 300)
    out = ref.clone()
    out[384:512, 128:256] = 0
    result = check_gate(out, ref)
    assert result.worst_tile == (3, 1)
    assert result.worst_tile_failed_share == 1.0
    assert result.worst_tile_mean_abs == pytest.approx(1.0)


def test_chunks_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    ref = torch.randn(7, 100, 130, generator=generator)
    out = ref + 0.002 * torch.randn(7, 100, 130, generator=generator)
    whole = check_gate(out, ref)
    monkeypatch.setattr(gate, "CHUNK_ELEMENTS", 130 * 128)
    assert check_gate(out, ref) == whole
    assert 0 < whole.failed < whole.total


def test_half_precision_errors_are_taken_in_float32():
    ref = torch.tensor([[256.0]], dtype=torch.float16)
    out = torch.tensor([[262.0]], dtype=torch.float16)
    result = check_gate(out, ref)
    assert result.max_abs == 6.0
    assert result.dtype == "float16"


def test_merging_keeps_the_worst_and_adds_the_counts():
    ref = torch.ones(4, 4)
    bad = ref.clone()
    bad[0, 0] = math.nan
    merged = merge_gates([check_gate(ref, ref), check_gate(bad, ref), check_gate(ref + 0.01, ref)])
    assert not merged.passed
    assert (merged.failed, merged.total) == (1, 48)
    assert merged.use == math.inf


def test_a_result_with_infinities_survives_json():
    result = check_gate(torch.full((1, 1), math.nan), torch.ones(1, 1))
    stored = result.model_dump_json()
    assert gate.GateResult.model_validate_json(stored).model_dump_json() == stored
    assert gate.GateResult.model_validate_json(stored).use == math.inf
