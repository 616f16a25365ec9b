"""Acceptance 1 to 3: an A/A campaign never wins, a true gain is seen, and a drift moves nothing."""

import math
from collections import Counter

import numpy as np
import pytest

from rooflane.eval.stats.evidence import Stored
from rooflane.eval.stats.verdict import Verdict

# Enough shapes and rounds for the estimator to have something to average, few enough for a thousand campaigns.
SMALL = {"shapes": 5, "rounds": 4, "calls": 3, "noise": 0.01}
CLAIMS = {Verdict.FASTER, Verdict.SLOWER}


def covers(interval, truth):
    """Tell whether an interval holds a ratio."""
    return interval.low <= truth <= interval.high


@pytest.mark.slow
def test_a_thousand_null_campaigns_claim_at_most_five_percent_and_cover_at_their_level(rng, draw, judge):
    found = [judge(draw(rng, **SMALL)) for _ in range(1000)]
    verdicts = Counter(one.judgement.verdict for one in found)
    assert sum(verdicts[claim] for claim in CLAIMS) <= 50, verdicts
    assert 930 <= sum(covers(one.estimate.geomean, 1) for one in found) <= 970
    # Clean campaigns are not condemned by their own nulls either.
    assert verdicts[Verdict.CONTAMINATED] == 0
    # Holm keeps single shapes quiet too: 5% of campaigns may show one, not half of them.
    shapes = sum(any(shape.holm_p <= 0.05 for shape in one.estimate.shapes.values()) for one in found)
    assert shapes <= 75


@pytest.mark.parametrize(("gain", "least", "most"), [(0.02, 0.72, 0.88), (0.03, 0.99, 1.0)])
def test_power_at_one_percent_and_eight_processes(rng, draw, judge, gain, least, most):
    found = [judge(draw(rng, gain=gain, **SMALL)) for _ in range(150)]
    share = sum(one.judgement.verdict == Verdict.FASTER for one in found) / len(found)
    assert least <= share <= most
    assert np.mean([covers(one.estimate.geomean, 1 + gain) for one in found]) >= 0.92


def test_a_slower_candidate_is_called_slower(rng, draw, judge):
    found = [judge(draw(rng, gain=1 / 1.03 - 1, **SMALL)) for _ in range(50)]
    assert {one.judgement.verdict for one in found} == {Verdict.SLOWER}


def test_stored_nulls_replace_the_provisional_floor_and_claim_no_more(rng, draw, judge):
    nulls = [judge(draw(rng, **SMALL)) for _ in range(10)]
    stored = Stored([[null.mean.log for null in one.nulls.values()] for one in nulls])
    found = [judge(draw(rng, **SMALL), stored) for _ in range(100)]
    assert not found[0].floors.geomean.provisional and found[0].floors.geomean.count == 20
    # 95% of nulls stray by less than about two standard errors of 0.35%.
    assert 0.004 <= found[0].floors.geomean.value <= 0.015
    assert sum(one.judgement.verdict in CLAIMS for one in found) <= 5


def linear(when, logs):
    """The machine slows by 5% over each process."""
    return logs + np.log1p(0.05 * when)


def saturating(when, logs):
    """The machine slows by 5% at first and then settles."""
    return logs + np.log1p(0.05 * (1 - np.exp(-when / 0.2)))


@pytest.mark.parametrize("drift", [linear, saturating])
def test_a_drift_of_five_percent_moves_the_null_by_less_than_a_thousandth(rng, draw, judge, drift):
    one = judge(draw(rng, sd=0, noise=0, disturb=drift))
    assert abs(math.log(one.estimate.geomean.centre)) < 1e-3
    assert one.judgement.verdict not in CLAIMS


def test_the_organisers_three_rounds_and_pooled_median_would_show_the_drift_as_a_gain():
    # Rounds of 100 calls a side, baseline first, last and first again; the last call is 5% slower than the first.
    pace = 1 + 0.05 * np.arange(600) / 599
    windows = pace.reshape(6, 100)
    baseline, candidate = windows[[0, 3, 4]], windows[[1, 2, 5]]
    gain = np.median(baseline) / np.median(candidate) - 1
    assert gain == pytest.approx(0.008, abs=0.002)
