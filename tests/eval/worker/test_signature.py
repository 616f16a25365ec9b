"""The baseline is known by its operations, whatever name it is handed in under."""

import pytest
import torch

from rooflane.baseline import CONTROLS, build_baseline, config_of, generate_random_case
from rooflane.eval.worker.subject import is_baseline, operation_signature


@pytest.fixture
def setting(tiny_shape):
    case = generate_random_case(config_of(tiny_shape), "cpu", torch.float32, 3, 0.2)
    return tiny_shape, build_baseline(tiny_shape, "cpu", 1), case


def test_the_baseline_in_a_wrapper_is_the_baseline(setting):
    shape, model, case = setting
    other = build_baseline(shape, "cpu", 2)

    def fast_kernel(x, mask=None):
        return other(x, mask)

    assert is_baseline(fast_kernel, model, *case)


def test_another_way_to_compute_is_not(setting):
    shape, model, case = setting
    sdpa = CONTROLS["sdpa"].build(build_baseline(shape, "cpu", 1), shape, torch.device("cpu"))
    assert not is_baseline(sdpa, model, *case)
    assert not is_baseline(lambda x, mask=None: model(x, mask).clone(), model, *case)
    assert not is_baseline(lambda x, mask=None: x, model, *case)


def test_the_signature_names_operations_in_order(setting):
    _, model, case = setting
    names = [name for name, _ in operation_signature(model, *case)]
    assert names.count("aten::softmax") == 2  # one a layer
    assert names.index("aten::layer_norm") < names.index("aten::softmax") < names.index("aten::gelu")
