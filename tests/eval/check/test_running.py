"""What changes in a worker's process while a candidate runs: named, and no evidence by itself."""

import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from rooflane.eval.check import running
from rooflane.eval.check.cases import Case, draw_case
from rooflane.eval.check.fingerprint import of_output
from rooflane.eval.check.running import LateWork, RunningState

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads and processes are read from /proc")


@contextmanager
def thread():
    stop = threading.Event()
    one = threading.Thread(target=stop.wait)
    one.start()
    yield one
    stop.set()
    one.join()
    # The system lists a thread for a moment after Python has joined it.
    while Path(f"/proc/self/task/{one.native_id}").exists():
        sleep(0.001)


@contextmanager
def process():
    one = subprocess.Popen(["sleep", "60"])
    yield one
    one.kill()
    one.wait()


FLAGS = {
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "the float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_changed_flag_is_named_with_both_values(name):
    read, write, other = FLAGS[name]
    state, before = RunningState(), read()
    write(other)
    try:
        assert f"in the candidate's own process {name} went from {before} to {other}" in state.changes()
    finally:
        write(before)
    assert state.changes() == []


@linux
@pytest.mark.parametrize(("start", "said"), [(thread, "1 thread of"), (process, "1 process of")])
def test_what_came_after_settling_is_counted_while_it_runs(start, said):
    state = RunningState()
    with start():
        assert state.changes() == [], "nothing was settled yet"
    state.settle()
    with start():
        (line,) = state.changes()
        assert line.startswith(said) and line.endswith("came while it was timed")
    assert state.changes() == []


@linux
def test_a_thread_that_ended_does_not_make_up_for_one_that_came():
    with thread() as early:
        state = RunningState()
        state.settle()
    assert not early.is_alive()
    with thread():
        assert len(state.changes()) == 1


@linux
@pytest.mark.parametrize("start", [thread, process])
def test_late_work_is_waited_for_and_not_for_ever(start):
    began = monotonic()
    LateWork().wait()
    assert monotonic() - began < running.LATE_WORK_S, "nothing appeared"
    late = LateWork()
    with start():
        began = monotonic()
        late.wait()
        assert running.LATE_WORK_S <= monotonic() - began < 1


@linux
def test_late_work_that_ends_soon_is_waited_for_until_it_ends():
    late, done = LateWork(), []
    timer = threading.Timer(0.01, lambda: done.append(True))
    timer.start()
    late.wait()
    assert done


@linux
def test_children_are_found_where_the_kernel_lists_none():
    with process() as one:
        assert one.pid in running._processes_of(running.os.getpid())
    assert one.pid not in running._processes_of(running.os.getpid())


@pytest.mark.parametrize("kind", ["drawn", "mask", "stress", "swapped", "halved", "nudged"])
def test_what_the_harness_draws_does_not_depend_on_the_default_dtype(tiny_shape, kind):
    name = {"mask": "holes", "stress": "plain"}.get(kind, "")
    drawn = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            x, mask = draw_case(Case(3, 0.3 if kind != "mask" else 0.0, kind, name), tiny_shape, torch.device("cpu"))
            drawn.append((x, mask, of_output(x, tiny_shape.tokens, 5)))
        finally:
            torch.set_default_dtype(torch.float32)
    for other in drawn[1:]:
        assert all(torch.equal(one, two) for one, two in zip(drawn[0], other, strict=True))
