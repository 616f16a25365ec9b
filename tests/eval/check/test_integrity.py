"""Clocks against clocks, times against hardware: impossible figures are named, ordinary ones are not."""

import pytest

from rooflane.dispatch import load_profile
from rooflane.eval.check.integrity import (
    WindowWall,
    hidden_time,
    impossible_times,
    physical_floor_ns,
)
from rooflane.shapes import Shape


def walls(event_us, gap_us, *, calls=50, windows=4):
    """Return windows of calls that take `event_us` by the clock and `gap_us` beside it."""
    event = round(event_us * 1e3) * calls
    return [WindowWall(event + round(gap_us * 1e3) * calls, calls, calls, event)] * windows


def test_an_honest_clock_leaves_nothing_unexplained():
    null = walls(500, 40)
    assert hidden_time(walls(100, 40), null) == []
    assert hidden_time(walls(100, 60), null) == [], "a little more than the null is noise"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_a_clock_that_shows_half_or_less_is_found(share):
    true = 300.0
    lying = walls(true * share, 40 + true * (1 - share))
    (line,) = hidden_time(lying, walls(500, 40))
    assert "the parent's wall clock 340.0 us" in line


def test_one_window_on_a_busy_machine_is_no_evidence():
    busy = [*walls(100, 40, windows=3), *walls(100, 5000, windows=1)]
    assert hidden_time(busy, walls(500, 40)) == []


def test_leading_calls_count_as_calls():
    event = 100_000 * 50
    with_lead = [WindowWall(100_000 * 52 + 40_000 * 52, 52, 50, event)] * 4
    assert with_lead[0].hidden_ns == pytest.approx(40_000)
    assert hidden_time(with_lead, walls(500, 40)) == []


def test_impossible_times_are_named():
    assert impossible_times([50_000] * 3, [10_000] * 3, 0.0, "measured") == []
    assert "no real call takes" in impossible_times([50_000, 0], [], 0.0, "measured")[0]
    assert "the harness alone" in impossible_times([1_000] * 3, [10_000] * 3, 0.0, "measured")[0]
    (line,) = impossible_times([1_000_000] * 3, [], 2_500_000.0, "measured")
    assert "best rates (measured)" in line
    assert impossible_times([1_000_000] * 3, [], 2_500_000.0, "assumed") == []
    assert impossible_times([], [10_000], 1e9, "measured") == []


def test_the_floor_is_the_arithmetic_or_the_traffic_that_overflows_the_cache():
    profile = load_profile("h200")
    wide = Shape("wide", 64, 128, 1024, 16, 1024, 8)
    floor_ns, mark = physical_floor_ns(wide, profile, wide.tokens)
    flops = 2 * 8 * wide.tokens * 6 * 1024**2
    fastest = max(profile.matmul_float16.si, profile.matmul_bfloat16.si, profile.matmul_float32.si)
    assert floor_ns == pytest.approx(flops / fastest * 1e9)
    assert mark in ("measured", "datasheet", "assumed")
    # 34 GB in and out against a cache of 60 MB, and next to no arithmetic: traffic decides.
    thin = Shape("thin", 100_000, 128, 64, 4, 1, 1)
    floor_ns, _ = physical_floor_ns(thin, profile, thin.tokens)
    moved = 2 * thin.tokens * 64 * 4 - profile.cache_bytes
    assert floor_ns == pytest.approx(moved / profile.copy_bytes_per_s * 1e9)
    # Padding need not be computed.
    assert physical_floor_ns(wide, profile, wide.tokens / 2)[0] == pytest.approx(flops / fastest / 2 * 1e9)
    assert physical_floor_ns(wide, load_profile("cpu"), wide.tokens)[0] == 0
