"""Lanes: how a round is cut into windows, with fresh inputs and as the organiser's script runs it."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import pytest

from rooflane.eval import shape_timing
from rooflane.eval.lanes import Lane, Schedule
from rooflane.eval.launch import Crash
from rooflane.eval.shape_timing import ShapeTiming
from rooflane.eval.team import ReferenceLost

CALL_NS = 50_000


class Worker:
    """Answers as a worker would: event times of 50 us, bare ones of 49."""

    def __init__(self, bare_calls=None):
        self.asked = []
        self.bare_calls = bare_calls

    def __call__(self, op, stage, **values):
        self.asked.append((op, values))
        if op == "prepare":
            self.window = values
            return {}
        if op != "finish":
            return {}
        calls = self.window["calls"]
        bare = self.bare_calls if self.bare_calls is not None else calls if self.window["bare"] else 0
        return {
            "event_ns": [CALL_NS] * calls, "host_ns": [7000] * calls, "bare_ns": [49_000] * bare, "loop_ns": 95_000,
            "marks": base64.b64encode(bytes(4 * calls)).decode(), "kept": [], "overwritten": False, "tokens": 8.0,
            "deferred": [], "fault": "", "changed": "",
        }  # fmt: skip

    def windows(self, *names):
        return [tuple(values[name] for name in names) for op, values in self.asked if op == "prepare"]


def lane(worker, *, fixed, **values):
    schedule = Schedule(lambda purpose: 5, 0.0, fixed)
    return Lane("mine", worker, schedule, capacity=8, call_ns=CALL_NS, reference_ns=2_000_000, **values)


def test_a_round_of_fresh_inputs_is_cut_by_what_may_be_alive_at_once():
    """Eight inputs at once, two of them for the leading calls: twenty calls take four windows."""
    worker = Worker()
    found = lane(worker, fixed=False).measure(0, 20)
    assert worker.windows("calls", "lead", "load", "bare") == [(6, 2, 0, False)] * 3 + [(2, 2, 0, False)]
    assert len(found.event_ns) == 20 and found.bare_ns == []


def test_a_round_as_the_script_runs_it_is_one_window_behind_a_round_of_eager():
    worker = Worker()
    mine = lane(worker, fixed=True, as_script=True)
    found = mine.measure(0, 20)
    assert worker.windows("calls", "lead", "load", "bare") == [(20, 2, 20, True)]
    assert found.event_ns == [CALL_NS] * 20 and found.bare_ns == [49_000] * 20 and found.loop_ns == 95_000
    (wall,) = mine.walls
    # Twenty calls with a look, twenty without, two ahead: all inside the parent's clock.
    assert (wall.calls, wall.timed_calls, wall.event_ns) == (42, 40, 20 * (CALL_NS + 49_000))


@pytest.mark.parametrize(("reference_ns", "load"), [(100_000_000, 5), (3_000_000_000, 1)])
def test_half_a_second_of_eager_is_load_enough(reference_ns, load):
    worker = Worker()
    mine = lane(worker, fixed=True, as_script=True)
    mine.reference_ns = reference_ns
    mine.measure(0, 20)
    assert worker.windows("load") == [(load,)]


@pytest.mark.parametrize(("as_script", "bare_calls"), [(True, 19), (True, 0), (False, 3)])
def test_times_that_were_not_asked_for_end_the_worker(as_script, bare_calls):
    with pytest.raises(Crash, match="not one for each call"):
        lane(Worker(bare_calls), fixed=True, as_script=as_script).measure(0, 20)


@pytest.fixture
def timing(monkeypatch):
    """Return a function that makes a shape's timing with two workers, and the wakefulness they were asked for."""

    def make(device="cuda", cores=4, lost=None):
        said = []

        def ask(worker, op, stage, on, cores=None):
            said.append((worker, op, on, cores))
            if worker == lost:
                team.discard(worker)
                raise (ReferenceLost("gone", "eager") if worker == "reference" else Crash("gone"))

        team = {"reference", "mine"}
        monkeypatch.setattr(shape_timing, "usable_cores", lambda: cores)
        monkeypatch.setattr(shape_timing, "core_shares", lambda count: [[number] for number in range(count)])
        work = SimpleNamespace(context=SimpleNamespace(device=device), team=team, ask=ask)
        return ShapeTiming(work, []), said

    return make


WORKERS = ("reference", "mine")


def test_a_gpus_workers_stay_awake_while_they_are_timed_and_no_longer(timing):
    desk, said = timing()
    with pytest.raises(ValueError), desk._awake(WORKERS):
        assert said == [("reference", "stay_awake", True, [0]), ("mine", "stay_awake", True, [1])]
        raise ValueError
    assert said[2:] == [("reference", "stay_awake", False, None), ("mine", "stay_awake", False, None)]


@pytest.mark.parametrize("where", [{"device": "cpu"}, {"cores": 3.5}])
def test_nobody_stays_awake_where_the_cores_are_needed(timing, where):
    desk, said = timing(**where)
    with desk._awake(WORKERS):
        pass
    assert said == []


@pytest.mark.parametrize("lost", WORKERS)
def test_a_worker_that_is_lost_is_told_of_by_its_own_windows(timing, lost):
    desk, said = timing(lost=lost)
    with desk._awake(WORKERS):
        pass
    assert [worker for worker, _, on, _ in said if not on] == [name for name in WORKERS if name != lost]
