"""The common call of a bound forward in C++: its steps in order, and the calls that take the path in Python."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from rooflane.families.runtime.host import host_module

STREAM = 0xFEDC_BA98_7654
B, S, D = 2, 3, 8


class Bound:
    """The parts that a bound forward gives the common call; each records its use."""

    def __init__(self, driver) -> None:
        self.driver, self.used = driver, []
        self.launches: dict[bool, object] = {}
        self.device, self.stream, self.changed, self.noted = 0, STREAM, False, True
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
        return self.noted

    def refresh(self):
        self.used.append(f"refresh after {len(self.driver.calls)}")
        return self.changed

    def bind(self, masked):
        self.launches[masked] = self.driver.launcher(host_module().Launcher)


@pytest.fixture
def bound(compiled, stand_in):
    return Bound(stand_in())


def test_a_common_call_enters_the_stream_launches_and_then_checks_the_weights(bound, tensors):
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
    assert entered(bound) == [STREAM, 0, 2**64 - 1]


def entered(bound):
    return [part[1] for part in bound.used if part[0] == "enter"]


def test_a_stream_is_entered_once_while_it_stays(bound, tensors):
    bound.bind(False)
    for bound.stream in (STREAM, STREAM, 5, 5, STREAM):
        bound.call(tensors[0])
    assert entered(bound) == [STREAM, 5, STREAM]


def test_a_stream_is_entered_again_after_pythons_path_and_while_it_is_not_noted(bound, tensors):
    bound.bind(False)
    bound.call(tensors[0])
    assert bound.call(*tensors[:2]) == "path", "which may have gone to another stream"
    bound.call(tensors[0])
    assert entered(bound) == [STREAM, STREAM]
    bound.noted, bound.stream = False, 7  # as while a graph is captured
    bound.call(tensors[0])
    bound.noted = True
    bound.call(tensors[0])
    assert entered(bound) == [STREAM, STREAM, 7, 7]


def test_a_tensor_over_foreign_memory_gets_an_output_too(bound):
    bound.bind(False)
    x = torch.from_numpy(np.ones((B, S, D), np.float32))
    out = bound.call(x)
    assert out.shape == x.shape and out.is_contiguous() and out.data_ptr() != x.data_ptr()
    out.fill_(2.0)
    assert x.sum() == B * S * D


def uncommon(x, mask):
    """Calls of other kinds, by what differs."""

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


def test_a_refused_launch_raises_and_an_error_of_a_part_passes(tensors, stand_in, compiled):
    refused = Bound(stand_in(701))
    refused.bind(False)
    with pytest.raises(RuntimeError, match="status 701"):
        refused.call(tensors[0])
    assert refused.used == [("enter", STREAM)], "nothing else happens"
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


def test_a_model_that_holds_its_forward_is_collected(compiled, stand_in):
    model = nn.Linear(4, 4)
    launches = {False: stand_in().launcher(compiled.Launcher, held=(model,))}
    model.fast = compiled.Call(
        model.forward, launches, *[print] * 4, torch.device("cpu"), 0, torch.float32, (B, S, D)
    )  # fmt: skip
    watch = weakref.ref(model)
    del model, launches
    gc.collect()
    assert watch() is None
