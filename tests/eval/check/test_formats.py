"""Number formats: values by hand, bounds from their mantissas and steps, and what scales leave unchanged."""

import pytest
import torch
from torch.nn import functional

from rooflane.eval.check.formats import (
    E4M3_LARGEST,
    FORMATS,
    INT4_LARGEST,
    INT8_LARGEST,
    TF32,
    Format,
    RoundedOperands,
    per_block,
    per_row,
    per_tensor,
    smooth,
    to_e4m3,
)

BY_NAME = {one.name: one for one in FORMATS}
# Scales are float32, so a value on the grid carries a few of its roundings.
SCALE_ROUNDING = 2.0**-22


def drawn(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def rounded(name, values):
    """Return values rounded as the first operand is."""
    return BY_NAME[name].operands(values, values)[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0625, 1.0),  # half way between 1 and 1.125: ties to even
        (1.1875, 1.25),  # half way between 1.125 and 1.25
        (17.0, 16.0),  # the step is 2 from 16 to 32
        (19.1, 20.0),
        (448.0, 448.0),  # the largest
        (2.0**-9, 2.0**-9),  # the smallest subnormal
        (2.0**-10, 0.0),  # half of it
        (-0.3, -0.3125),
    ],
)
def test_e4m3_has_three_bits_of_mantissa(value, expected):
    assert to_e4m3(torch.tensor([value])).item() == expected


@pytest.mark.parametrize(
    ("name", "bits"),
    [("TF32", 11), ("fp16", 11), ("bf16", 8), ("FP8 e4m3 per tensor", 4), ("FP8 e4m3 per row", 4)],
)
def test_the_relative_error_of_a_normal_value_is_at_most_half_a_unit(name, bits):
    # From 1 to 32 every value is normal in each format, also after a scale to 448.
    values = 1 + 31 * torch.rand(64, 200, generator=torch.Generator().manual_seed(1))
    error = ((rounded(name, values) - values) / values).abs().max().item()
    assert 0.9 * 2.0**-bits < error <= 2.0**-bits + SCALE_ROUNDING


def test_int8_per_row_is_within_half_a_step_and_keeps_the_largest():
    values = drawn(50, 300) * torch.logspace(-6, 6, 50)[:, None]
    out = rounded("INT8 per row", values)
    step = values.abs().amax(-1, keepdim=True) / 127
    error = ((out - values).abs() / step).max().item()
    assert 0.49 < error <= 0.5 + 127 * SCALE_ROUNDING
    largest = values.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(out.gather(-1, largest), values.gather(-1, largest), rtol=SCALE_ROUNDING, atol=0)
    assert (out / step).round().unique().numel() <= 255


def test_int8_per_row_by_hand():
    # The step is 1: ties go to even, and the two rows have scales of their own.
    values = torch.tensor([[127.0, 0.5, 1.5, -3.2], [254.0, 0.5, 1.5, -3.2]])
    assert rounded("INT8 per row", values).tolist() == [[127, 0, 2, -3], [254, 0, 2, -4]]


def test_int4_weights_leave_the_activations_and_round_groups_of_128():
    a, weights = drawn(3, 300), drawn(5, 300, seed=1)
    same, out = BY_NAME["INT4 weights"].operands(a, weights)
    assert same is a
    for begin, end in ((0, 128), (128, 256), (256, 300)):
        torch.testing.assert_close(out[:, begin:end], per_row(INT4_LARGEST, torch.round, weights[:, begin:end]))
    step = weights[:, :128].abs().amax(-1, keepdim=True) / 7
    assert (out[:, :128] / step).round().unique().tolist() == list(range(-7, 8))


def test_a_block_has_a_scale_of_its_own_on_ragged_edges_too():
    values = drawn(2, 200, 150)
    out = per_block(E4M3_LARGEST, to_e4m3, values, rows=128)
    for one, of in zip(out, values, strict=True):
        for rows in (slice(0, 128), slice(128, 200)):
            for columns in (slice(0, 128), slice(128, 150)):
                expected = per_tensor(E4M3_LARGEST, to_e4m3, of[rows, columns])
                torch.testing.assert_close(one[rows, columns], expected, rtol=0, atol=0)
    # A block as wide as the row, one row high, is the row.
    narrow = values[..., :96]
    assert torch.equal(per_block(INT8_LARGEST, torch.round, narrow), per_row(INT8_LARGEST, torch.round, narrow))


def test_finer_scales_save_small_rows_beside_large_ones():
    values = drawn(2, 64)
    values[0] *= 1e6
    lost, kept = per_tensor(INT8_LARGEST, torch.round, values), per_row(INT8_LARGEST, torch.round, values)
    assert not lost[1].any() and kept[1].count_nonzero() > 60


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
def test_zeros_stay_zeros(name):
    zeros = torch.zeros(3, 130)
    for out in BY_NAME[name].operands(zeros, zeros):
        assert out.shape == zeros.shape and not out.any()


def test_smooth_scales_leave_the_exact_product_and_even_the_ranges():
    a, weights = drawn(4, 30, 64).double(), drawn(20, 64, seed=1).double()
    a[..., 5] *= 1000  # a channel of outliers
    a[..., 6] = 0
    moved, scaled = smooth(a, weights)
    torch.testing.assert_close(moved @ scaled.T, a @ weights.T, rtol=1e-12, atol=1e-12)
    used = [column for column in range(64) if column != 6]
    torch.testing.assert_close(moved.abs().flatten(0, 1).amax(0)[used], scaled.abs().amax(0)[used])
    # What it is for: with the outliers moved to the weights the product is nearer to the exact one.
    errors = {}
    for name in ("INT8 per row", "INT8 smooth"):
        left, right = BY_NAME[name].operands(a.float(), weights.float())
        errors[name] = (left.double() @ right.double().T - a @ weights.T).norm().item()
    assert errors["INT8 smooth"] < errors["INT8 per row"] / 2


def test_operands_are_rounded_along_the_reduction_of_each_product():
    a, b = drawn(2, 3, 40), drawn(2, 40, 5, seed=1)
    int8 = BY_NAME["INT8 per row"]
    left, right = int8.operands(a, b.mT)
    with RoundedOperands(None, int8):
        assert torch.equal(torch.matmul(a, b), torch.matmul(left, right.mT))
        assert torch.equal(functional.linear(a, a[0]), a @ a[0].T)
    with RoundedOperands(int8, None):
        assert torch.equal(functional.linear(a, b[0].T), functional.linear(left, int8.operands(a, b[0].T)[1]))
    double = a.double()
    with RoundedOperands(TF32, TF32):
        assert torch.equal(functional.linear(double, double[0]), double @ double[0].T)


def test_a_bias_is_added_in_float32():
    none = Format("zero", lambda a, b: (a * 0, b * 0))
    bias = drawn(5)
    with RoundedOperands(none, None):
        assert torch.equal(functional.linear(drawn(3, 8), drawn(5, 8), bias), bias.expand(3, 5))
