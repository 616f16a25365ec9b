"""How many processes a resolution takes: the protocol's table, the gate's price, requests that cannot be met."""

import pytest

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.nulls import NullResult
from rooflane.eval.stats.power import noise_of, parse_share, plan, power, smallest_effect

# The smallest gain seen with 80% power, in percent, without the gate.
PROCESSES = (3, 5, 8, 10, 16, 24)
TABLE = {
    0.005: (1.6, 0.8, 0.6, 0.5, 0.4, 0.3),
    0.01: (3.1, 1.7, 1.2, 1.0, 0.75, 0.6),
    0.02: (6.2, 3.3, 2.3, 2.0, 1.5, 1.2),
}


@pytest.mark.parametrize("sd", TABLE)
def test_the_protocols_table_is_reproduced(sd):
    found = [100 * smallest_effect(sd, processes, gate=False) for processes in PROCESSES]
    # The table's figures are simulated and rounded, to a tenth of a percent mostly.
    assert found == pytest.approx(TABLE[sd], rel=0.09, abs=0.05)


def test_the_gate_costs_what_the_protocol_says():
    # At 8 processes and 1%: 80% power at 1.15% without the gate, at 2.0% with it.
    assert smallest_effect(0.01, 8, gate=False) == pytest.approx(0.0115, abs=2e-4)
    assert smallest_effect(0.01, 8) == pytest.approx(0.020, abs=3e-4)
    assert power(0.0, 0.01, 8) < 0.001 < 0.02 < power(0.0, 0.01, 8, gate=False) < 0.03


def test_a_plan_is_the_fewest_processes_that_do():
    found = plan(0.02, 0.01, process_s=60)
    assert found.enough and found.power >= 0.8
    assert power(0.02, 0.01, found.processes - 1) < 0.8
    assert found.minutes == found.processes
    assert found.smallest <= 0.02


def test_a_known_floor_is_subtracted():
    assert plan(0.02, 0.01, floor=0.01).processes > plan(0.02, 0.01, floor=0.002).processes


def test_no_plan_is_under_the_least_and_none_over_the_most():
    assert plan(0.5, 0.001).processes == 6
    short = plan(0.001, 0.02, most=12)
    assert (short.processes, short.enough) == (12, False)
    assert short.smallest > 0.001


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"see": 0.0, "sd": 0.01}, "above 0"),
        ({"see": 0.01, "sd": -1.0}, "cannot be"),
        ({"see": 0.01, "sd": 0.01, "floor": 0.02}, "floor of 2.00% lies above"),
        ({"see": 0.01, "sd": 0.01, "most": 3}, "6 processes or more"),
    ],
)
def test_what_cannot_be_planned_says_why(given, said):
    with pytest.raises(EvaluationError, match=said):
        plan(**given)


def test_shares():
    assert parse_share("1%") == parse_share("0.01") == 0.01
    for text in ("one", "-1%", "nan", "inf", ""):
        with pytest.raises(EvaluationError, match="no share"):
            parse_share(text)
    assert parse_share("150%") == 1.5
    for text, meant in (("1", "1% or 0.01"), ("2.5", "2.5% or 0.025")):
        with pytest.raises(EvaluationError, match=meant):
            parse_share(text)


def test_the_noise_of_several_nulls_is_their_pooled_spread():
    def null(sd, seconds):
        return NullResult(
            machine="m", software="s", processes=8, run="r", arm="eager", measured_at="", log=0.0, sd=sd, shapes={},
            process_s=seconds,
        )  # fmt: skip

    sd, seconds = noise_of([null(0.01, 60.0), null(0.02, None), null(None, 10.0)])
    assert sd == pytest.approx((0.00025) ** 0.5)
    assert seconds == 60.0
    with pytest.raises(EvaluationError, match="--sd"):
        noise_of([null(None, 1.0)])
