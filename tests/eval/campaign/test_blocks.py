"""Order, counts and failures of the interleaved blocks, with arms that do as they are told."""

import math

import pytest

from rooflane.eval import evaluate, render_markdown
from rooflane.eval.campaign.blocks import Counts, Round, choose_counts, time_blocks
from rooflane.eval.stats.estimator import paired_log_ratio
from rooflane.shapes import Shape


class Machine:
    """Time that passes only when an arm is measured: `pace` ns a call, growing by `drift` a call."""

    def __init__(self, pace=1e6, drift=0.0):
        self.pace, self.drift, self.calls, self.order = pace, drift, 0, []

    def arm(self, name, factor=1.0, fails_in=None):
        return FakeLane(self, name, factor, fails_in)


class FakeLane:
    def __init__(self, machine, name, factor, fails_in):
        self.machine, self.name, self.factor, self.fails_in = machine, name, factor, fails_in

    def measure(self, round_index, calls):
        if round_index == self.fails_in:
            raise RuntimeError("broke")
        machine = self.machine
        machine.order.append(self.name)
        times = []
        for _ in range(calls):
            times.append(round((machine.pace + machine.drift * machine.calls) * self.factor))
            machine.calls += 1
        return Round(times)


def run(arms, *, rounds=4, repeats=3, **options):
    counts = dict.fromkeys(arms, Counts(1, repeats, False))
    return time_blocks(arms, counts, rounds=rounds, order_seed=5, **options)


def events(samples, arm):
    return [part.event_ns for part in samples[arm].rounds]


def test_every_odd_round_mirrors_the_round_before():
    machine = Machine()
    run({name: machine.arm(name) for name in "abcd"}, rounds=6)
    rounds = [machine.order[start : start + 4] for start in range(0, 24, 4)]
    assert all(sorted(part) == list("abcd") for part in rounds)
    assert all(rounds[index] == rounds[index + 1][::-1] for index in (0, 2, 4))
    assert len({tuple(part) for part in rounds[::2]}) > 1, "the order is drawn anew for each pair"


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_rounds_that_cannot_be_mirrored_are_refused(rounds):
    machine = Machine()
    with pytest.raises(ValueError, match="even"):
        run({"a": machine.arm("a")}, rounds=rounds)


def test_a_linear_drift_leaves_equal_arms_equal():
    machine = Machine(drift=1000)
    samples, _ = run({name: machine.arm(name) for name in "ab"}, repeats=10)
    assert abs(paired_log_ratio(events(samples, "a"), events(samples, "b"))) < 2e-4


def test_a_slower_arm_is_found_slower_by_its_factor():
    machine = Machine()
    samples, _ = run({"a": machine.arm("a"), "b": machine.arm("b", 2.0)})
    assert paired_log_ratio(events(samples, "b"), events(samples, "a")) == pytest.approx(math.log(2))


def test_sparse_arms_stand_in_every_third_block_and_the_rest_in_each():
    machine = Machine()
    recounts = []

    def recount(arm, before, call_ns):
        recounts.append(arm)
        return before

    samples, _ = run({name: machine.arm(name) for name in "abc"}, rounds=8, sparse={"c"}, recount=recount)
    assert [bool(part) for part in events(samples, "c")] == [True, True, False, False, False, False, True, True]
    assert all(map(all, events(samples, "a"))) and len(events(samples, "a")) == 8
    blocks = ["".join(sorted(machine.order[start:stop])) for start, stop in ((0, 6), (6, 10), (10, 14), (14, 20))]
    assert blocks == ["aabbcc", "aabb", "aabb", "aabbcc"]
    assert (recounts.count("a"), recounts.count("c")) == (4, 2)


@pytest.mark.slow
def test_a_long_run_times_its_controls_in_every_third_block_and_reports_them(tmp_path, quiet_host):
    shape = Shape("a", 2, 8, 16, 2, 16, 1)
    settings = {"device": "cpu", "profile": "cpu", "controls": ("identity", "sdpa"), "budget_s": 0.05}
    run = evaluate([shape], "chunked", processes=2, rounds=6, runs_dir=tmp_path, **settings)
    rows = {row.arm: [bool(part) for part in row.timing.event_ns] for row in run.records() if row.process == 1}
    assert rows.pop("sdpa") == [True, True, False, False, False, False]
    assert set(map(tuple, rows.values())) == {(True,) * 6}, "the null, the no-op and the anchor watch every block"
    summary = run.summary()
    cell = summary.row("a").cells["sdpa"]
    assert cell.speedup.count == 2 and cell.counts.startswith("2x")
    assert "sdpa" in render_markdown(summary).lower()


def test_an_arm_that_raises_is_dropped_and_the_others_go_on():
    machine = Machine()
    samples, failures = run({"good": machine.arm("good"), "late": machine.arm("late", fails_in=2)})
    assert set(samples) == {"good"}
    assert str(failures["late"]) == "broke"
    assert len(samples["good"].rounds) == 4


def test_a_fatal_exception_ends_the_whole():
    machine = Machine()
    with pytest.raises(RuntimeError, match="broke"):
        run({"a": machine.arm("a", fails_in=1)}, fatal=(RuntimeError,))


def test_an_arm_whose_calls_became_quicker_is_given_more_of_them():
    machine = Machine(pace=10)

    def recount(arm, before, call_ns):
        return Counts(1, 50, False) if call_ns < 100 else before

    samples, _ = run({"a": machine.arm("a")}, repeats=1, recount=recount)
    assert [len(part) for part in events(samples, "a")] == [1, 1, 50, 50]


@pytest.mark.parametrize(
    ("call_ns", "budget_s", "expected"),
    [
        (1_000, 2.0, Counts(20, 100, False)),
        (50_000_000, 2.0, Counts(8, 8, True)),
        (10_000_000_000, 2.0, Counts(1, 1, True)),  # never less than one call
    ],
)
def test_counts_shrink_to_the_budget(call_ns, budget_s, expected):
    assert choose_counts(call_ns, warmups=20, repeats=100, rounds=4, budget_s=budget_s) == expected
