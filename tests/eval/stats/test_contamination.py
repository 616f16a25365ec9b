"""What makes a block contaminated, and what never does."""

import pytest

from rooflane.eval.stats.rounds import Rounds, find_contamination, rounds_of
from rooflane.eval.stats.summary import summarise
from rooflane.shapes import Shape

STEADY = [1000.0, 1010.0, 990.0, 1005.0, 995.0, 1000.0, 1002.0, 998.0]  # four blocks


def campaign(anchor=None, noop=None, telemetry=None, processes=6):
    """Return two shapes' rounds, the watching arms of process 0 on shape a replaced."""
    times = {}
    for shape in "ab":
        for arm in ("eager", "anchor", "noop"):
            scale = 5 if arm == "noop" else 1
            steady = [value * scale for value in STEADY]
            times[shape, arm] = dict.fromkeys(range(processes), steady)
    for arm, changed in (("anchor", anchor), ("noop", noop)):
        if changed:
            times["a", arm] = times["a", arm] | {0: changed}
    return Rounds(times, telemetry or {})


def test_a_quiet_campaign_drops_nothing():
    found = find_contamination(campaign())
    assert (found.count, found.total, found.too_much, found.describe()) == (0, 48, False, "")


def test_a_slow_anchor_drops_its_block_of_that_shape_and_process_alone():
    found = find_contamination(campaign(anchor=[1000.0, 1000.0, 1500.0, 1500.0, *STEADY[4:]]))
    assert found.dropped == {("a", 0): frozenset({1})}
    assert found.describe() == "1 of 48 blocks dropped for every arm (1 by the anchor)"


def test_a_fast_block_is_as_suspect_as_a_slow_one():
    found = find_contamination(campaign(anchor=[700.0, 700.0, *STEADY[2:]]))
    assert found.at("a", 0) == {0}


def test_the_arms_own_times_decide_nothing():
    rounds = campaign()
    wild = [10.0, 1e9, 10.0, 1e9, 10.0, 1e9, 10.0, 1e9]
    times = dict(rounds.times) | {("a", "eager"): dict.fromkeys(range(6), wild)}
    assert find_contamination(Rounds(times)).count == 0


def test_a_shape_that_leaves_another_cache_behind_is_no_disturbance():
    rounds = campaign()
    slow = {process: [1.3 * value for value in STEADY] for process in range(6)}
    assert find_contamination(Rounds(dict(rounds.times) | {("b", "anchor"): slow})).count == 0


def test_a_no_op_may_fall_on_the_next_tick_of_the_clock():
    tick = [value * 5 for value in STEADY]
    assert find_contamination(campaign(noop=[tick[0] + 1024, tick[1] + 1024, *tick[2:]])).count == 0
    assert find_contamination(campaign(noop=[tick[0] + 9000, tick[1] + 9000, *tick[2:]])).at("a", 0) == {0}


def test_a_block_the_watching_arms_sat_out_is_judged_by_telemetry_alone():
    rounds = campaign(anchor=[None, None, *STEADY[2:]], telemetry={("a", 0): [{"other_processes": 2}, {}, {}, {}]})
    assert find_contamination(rounds).dropped == {("a", 0): frozenset({0})}


def test_a_block_disturbed_twice_is_dropped_once():
    states = {("a", 0): [{"throttle": ["HwSlowdown"], "other_processes": 1}, {}, {}, {}]}
    found = find_contamination(campaign(telemetry=states))
    assert found.count == 1
    assert found.reasons == {"throttling": 1, "another process": 1}


def test_when_nothing_is_left_it_says_so():
    states = {(shape, process): [{"throttle": True}] * 4 for shape in "ab" for process in range(6)}
    found = find_contamination(campaign(telemetry=states))
    assert found.too_much
    assert found.describe().endswith("; nothing is left")


def test_rows_without_watching_arms_or_telemetry_show_nothing(make_record):
    rows = [make_record(Shape("a", 2, 8, 16, 2, 16, 1), process, "eager") for process in range(3)]
    assert find_contamination(rounds_of(rows)).count == 0


@pytest.mark.parametrize("blocks", [None, [], [None, None]])
def test_a_reading_that_failed_is_no_evidence(make_record, blocks):
    row = make_record(Shape("a", 2, 8, 16, 2, 16, 1), 0, "eager", (1000,) * 4, telemetry={"blocks": blocks})
    assert find_contamination(rounds_of([row])).count == 0


def test_a_block_disturbed_for_two_reasons_counts_once_and_names_both():
    slow = [1000.0, 1010.0, 5990.0, 5005.0, 995.0, 1000.0, 1002.0, 998.0]
    states = {("a", 0): [{}, {"throttle": ["SwPowerCap"]}, {}, {}]}
    found = find_contamination(campaign(anchor=slow, telemetry=states))
    assert found.describe() == (
        "1 of 48 blocks dropped for every arm (1 by the anchor, 1 by the power limit, some by more than one)"
    )


CAPPED, FREE = {"sm_mhz": 1700, "throttle": ["SwPowerCap"]}, {"sm_mhz": 1980, "throttle": []}
SLOWED = {"sm_mhz": 1200, "throttle": []}


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (CAPPED, "the power limit"),
        (CAPPED | {"sm_mhz": 1200}, "the power limit"),
        (SLOWED, "a slow clock"),
    ],
)
def test_a_condition_that_meets_every_block_of_a_shape_drops_none(state, what):
    states = {(shape, process): [FREE] * 4 for shape in "ab" for process in range(6)}
    states |= {("a", process): [state] * 4 for process in range(2)}
    found = find_contamination(campaign(telemetry=states))
    assert (found.count, found.lasting) == (0, {("a", 0): what, ("a", 1): what})
    assert (found.conditions("a"), found.conditions("b")) == ({what: 2}, {})


def test_at_the_power_limit_throughout_a_lower_clock_in_some_blocks_is_the_same_condition():
    states = {(shape, process): [FREE] * 4 for shape in "ab" for process in range(6)}
    found = find_contamination(campaign(telemetry=states | {("a", 0): [CAPPED, CAPPED | {"sm_mhz": 1200}] * 2}))
    assert found.count == 0 and found.lasting


@pytest.mark.parametrize(
    ("states", "dropped"),
    [
        ([CAPPED, CAPPED, CAPPED, FREE], {0, 1, 2}),  # in a part only
        ([CAPPED, {}, CAPPED, CAPPED], {0, 2, 3}),  # one reading failed, so it is not known of every block
        ([CAPPED] * 3, {0, 1, 2}),  # fewer readings than blocks
        ([{"sm_mhz": 1980, "throttle": ["HwThermalSlowdown"]}] * 4, {0, 1, 2, 3}),  # heat comes and goes
        ([FREE | {"other_processes": 1}] * 4, {0, 1, 2, 3}),  # a neighbour need not meet all arms alike
        ([CAPPED | {"other_processes": 1}, CAPPED, CAPPED, CAPPED], {0}),  # what else a block shows still counts
        ([SLOWED, SLOWED, FREE, FREE], {0, 1}),
    ],
)
def test_a_condition_of_some_blocks_still_drops_them(states, dropped):
    telemetry = {(shape, process): [FREE] * 4 for shape in "ab" for process in range(6)} | {("a", 0): states}
    assert find_contamination(campaign(telemetry=telemetry)).at("a", 0) == dropped


def test_a_shape_at_the_power_limit_in_every_block_keeps_its_ratio_and_the_campaign_its_mean(make_meta, full_rows):
    meta = make_meta([Shape(name, 2, 8, 16, 2, 16, 1) for name in "ab"])
    rows = [
        row.model_copy(update={"telemetry": {"blocks": [CAPPED if row.shape_id == "a" else FREE]}})
        for row in full_rows(meta, {"mine": 2.0})
    ]
    summary = summarise(meta, rows)
    (headline,) = summary.headlines
    assert (headline.verdict, headline.geomean.centre) == ("faster", pytest.approx(2.0))
    assert summary.row("a").cells["mine"].verdict == "faster"


@pytest.mark.parametrize(
    ("eager", "reasons"),
    [
        ({"disturbed": ["a stop of eager's process"]}, {"a stop of eager's process": 1}),
        (
            {"disturbed": ["another priority of eager's", "other cores for eager"]},
            {"another priority of eager's": 1, "other cores for eager": 1},
        ),
        ({"lost": 0.6, "others_lost": 0.1}, {"work in eager's place": 1}),
        ({"lost": 0.6, "others_lost": 0.5}, {}),  # the machine is busy for all
        ({"lost": 0.1, "others_lost": 0.9}, {}),  # the candidate's own loss
        ({}, {}),
    ],
)
def test_what_is_done_to_eager_alone_drops_the_block_for_every_arm(eager, reasons):
    found = find_contamination(campaign(telemetry={("a", 0): [{}, {"eager": eager} if eager else {}, {}, {}]}))
    assert found.reasons == reasons
    assert found.dropped == ({("a", 0): frozenset({1})} if reasons else {})
