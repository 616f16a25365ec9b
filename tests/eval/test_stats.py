"""Intervals against closed forms, pairing against drift, and times that cannot be."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflane.eval.stats import TimesError, median_ns, paired_log_ratio, t_interval, welch_interval


def test_t_interval_of_two_values_is_the_closed_form():
    # With one degree of freedom the t quantile is tan(pi (p - 1/2)): 12.706 at 97.5%.
    low, high = 0.1, 0.3
    half = math.tan(math.pi * 0.475) * (high - low) / 2
    found = t_interval([low, high])
    assert found.centre == pytest.approx(math.exp(0.2))
    assert found.low == pytest.approx(math.exp(0.2 - half))
    assert found.high == pytest.approx(math.exp(0.2 + half))


def test_one_process_gives_no_interval():
    found = t_interval([0.5])
    assert (found.low, found.high, found.count) == (None, None, 1)


def test_t_interval_covers_at_its_level():
    draw = random.Random(3)
    hits = sum(
        found.low <= 1.02 <= found.high
        for found in (t_interval([draw.gauss(math.log(1.02), 0.01) for _ in range(8)]) for _ in range(2000))
    )
    assert 0.93 <= hits / 2000 <= 0.97


def test_welch_equals_students_t_where_spreads_and_counts_agree():
    a, b = [0.0, 0.1, 0.2], [1.0, 1.1, 1.2]
    found = welch_interval(b, a)
    # 4 degrees of freedom: t = 2.7764; standard error sqrt(0.01/3 + 0.01/3).
    half = 2.7764451 * math.sqrt(0.02 / 3)
    assert found.centre == pytest.approx(math.e)
    assert math.log(found.high) - 1 == pytest.approx(half, rel=1e-6)


def test_the_mirrored_pair_cancels_a_linear_drift():
    # The machine slows by 5% over eight windows of equal arms, run in the order A B, B A, A B, B A.
    pace = [1 + 0.05 * window / 7 for window in range(8)]
    order = "ABBAABBA"
    times = {"A": [], "B": []}
    for window, arm in enumerate(order):
        times[arm].append([round(1e9 * pace[window])])
    assert abs(paired_log_ratio(times["A"], times["B"])) < 1e-4
    # Without the mirror the second arm would look slower by a whole window's drift.
    assert abs(math.log(pace[1] / pace[0])) > 5e-3


@pytest.mark.parametrize("bad", [0, -5, math.nan, math.inf])
def test_an_impossible_time_is_refused(bad):
    with pytest.raises(TimesError, match="no real call takes"):
        median_ns([10, bad, 12])


@pytest.mark.parametrize(("base", "arm"), [([[1]], [[1]]), ([[1], [1]], [[1]]), ([], [])])
def test_rounds_that_cannot_be_paired_are_refused(base, arm):
    with pytest.raises(TimesError, match="cannot be paired"):
        paired_log_ratio(base, arm)


TWO_ROUNDS = st.lists(st.integers(1, 10**12), min_size=2, max_size=2)


@given(TWO_ROUNDS, TWO_ROUNDS)
def test_swapping_the_arms_inverts_the_ratio(a, b):
    forwards = paired_log_ratio([[v] for v in a], [[v] for v in b])
    backwards = paired_log_ratio([[v] for v in b], [[v] for v in a])
    assert forwards == pytest.approx(-backwards, abs=1e-9)
