"""The script's own protocol in a candidate's worker: its order, its one input, and an eager that is too large."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rooflane.eval.worker.clock import CpuClock
from rooflane.eval.worker.script_rounds import ScriptRounds
from rooflane.eval.worker.subject import Subject
from rooflane.eval.worker.windows import Windows

CPU = torch.device("cpu")


@pytest.fixture
def make_rounds(tiny_shape):
    """Return a function that makes rounds over an eager and a candidate's forward, and the calls they will get."""

    def make(eager=None, mine=None):
        calls = []

        def called(name, forward):
            def run(x, mask):
                calls.append((name, x))
                return forward(x) if forward else x.clone()

            return run

        subject = Subject(tiny_shape, CPU, None, None, called("eager", eager), None)
        subject.arms["mine"] = SimpleNamespace(forward=called("mine", mine))
        looks = []
        return ScriptRounds(Windows(subject, CpuClock(), lambda: looks.append(len(calls)) or 1)), calls, looks

    return make


def test_warm_ups_then_rounds_in_turn_on_one_input(make_rounds):
    """The script warms the baseline, then ours; even rounds start with the baseline, odd ones with ours."""
    rounds, calls, looks = make_rounds()
    found = rounds.script_rounds("mine", seed=3, warmups=2, repeats=3, rounds=4)
    order = [name for name, _ in calls]
    e, m = ["eager"] * 3, ["mine"] * 3
    assert order == ["eager"] * 2 + ["mine"] * 2 + e + m + m + e + e + m + m + e
    assert all(x is calls[0][1] for _, x in calls)
    assert looks == [0], "the host is looked at before anything is warm"
    assert [len(part) for part in found["bare_ns"]] == [len(part) for part in found["bare_eager_ns"]] == [3] * 4
    assert min(min(part) for part in found["bare_ns"]) > 0


def test_eager_that_does_not_fit_beside_the_candidate_is_told(make_rounds):
    def too_large(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rounds, _, _ = make_rounds(eager=too_large)
    found = rounds.script_rounds("mine", 3, 1, 2, 4)
    assert found["failed"] == "oom" and "out of memory" in found["reason"]


def test_a_candidate_that_raises_is_told(make_rounds):
    def broken(x):
        raise RuntimeError("not today")

    rounds, _, _ = make_rounds(mine=broken)
    found = rounds.script_rounds("mine", 3, 1, 2, 4)
    assert found["failed"] == "error" and "not today" in found["reason"]
