"""Turning any one guard off makes a named check fail: the checks above are no decoration.

Each guard is taken out of the production code, and the very assertion that an acceptance test makes is then false.
"""

import numpy as np
import pytest

from rooflane.eval import EvaluationError, open_run
from rooflane.eval.stats import estimator, rounds, run, verdict
from rooflane.eval.stats import evidence as assess_module
from rooflane.eval.stats.evidence import Stored
from rooflane.eval.stats.rounds import Contamination
from rooflane.eval.stats.verdict import Floor, Floors, Verdict

SMALL = {"shapes": 5, "rounds": 8, "calls": 3}
EAGER, IDENTITY, MINE = 0, 1, 2
OPEN = Floor(0.0, True, 0)


def biased(when, logs):
    """An address effect on the candidate and on eager's copy."""
    logs[:, :, IDENTITY] += 0.012
    logs[:, :, MINE] -= 0.012
    return logs


def test_without_the_null_gate_a_hidden_effect_wins(rng, draw, judge, monkeypatch):
    campaigns = [draw(rng, sd=0.003, disturb=biased, **SMALL) for _ in range(20)]

    def wins():
        return sum(judge(calls).judgement.verdict == Verdict.FASTER for calls in campaigns)

    assert wins() <= 4  # test_a_small_hidden_effect_raises_the_floor_to_itself
    monkeypatch.setattr(assess_module, "find_floors", lambda *given: Floors(OPEN))
    assert wins() >= 18


def test_without_the_null_gate_a_broken_campaign_is_not_condemned(rng, draw, judge, monkeypatch):
    def address_effect(when, logs):
        logs[:, :, IDENTITY] += 0.05
        return logs

    calls = draw(rng, disturb=address_effect, **SMALL)
    assert judge(calls).judgement.verdict == Verdict.CONTAMINATED
    monkeypatch.setattr(assess_module, "find_floors", lambda *given: Floors(OPEN))
    assert judge(calls).judgement.verdict != Verdict.CONTAMINATED


def test_without_the_contamination_rule_bad_blocks_win(rng, draw, judge, monkeypatch):
    def neighbour(when, logs):
        bad = rng.random((*logs.shape[:2], 1, logs.shape[3] // 2)) < 0.35
        hit = np.full((1, 1, logs.shape[2], 1), 1.3)
        hit[:, :, EAGER] = hit[:, :, IDENTITY] = 1.6
        return logs + np.log(hit) * np.repeat(bad, 2, axis=3)

    campaigns = [draw(rng, disturb=neighbour, **SMALL) for _ in range(10)]
    assert {judge(calls).judgement.verdict for calls in campaigns} == {Verdict.CONTAMINATED}
    # The judging fixture looks the rule up where the production code does.
    monkeypatch.setitem(judge.__globals__, "find_contamination", lambda rounds: Contamination())
    assert sum(judge(calls).judgement.verdict == Verdict.FASTER for calls in campaigns) >= 8


def test_without_holm_half_of_all_null_campaigns_show_a_winning_or_losing_shape(rng, draw, judge, monkeypatch):
    campaigns = [draw(rng, shapes=14, rounds=4, calls=3) for _ in range(40)]

    def loud():
        found = [judge(calls) for calls in campaigns]
        return sum(any(shape.holm_p <= 0.05 for shape in one.estimate.shapes.values()) for one in found)

    assert loud() <= 6  # 15%
    monkeypatch.setattr(estimator, "holm", lambda p_values: dict(p_values))
    assert loud() >= 14  # a third


def test_without_the_digest_a_changed_sample_is_believed(stored_run, monkeypatch):
    stored_run.finish()
    path = stored_run.folder / "records.jsonl"
    path.write_text(path.read_text().replace("500000", "400000"))
    with pytest.raises(EvaluationError, match="changed after"):
        open_run(stored_run.folder)
    monkeypatch.setattr(run, "verify_seal", lambda folder: None)
    assert open_run(stored_run.folder).summary().headlines[0].geomean.centre > 2.001


def test_without_the_strict_level_a_quick_look_claims(rng, draw, judge, monkeypatch):
    campaigns = [draw(rng, gain=0.2, sd=0.02, processes=3, **SMALL) for _ in range(20)]

    def claims():
        return sum(judge(calls).judgement.verdict == Verdict.FASTER for calls in campaigns)

    assert claims() <= 5
    monkeypatch.setattr(verdict, "LEAST_PROCESSES", 2)
    assert claims() >= 15


def test_without_the_factor_of_two_a_contaminated_campaign_claims_a_small_gain(rng, draw, judge, monkeypatch):
    def neighbour(when, logs):
        bad = rng.random((*logs.shape[:2], 1, logs.shape[3] // 2)) < 0.35
        return logs + np.log(1.3) * np.repeat(bad, 2, axis=3)

    campaigns = [draw(rng, gain=0.2, disturb=neighbour, **SMALL) for _ in range(5)]
    assert {judge(calls).judgement.verdict for calls in campaigns} == {Verdict.CONTAMINATED}
    monkeypatch.setattr(verdict, "WIDE", 1.0)
    assert {judge(calls).judgement.verdict for calls in campaigns} == {Verdict.FASTER}


def test_without_the_second_run_one_run_sets_a_later_floor(rng, draw, judge, monkeypatch):
    calls = draw(rng, gain=0.1, sd=0.003, **SMALL)
    stored = Stored([[0.003]] * 19 + [[0.3, 0.3]])
    assert judge(calls, stored).judgement.verdict == Verdict.FASTER
    monkeypatch.setattr(verdict, "_upper", lambda runs: max(abs(log) for run in runs for log in run))
    assert judge(calls, stored).judgement.verdict == Verdict.INCONCLUSIVE


def test_without_lasting_conditions_a_shape_at_the_power_limit_takes_the_answer_away(rng, draw, judge, monkeypatch):
    calls = draw(rng, gain=0.5, **SMALL)
    free, capped = ({"sm_mhz": clock, "throttle": throttle} for clock, throttle in ((1980, []), (1700, ["SwPowerCap"])))
    telemetry = {
        (str(shape), process): [capped if shape == 4 else free] * 4 for shape in range(5) for process in range(8)
    }
    assert judge(calls, telemetry=telemetry).judgement.verdict == Verdict.FASTER
    monkeypatch.setattr(rounds, "LASTING", ())
    lost = judge(calls, telemetry=telemetry)
    assert lost.judgement.verdict == Verdict.NONE and "a clean block of shape 4" in lost.judgement.why
