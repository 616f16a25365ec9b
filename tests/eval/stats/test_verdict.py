"""The noise floor from nulls, and the verdicts against it."""

import math

import pytest

from rooflane.eval.stats.estimator import combine, holm_levels
from rooflane.eval.stats.mean import Interval, Mean, mean_of
from rooflane.eval.stats.verdict import Conditions, Floor, Verdict, find_floors, judge, judge_campaign, null_floor

QUIET = [0.002, -0.001, 0.001, -0.002, 0.0015, -0.0015, 0.0005, -0.0005]
LOUD = [8 * value for value in QUIET]
STILL, NOISY = mean_of(QUIET), mean_of(LOUD)


def test_until_nineteen_are_stored_the_floor_is_this_campaigns_own():
    floor, excludes = null_floor([STILL, STILL], [[0.5]] * 18)
    assert floor.provisional and not excludes
    assert math.log1p(floor.value) == pytest.approx(STILL.half_width())
    # Nineteen of one run are the noise of one machine state.
    assert null_floor([STILL], [[0.5] * 19])[0].provisional


def test_two_nulls_are_pooled_as_their_arms_share_a_comparisons_noise():
    floor, _ = null_floor([STILL, NOISY])
    widths = [STILL.half_width(), NOISY.half_width()]
    assert math.log1p(floor.value) == pytest.approx(math.sqrt(sum(width**2 for width in widths) / 2))


def test_from_nineteen_on_the_floor_is_the_stored_95th_percentile_whatever_the_sign():
    # Of 99 the 95th: a further one exceeds it with 5%.
    stored = [[0.001 * index * (-1) ** index] for index in range(1, 100)]
    floor, _ = null_floor([STILL], stored)
    assert (floor.provisional, floor.count) == (False, 99)
    assert math.log1p(floor.value) == pytest.approx(0.095)


@pytest.mark.parametrize("runs", [10, 19, 60])
@pytest.mark.parametrize("arms", [2, 3])
def test_no_single_run_can_raise_a_later_floor(runs, arms):
    calm = [[0.004 + 0.0001 * run] * arms for run in range(runs)]
    highest = max(map(max, calm))
    before = null_floor([STILL], calm)[0].value
    after = null_floor([STILL], [*calm, [0.5] * arms])[0]
    assert before <= after.value <= math.expm1(highest)
    # Two runs that agree can.
    assert null_floor([STILL], [*calm, [0.5] * arms, [0.5] * arms])[0].value > before


def test_a_floor_far_above_this_runs_own_nulls_is_told():
    far = null_floor([STILL], [[0.02]] * 19)[0]
    assert far.describe() == "2.02% (from 19 stored nulls, over 3 times the 0.12% that this run's own nulls show)"
    near = null_floor([NOISY], [[0.02]] * 19)[0]
    assert near.describe() == "2.02% (from 19 stored nulls)"


def test_a_floor_that_means_nothing_is_words_and_no_percentage():
    wild = null_floor([mean_of([0.9, -0.4])])[0]
    assert wild.value > 1000
    assert wild.describe() == "unknown: the nulls of 2 processes spread too widely"
    assert wild.share() == "unknown"
    said = judge(Interval(3.0, 2.0, 4.5, 2), wild)
    assert said.verdict == Verdict.INCONCLUSIVE
    assert said.why == "the noise floor is unknown: the nulls of 2 processes spread too widely"
    short = judge_campaign(mean_of([1.0, 1.1]), wild, Conditions(2))
    assert short.verdict == Verdict.NONE and "unknown: the nulls of 2 processes" in short.why
    # An exponent that no float holds is no crash.
    assert null_floor([mean_of([100.0, -100.0])])[0].unknown


def test_a_null_that_excludes_one_raises_the_floor_to_itself():
    floor, excludes = null_floor([mean_of([0.01 + value for value in QUIET])])
    assert excludes and floor.biased
    assert math.log1p(floor.value) == pytest.approx(0.01)
    assert "raised to this run's own null" in floor.describe()


def test_no_null_no_floor():
    assert null_floor([]) == (None, False)
    assert null_floor([mean_of([0.1])]) == (None, False)


@pytest.mark.parametrize(("bias", "broken"), [(0.0, False), (0.012, False), (0.03, True)])
def test_the_gate_condemns_only_what_no_floor_below_the_cap_covers(bias, broken):
    null = combine({"a": dict(enumerate(bias + value for value in QUIET))}, range(8))
    assert bool(find_floors([null]).broken) == broken
    # A wide null that contains 1 is a high floor, not a broken campaign.
    wide = combine({"a": dict(enumerate(40 * value for value in QUIET))}, range(8))
    assert find_floors([wide]).geomean.value > 0.02 and not find_floors([wide]).broken


def test_each_shape_has_a_floor_of_its_own():
    null = combine({"a": dict(enumerate(QUIET)), "b": dict(enumerate(LOUD))}, range(8))
    floors = find_floors([null], stored_shapes={"a": [[0.004]] * 19})
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


def near(ratio, error=0.01, processes=8):
    """Return the mean of a ratio with a relative error."""
    return Mean(math.log(ratio), error, processes - 1, processes)


def test_a_whole_campaign_is_judged_at_95_percent():
    clear = near(1.05)
    assert judge_campaign(clear, FLOOR, Conditions(8)).verdict == Verdict.FASTER
    assert judge_campaign(near(1 / 1.05), FLOOR, Conditions(8)).verdict == Verdict.SLOWER
    assert judge_campaign(clear, None, Conditions(8)).verdict == Verdict.INCONCLUSIVE
    assert judge_campaign(Mean(1.0, None, 0, 1), FLOOR, Conditions(1)).why == "one process gives no interval"


SHORT = [Conditions(8, quick=True), Conditions(5), Conditions(3), Conditions(8, partial=2)]


@pytest.mark.parametrize("conditions", SHORT)
def test_a_short_campaign_claims_what_the_strict_interval_shows(conditions):
    # With 7 degrees of freedom t is 2.36 at 95% and 5.41 at 99.9%; the floor is 1%.
    assert judge_campaign(near(1.06), FLOOR, conditions).verdict == Verdict.NONE  # 95% from 1.035, 99.9% from 1.004
    said = judge_campaign(near(1.08), FLOOR, conditions)  # 99.9% from 1.023
    assert said.verdict == Verdict.FASTER and "even the interval at 99.9%" in said.why and conditions.short in said.why
    assert judge_campaign(near(1 / 1.08), FLOOR, conditions).verdict == Verdict.SLOWER
    # With a wide interval the factor of 2 decides: 95% from 2.46, 99.9% from 0.79.
    assert "by more than a factor of 2" in judge_campaign(near(4.0, 0.2), FLOOR, conditions).why
    assert judge_campaign(near(1 / 4.0, 0.2), FLOOR, conditions).verdict == Verdict.SLOWER
    assert judge_campaign(near(2.5, 0.2), FLOOR, conditions).verdict == Verdict.NONE
    # It claims no equality, and nothing without a floor.
    assert judge_campaign(near(1.0, 0.0001), FLOOR, conditions).verdict == Verdict.NONE
    assert "so the noise floor is unknown" in judge_campaign(near(4.0), None, conditions).why


def test_a_contaminated_campaign_answers_only_beyond_a_factor_of_two():
    noisy = Conditions(8, contaminated="a third was dropped")
    assert judge_campaign(near(1.9), FLOOR, noisy).verdict == Verdict.CONTAMINATED
    assert judge_campaign(near(1.9), FLOOR, noisy).why == "a third was dropped"
    said = judge_campaign(near(30.0), FLOOR, noisy)
    assert said.verdict == Verdict.FASTER and "(a third was dropped)" in said.why
    assert judge_campaign(near(1 / 30.0), FLOOR, noisy).verdict == Verdict.SLOWER
    assert judge_campaign(near(2.05), FLOOR, noisy).verdict == Verdict.CONTAMINATED, "1% too near"
    # A null that strays by 40% moves the factor with the floor.
    assert judge_campaign(near(2.7), Floor(0.4, True, 0), noisy).verdict == Verdict.CONTAMINATED
    assert judge_campaign(near(1.9), FLOOR, Conditions(3, contaminated="noise")).verdict == Verdict.NONE
    assert judge_campaign(Mean(3.0, None, 0, 8), FLOOR, noisy).verdict == Verdict.CONTAMINATED


def test_a_shape_of_a_short_campaign_must_hold_among_all_at_the_same_level():
    assert judge_campaign(near(1.08), FLOOR, Conditions(3), holm_p=0.0005).verdict == Verdict.FASTER
    assert judge_campaign(near(1.08), FLOOR, Conditions(3), holm_p=0.01).verdict == Verdict.NONE
    assert judge_campaign(near(4.0), FLOOR, Conditions(3), holm_p=0.01).verdict == Verdict.FASTER
    assert judge_campaign(near(4.0), FLOOR, Conditions(3), holm_p=0.06).verdict == Verdict.NONE


def test_holms_levels_step_down_until_the_first_that_fails():
    levels = holm_levels({"a": 0.001, "b": 0.02, "c": 0.5, "d": 0.9})
    # 0.001 <= 0.05/4; 0.02 > 0.05/3, so it and the rest are held to a third of 5%.
    assert levels == pytest.approx({"a": 1 - 0.05 / 4, "b": 1 - 0.05 / 3, "c": 1 - 0.05 / 3, "d": 1 - 0.05 / 3})
