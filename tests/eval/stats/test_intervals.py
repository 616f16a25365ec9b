"""Intervals against closed forms, pairing against drift, and times that cannot be."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflane.eval.stats.estimator import block_means, holm, paired_log_ratio, sign_flip_p, t_interval
from rooflane.eval.stats.mean import difference, mean_of
from rooflane.eval.stats.rounds import TimesError, median_ns


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
    found = difference(mean_of(b), mean_of(a)).interval()
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


def test_holm_multiplies_by_what_is_left_and_never_steps_back():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert adjusted == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({}) == {}


def test_the_p_value_and_the_interval_say_the_same():
    logs = [0.01, 0.02, 0.005, 0.015, 0.03, -0.002]
    p = mean_of(logs).p
    found = t_interval(logs, 1 - p)
    assert min(abs(math.log(found.low)), abs(math.log(found.high))) == pytest.approx(0, abs=1e-9)
    assert mean_of([0.1]).p is None
    assert mean_of([0.0, 0.0]).p == 1.0 and mean_of([0.1, 0.1]).p == 0.0


def test_welchs_p_value_and_interval_say_the_same():
    a, b = [0.1, 0.12, 0.09, 0.13], [0.08, 0.1, 0.05]
    mean = difference(mean_of(a), mean_of(b))
    found = mean.interval(1 - mean.p)
    assert min(abs(math.log(found.low)), abs(math.log(found.high))) == pytest.approx(0, abs=1e-9)


def test_the_sign_flip_p_is_a_count_of_patterns():
    # Eight of one sign: only the pattern itself and its mirror image reach the sum, 2 / 2^8.
    assert sign_flip_p([0.01] * 8) == pytest.approx(2 / 2**8)
    # Of +3 and -1 all four patterns: 2, 4, -4, -2 against 2: every one reaches it.
    assert sign_flip_p([3.0, -1.0]) == 1.0
    assert sign_flip_p([0.5]) is None
    draw = random.Random(1)
    assert sign_flip_p([draw.gauss(0.01, 0.01) for _ in range(24)]) < 0.01


def test_a_dropped_block_takes_both_halves_of_both_arms():
    base, arm = [10.0, 10.0, 99.0, 99.0], [5.0, 5.0, 1.0, 1.0]
    assert block_means(base, arm, {1}) == pytest.approx((math.log(10), math.log(5)))
    assert block_means(base, arm, {0, 1}) is None
