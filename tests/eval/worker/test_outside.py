"""What other processes do to eager's is seen from inside it: stops, priority and cores, each on a real child."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rooflane.eval.worker.outside import CORES, PRIORITY, STOPPED, Standing, standing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process reads its scheduling from /proc")

# Looks when a line arrives; a second thread stands for torch's.
CHILD = """
import os, sys, threading
from rooflane.eval.worker.outside import Outside, standing
threading.Thread(target=threading.Event().wait, daemon=True).start()
outside = Outside(standing())
print(*os.listdir("/proc/self/task"), flush=True)
for line in sys.stdin:
    print(repr(outside.found([set(map(int, line.split()))] if line.strip() else [])), flush=True)
"""


@pytest.fixture(scope="module")
def start():
    """Return a function that starts a child: its process, its threads, and a way to have it look."""
    started = []

    def make():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        threads = sorted(map(int, child.stdout.readline().split()))

        def look(cores=""):
            child.stdin.write(f"{cores}\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        return child.pid, threads, look

    yield make
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def child(start):
    return start()


def test_a_process_left_alone_sees_nothing(child):
    _, threads, look = child
    assert len(threads) == 2
    assert [look() for _ in range(3)] == ["[]"] * 3


def test_a_stop_is_seen_once_however_short(child):
    pid, _, look = child
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.05)  # until the signal is handled, in whichever thread
    assert [look(), look()] == [repr([STOPPED]), "[]"]


@pytest.mark.parametrize("which", [0, 1])
def test_another_priority_of_any_thread_is_seen(child, which):
    _, threads, look = child
    os.setpriority(os.PRIO_PROCESS, threads[which], os.getpriority(os.PRIO_PROCESS, 0) + 1)
    assert look() == repr([PRIORITY])


def test_another_policy_is_seen(child):
    pid, _, look = child
    os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
    assert look() == repr([PRIORITY])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be changed for another")
@pytest.mark.parametrize("which", [0, 1])
def test_other_cores_of_any_thread_are_seen_unless_the_process_chose_them(child, which):
    _, threads, look = child
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(threads[which], {core})
    assert look() == repr([CORES])
    assert look(core) == "[]"


def test_a_standing_is_what_the_parent_would_see():
    now = standing()
    assert now == Standing(
        os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), tuple(sorted(os.sched_getaffinity(0)))
    )
    assert standing(1 << 22) is None, "no such thread"
