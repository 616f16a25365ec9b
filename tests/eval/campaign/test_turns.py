"""Whether eager's turns were its own, from the processor time of its threads."""

import os
import sys
import time

import pytest

from rooflane.eval.campaign.turns import LEAST_WALL_NS, TurnWatch, cpu_times
from rooflane.eval.record.records import REFERENCE

WALL = 100_000_000


def watched(arms, cores=2.0, wall=WALL):
    """Return block 0's state of arms given by name: a worker and the run and waited shares of each thread."""
    watch = TurnWatch(cores)
    for arm, (worker, *threads) in arms.items():
        after = {number: (int(run * wall), int(waited * wall)) for number, (run, waited) in enumerate(threads)}
        watch.add(0, arm, worker, wall, dict.fromkeys(after, (0, 0)), after)
    return watch.state(0, "eager")


@pytest.mark.parametrize(
    ("eager", "mine", "lost", "others"),
    [
        ([(1.0, 0.0)], [(1.0, 0.0)], 0.0, 0.0),  # alone on its core
        ([(0.5, 0.5)], [(1.0, 0.0)], 0.5, 0.0),  # another process had the core half of the time
        ([(0.5, 0.5)], [(0.5, 0.5)], 0.5, 0.5),  # a busy machine takes from all alike
        ([(0.5, 0.5)] * 4, [(1.0, 0.0)], 0.0, 0.0),  # four threads of its own on two cores
        ([(0.25, 0.75)] * 4, [(1.0, 0.0)], 0.5, 0.0),  # and with others beside them
        ([(0.01, 0.0)], [(1.0, 0.0)], 0.0, 0.0),  # it waits for something else than a core
    ],
)
def test_what_eager_missed_of_its_cores_is_set_beside_what_the_candidates_missed(eager, mine, lost, others):
    state = watched({"eager": (REFERENCE, *eager), "mine": ("mine", *mine)})
    assert state == {"lost": pytest.approx(lost, abs=0.01), "others_lost": pytest.approx(others, abs=0.01)}


def test_the_other_arms_of_eagers_worker_are_no_yardstick():
    # They share whatever is done to its process.
    arms = {"eager": (REFERENCE, (0.5, 0.5)), "identity": (REFERENCE, (0.5, 0.5)), "mine": ("mine", (1.0, 0.0))}
    assert watched(arms)["others_lost"] == 0.0
    assert watched({name: arms[name] for name in ("eager", "identity")}) == {}


def test_a_short_turn_says_nothing_and_a_sum_of_them_does():
    arms = {"eager": (REFERENCE, (0.5, 0.5)), "mine": ("mine", (1.0, 0.0))}
    assert watched(arms, wall=LEAST_WALL_NS - 1) == {}
    watch = TurnWatch(2.0)
    for _ in range(2):
        for arm, (worker, (run, waited)) in arms.items():
            wall = LEAST_WALL_NS // 2
            watch.add(0, arm, worker, wall, {1: (0, 0)}, {1: (int(run * wall), int(waited * wall))})
    assert watch.state(0, "eager") == {"lost": 0.5, "others_lost": 0.0}


def test_what_eagers_worker_saw_stands_once_in_its_block():
    watch = TurnWatch(2.0)
    watch.disturb(1, ["a stop"])
    watch.disturb(1, ["a stop", "other cores"])
    watch.disturb(2, [])
    assert [watch.state(block, "eager") for block in range(3)] == [{}, {"disturbed": ["a stop", "other cores"]}, {}]


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_the_system_counts_what_a_process_runs():
    before = cpu_times(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    time.sleep(0.001)  # the system adds a thread's time up when it leaves its core
    run = sum(after[0] - before[thread][0] for thread, after in cpu_times(os.getpid()).items() if thread in before)
    assert 40_000_000 < run < 500_000_000
    assert cpu_times(None) == cpu_times(1 << 22) == {}
