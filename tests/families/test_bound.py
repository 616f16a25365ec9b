"""A bound forward's call path in Python and in C++, on a CPU with a stand-in for the driver."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rooflane.families.runtime import bound as bound_module
from rooflane.families.runtime.bound import BoundForward, bound_forward
from rooflane.families.runtime.host import PythonLauncher, host_module
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Shape

SHAPE = Shape("bound", 2, 3, 8, 1, 8, 1)


def obstacle(model):
    return "weights over 100" if model.weight.abs().max() > 100 else None


def wide(x, mask):
    """Stand for the forward in the model's own number type; its output can be told from every other."""
    return x


class Path:
    """A forward bound to a stand-in, and a record of its calls."""

    def __init__(self, driver, device, in_cpp):
        self.driver, self.bound = driver, []
        self.model = nn.Linear(8, 8)
        self.weights = PackedWeights(self.model, lambda source: {"w": source.weight.clone()}, obstacle)
        kind = host_module().Launcher if in_cpp else PythonLauncher

        def bind(x, mask, out):
            self.bound.append(mask is not None)
            return driver.launcher(kind)

        if in_cpp:
            self.forward = bound_forward(bind, self.weights, SHAPE, device, wide)
            assert type(self.forward).__name__ == "Call"
        else:
            self.forward = BoundForward(bind, self.weights, SHAPE, device, wide)

    @property
    def pointers(self):
        return [call[3][:3] for call in self.driver.calls]


@pytest.fixture(params=["C++", "Python"])
def path(request, stand_in, monkeypatch):
    if request.param == "C++":
        request.getfixturevalue("compiled")
    monkeypatch.setattr(bound_module, "current_device", lambda: 0)
    monkeypatch.setattr(bound_module, "raw_stream", lambda index: 7 + index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Path(stand_in(), torch.device("cpu"), request.param == "C++")


@pytest.fixture
def case():
    return torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)


def test_each_kind_of_call_is_bound_once_and_every_call_launched(path, case):
    x, mask = case
    outputs = [path.forward(x, mask), path.forward(x), path.forward(x, mask), path.forward(x, None)]
    assert path.bound == [True, False]
    masks = [mask.data_ptr(), 0] * 2
    assert path.pointers == [[x.data_ptr(), m, out.data_ptr()] for m, out in zip(masks, outputs, strict=True)]
    assert len({out.data_ptr() for out in outputs}) == 4, "a fresh output each call"
    assert {call[2] for call in path.driver.calls} == {7}


def test_changed_weights_are_packed_again_and_the_call_launched_again(path, case):
    path.forward(*case)
    with torch.no_grad():
        path.model.weight.mul_(2.0)
    out = path.forward(*case)
    assert torch.equal(path.weights.tensors["w"], path.model.weight)
    assert [pointers[2] for pointers in path.pointers[1:]] == [out.data_ptr()] * 2
    path.forward(*case)
    assert len(path.driver.calls) == 4


def test_weights_out_of_range_are_left_to_the_wide_forward(path, case):
    x, mask = case
    path.forward(x, mask)
    with torch.no_grad():
        path.model.weight.mul_(1e4)
    with pytest.warns(UserWarning, match="weights over 100; calls take a slower path"):
        assert path.forward(x, mask) is x
    assert path.forward(x, mask) is x, "at every later call too"
    with torch.no_grad():
        path.model.weight.mul_(1e-4)
    assert path.forward(x, mask).data_ptr() == path.pointers[-1][2]


def test_an_input_that_is_not_contiguous_or_aligned_is_copied(path, case):
    x, mask = case
    path.forward(x, mask)
    odd = torch.zeros(49)[1:].view(2, 3, 8)
    for given in (odd, torch.zeros(2, 8, 3).transpose(1, 2)):
        out = path.forward(given, mask)
        assert out.shape == x.shape and out.is_contiguous()
        assert path.pointers[-1][0] != given.data_ptr() and path.pointers[-1][0] % 16 == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, mask: (x[:1], mask), "called with"),
        (lambda x, mask: (x.double(), mask), "cast x"),
        (lambda x, mask: (x, mask.float()), "bool mask"),
        (lambda x, mask: (x, mask[:, :2]), "bool mask"),
        (lambda x, mask: (x, mask.to("meta")), "move the mask"),
    ],
)
def test_a_call_of_another_kind_is_refused_before_and_after_the_first(path, case, change, said):
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            path.forward(*change(*case))
        path.forward(*case)
    assert len(path.driver.calls) == 2


def test_without_the_compiled_module_the_forward_is_pythons(monkeypatch, stand_in, case):
    monkeypatch.setattr(bound_module, "host_module", lambda: None)
    weights = PackedWeights(nn.Linear(8, 8), lambda source: {"w": source.weight.clone()})
    forward = bound_forward(lambda *case: stand_in().launcher(), weights, SHAPE, torch.device("cpu"))
    assert isinstance(forward, BoundForward)
