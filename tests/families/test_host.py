"""The host path: launches through a stand-in for the driver, the common call against Python's own, sums of versions."""

from __future__ import annotations

import gc
import struct
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from rooflane.families import host
from rooflane.families.cuda_kernel import parameter_bits
from rooflane.families.host import PythonLauncher, host_module
from rooflane.families.weights import PackedWeights

STREAM = 0xFEDC_BA98_7654
B, S, D = 2, 3, 8


@pytest.fixture(params=["C++", "Python"])
def launcher(request):
    """Each of the two launchers."""
    return PythonLauncher if request.param == "Python" else request.getfixturevalue("compiled").Launcher


@pytest.fixture
def tensors():
    return torch.ones(B, S, D), torch.ones(B, S, dtype=torch.bool), torch.zeros(B, S, D)


def test_a_launch_hands_the_driver_its_bits(launcher, tensors, stand_in):
    driver = stand_in()
    launch = driver.launcher(launcher)
    x, mask, out = tensors
    assert launch(STREAM, x, mask, out) is None
    launch(0, x, None, out)
    sizes = (132, 1, 1, 256, 1, 1, 217600)
    pointers = [tensor.data_ptr() for tensor in tensors]
    assert driver.calls[0] == (driver.FUNCTION, sizes, STREAM, [*pointers, *driver.FIXED])
    assert driver.calls[1] == (driver.FUNCTION, sizes, 0, [pointers[0], 0, pointers[2], *driver.FIXED])


def test_a_launcher_keeps_what_its_kernel_knows_by_address(launcher, tensors, stand_in):
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
    assert entered == [1] and len(refused.calls) == 2, "once, and the second refusal is told"


def test_what_entering_raises_is_told(launcher, tensors, stand_in):
    def enter():
        raise LookupError("no such device")

    with pytest.raises(LookupError, match="no such device"):
        stand_in(201).launcher(launcher, enter=enter)(STREAM, *tensors)


def test_a_launch_the_driver_refuses_raises(launcher, tensors, stand_in):
    with pytest.raises(RuntimeError, match="status 701"):
        stand_in(701).launcher(launcher)(0, *tensors)


@pytest.mark.parametrize("stream", ["stream", -1, 1.5, None])
def test_what_is_no_stream_is_refused(stream, tensors, stand_in, compiled):
    driver = stand_in()
    with pytest.raises(TypeError):
        driver.launcher(host_module().Launcher)(stream, *tensors)
    assert not driver.calls


@pytest.mark.parametrize("given", [(), (0,), (0, "x", None, "out"), (0, 16, 32, 48)], ids=str)
def test_what_is_no_launch_is_refused(given, stand_in, compiled):
    driver = stand_in()
    with pytest.raises(TypeError):
        driver.launcher(host_module().Launcher)(*given)
    assert not driver.calls


@pytest.mark.parametrize("fixed", [(1.5,), (-1,), ("a",), 7])
def test_a_launcher_that_cannot_be_is_refused(fixed, stand_in, compiled):
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


def test_versions_sum_as_pythons_do(compiled):
    model = nn.TransformerEncoderLayer(16, 2, 16)
    parameters = list(model.parameters())
    sums = []
    for change in range(4):
        with torch.no_grad():
            parameters[change].add_(1.0)
            parameters[0].mul_(2.0)
        sums.append(host_module().sum_versions(parameters))
        assert sums[-1] == sum(parameter._version for parameter in parameters)
    assert sums == sorted(set(sums)), "every change is seen"
    assert host_module().sum_versions([]) == 0


def test_a_sum_over_something_else_is_refused(compiled):
    add = host_module().sum_versions
    with pytest.raises(TypeError, match="a list of tensors"):
        add([torch.zeros(1), 3])
    with pytest.raises(TypeError):
        add((torch.zeros(1),))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        add([torch.zeros(1)])


class Bound:
    """What a bound forward hands to the common call, with each part noted as it is used."""

    def __init__(self, driver) -> None:
        self.driver, self.used = driver, []
        self.launches: dict[bool, object] = {}
        self.device, self.stream, self.changed = 0, STREAM, False
        self.call = host_module().Call(
            self.path, self.launches, lambda: self.device, self.stream_of, self.enter, self.refresh,
            torch.device("cpu"), 0, torch.float32, (B, S, D),
        )  # fmt: skip

    def path(self, x, mask):
        self.used.append("path")
        return "path"

    def stream_of(self, index):
        assert index == 0
        return self.stream

    def enter(self, stream):
        self.used.append(("enter", stream))

    def refresh(self):
        self.used.append(f"refresh after {len(self.driver.calls)}")
        return self.changed

    def bind(self, masked):
        self.launches[masked] = self.driver.launcher(host_module().Launcher)


@pytest.fixture
def bound(compiled, stand_in):
    return Bound(stand_in())


def test_a_common_call_enters_the_stream_launches_and_then_looks_at_the_weights(bound, tensors):
    x, mask, _ = tensors
    bound.bind(True), bound.bind(False)
    out = bound.call(x, mask)
    assert bound.used == [("enter", STREAM), "refresh after 1"]
    assert out.shape == x.shape and out.dtype == x.dtype and out.device == x.device and not out.requires_grad
    assert bound.driver.calls[0][3][:3] == [x.data_ptr(), mask.data_ptr(), out.data_ptr()]
    for given in ((x,), (x, None)):
        other = bound.call(*given)
        assert bound.driver.calls[-1][3][:3] == [x.data_ptr(), 0, other.data_ptr()]
        assert other.data_ptr() != out.data_ptr()
    bound.call(x=x, mask=mask)
    assert bound.driver.calls[-1][3][1] == mask.data_ptr()


def test_a_call_whose_weights_changed_launches_again_into_the_same_output(bound, tensors):
    x, mask, _ = tensors
    bound.bind(True)
    bound.changed = True
    out = bound.call(x, mask)
    assert [call[3][2] for call in bound.driver.calls] == [out.data_ptr()] * 2
    assert bound.used[-1] == "refresh after 1", "between the two launches"


def test_a_call_on_another_stream_goes_there(bound, tensors):
    bound.bind(False)
    for bound.stream in (STREAM, 0, 2**64 - 1):
        bound.call(tensors[0])
    assert [call[2] for call in bound.driver.calls] == [STREAM, 0, 2**64 - 1]
    assert [part[1] for part in bound.used if part[0] == "enter"] == [STREAM, 0, 2**64 - 1]


def uncommon(x, mask):
    """Calls that are not the common one, by what is uncommon about them."""

    class Other(torch.Tensor):
        pass

    odd = torch.zeros(B * S * D + 1)[1:].view(B, S, D)
    strided = torch.zeros(B, D, S).transpose(1, 2)
    return {
        "a batch": (torch.zeros(B + 1, S, D), None),
        "two dimensions": (torch.zeros(B * S, D), None),
        "a dtype": (x.double(), None),
        "a device": (x.to("meta"), None),
        "an odd address": (odd, None),
        "strides": (strided, None),
        "a subclass": (x.as_subclass(Other), None),
        "no tensor": ([1.0], None),
        "a mask of another dtype": (x, mask.float()),
        "a mask of another shape": (x, mask[:, :2]),
        "a mask with strides": (x, torch.ones(S, B, dtype=torch.bool).T),
        "a mask elsewhere": (x, mask.to("meta")),
        "a mask that is no tensor": (x, 1),
    }  # fmt: skip


@pytest.mark.parametrize("what", uncommon(torch.ones(B, S, D), torch.ones(B, S, dtype=torch.bool)))
def test_an_uncommon_call_takes_pythons_path(bound, tensors, what):
    bound.bind(True), bound.bind(False)
    assert bound.call(*uncommon(*tensors[:2])[what]) == "path"
    assert bound.used == ["path"] and not bound.driver.calls


def test_what_is_not_bound_and_another_current_device_take_pythons_path(bound, tensors):
    x, mask, _ = tensors
    bound.bind(True)
    assert bound.call(x) == "path"
    bound.device = 1
    assert bound.call(x, mask) == "path"
    assert not bound.driver.calls


def test_a_launch_in_python_gets_the_calls_own_tensors(bound, tensors):
    x, mask, _ = tensors
    given = []
    bound.launches[True] = lambda *arguments: given.append(arguments)
    bound.changed = True
    out = bound.call(x, mask)
    assert len(given) == 2
    for stream, *got in given:
        assert stream == STREAM and all(one is other for one, other in zip(got, (x, mask, out), strict=True))


def test_outputs_belong_to_the_mode_of_the_call(bound, tensors):
    bound.bind(False)
    with torch.inference_mode():
        assert bound.call(tensors[0]).is_inference()
    assert not bound.call(tensors[0]).is_inference()


def test_a_refused_launch_is_told_and_what_a_part_raises_passes(tensors, stand_in, compiled):
    refused = Bound(stand_in(701))
    refused.bind(False)
    with pytest.raises(RuntimeError, match="status 701"):
        refused.call(tensors[0])
    assert refused.used == [("enter", STREAM)], "nothing further is done"
    bound = Bound(stand_in())
    bound.bind(False)
    bound.launches[True] = lambda *arguments: {}["missing"]
    with pytest.raises(KeyError, match="missing"):
        bound.call(*tensors[:2])


def test_threads_launch_with_their_own_parameters(bound):
    bound.bind(False)
    inputs = [torch.full((B, S, D), float(number)) for number in range(4)]
    outputs = [[] for _ in inputs]
    threads = [
        threading.Thread(target=lambda x, kept: kept.extend(bound.call(x) for _ in range(50)), args=pair)
        for pair in zip(inputs, outputs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = {(call[3][0], call[3][2]) for call in bound.driver.calls}
    assert len(bound.driver.calls) == 200
    assert pairs == {(x.data_ptr(), out.data_ptr()) for x, kept in zip(inputs, outputs, strict=True) for out in kept}


def test_calls_leave_nothing_behind(bound, tensors):
    bound.bind(False)
    x = torch.ones(B, S, D)
    watch = weakref.ref(bound.call(x))
    assert watch() is None
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


def test_a_model_that_holds_its_forward_is_let_go(compiled, stand_in):
    model = nn.Linear(4, 4)
    launches = {False: stand_in().launcher(compiled.Launcher, held=(model,))}
    model.fast = compiled.Call(
        model.forward, launches, *[print] * 4, torch.device("cpu"), 0, torch.float32, (B, S, D)
    )  # fmt: skip
    watch = weakref.ref(model)
    del model, launches
    gc.collect()
    assert watch() is None


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_without_a_compiler_pythons_paths_serve_and_say_so(monkeypatch, empty_cache):
    monkeypatch.setenv("CXX", str(empty_cache / "no-such-compiler"))
    with pytest.warns(UserWarning, match=r"no-such-compiler.*apt-get install g\+\+.*rooflane doctor"):
        assert host_module.__wrapped__() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.warns(UserWarning, match=r"none of g\+\+, clang\+\+, c\+\+ is on the path"):
        assert host_module.__wrapped__() is None


def test_a_compiler_that_fails_is_quoted_at_its_error(monkeypatch, empty_cache):
    lines = [f"In file included from header{number}.h" for number in range(50)]
    said = "\n".join((*lines, "x.cpp:1: fatal error: Python.h: not there"))
    compiler = empty_cache / "compiler.py"
    compiler.write_text(f"import sys\nsys.exit({said!r})\n")
    # A command of several words, as when ccache stands before a compiler.
    monkeypatch.setenv("CXX", f"{sys.executable} {compiler}")
    with pytest.warns(UserWarning, match=r"ended with status 1: x.cpp:1: fatal error: Python.h: not there; calls"):
        assert host_module.__wrapped__() is None


def test_a_file_that_does_not_load_is_made_anew(monkeypatch, empty_cache, compiled):
    good = Path(compiled.__file__).read_bytes()
    made = []
    monkeypatch.setattr(host, "CODE", host.CODE + "// a text that no other test loads\n")
    monkeypatch.setattr(host, "_compile", lambda code: made.append(code) or good[:100])
    with pytest.warns(UserWarning, match="could not be compiled"):
        assert host_module.__wrapped__() is None
    (file,) = empty_cache.rglob("rooflane_host*")
    assert file.read_bytes() == good[:100]
    monkeypatch.setattr(host, "_compile", lambda code: made.append(code) or good)
    assert host_module.__wrapped__().sum_versions([]) == 0 and len(made) == 2
    assert file.read_bytes() == good
    assert host_module.__wrapped__().sum_versions([]) == 0 and len(made) == 2, "from now on from the disk"


def test_modules_of_two_texts_are_two_modules(monkeypatch, empty_cache, compiled):
    """pybind11 hands out the module it knows by a name: another version's must not be taken for ours."""
    good = Path(compiled.__file__).read_bytes()
    other = good.replace(b"expected a list of tensors", b"expected a list of TENSORS")
    assert other != good
    monkeypatch.setattr(host, "_compile", lambda code: other)
    monkeypatch.setattr(host, "CODE", host.CODE + "\n")
    for module, said in ((host_module.__wrapped__(), "TENSORS"), (compiled, "tensors")):
        with pytest.raises(TypeError, match=said):
            module.sum_versions([3])


def test_packed_weights_notice_a_change_either_way():
    model = nn.Linear(4, 4)
    weights = PackedWeights(model, lambda source: {"weight": source.weight.clone()})
    assert not weights.refresh()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert weights.refresh() and torch.equal(weights.tensors["weight"], model.weight)
    assert not weights.refresh()
