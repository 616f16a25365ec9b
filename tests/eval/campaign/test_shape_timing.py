"""Which workers busy-wait, and where: a GPU's workers, on cores of their own, while they are timed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rooflane.eval.campaign import shape_timing
from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.shape_timing import busy_waiting
from rooflane.eval.campaign.team import ReferenceLost

WORKERS = ("reference", "mine")


@pytest.fixture
def make_session(monkeypatch):
    """Return a function that makes a session with two workers, and what they were asked."""

    def make(device="cuda", cores=4, lost=None):
        said = []

        def ask(worker, request, what, arm):
            said.append((worker, request.on, request.cores))
            assert (arm.worker, what) == (worker, "clocks")
            if worker == lost:
                team.discard(worker)
                raise (ReferenceLost("gone", arm) if worker == "reference" else Crash("gone"))

        team = {"reference", "mine"}
        monkeypatch.setattr(shape_timing, "usable_cores", lambda: cores)
        monkeypatch.setattr(shape_timing, "core_shares", lambda count: [[number] for number in range(count)])
        work = SimpleNamespace(context=SimpleNamespace(device=device), team=team, ask=ask)
        return work, said

    return make


def test_a_gpus_workers_busy_wait_while_they_are_timed_and_no_longer(make_session):
    session, said = make_session()
    with pytest.raises(ValueError), busy_waiting(session, WORKERS):
        assert said == [("reference", True, [0]), ("mine", True, [1])]
        raise ValueError
    assert said[2:] == [("reference", False, []), ("mine", False, [])]


def test_ctrl_c_waits_for_nobody(make_session):
    """A worker in the midst of a call would be asked and waited for, up to its time limit."""
    session, said = make_session()
    with pytest.raises(KeyboardInterrupt), busy_waiting(session, WORKERS):
        raise KeyboardInterrupt
    assert len(said) == 2


@pytest.mark.parametrize("where", [{"device": "cpu"}, {"cores": 3.5}])
def test_nobody_busy_waits_where_the_cores_are_needed(make_session, where):
    session, said = make_session(**where)
    with busy_waiting(session, WORKERS):
        pass
    assert said == []


@pytest.mark.parametrize("lost", WORKERS)
def test_a_worker_that_is_lost_is_reported_by_its_own_windows(make_session, lost):
    session, said = make_session(lost=lost)
    with busy_waiting(session, WORKERS):
        pass
    assert [worker for worker, on, _ in said if not on] == [name for name in WORKERS if name != lost]
