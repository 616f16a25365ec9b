"""The C++ host path: launches through a stand-in for the driver, and sums of versions."""

from __future__ import annotations

import gc
import struct
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from rooflane.families.runtime import host
from rooflane.families.runtime.call_checks import ALIGNMENT
from rooflane.families.runtime.cuda_kernel import parameter_bits
from rooflane.families.runtime.host import PythonLauncher, host_module
from rooflane.families.runtime.weights import PackedWeights

STREAM = 0xFEDC_BA98_7654


@pytest.fixture(params=["C++", "Python"])
def launcher(request):
    """Each of the two launchers."""
    return PythonLauncher if request.param == "Python" else request.getfixturevalue("compiled").Launcher


def test_a_launch_gives_the_driver_its_bits(launcher, tensors, stand_in):
    driver = stand_in()
    launch = driver.launcher(launcher)
    x, mask, out = tensors
    assert launch(STREAM, x, mask, out) is None
    launch(0, x, None, out)
    sizes = (132, 1, 1, 256, 1, 1, 217600)
    pointers = [tensor.data_ptr() for tensor in tensors]
    assert driver.calls[0] == (driver.FUNCTION, sizes, STREAM, [*pointers, *driver.FIXED])
    assert driver.calls[1] == (driver.FUNCTION, sizes, 0, [pointers[0], 0, pointers[2], *driver.FIXED])


def test_a_launcher_keeps_the_tensors_behind_its_addresses_alive(launcher, tensors, stand_in):
    weights = torch.zeros(4)
    watch = weakref.ref(weights)
    launch = stand_in().launcher(launcher, held=(weights,))
    del weights
    gc.collect()
    assert watch() is not None
    del launch
    gc.collect()
    assert watch() is None


def test_a_thread_without_a_context_enters_one_and_launches_again(launcher, tensors, stand_in):
    driver, entered = stand_in(201, 0), []
    driver.launcher(launcher, enter=lambda: entered.append(len(driver.calls)))(STREAM, *tensors)
    assert entered == [1] and len(driver.calls) == 2
    refused, entered = stand_in(201), []
    with pytest.raises(RuntimeError, match="status 201"):
        refused.launcher(launcher, enter=lambda: entered.append(len(refused.calls)))(STREAM, *tensors)
    assert entered == [1] and len(refused.calls) == 2, "one more try, and the second refusal is reported"


def test_an_error_of_entering_is_raised(launcher, tensors, stand_in):
    def enter():
        raise LookupError("no such device")

    with pytest.raises(LookupError, match="no such device"):
        stand_in(201).launcher(launcher, enter=enter)(STREAM, *tensors)


def test_a_launch_the_driver_refuses_raises(launcher, tensors, stand_in):
    with pytest.raises(RuntimeError, match="status 701"):
        stand_in(701).launcher(launcher)(0, *tensors)


@pytest.mark.parametrize("stream", ["stream", -1, 1.5, None])
def test_a_wrong_stream_is_refused(stream, tensors, stand_in, compiled):
    driver = stand_in()
    with pytest.raises(TypeError):
        driver.launcher(host_module().Launcher)(stream, *tensors)
    assert not driver.calls


@pytest.mark.parametrize("given", [(), (0,), (0, "x", None, "out"), (0, 16, 32, 48)], ids=str)
def test_wrong_launch_arguments_are_refused(given, stand_in, compiled):
    driver = stand_in()
    with pytest.raises(TypeError):
        driver.launcher(host_module().Launcher)(*given)
    assert not driver.calls


@pytest.mark.parametrize("fixed", [(1.5,), (-1,), ("a",), 7])
def test_wrong_fixed_parameters_are_refused(fixed, stand_in, compiled):
    with pytest.raises(TypeError):
        stand_in().launcher(host_module().Launcher, fixed=fixed)


def test_parameter_bits():
    tensor = torch.zeros(4)
    assert parameter_bits(tensor[1:]) == tensor.data_ptr() + 4
    assert parameter_bits(7) == 7 and parameter_bits(-1) == 2**32 - 1
    assert parameter_bits(1.0) == 0x3F800000
    assert struct.unpack("<f", struct.pack("<I", parameter_bits(1e-5)))[0] == pytest.approx(1e-5, rel=1e-6)
    with pytest.raises(struct.error):
        parameter_bits(2**31)


def test_the_sum_of_versions_equals_pythons(compiled):
    model = nn.TransformerEncoderLayer(16, 2, 16)
    parameters = list(model.parameters())
    sums = []
    for change in range(4):
        with torch.no_grad():
            parameters[change].add_(1.0)
            parameters[0].mul_(2.0)
        sums.append(host_module().sum_versions(parameters))
        assert sums[-1] == sum(parameter._version for parameter in parameters)
    assert sums == sorted(set(sums)), "every change shows"
    assert host_module().sum_versions([]) == 0


def test_a_sum_over_anything_but_tensors_is_refused(compiled):
    add = host_module().sum_versions
    with pytest.raises(TypeError, match="a list of tensors"):
        add([torch.zeros(1), 3])
    with pytest.raises(TypeError):
        add((torch.zeros(1),))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        add([torch.zeros(1)])


def test_both_languages_have_one_alignment_and_one_status():
    code = Path(host.__file__).with_name("host.cpp").read_text()
    assert f"ALIGNMENT = {ALIGNMENT};" in code and f"NO_CONTEXT = {host.NO_CONTEXT};" in code


def test_packed_weights_notice_a_change_either_way():
    model = nn.Linear(4, 4)
    weights = PackedWeights(model, lambda source: {"weight": source.weight.clone()})
    assert not weights.refresh()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert weights.refresh() and torch.equal(weights.tensors["weight"], model.weight)
    assert not weights.refresh()
