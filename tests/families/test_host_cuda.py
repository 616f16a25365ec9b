"""A call's host path on a GPU, in C++ and in Python: threads, graphs, devices, lack of memory, garbage collection."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from rooflane.families import get_family
from rooflane.families.runtime import bound, cuda_kernel, watch
from rooflane.families.runtime.host import host_module
from rooflane.shapes import Shape

pytestmark = pytest.mark.gpu

# Every kind of GPU has a kernel for both. The second one's output is too large for the allocator's pool of small ones.
SMALL, LARGE = Shape("small", 3, 40, 64, 2, 64, 2, True), Shape("large", 64, 128, 128, 4, 128, 1, True)
TOLERANCE = 8e-3


@pytest.fixture(params=["C++", "Python"], autouse=True)
def language(request, monkeypatch):
    if request.param == "Python":
        for module in (bound, cuda_kernel, watch):
            monkeypatch.setattr(module, "host_module", lambda: None)
    elif host_module() is None:
        pytest.skip("needs a C++ compiler")
    return request.param


@pytest.fixture
def built(make_case, device):
    """Return `(shape) -> forward, model, x, mask, float64 output`, the forward called once."""

    def build(shape):
        model, x, mask, expected = make_case(shape, 3, "prefix")
        forward = get_family("resident").build(model, shape, device)
        with torch.inference_mode():
            forward(x, mask)
        return forward, model, x, mask, expected

    return build


def close(out, expected):
    return (out.double() - expected).abs().max() <= TOLERANCE


def test_both_languages_compute_the_same(built, language):
    forward, _, x, mask, expected = built(SMALL)
    assert (type(forward).__name__ == "Call") == (language == "C++")
    assert close(forward(x, mask), expected)


def test_a_thread_that_never_used_the_device_launches(built):
    forward, _, x, mask, expected = built(SMALL)
    outputs, errors = [], []

    def call():
        try:
            outputs.append(forward(x, mask))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not errors and close(outputs[0], expected)


def test_a_callers_own_graph_holds_the_call(built):
    forward, model, x, mask, expected = built(SMALL)
    held = torch.zeros_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = forward(held, mask)
    held.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, expected)


def test_lack_of_memory_raises_torchs_own_error(built):
    forward, _, x, mask, expected = built(LARGE)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            kept = [forward(x, mask) for _ in range(64)]
            assert not kept
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert close(forward(x, mask), expected)


def test_a_model_that_holds_its_forward_is_collected(built):
    forward, model, *_ = built(SMALL)
    model.fast = forward
    watch = weakref.ref(model)
    del forward, model, _
    gc.collect()
    assert watch() is None


def test_a_call_works_while_another_device_is_current(built):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    forward, _, x, mask, expected = built(SMALL)
    with torch.cuda.device(1):
        assert close(forward(x, mask), expected)
