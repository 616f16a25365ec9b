"""Clocks beside each other: launch share, what nobody accounts for, and the harness dividend."""

import pytest

from rooflane.eval import open_run
from rooflane.eval.record.records import Timing
from rooflane.eval.report.tables import COARSE_TICK
from rooflane.eval.stats.rounds import clock_tick_ns, dividend, hidden_ns, launch_share


def timing(event, device=(), host=(), harness=()):
    return Timing(
        clock="synthetic",
        event_ns=[[event] * 3] * 2,
        host_ns=[list(host)] if host else [],
        device_ns=list(device),
        harness_ns=list(harness),
        warmups=1,
        repeats=3,
        shrunk=False,
        inputs="fresh",
        valid_tokens=1,
    )


@pytest.mark.parametrize(("event", "device", "share"), [(2000, [500], 0.75), (1000, [1100], 0.0), (1000, [], None)])
def test_the_launch_share_is_what_the_device_was_idle(event, device, share):
    # A process without a device clock has no part in it, however slow its host was.
    assert launch_share([timing(event, device), timing(9000)]) == share


def test_time_that_neither_device_nor_host_accounts_for_is_hidden_beyond_the_nulls():
    eager = [timing(100_000, device=[99_000], host=[20_000])]
    honest = [timing(50_000, device=[49_500], host=[10_000])]
    slow_host = [timing(50_000, device=[10_000], host=[49_500])]
    hiding = [timing(90_000, device=[30_000], host=[20_000])]
    assert hidden_ns(honest, eager) == hidden_ns(slow_host, eager) == 0
    assert hidden_ns(hiding, eager) == pytest.approx(59_000)
    # What eager leaves unexplained too is the machine's, not the candidate's.
    assert hidden_ns(hiding, [timing(200_000, device=[99_000], host=[20_000])]) == 0
    assert hidden_ns([timing(1)], eager) is None


def test_the_dividend_is_the_fixed_inputs_speedup_over_the_fresh_ones(make_record):
    from rooflane.shapes import Shape

    shape = Shape("a", 2, 8, 16, 2, 16, 1)
    base = {0: make_record(shape, 0, "eager"), 1: make_record(shape, 1, "eager")}
    arm = {0: make_record(shape, 0, "mine"), 1: make_record(shape, 1, "mine")}
    assert dividend(base, arm, {0: 0.0, 1: 0.0}) is None
    base[0] = base[0].model_copy(update={"timing": timing(1000, harness=[1000] * 5)})
    arm[0] = arm[0].model_copy(update={"timing": timing(500, harness=[400] * 5)})
    # 2.5x on one object against 2x on fresh ones.
    assert dividend(base, arm, {0: 0.6931471805599453, 1: 5.0}) == pytest.approx(1.25)


def on_gpu(times):
    return timing(1).model_copy(update={"clock": "cuda-events", "event_ns": [times]})


def test_the_tick_is_the_least_step_between_two_times():
    times = [10_016 + 32 * (step * 7 % 299) for step in range(299)]
    assert clock_tick_ns([on_gpu(times)]) == 32
    # A driver's float32 milliseconds no longer tell single nanoseconds of a long call.
    assert clock_tick_ns([on_gpu([*times, 40_000_000, 40_000_003])]) == 32
    assert clock_tick_ns([on_gpu(times[:50])]) is None
    assert clock_tick_ns([timing(time) for time in times]) is None


def test_one_call_in_a_window_is_enough_on_the_gpu_that_was_measured(root):
    summary = open_run(root / "briefs" / "records" / "h200-published").summary()
    shortest = min(row.cells["dispatched"].event_ms.centre for row in summary.rows if row.eager.event_ms)
    assert summary.tick_ns / (shortest * 1e6) < COARSE_TICK / 10
