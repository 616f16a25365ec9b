"""A calm core for a launching thread: shares that do not meet, moves that follow the loop, and a way back."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooflane.eval.worker import cpu_pinning
from rooflane.eval.worker.cpu_pinning import FastCore, core_shares, usable_cores

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot choose its core here")


@pytest.fixture
def host(monkeypatch):
    """A host of six cores whose loops, paces and refusals the test says; `cores` is where the thread may run."""
    host = SimpleNamespace(cores=set(range(6)), loops=[], paces={}, looks=[], refuse=False)

    def move(pid, cores):
        if host.refuse:
            raise PermissionError("not yours")
        host.cores = set(cores)

    def look(cores):
        host.looks.append(set(cores))
        return {core: pace for core, pace in host.paces.items() if core in cores}

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(host.cores), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", move, raising=False)
    monkeypatch.setattr(cpu_pinning, "THREADS", Path("/nowhere"))
    monkeypatch.setattr(cpu_pinning, "loop_ns", lambda: host.loops.pop(0))
    monkeypatch.setattr(cpu_pinning, "core_paces", look)
    return host


def test_a_thread_leaves_a_slow_core_for_the_calmest_of_its_share_and_is_let_go(host):
    """Core 5 is calmer than all and another worker's; 1.3 times the calm pace is no reason to move."""
    core = FastCore()
    core.hold([0, 1, 2])
    assert host.cores == {0, 1, 2}
    host.paces = {0: 190, 1: 100, 2: 150, 5: 50}
    host.loops = [150, 101, 130]
    assert core.pace_ns() == 101 and host.cores == {1}, "the first look finds the calm core whatever the loop says"
    assert core.pace_ns() == 130 and len(host.looks) == 1
    host.paces = {0: 99, 1: 180, 2: 150}
    host.loops = [131, 104]
    assert core.pace_ns() == 104 and host.cores == {0} and host.looks[1] == {0, 1, 2}
    core.leave()
    core.leave()
    assert host.cores == set(range(6))


def test_a_second_share_takes_the_place_of_the_first(host):
    core = FastCore()
    core.hold([0, 1])
    host.loops, host.paces = [100, 100], {0: 90, 1: 100}
    core.pace_ns()
    core.hold([2, 3])
    assert host.cores == {2, 3}
    # What the first share's cores could do says nothing of these: the calmest is looked for again.
    host.loops, host.paces = [110, 120], {2: 130, 3: 120}
    core.pace_ns()
    assert host.cores == {3} and host.looks == [{0, 1}, {2, 3}]
    core.hold([])
    assert host.cores == set(range(6))


@pytest.mark.parametrize(("cores", "refuse"), [([], False), ([0, 1], True)])
def test_where_no_core_can_be_chosen_nothing_moves(host, cores, refuse):
    host.refuse = refuse
    host.loops = [100, 90, 200]
    core = FastCore()
    core.hold(cores)
    assert [core.pace_ns() for _ in range(3)] == [100, 90, 200]
    core.leave()
    assert host.cores == set(range(6)) and host.looks == []


def test_cores_that_are_taken_away_meanwhile_leave_the_thread_where_it_is(host):
    core = FastCore()
    core.hold([0, 1])
    host.refuse, host.loops = True, [100, 90]
    assert core.pace_ns() == 90
    core.leave()
    core.leave()
    assert host.cores == {0, 1}


def test_of_many_cores_every_second_or_third_is_looked_at(host):
    host.cores = set(range(70))
    core = FastCore()
    core.hold(range(70))
    host.loops, host.paces = [100, 100], {3: 80, 4: 90}
    core.pace_ns()
    assert host.looks == [set(range(0, 70, 3))] and host.cores == {3}


@linux
def test_a_thread_that_was_started_while_held_is_let_go_too():
    before = os.sched_getaffinity(0)
    core = FastCore()
    core.hold([min(before)])
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    core.leave()
    assert os.sched_getaffinity(thread.native_id) == before
    done.set()
    thread.join()


@linux
def test_a_real_thread_is_held_and_given_back():
    before = os.sched_getaffinity(0)
    core = FastCore()
    core.hold([min(before)])
    assert core.pace_ns() > 0 and os.sched_getaffinity(0) == {min(before)}
    core.leave()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("count", "shares"),
    [(1, [[0, 1, 2, 3, 4, 5]]), (2, [[0, 1, 2], [3, 4, 5]]), (4, [[0], [1, 2], [3], [4, 5]]), (0, [])],
)
def test_shares_are_neighbours_and_none_is_in_two(host, count, shares):
    assert core_shares(count) == shares


def test_without_affinity_every_share_is_empty(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert core_shares(3) == [[], [], []]


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", 8), ("250000 100000\n", 2.5), ("9900000 100000\n", 8), ("nonsense", 8)]
)
def test_a_containers_share_of_time_bounds_the_cores(monkeypatch, tmp_path, text, cores):
    quota = Path(tmp_path / "cpu.max")
    quota.write_text(text)
    monkeypatch.setattr("rooflane.eval.worker.cpu_pinning.CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == cores


def test_without_affinity_or_control_groups_every_core_counts(monkeypatch, tmp_path):
    monkeypatch.setattr("rooflane.eval.worker.cpu_pinning.CPU_QUOTA", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
