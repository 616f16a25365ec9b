"""Fingerprints: equal bytes give equal ones, any change shows, and the limit is the gate's own tolerance."""

import math

import pytest
import torch

from rooflane.eval.check.fingerprint import ROWS_AT_MOST, Fingerprinter, limits, of_output, worst_row
from rooflane.eval.check.gate import ATOL, RTOL

TOKENS, WIDTH = 96, 16


@pytest.fixture
def out():
    return torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(3))


def test_equal_bytes_give_equal_numbers_and_one_changed_element_does_not(out):
    before = of_output(out, TOKENS, 7)
    assert torch.equal(before, of_output(out.clone(), TOKENS, 7))
    changed = out.clone()
    changed[1, 17, 5] += 1e-4
    assert not torch.equal(before, of_output(changed, TOKENS, 7))
    assert not torch.equal(before, of_output(out, TOKENS, 8)), "other signs, other numbers"


def test_an_output_in_another_order_of_memory_has_the_same_fingerprint(out):
    turned = out.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert torch.equal(of_output(turned, TOKENS, 7), of_output(out, TOKENS, 7))


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (97, 97), (128, 128), (8192, 128), (131, 1), (1000, 125)])
def test_rows_divide_the_tokens(tokens, rows):
    assert rows <= ROWS_AT_MOST
    assert of_output(torch.zeros(1, tokens, 4), tokens, 1).shape == (rows,)


def test_errors_within_the_gate_stay_within_the_limit_and_another_answer_does_not(out):
    expected, allowed = of_output(out, TOKENS, 7), limits(out, TOKENS)
    generator = torch.Generator().manual_seed(11)
    size = torch.clamp(out.abs() * RTOL, min=ATOL)
    for _ in range(20):
        signs = torch.randint(0, 2, out.shape, generator=generator) * 2 - 1
        _, ratio = worst_row(of_output(out + size * signs, TOKENS, 7), expected, allowed)
        assert ratio <= 1, "every element stands at its own tolerance"
    _, ratio = worst_row(of_output(torch.randn(out.shape, generator=generator), TOKENS, 7), expected, allowed)
    assert ratio > 1
    row, ratio = worst_row(of_output(torch.full_like(out, math.nan), TOKENS, 7), expected, allowed)
    assert ratio == math.inf


def test_half_precision_is_summed_in_float32():
    out = torch.ones(1, 128, 64, dtype=torch.bfloat16)
    assert of_output(out, 128, 1).dtype == torch.float32
    assert torch.equal(of_output(out, 128, 1), of_output(out.float(), 128, 1))


def test_slots_do_not_touch_each_other(out):
    taker = Fingerprinter(out.numel(), TOKENS, out.dtype, out.device, 7, 3)
    taker.take(out, 1)
    marks = taker.read()
    assert torch.equal(marks[1], of_output(out, TOKENS, 7))
    assert not marks[0].any()
    assert not marks[2].any()
    assert not taker.like(2).read().any()
