"""What changes after optimize(), and a caller's own CUDA graph, for every family on a GPU."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.func import functional_call

from rooflane.baseline import BaselineTransformer, build_baseline
from rooflane.dispatch import optimize
from rooflane.shapes import Shape

pytestmark = pytest.mark.gpu

SHAPES = {
    "resident": Shape("resident", 8, 64, 128, 4, 128, 2),
    "graph_compile": Shape("graph_compile", 4, 128, 256, 4, 256, 2),
    "gemm_fp16": Shape("gemm_fp16", 4, 128, 256, 4, 512, 2),
    "sdpa_flash": Shape("sdpa_flash", 2, 512, 128, 4, 128, 2),
    "chunked": Shape("chunked", 4, 200, 128, 4, 256, 2),
}


@pytest.fixture(params=SHAPES)
def case(request, write_rules):
    """A model, its dispatched twin, which has been called once with a mask and once without, and an input."""
    shape = SHAPES[request.param]
    rules = write_rules(f'[[rule]]\nname = "all"\nwhen = {{}}\nfamily = "{shape.id}"\nbecause = "a test"\n')
    model = build_baseline(shape, "cuda", 0)
    fast = optimize(model, shape, rules=rules, on_unseen="error")
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(shape.batch_size, shape.seq_len, shape.d_model, generator=generator, device="cuda")
    mask = torch.ones(shape.batch_size, shape.seq_len, dtype=torch.bool, device="cuda")
    mask[0, shape.seq_len // 2 :] = False
    with torch.no_grad():
        fast(x), fast(x, mask)
    return model, fast, x, mask


def truth(model: BaselineTransformer, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double(), mask)


def assert_passes(out: torch.Tensor, expected: torch.Tensor) -> None:
    from rooflane.eval import check_gate

    found = check_gate(out.double(), expected)
    assert found.passed, found


def fused_step(model, make) -> None:
    # Random: a constant step would leave outputs that cancel, which half precision cannot follow.
    generator = torch.Generator("cuda").manual_seed(2)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda")
    make(model.parameters()).step()


def write_unrecorded(model, fast) -> None:
    model.layers[0].ffn_in.weight.data.mul_(3)
    fast.repack()


WRITES = {
    "SGD fused": lambda model, fast: fused_step(model, lambda p: torch.optim.SGD(p, 0.02, fused=True)),
    "Adam fused": lambda model, fast: fused_step(model, lambda p: torch.optim.Adam(p, 0.02, fused=True)),
    "AdamW fused": lambda model, fast: fused_step(model, lambda p: torch.optim.AdamW(p, 0.02, fused=True)),
    ".data.mul_, then repack": write_unrecorded,
    ".data =": lambda model, fast: setattr(
        model.layers[1].ffn_in.weight, "data", 2 * model.layers[1].ffn_in.weight.data
    ),
    "in place": lambda model, fast: model.final_norm.weight.mul_(2),
}


def test_written_weights_are_used_at_the_next_call(case):
    model, fast, x, mask = case
    first = copy.deepcopy(model.state_dict())
    for name, write in WRITES.items():
        model.load_state_dict(first)
        with torch.no_grad():
            before = fast(x, mask)
            write(model, fast)
            out = fast(x, mask)
        assert not torch.allclose(out, before, atol=1e-2), f"{name} changes the answer"
        assert_passes(out, truth(model, x, mask))


def test_parameters_swapped_for_a_call_and_a_changed_part(case):
    model, fast, x, _ = case
    swapped = {name: 1.25 * value for name, value in model.state_dict().items()}
    twin = copy.deepcopy(model)
    twin.load_state_dict(swapped)
    with torch.no_grad():
        assert_passes(functional_call(fast, swapped, (x,)), truth(twin, x))
        assert_passes(fast(x), truth(model, x))
        for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
            norm.eps = 0.5
        assert_passes(fast(x), truth(model, x))


def test_weights_out_of_float16s_range_are_computed_in_the_models_own_type(case):
    model, fast, x, mask = case
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.layers[0].ffn_in.weight.mul_(1e5)
        model.layers[0].ffn_out.weight.mul_(1e-5)
        with pytest.warns(UserWarning, match="layers.0.ffn_in may reach"):
            out = fast(x, mask)
        assert_passes(out, truth(model, x, mask))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_passes(fast(x), truth(model, x))
            model.load_state_dict(kept)
            assert_passes(fast(x, mask), truth(model, x, mask))


@pytest.mark.parametrize("masked", [True, False])
def test_a_callers_own_graph_holds_the_call(case, masked):
    model, fast, x, mask = case
    if masked and fast.route.family == "chunked":
        refused = pytest.raises(RuntimeError, match="chunked reads the lengths")
        with torch.inference_mode(), refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            fast(x, mask)
        return
    held, given = torch.zeros_like(x), (mask,) if masked else ()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = fast(held, *given)
        for factor in (1.0, -2.0):
            held.copy_(factor * x)
            graph.replay()
            torch.cuda.synchronize()
            assert_passes(out, truth(model, factor * x, *given))
        # A call between two replays changes neither.
        fast(x, *given)
        graph.replay()
        torch.cuda.synchronize()
        assert_passes(out, truth(model, -2.0 * x, *given))


def test_weights_changed_just_before_a_capture_are_refused(case):
    model, fast, x, _ = case
    with torch.no_grad():
        model.final_norm.weight.mul_(2)
        refused = pytest.raises(RuntimeError, match="call it once before capturing|capturing")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            fast(x)
        torch.cuda.synchronize()
        assert_passes(fast(x), truth(model, x))
