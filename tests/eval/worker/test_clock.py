"""The clocks of one worker: what they time, and how much is enough for an estimate."""

import torch

from rooflane.eval.worker.clock import CPU_COLD_CALLS, CpuClock, cache_bytes, estimate_ns, make_clock


class FakeClock:
    """Time that is what the forward says it is."""

    name = "synthetic"

    def window(self, forward, cases, after=None):
        times = [round(100 * forward(x, mask)) for x, mask in cases]
        return lambda: (times, [time // 2 for time in times])


CASE = (torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool))


def test_the_estimate_is_the_median_call():
    costs = iter([50.0, 9.0, 1.0, 1.0])
    assert estimate_ns(lambda x, mask: next(costs), CASE, FakeClock()) == 100


def test_one_long_call_is_estimate_enough():
    costs = iter([5e7])
    assert estimate_ns(lambda x, mask: next(costs), CASE, FakeClock()) == 5_000_000_000


def test_the_cpu_clock_times_each_call_and_hands_its_output_on():
    clock = make_clock("cpu")
    assert isinstance(clock, CpuClock)
    outputs = {}
    events, host = clock.window(lambda x, mask: torch.randn(1000).sort(), [CASE] * 3, outputs.__setitem__)()
    assert len(events) == 3
    assert min(events) > 0
    assert sorted(outputs) == [0, 1, 2]
    assert host == clock.spans(None, [], 0) == clock.idle(None, []) == []


def test_what_is_done_with_an_output_is_not_timed():
    import time

    def slow_look(number, out):
        time.sleep(0.02)

    events, _ = CpuClock().window(lambda x, mask: x, [CASE] * 3, slow_look)()
    assert min(events) < 20_000_000


def test_a_replaced_clock_is_not_the_one_that_is_read(monkeypatch):
    import time

    monkeypatch.setattr(time, "perf_counter_ns", lambda: 7)
    events, _ = CpuClock().window(lambda x, mask: torch.randn(1000).sort(), [CASE])()
    assert events[0] > 0


def test_cold_calls_come_behind_a_write_of_twice_the_cache():
    assert cache_bytes(torch.device("cpu")) >= 1 << 18
    assert len(CpuClock().cold(lambda x, mask: x, [CASE] * 5)) == CPU_COLD_CALLS
