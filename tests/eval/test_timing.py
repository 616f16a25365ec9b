"""Order, counts and inputs of the timing protocol, on a clock that does as it is told."""

import math

import pytest
import torch

from rooflane.eval.stats import paired_log_ratio
from rooflane.eval.timing import Counts, CpuClock, InputPool, choose_counts, estimate_ns, make_clock, time_arms


class FakeClock:
    """Time that passes only when a window runs: `pace` ns a call, growing by `drift` a call."""

    name = "synthetic"

    def __init__(self, pace=1000.0, drift=0.0):
        self.pace, self.drift, self.calls, self.log = pace, drift, 0, []

    def synchronize(self):
        pass

    def window(self, forward, cases):
        times = []
        for x, mask in cases:
            cost = forward(x, mask)
            times.append(round((self.pace + self.drift * self.calls) * cost))
            self.calls += 1
        self.log.append((forward, len(cases)))
        return times, [time // 2 for time in times]

    def spans(self, forward, cases, host_ns):
        self.log.append(("spans", forward, len(cases), host_ns))
        return [7 for _ in cases]


def pool(capacity=4, fixed=False):
    mask = torch.ones(1, 2, dtype=torch.bool)
    return InputPool(lambda number: (torch.full((1, 2, 1), float(number)), mask.clone()), capacity, fixed=fixed)


def run(arms, clock, *, rounds=4, repeats=3, inputs=None, counts=None):
    counts = counts or {name: Counts(1, repeats, False) for name in arms}
    return time_arms(arms, counts, inputs or pool(), clock, rounds=rounds, order_seed=5, inputs="fresh")


def named(names):
    """Return arms whose forwards can be told apart in the clock's log."""
    return {name: (lambda x, mask, name=name: 1.0) for name in names}


def test_every_odd_round_mirrors_the_round_before():
    clock = FakeClock()
    arms = named("abcd")
    run(arms, clock, rounds=6)
    names = {forward: name for name, forward in arms.items()}
    order = [names[entry[0]] for entry in clock.log if entry[0] != "spans"]
    rounds = [order[start : start + 4] for start in range(0, 24, 4)]
    assert all(sorted(part) == list("abcd") for part in rounds)
    assert all(rounds[index] == rounds[index + 1][::-1] for index in (0, 2, 4))
    assert len({tuple(part) for part in rounds[::2]}) > 1, "the order is drawn anew for each pair"


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_rounds_that_cannot_be_mirrored_are_refused(rounds):
    with pytest.raises(ValueError, match="even"):
        run(named("ab"), FakeClock(), rounds=rounds)


def test_a_linear_drift_leaves_equal_arms_equal():
    timings, _ = run(named("ab"), FakeClock(pace=1e6, drift=1000), rounds=4, repeats=10)
    assert abs(paired_log_ratio(timings["a"].event_ns, timings["b"].event_ns)) < 2e-4


def test_a_slower_arm_is_found_slower_by_its_factor():
    arms = {"a": lambda x, mask: 1.0, "b": lambda x, mask: 2.0}
    timings, _ = run(arms, FakeClock(pace=1e6))
    assert paired_log_ratio(timings["b"].event_ns, timings["a"].event_ns) == pytest.approx(math.log(2))


def test_no_arm_sees_one_content_twice_in_fresh_mode():
    seen = {"a": [], "b": []}

    def arm(name):
        return lambda x, mask: seen[name].append(float(x[0, 0, 0])) or 1.0

    run({"a": arm("a"), "b": arm("b")}, FakeClock(), repeats=6, inputs=pool(capacity=4))
    for name, contents in seen.items():
        assert len(contents) == len(set(contents)) == 1 + 4 * 6, name


def test_arms_of_a_round_meet_the_same_contents_where_the_pool_holds_them():
    seen = {"a": [], "b": []}
    arms = {name: (lambda x, mask, name=name: seen[name].append(float(x[0, 0, 0])) or 1.0) for name in seen}
    run(arms, FakeClock(), repeats=4, inputs=pool(capacity=4))
    assert seen["a"] == seen["b"]


def test_fixed_mode_is_one_input_for_every_call():
    seen = set()
    arms = {name: (lambda x, mask: seen.add((id(x), id(mask))) or 1.0) for name in "ab"}
    run(arms, FakeClock(), inputs=pool(fixed=True))
    assert len(seen) == 1


def test_timed_inputs_are_ordinary_tensors():
    kinds = set()
    run({"a": lambda x, mask: kinds.add(x.is_inference()) or 1.0}, FakeClock(), inputs=pool(capacity=1))
    assert kinds == {False}


def test_calls_repeats_and_spans_are_counted():
    clock = FakeClock()
    counts = {"a": Counts(2, 5, False), "b": Counts(1, 30, True)}
    timings, failures = run(named("ab"), clock, counts=counts)
    assert not failures
    assert [len(part) for part in timings["a"].event_ns] == [5] * 4
    assert [len(part) for part in timings["b"].host_ns] == [30] * 4
    assert (len(timings["a"].device_ns), len(timings["b"].device_ns)) == (5, 20)
    assert timings["b"].shrunk
    assert not timings["a"].shrunk


def test_an_arm_that_raises_is_dropped_and_the_others_go_on():
    calls = []

    def late(x, mask):
        calls.append(1)
        if len(calls) > 8:
            raise RuntimeError("broke")
        return 1.0

    timings, failures = run({"good": lambda x, mask: 1.0, "late": late}, FakeClock())
    assert set(timings) == {"good"}
    assert str(failures["late"]) == "broke"
    assert len(timings["good"].event_ns) == 4


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


def test_the_estimate_is_the_median_call():
    costs = iter([50.0, 9.0, 1.0, 1.0])
    case = (torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert estimate_ns(lambda x, mask: next(costs), case, FakeClock(pace=100)) == 100


def test_one_long_call_is_estimate_enough():
    costs = iter([5.0])
    case = (torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert estimate_ns(lambda x, mask: next(costs), case, FakeClock(pace=1e9)) == 5_000_000_000


def test_the_cpu_clock_times_each_call():
    clock = make_clock("cpu")
    assert isinstance(clock, CpuClock)
    x, mask = torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool)
    events, host = clock.window(lambda x, mask: torch.randn(1000).sort(), [(x, mask)] * 3)
    assert len(events) == 3
    assert min(events) > 0
    assert host == clock.spans(None, [], 0) == []
