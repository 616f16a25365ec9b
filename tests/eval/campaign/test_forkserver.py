"""The fork server and its workers: one start for many workers, each with an end of its own."""

import os
import signal
import sys

import pytest

from rooflane.eval import evaluate
from rooflane.eval.campaign import forkserver
from rooflane.eval.campaign.launch import Buffer, Crash, WorkerProcess, end_strays
from rooflane.eval.worker.protocol import Failed, Hello
from rooflane.shapes import Shape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    buffer = Buffer()
    started = WorkerProcess("mine", (buffer,), timeout_s=60)
    yield started
    started.end()
    buffer.close()


def hello(worker):
    return worker.ask(Hello("cpu", {}, "", describe=False), "its start")


@pytest.mark.slow
def test_workers_share_one_server_and_nothing_else(worker):
    server = forkserver.fork_server()
    buffer = Buffer()
    other = WorkerProcess("other", (buffer,), timeout_s=60)
    try:
        assert forkserver.fork_server() is server
        assert len({worker.pid, other.pid, server.pid, os.getpid()}) == 4
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(Crash, match="SIGKILL"):
            hello(other)
        assert isinstance(hello(worker), Failed), "no profile was given; the worker lives and says so"
        assert server.alive()
    finally:
        other.end()
        buffer.close()


@pytest.mark.slow
def test_a_worker_that_lives_is_no_stray(worker):
    hello(worker)
    assert end_strays() == []
    assert isinstance(hello(worker), Failed)


@pytest.mark.slow
def test_the_server_has_one_thread_and_knows_no_seed(worker):
    server = forkserver.fork_server()
    assert len(os.listdir(f"/proc/{server.pid}/task")) == 1
    with open(f"/proc/{server.pid}/cmdline") as file:
        assert "seed" not in file.read()


@pytest.mark.slow
def test_what_cannot_be_loaded_ahead_is_left_to_the_workers(worker):
    server = forkserver.fork_server()
    server.preload(("json", "no_module_of_this_name"))
    assert server.alive() and isinstance(hello(worker), Failed)


@pytest.mark.slow
def test_a_server_that_ends_is_quoted(own_server):
    server = forkserver.fork_server()
    server.preload(())
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(forkserver.ForkServerError, match="the workers' server ended: it printed nothing"):
        server.poll(1)
    assert forkserver.fork_server() is not server


@pytest.mark.slow
def test_other_variables_mean_another_server(worker, monkeypatch):
    first = forkserver.fork_server()
    monkeypatch.setenv("ROOFLANE_TEST_VARIABLE", "1")
    second = forkserver.fork_server()
    assert second is not first
    assert not first.alive()


@pytest.mark.slow
def test_workers_start_a_new_interpreter_where_none_can_be_forked(monkeypatch):
    monkeypatch.setattr(forkserver, "available", lambda: False)
    buffer = Buffer()
    started = WorkerProcess("mine", (buffer,), timeout_s=120)
    try:
        assert forkserver.fork_server() is None
        assert isinstance(hello(started), Failed)
    finally:
        started.end()
        buffer.close()


@pytest.mark.slow
def test_lines_that_answer_nothing_are_noted_and_passed_over(worker):
    worker._partial = b'{"answers": 1, "event_ns": [1]}\nno json\n'
    assert isinstance(hello(worker), Failed)
    assert len(worker.forged) == 2
    assert "nothing that was asked" in worker.forged[0]


@pytest.mark.slow
def test_an_answer_that_no_harness_writes_costs_its_worker_and_is_reported(worker, monkeypatch):
    monkeypatch.setattr("rooflane.eval.campaign.launch.secrets.randbits", lambda bits: 7)
    worker._partial = b'{"answers": 7, "answer": "Greeting", "body": {"environment": {}, "uuid": 5}}\n'
    with pytest.raises(Crash, match="the worker's answer at its start is not what was asked for, and it was ended"):
        hello(worker)
    assert worker.forged == [
        "the answer at its start is not what the harness writes: Greeting, field uuid: Input should be a valid string"
    ]


@pytest.fixture
def own_server():
    """End the shared server before and after: the next one is started from the test's own folder."""
    forkserver.close_fork_server()
    yield
    forkserver.close_fork_server()


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False])
def test_a_file_named_like_a_module_of_pythons_own_is_not_taken_for_it(own_server, tmp_path, monkeypatch, forked):
    for name in ("random", "types", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a user file was imported')\n")
    monkeypatch.chdir(tmp_path)
    if not forked:
        monkeypatch.setattr(forkserver, "available", lambda: False)
    buffer = Buffer()
    started = WorkerProcess("mine", (buffer,), timeout_s=120)
    try:
        assert isinstance(hello(started), Failed), "no profile was given; the worker lives and says so"
    finally:
        started.end()
        buffer.close()


@pytest.mark.slow
def test_a_candidate_named_random_runs_and_imports_its_neighbour(own_server, tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("def same(out):\n    return out\n")
    (tmp_path / "random.py").write_text(
        "import neighbour\n\n\ndef build(model, shape, device):\n"
        "    return lambda x, mask=None: neighbour.same(model(x, mask))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = evaluate(
        [Shape("tiny", 2, 8, 16, 2, 16, 1)],
        "random.py",
        processes=1,
        device="cpu",
        profile="cpu",
        controls=(),
        budget_s=0.02,
    )
    assert {row.status for row in run.records()} == {"ok"}


@pytest.mark.slow
def test_a_reply_that_ctrl_c_left_unread_is_not_taken_for_the_next(own_server, monkeypatch):
    server = forkserver.fork_server()
    server.preload(())
    real = server._socket

    class Interrupted:
        """The server's socket, Ctrl-C at its first reply."""

        def sendmsg(self, *values):
            return real.sendmsg(*values)

        def recv(self, size):
            server._socket = real
            raise KeyboardInterrupt

    server._socket = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        server.preload(("json",))
    # No child of this number: the server answers that it is gone, and not that it imported something.
    assert server.poll(1) == -signal.SIGKILL
