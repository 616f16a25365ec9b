"""What a worker sees of tampering in its own process."""

import sys
import time

import pytest
import torch

from rooflane.eval.check.tamper import CANDIDATE_MODULE, ProcessState, digest
from rooflane.eval.worker import clock


@pytest.mark.parametrize(
    ("owner", "name"),
    [(time, "perf_counter_ns"), (torch, "equal"), (torch.cuda.Event, "elapsed_time"), (clock, "_now")],
)
def test_a_replaced_function_is_named(monkeypatch, owner, name):
    state = ProcessState()
    assert state.changes() == []
    monkeypatch.setattr(owner, name, lambda *_: 0)
    (line,) = state.changes()
    assert line.endswith("was replaced while the candidate ran")
    assert name in line


@pytest.mark.parametrize("name", ["__compiled_fn_1_79a7", "__resume_at_12_3"])
def test_what_the_compiler_puts_into_a_module_and_takes_out_again_is_no_finding(monkeypatch, name):
    monkeypatch.setattr(clock, name, lambda: None, raising=False)
    state = ProcessState()
    monkeypatch.delattr(clock, name)
    assert state.changes() == []


def test_code_put_into_a_function_of_the_harness_is_seen(monkeypatch):
    state = ProcessState()

    def always(device):
        return None

    monkeypatch.setattr(clock.make_clock, "__code__", always.__code__)
    lines = state.changes()
    assert "rooflane.eval.worker.clock.make_clock was replaced while the candidate ran" in lines
    # Every module of the harness that imported it has its own line.
    assert all(line.endswith(".make_clock was replaced while the candidate ran") for line in lines)


def test_an_import_hook_of_the_candidates_is_named(monkeypatch):
    hook = type("Hook", (), {"__module__": f"{CANDIDATE_MODULE}mine", "find_spec": lambda *_: None})()
    state = ProcessState()
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert state.changes() == ["the candidate put an import hook in place (Hook)"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64])
def test_a_digest_depends_on_every_bit_and_its_place(dtype):
    values = (torch.arange(37) % 2).to(dtype)
    swapped = values.clone()
    swapped[3], swapped[4] = values[4], values[3]
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(swapped)
    assert digest(torch.zeros(5)) != digest(torch.zeros(5).neg()), "a sign bit is a bit"
