"""How fast the host is: the loop, each core's pace, and what a campaign says of it."""

from __future__ import annotations

import os

import pytest

from rooflane.eval.device import doctor
from rooflane.eval.report.report import render_markdown
from rooflane.eval.stats import host_pace
from rooflane.eval.stats.host_pace import core_paces, loop_ns, slow_cores
from rooflane.eval.stats.summary import summarise
from rooflane.shapes import Shape

SHAPE = Shape("a", 2, 8, 16, 2, 16, 1, True)
linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot choose its core here")


def test_the_loop_is_the_lesser_of_two(monkeypatch):
    """An interrupt inside one of the two is no slow host."""
    ticks = iter([0, 900, 1000, 1400])
    monkeypatch.setattr(host_pace, "_now", lambda: next(ticks))
    assert loop_ns() == 400


@linux
def test_every_allowed_core_is_timed_and_the_choice_of_cores_given_back():
    before = os.sched_getaffinity(0)
    paces = core_paces()
    assert set(paces) == before == os.sched_getaffinity(0)
    assert all(pace > 0 for pace in paces.values())


@linux
def test_a_core_that_is_refused_leaves_no_paces_and_no_other_affinity(monkeypatch):
    before = os.sched_getaffinity(0)
    real = os.sched_setaffinity

    def refuse(pid, cores):
        if len(cores) == 1:
            raise PermissionError("not yours")
        real(pid, cores)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: refuse(pid, before if len(cores) == 3 else cores))
    assert core_paces() == {}
    monkeypatch.undo()
    assert os.sched_getaffinity(0) == before


def test_where_a_process_cannot_choose_there_are_no_paces(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert core_paces() == {}


def test_a_core_is_slow_past_1_3_times_the_quickest():
    assert slow_cores({0: 130, 1: 100, 2: 131, 5: 190}) == [2, 5]


@pytest.mark.parametrize(
    ("paces", "status", "said"),
    [
        ({0: 100_000, 1: 105_000}, "ok", "2, a fixed loop takes 100 us"),
        ({0: 100_000, 1: 190_000, 2: 99_000}, "note", "on 1 of 3 cores a fixed loop takes over 1.3 times its 99 us"),
    ],
)
def test_the_doctor_tells_slow_cores(monkeypatch, paces, status, said):
    monkeypatch.setattr(doctor, "core_paces", lambda: paces)
    (finding,) = [finding for finding in doctor.examine() if finding.topic == "cores"]
    assert finding.status == status and said in finding.detail and bool(finding.remedy) == (status == "note")


def with_loops(record, loops):
    return record.model_copy(update={"timing": record.timing.model_copy(update={"loop_ns": loops})})


def test_a_campaign_reports_how_often_each_arm_met_a_slow_host(make_meta, full_rows):
    meta = make_meta([SHAPE], processes=3, candidates=("mine",))
    loops = {"eager": [100_000, 200_000], "mine": [100_000, 101_000], "copy of mine": [100_000, 180_000]}
    rows = [with_loops(row, loops.get(row.arm, [100_000, 100_000])) for row in full_rows(meta, {"mine": 2.0})]
    summary = summarise(meta, rows)
    assert summary.host.fast_ns == 100_000
    assert summary.host.rounds == {"eager": 6, "mine": 6} and summary.host.slow == {"eager": 3, "mine": 0}
    assert "took over 1.3 times that before these rounds: 3 of 6 of eager, 0 of 6 of mine" in render_markdown(summary)
    assert summary.as_dict()["host"]["slow"]["eager"] == 3


def test_a_fast_host_and_a_run_without_loops_say_nothing(make_meta, full_rows):
    meta = make_meta([SHAPE], processes=3, candidates=("mine",))
    rows = full_rows(meta, {"mine": 2.0})
    assert summarise(meta, rows).host is None
    calm = summarise(meta, [with_loops(row, [100_000, 120_000]) for row in rows])
    assert calm.host.describe() == "" and "fixed loop" not in render_markdown(calm)
