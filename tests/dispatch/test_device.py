"""The device at hand, with NVIDIA's library replaced by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rooflane.dispatch.device import device_name, host_memory_bytes


class FakeNvml(SimpleNamespace):
    class NVMLError(Exception):
        pass

    names = {0: "NVIDIA H200", 1: "NVIDIA L4", "GPU-abc": b"NVIDIA T4"}
    broken = False
    open = 0

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index not in self.names:
            raise self.NVMLError
        return index

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex

    def nvmlDeviceGetName(self, handle):
        return self.names[handle]


@pytest.fixture
def nvml(monkeypatch):
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield library
    assert library.open == 0


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "NVIDIA H200"),
        ("1,0", "NVIDIA L4"),
        ("GPU-abc", "NVIDIA T4"),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_visible_devices_choose(nvml, monkeypatch, visible, name):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_name() == name


def test_no_driver_means_no_device(nvml):
    nvml.broken = True
    assert device_name() is None


def test_no_library_means_no_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_name() is None


def test_host_memory_is_plausible():
    assert host_memory_bytes() > 2**28
