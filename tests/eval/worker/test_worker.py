"""A worker's wait for requests, busy or asleep."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from rooflane.eval.worker import worker as worker_module
from rooflane.eval.worker.process import Channel
from rooflane.eval.worker.protocol import BusyWait, Done, EndShape, Go, Hello, encode_request
from rooflane.eval.worker.worker import Worker


@pytest.fixture
def ends():
    """The parent's socket, and the worker's channel over the other end."""
    ours, theirs = socket.socketpair()
    yield ours, Channel(theirs.detach())
    ours.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_request_arrives_whole_however_it_is_waited_for(ends, busy):
    ours, channel = ends
    line = encode_request(Hello("cpu", {}, "x" * 100_000, describe=False), 1)

    def send():
        time.sleep(0.05)
        ours.sendall(line)

    sender = threading.Thread(target=send)
    sender.start()
    number, request = channel.receive(busy=busy)
    assert number == 1 and request.rules == "x" * 100_000
    sender.join()


@pytest.mark.parametrize("busy", [False, True])
def test_a_parent_that_is_gone_ends_the_wait(ends, busy):
    ours, channel = ends
    ours.close()
    assert channel.receive(busy=busy) is None


def test_busy_waiting_keeps_the_processor_and_waiting_asleep_does_not(ends):
    """A thread that sleeps between its windows loses its core; that is what the wait is for."""
    ours, channel = ends
    used = {}
    for busy in (False, True):
        threading.Timer(0.3, ours.sendall, [encode_request(Go(), 1)]).start()
        before = time.thread_time()
        channel.receive(busy=busy)
        used[busy] = time.thread_time() - before
    assert used[False] < 0.05 < used[True]


def test_a_worker_busy_waits_until_it_is_asked_to_stop_or_its_shape_ends(monkeypatch):
    monkeypatch.setattr(worker_module, "loop_ns", lambda: 111)
    worker = Worker([])
    monkeypatch.setattr(worker._core, "pace_ns", lambda: 95)
    held = []
    monkeypatch.setattr(worker._core, "hold", held.append)
    assert not worker.busy and worker._host_pace_ns() == 111
    assert worker.handle(BusyWait(True, [2, 3])) == Done()
    assert worker.busy and worker._host_pace_ns() == 95
    worker.handle(BusyWait(False, []))
    assert not worker.busy
    worker.handle(BusyWait(True, [4]))
    assert worker.handle(EndShape()) == Done()
    assert not worker.busy and held == [[2, 3], [], [4], ()]
