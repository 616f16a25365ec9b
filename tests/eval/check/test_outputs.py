"""Outputs' shared memory: pinned where there is a GPU, and unpinned before it goes."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest
import torch

from rooflane.eval.check.outputs import SharedBytes


@pytest.fixture
def descriptor():
    number = os.memfd_create("test")
    yield number
    os.close(number)


def test_bytes_written_are_read_back_in_order(descriptor):
    out = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()
    SharedBytes(descriptor).write(out)
    assert torch.equal(SharedBytes(descriptor).read((6, 4), torch.float32, torch.device("cpu")), out)


def test_memory_is_unpinned_before_it_goes(descriptor, monkeypatch):
    """The runtime refuses to pin an address that is still pinned, and a new mapping may get an old one's."""
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(("pin", address, size)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unpin", address)),
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = SharedBytes(descriptor)
    memory.write(torch.zeros(10))
    memory.write(torch.zeros(5))
    (first,) = calls
    assert first[2] % os.sysconf("SC_PAGE_SIZE") == 0, "whole pages, as the runtime pins them"
    memory.write(torch.zeros(5000))
    assert calls[1] == ("unpin", first[1]) and calls[2][0] == "pin" and len(calls) == 3
    second = calls[2][1]
    del memory
    gc.collect()
    assert calls[3:] == [("unpin", second)]
