"""Acceptance 4: bimodal clocks, one-sided spikes and contaminated blocks end CONTAMINATED or covered, never wrong."""

from collections import Counter

import numpy as np
import pytest

from rooflane.eval.stats.verdict import Verdict

CAMPAIGNS = 30
SMALL = {"shapes": 5, "rounds": 8, "calls": 5}
EAGER, IDENTITY, MINE = 0, 1, 2


def two_clocks_by_process(rng):
    """Each process gets one of two clocks, a fifth apart."""
    return lambda when, logs: logs + np.log(1.25) * rng.integers(0, 2, (len(logs), 1, 1, 1))


def two_clocks_by_block(rng):
    """The clock jumps between blocks."""

    def disturb(when, logs):
        jump = rng.integers(0, 2, (*logs.shape[:2], 1, logs.shape[3] // 2))
        return logs + np.log(1.25) * np.repeat(jump, 2, axis=3)

    return disturb


def two_clocks_by_window(rng):
    """The clock jumps at any window: not even the two arms of a pair share it."""
    return lambda when, logs: logs + np.log(1.25) * rng.integers(0, 2, logs.shape)


def spikes(rng):
    """A tenth of the windows of any arm is hit, by up to several times its length."""
    return lambda when, logs: logs + np.log1p(rng.exponential(1, logs.shape)) * (rng.random(logs.shape) < 0.1)


def bad_blocks(rng, share):
    """In some blocks a neighbour slows the machine, and eager and its copy more than the others."""

    def disturb(when, logs):
        bad = rng.random((*logs.shape[:2], 1, logs.shape[3] // 2)) < share
        hit = np.full((1, 1, logs.shape[2], 1), 1.3)
        hit[:, :, EAGER] = hit[:, :, IDENTITY] = 1.6
        return logs + np.log(hit) * np.repeat(bad, 2, axis=3)

    return disturb


def campaigns(rng, draw, judge, disturb, gain=0.0):
    """Return the assessments of some campaigns on a disturbed machine."""
    return [judge(draw(rng, gain=gain, disturb=disturb, **SMALL)) for _ in range(CAMPAIGNS)]


@pytest.mark.parametrize("make", [two_clocks_by_process, two_clocks_by_block, two_clocks_by_window, spikes])
@pytest.mark.parametrize("gain", [0.0, 0.05])
def test_a_restless_machine_ends_contaminated_or_covered(rng, draw, judge, make, gain):
    found = campaigns(rng, draw, judge, make(rng), gain)
    verdicts = Counter(one.judgement.verdict for one in found)
    wrong = Verdict.SLOWER if gain else Verdict.FASTER
    assert verdicts[wrong] == 0 and (gain or verdicts[Verdict.SLOWER] == 0), verdicts
    said = [one for one in found if one.judgement.verdict != Verdict.CONTAMINATED]
    missed = sum(not one.estimate.geomean.low <= 1 + gain <= one.estimate.geomean.high for one in said)
    assert missed <= max(1, 0.15 * len(said))


def test_a_tenth_of_bad_blocks_is_dropped_for_every_arm_and_the_rest_is_right(rng, draw, judge):
    found = campaigns(rng, draw, judge, bad_blocks(rng, 0.1))
    assert {one.judgement.verdict for one in found} <= {Verdict.EQUIVALENT, Verdict.INCONCLUSIVE}
    assert np.mean([one.estimate.geomean.low <= 1 <= one.estimate.geomean.high for one in found]) >= 0.85


def test_more_than_a_fifth_of_bad_blocks_is_contaminated(rng, draw, judge):
    found = campaigns(rng, draw, judge, bad_blocks(rng, 0.35))
    assert {one.judgement.verdict for one in found} == {Verdict.CONTAMINATED}
    assert "blocks dropped for every arm" in found[0].judgement.why


def test_a_fifth_of_bad_blocks_is_never_wrong(rng, draw, judge):
    verdicts = {one.judgement.verdict for one in campaigns(rng, draw, judge, bad_blocks(rng, 0.2))}
    assert not verdicts & {Verdict.FASTER, Verdict.SLOWER}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"throttle": ["HwThermalSlowdown"]}, "throttling"),
        ({"sm_mhz": 1200}, "a slow clock"),
        ({"other_processes": 1}, "another process"),
    ],
)
def test_telemetry_alone_condemns(rng, draw, judge, state, reason):
    calls = draw(rng, **SMALL)
    good = {"sm_mhz": 1980, "throttle": [], "other_processes": 0}
    places = [(str(shape), process) for shape in range(5) for process in range(8)]
    few = {place: [good, good, good, good | state if place == ("0", 0) else good] for place in places}
    many = {place: [good | state, good, good, good] for place in places}
    assert judge(calls, telemetry=few).judgement.verdict in (Verdict.EQUIVALENT, Verdict.INCONCLUSIVE)
    condemned = judge(calls, telemetry=many).judgement
    assert condemned.verdict == Verdict.CONTAMINATED and reason in condemned.why


def test_a_clock_the_owner_chose_is_no_throttling(rng, draw, judge):
    chosen = {"sm_mhz": 1400, "throttle": ["ApplicationsClocksSetting"], "other_processes": 0}
    places = {(str(shape), process): [chosen] * 4 for shape in range(5) for process in range(8)}
    assert judge(draw(rng, **SMALL), telemetry=places).judgement.verdict != Verdict.CONTAMINATED


def test_an_arm_that_differs_from_its_own_copy_condemns_the_campaign(rng, draw, judge):
    def address_effect(when, logs):
        logs[:, :, IDENTITY] += 0.05
        return logs

    judgement = judge(draw(rng, disturb=address_effect, **SMALL)).judgement
    assert judgement.verdict == Verdict.CONTAMINATED
    assert "its own copy differs by 5" in judgement.why


def test_a_small_hidden_effect_raises_the_floor_to_itself(rng, draw, judge):
    def address_effect(when, logs):
        logs[:, :, IDENTITY] += 0.012
        logs[:, :, MINE] -= 0.012
        return logs

    found = [judge(draw(rng, sd=0.003, disturb=address_effect, **SMALL)) for _ in range(20)]
    assert all(one.floors.geomean.biased for one in found)
    # The effect sits on the candidate as well, so the interval alone would call nearly every one of these faster.
    assert sum(one.estimate.geomean.low > 1 for one in found) >= 18
    assert sum(one.judgement.verdict == Verdict.FASTER for one in found) <= 4
