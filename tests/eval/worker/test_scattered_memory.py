"""Blocks with holes between them: how much they take, and that all of it comes back."""

from __future__ import annotations

import pytest
import torch

from rooflane.eval.submit.campaign import scatter_seed
from rooflane.eval.worker import worker as worker_module
from rooflane.eval.worker.scattered_memory import BLOCKS, PAGE_BYTES, SHARE, ScatteredMemory, scatter_memory
from rooflane.eval.worker.worker import Worker
from rooflane.shapes import Shape

H200_BYTES = 140_000_000_000


class Device:
    """A device that hands out addresses in order and may run out."""

    def __init__(self, blocks: int = 10**9) -> None:
        self.blocks = blocks
        self.sizes: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        if len(self.sizes) == self.blocks:
            raise MemoryError
        address = len(self.sizes) * 2**40
        self.sizes[address] = self.taken[address] = size
        return address

    def free(self, address: int) -> None:
        del self.taken[address]

    def scatter(self, seed: str, total_bytes: int = H200_BYTES) -> ScatteredMemory:
        return ScatteredMemory(seed, total_bytes, self.allocate, self.free)


def test_half_of_the_blocks_stay_taken_in_a_64th_of_the_memory():
    device = Device()
    device.scatter("1")
    assert len(device.sizes) == BLOCKS == 48 and len(device.taken) == 24
    assert sum(device.sizes.values()) <= H200_BYTES / SHARE
    assert all(size >= PAGE_BYTES and size % PAGE_BYTES == 0 for size in device.sizes.values())
    # Neighbours of one sort alone would be one block, or one hole.
    places = [address in device.taken for address in sorted(device.sizes)]
    assert sum(left != right for left, right in zip(places, places[1:], strict=False)) > 12


def test_a_seed_says_it_all():
    one, again, other = Device(), Device(), Device()
    for device, seed in ((one, "1"), (again, "1"), (other, "2")):
        device.scatter(seed)
    assert one.sizes == again.sizes and one.taken == again.taken
    assert one.sizes != other.sizes


def test_release_gives_everything_back_once():
    device = Device()
    scattered = device.scatter("1")
    scattered.release()
    assert not device.taken
    scattered.release()


def test_short_memory_is_left_alone():
    device = Device(blocks=30)
    device.scatter("1").release()
    assert len(device.sizes) == 30 and not device.taken
    none = Device()
    none.scatter("1", total_bytes=BLOCKS * SHARE * PAGE_BYTES - 1)
    assert not none.sizes


def test_without_the_drivers_library_nothing_is_scattered(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert scatter_memory("1") is None


def test_a_worker_scatters_for_each_shape_and_gives_back_behind_it(monkeypatch):
    devices, seeds = [], []

    def scatter(seed: str) -> ScatteredMemory:
        devices.append(Device())
        seeds.append(seed)
        return devices[-1].scatter(seed)

    monkeypatch.setattr(worker_module, "scatter_memory", scatter)
    worker = Worker([])
    worker.device = torch.device("cuda")
    monkeypatch.setattr(worker_module.oversize, "cap_memory", lambda *values: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def stop(*values):
        raise RuntimeError("no such device")

    monkeypatch.setattr(worker_module, "build_baseline", stop)
    shape = Shape("t", 2, 8, 16, 2, 16, 1).as_dict()
    for seed in (3, 4):
        assert worker.answer({"op": "shape", "shape": shape, "seed": seed, "memory_cap_bytes": None})["failed"]
    # A shape that could not even begin has given its blocks back when the next one scatters anew.
    assert seeds == ["3", "4"] and not devices[0].taken and len(devices[1].taken) == 24
    worker.answer({"op": "end_shape"})
    assert not devices[1].taken


def test_the_first_run_of_the_script_is_the_script_as_it_is():
    shape = Shape("a", 2, 8, 16, 2, 16, 1)
    assert [scatter_seed("cuda", process, shape) for process in range(3)] == ["", "1 a", "2 a"]
    assert scatter_seed("cpu", 1, shape) == ""


@pytest.mark.gpu
def test_no_allocator_counts_what_the_driver_gave():
    torch.cuda.synchronize()
    (free, total), counted = torch.cuda.mem_get_info(), torch.cuda.memory_reserved()
    scattered = scatter_memory("1")
    assert 0 < free - torch.cuda.mem_get_info()[0] <= total / SHARE
    assert torch.cuda.memory_reserved() == counted
    scattered.release()
    assert free - torch.cuda.mem_get_info()[0] <= PAGE_BYTES
