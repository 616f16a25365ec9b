"""The noise floor from nulls, and the verdicts against it."""

import math

import pytest

from rooflane.eval.stats.estimator import Interval, combine, half_width, holm_levels, t_interval
from rooflane.eval.stats.verdict import Floor, Verdict, find_floors, judge, judge_campaign, null_floor

QUIET = [0.002, -0.001, 0.001, -0.002, 0.0015, -0.0015, 0.0005, -0.0005]
LOUD = [8 * value for value in QUIET]


def test_until_nineteen_are_stored_the_floor_is_this_campaigns_own():
    floor, excludes = null_floor([QUIET, QUIET], [0.5] * 18)
    assert floor.provisional and not excludes
    assert math.log1p(floor.value) == pytest.approx(half_width(t_interval(QUIET)))


def test_two_nulls_are_pooled_as_their_arms_share_a_comparisons_noise():
    floor, _ = null_floor([QUIET, LOUD])
    widths = [half_width(t_interval(logs)) for logs in (QUIET, LOUD)]
    assert math.log1p(floor.value) == pytest.approx(math.sqrt(sum(width**2 for width in widths) / 2))


def test_from_nineteen_on_the_floor_is_the_stored_95th_percentile_whatever_the_sign():
    stored = [0.001 * index * (-1) ** index for index in range(1, 20)]
    floor, _ = null_floor([QUIET], stored)
    assert (floor.provisional, floor.count) == (False, 19)
    assert math.log1p(floor.value) == pytest.approx(0.019)
    # Of 99 the 95th: a further one exceeds it with 5%.
    assert math.log1p(null_floor([QUIET], [0.001 * i for i in range(1, 100)])[0].value) == pytest.approx(0.095)


def test_a_null_that_excludes_one_raises_the_floor_to_itself():
    floor, excludes = null_floor([[0.01 + value for value in QUIET]])
    assert excludes and floor.biased
    assert math.log1p(floor.value) == pytest.approx(0.01)
    assert "raised to this run's own null" in floor.describe()


def test_no_null_no_floor():
    assert null_floor([]) == (None, False)
    assert null_floor([[0.1]]) == (None, False)


@pytest.mark.parametrize(("bias", "broken"), [(0.0, False), (0.012, False), (0.03, True)])
def test_the_gate_condemns_only_what_no_floor_below_the_cap_covers(bias, broken):
    null = combine({"a": dict(enumerate(bias + value for value in QUIET))}, range(8))
    assert bool(find_floors([null]).broken) == broken
    # A wide null that contains 1 is a high floor, not a broken campaign.
    wide = combine({"a": dict(enumerate(40 * value for value in QUIET))}, range(8))
    assert find_floors([wide]).geomean.value > 0.02 and not find_floors([wide]).broken


def test_each_shape_has_a_floor_of_its_own():
    null = combine({"a": dict(enumerate(QUIET)), "b": dict(enumerate(LOUD))}, range(8))
    floors = find_floors([null], stored_shapes={"a": [0.004] * 19})
    assert not floors.shapes["a"].provisional and floors.shapes["b"].provisional
    assert floors.shapes["a"].value == pytest.approx(math.expm1(0.004))
    assert floors.shapes["b"].value > floors.geomean.value > floors.shapes["a"].value


FLOOR = Floor(0.01, True, 0)


@pytest.mark.parametrize(
    ("low", "high", "verdict", "why"),
    [
        (1.011, 1.05, Verdict.FASTER, "above"),
        (0.95, 0.989, Verdict.SLOWER, "below"),
        (0.995, 1.008, Verdict.EQUIVALENT, "within 1.00% of 1"),
        (1.002, 1.02, Verdict.INCONCLUSIVE, "detected, below the floor of 1.00% (provisional)"),
        (0.98, 0.995, Verdict.INCONCLUSIVE, "detected, below the floor"),
        (0.98, 1.03, Verdict.INCONCLUSIVE, "contains 1"),
    ],
)
def test_an_interval_against_the_floor(low, high, verdict, why):
    found = judge(Interval((low * high) ** 0.5, low, high, 8), FLOOR)
    assert found.verdict == verdict and why in found.why


def test_a_shape_must_also_hold_among_all_shapes():
    interval = Interval(1.05, 1.02, 1.08, 8)
    assert judge(interval, FLOOR, holm_p=0.04).verdict == Verdict.FASTER
    found = judge(interval, FLOOR, holm_p=0.2)
    assert found.verdict == Verdict.INCONCLUSIVE and "among all shapes" in found.why


def test_the_margin_is_the_callers():
    interval = Interval(1.0, 0.97, 1.03, 8)
    assert judge(interval, FLOOR, margin=0.05).verdict == Verdict.EQUIVALENT
    assert judge(interval, FLOOR, margin=0.01).verdict == Verdict.INCONCLUSIVE


def test_what_claims_nothing():
    clear = Interval(2.0, 1.9, 2.1, 8)
    assert judge_campaign(clear, FLOOR, processes=8, quick=True).verdict == Verdict.NONE
    assert judge_campaign(clear, FLOOR, processes=5).verdict == Verdict.NONE
    assert judge_campaign(clear, None, processes=8).verdict == Verdict.INCONCLUSIVE
    few = judge_campaign(Interval(2.0, 1.9, 2.1, 5), FLOOR, processes=8)
    assert few.verdict == Verdict.NONE and few.why.endswith("5 of this run's 8 have clean blocks of every shape")
    assert judge_campaign(Interval(2.0, 1.9, 2.1, 6), FLOOR, processes=8).verdict == Verdict.FASTER
    assert judge_campaign(clear, FLOOR, processes=8, contaminated="noise").why == "noise"
    assert judge(Interval(2.0, None, None, 1), FLOOR).verdict == Verdict.NONE


def test_holms_levels_step_down_until_the_first_that_fails():
    levels = holm_levels({"a": 0.001, "b": 0.02, "c": 0.5, "d": 0.9})
    # 0.001 <= 0.05/4; 0.02 > 0.05/3, so it and the rest are held to a third of 5%.
    assert levels == pytest.approx({"a": 1 - 0.05 / 4, "b": 1 - 0.05 / 3, "c": 1 - 0.05 / 3, "d": 1 - 0.05 / 3})
