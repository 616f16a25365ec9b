"""The host's C: sums of versions against Python's, and launches through a stand-in for the driver."""

from __future__ import annotations

import ctypes
import shutil
import struct
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

from rooflane.families.cuda_kernel import parameter_bits
from rooflane.families.host import host_module, version_sum

HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
pytestmark = pytest.mark.skipif(
    not (HEADER.exists() and (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))),
    reason="needs a C compiler and Python's headers, as Triton's launches do",
)
FUNCTION, STREAM = 0x1234_5678_9ABC, 0xFEDC_BA98_7654
POINTERS, FIXED = 3, (0x7F00_0000_1000, 4, parameter_bits(1e-5), 2**64 - 1)
SIZES = [ctypes.c_uint] * 7
DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *SIZES, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


class StandIn:
    """Takes the driver's place: notes what a launch was given and returns a status."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[int, tuple[int, ...], int, list[int]]] = []

        def launch(function, *arguments):
            *sizes, stream, parameters, extra = arguments
            assert extra is None
            count = POINTERS + len(FIXED)
            bits = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(count)]
            self.calls.append((function, tuple(sizes), stream, bits))
            return status

        self._kept = DRIVER(launch)
        self.entry = ctypes.cast(self._kept, ctypes.c_void_p).value

    def launcher(self, pointers: int = POINTERS, fixed: tuple[int, ...] = FIXED, enter=lambda: None):
        return host_module().Launcher(self.entry, FUNCTION, 132, 256, 217600, pointers, fixed, enter)


def test_a_thread_without_a_context_enters_one_and_launches_again():
    driver, entered = StandIn(status=201), []
    launch = driver.launcher(enter=lambda: entered.append(len(driver.calls)))
    with pytest.raises(RuntimeError, match="status 201"):
        launch(STREAM, 1, 2, 3)
    assert entered == [1] and len(driver.calls) == 2, "once, and the second refusal is told"


def test_what_entering_raises_is_told():
    def enter():
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        StandIn(status=201).launcher(enter=enter)(STREAM, 1, 2, 3)


def test_a_launch_hands_the_driver_its_bits():
    driver = StandIn()
    launch = driver.launcher()
    assert launch(STREAM, 16, None, 2**63) is None
    launch(0, 1, 2, 3)
    sizes = (132, 1, 1, 256, 1, 1, 217600)
    assert driver.calls[0] == (FUNCTION, sizes, STREAM, [16, 0, 2**63, *FIXED])
    assert driver.calls[1] == (FUNCTION, sizes, None, [1, 2, 3, *FIXED])


@pytest.mark.parametrize("arguments", [(), (1, 2, 3), (1, 2, 3, 4, 5)], ids=len)
def test_another_number_of_addresses_is_refused(arguments):
    driver = StandIn()
    with pytest.raises(TypeError, match="a stream and 3 addresses"):
        driver.launcher()(*arguments)
    assert not driver.calls


@pytest.mark.parametrize("arguments", [("stream", 1, 2, 3), (0, 1.5, 2, 3), (0, 1, 2, torch.zeros(1)), (None, 1, 2, 3)])
def test_what_is_no_address_is_refused(arguments):
    driver = StandIn()
    with pytest.raises(TypeError):
        driver.launcher()(*arguments)
    assert not driver.calls


def test_an_address_out_of_range_and_a_name_are_refused():
    driver = StandIn()
    with pytest.raises(OverflowError):
        driver.launcher()(0, -1, 2, 3)
    with pytest.raises(TypeError):
        driver.launcher()(0, 1, 2, out=3)
    assert not driver.calls


def test_a_launch_the_driver_refuses_raises():
    with pytest.raises(RuntimeError, match="status 701"):
        StandIn(701).launcher()(0, 1, 2, 3)


def test_a_launcher_that_cannot_be_is_refused():
    driver = StandIn()
    with pytest.raises(ValueError, match="at most 24"):
        driver.launcher(fixed=(0,) * 22)
    with pytest.raises(ValueError, match="at most 24"):
        driver.launcher(pointers=-1)
    with pytest.raises(TypeError):
        driver.launcher(fixed=(1.5,))
    with pytest.raises(TypeError):
        driver.launcher(fixed=[1])


def test_parameter_bits():
    tensor = torch.zeros(4)
    assert parameter_bits(tensor[1:]) == tensor.data_ptr() + 4
    assert parameter_bits(7) == 7 and parameter_bits(-1) == 2**32 - 1
    assert parameter_bits(1.0) == 0x3F800000
    assert struct.unpack("<f", struct.pack("<I", parameter_bits(1e-5)))[0] == pytest.approx(1e-5, rel=1e-6)
    with pytest.raises(struct.error):
        parameter_bits(2**31)


def test_versions_sum_as_pythons_do():
    model = nn.TransformerEncoderLayer(16, 2, 16)
    parameters = list(model.parameters())
    sums = []
    for change in range(4):
        with torch.no_grad():
            parameters[change].add_(1.0)
            parameters[0].mul_(2.0)
        sums.append(version_sum()(parameters))
        assert sums[-1] == sum(parameter._version for parameter in parameters)
    assert sums == sorted(set(sums)), "every change is seen"
    assert version_sum()([]) == 0


def test_a_sum_over_something_else_is_refused():
    with pytest.raises(TypeError, match="no such getter"):
        version_sum()([torch.zeros(1), 3])
    with pytest.raises(TypeError, match="a list"):
        version_sum()((torch.zeros(1),))
    with pytest.raises(TypeError, match="descriptor"):
        host_module().sum_getter([], 3)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        version_sum()([torch.zeros(1)])
