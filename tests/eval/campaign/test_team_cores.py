"""Threads of a worker in the sandbox get all cores back from the parent: the worker may not set them by their ids."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rooflane.eval.campaign.team import Doing, Team
from rooflane.eval.worker.protocol import BusyWait, Done, Hello

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot choose its core here")

# Keeps itself and then a thread to one core, as a candidate's thread is that is started while its worker is held.
HELD = """
import os, sys, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
thread = threading.Thread(target=sys.stdin.read)
thread.start()
print(thread.native_id, flush=True)
"""


@pytest.fixture
def child():
    started = subprocess.Popen([sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield started
    started.stdin.close()
    started.wait(timeout=60)
    started.stdout.close()


@pytest.fixture
def team():
    made = Team(["mine"], Hello("cpu", {}, "", describe=False), 60.0)
    yield made
    made._workers.clear()
    made.close()


def test_threads_run_anywhere_again_when_the_wait_ends(child, team):
    thread, cores = int(child.stdout.readline()), os.sched_getaffinity(0)
    held = [min(cores)]
    team._workers["mine"] = SimpleNamespace(pid=child.pid, ask=lambda *anything: Done(), forged=[], end=lambda: None)
    team.ask("mine", BusyWait(on=True, cores=held), Doing("clocks"))
    assert os.sched_getaffinity(thread) == set(held)
    team.ask("mine", BusyWait(on=False, cores=[]), Doing("clocks"))
    assert os.sched_getaffinity(thread) == os.sched_getaffinity(child.pid) == cores


def test_a_worker_that_has_ended_has_no_threads_to_let_go(team):
    team._workers["mine"] = SimpleNamespace(pid=1 << 30, ask=lambda *anything: Done(), forged=[], end=lambda: None)
    team.ask("mine", BusyWait(on=True, cores=[0]), Doing("clocks"))
    team.ask("mine", BusyWait(on=False, cores=[]), Doing("clocks"))
