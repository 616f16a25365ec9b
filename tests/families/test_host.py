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
from rooflane.families.runtime.watch import ModelWatch, StructureChanged
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


def watched(module):
    """Return a watch of a module whose comparison is in C++, as a model's on a GPU is."""
    watch = ModelWatch(module)
    watch._native = host_module().Watch
    watch._take()
    return watch


CHANGES = {
    "a version": lambda m: m.linear1.weight.mul_(2.0),
    "an address": lambda m: setattr(m.linear1.weight, "data", torch.zeros(16, 16)),
    "strides": lambda m: setattr(m.linear1.weight, "data", m.linear1.weight.data.t()),
    "two exchanged addresses": lambda m: exchange(m.linear1.weight, m.linear2.weight),
    "a parameter": lambda m: m.linear1._parameters.update(weight=torch.zeros(16, 16)),
    "a part of the same kind": lambda m: setattr(m, "linear2", nn.Linear(16, 16)),
}


def exchange(one, other):
    one.data, other.data = other.data, one.data


@pytest.mark.parametrize("native", [True, False], ids=["C++", "Python"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_watch_sees_other_weights_once(compiled, native, change):
    module = nn.TransformerEncoderLayer(16, 2, 16)
    watch = watched(module) if native else ModelWatch(module)
    assert not watch.changed() and not watch.changed()
    with torch.no_grad():
        CHANGES[change](module)
    assert watch.changed() and not watch.changed()


def hook(module):
    module.linear1.register_forward_hook(lambda *arguments: None)


FUNCTIONS = {
    "eps": lambda m: setattr(m.norm2, "eps", 0.1),
    "heads": lambda m: setattr(m.self_attn, "num_heads", 4),
    "activation": lambda m: setattr(m, "activation", torch.tanh),
    "a hook": hook,
    "a forward of its own": lambda m: setattr(m.linear1, "forward", torch.tanh),
    "a deleted part": lambda m: delattr(m, "norm1"),
    "a part of another kind": lambda m: setattr(m, "norm1", nn.RMSNorm(16)),
    "a class": lambda m: setattr(m.linear1, "__class__", nn.Bilinear),
    "a shape": lambda m: setattr(m, "linear1", nn.Linear(16, 8)),
    "a buffer": lambda m: m.register_buffer("gate", torch.zeros(1)),
}


@pytest.mark.parametrize("native", [True, False], ids=["C++", "Python"])
@pytest.mark.parametrize("change", FUNCTIONS)
def test_a_watch_names_another_function_every_time(compiled, native, change):
    module = nn.TransformerEncoderLayer(16, 2, 16)
    watch = watched(module) if native else ModelWatch(module)
    FUNCTIONS[change](module)
    for _ in range(2):
        with pytest.raises(StructureChanged, match="were changed after the forward was built"):
            watch.changed()


def test_a_watch_over_anything_but_tensors_is_refused(compiled):
    with pytest.raises(TypeError, match="a list of tensors"):
        host_module().Watch(*[[]] * 7, [torch.zeros(1), 3])


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
