"""Several shapes served by one module: dispatch per call, a bounded cache, and what unseen shapes get."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from rooflane.baseline import build_baseline
from rooflane.dispatch import OptimizeError, optimize

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

RULES = '[[rule]]\nname = "all"\nwhen = {}\nfamily = "double"\nbecause = "a test"\n'


@pytest.fixture
def double(fake_families):
    return fake_families(double={})["double"]


@pytest.fixture
def model(small):
    return build_baseline(small, "cpu", 0).requires_grad_(False)


@pytest.fixture
def dispatch(model, double, write_rules):
    """Return a function that optimises the model for some shapes."""
    return lambda shapes, **options: optimize(model, shapes, rules=write_rules(RULES), **options)


def x_of(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(batch * 100 + length))


def test_each_call_runs_the_forward_of_its_shape(dispatch, model, double, small):
    fast = dispatch([small, replace(small, id="long", seq_len=9)])
    for x in (x_of(3, 5), x_of(3, 9), x_of(3, 5)):
        assert torch.equal(fast(x), 2 * model(x))
    assert [build.shape.id for build in double.builds] == ["small", "long"]
    assert [route.shape.id for route in fast.routes] == ["small", "long"]
    assert fast.route.shape == small


def test_an_example_input_stands_for_its_shape(dispatch, model, double):
    fast = dispatch([x_of(2, 7), x_of(4, 3)])
    assert torch.equal(fast(x_of(4, 3)), 2 * model(x_of(4, 3)))
    assert [(b.shape.batch_size, b.shape.seq_len, b.shape.causal) for b in double.builds] == [
        (2, 7, True),
        (4, 3, True),
    ]


def test_unseen_shapes_run_the_models_own_forward_and_say_so_once(dispatch, model, double, small):
    fast = dispatch(small)
    expected = r"x is \(2, 4, 16\), the dispatched forward was built for \(3, 5, 16\)"
    with pytest.warns(UserWarning, match=expected) as caught:
        assert torch.equal(fast(x_of(2, 4)), model(x_of(2, 4)))
    assert caught[0].filename == __file__
    assert torch.equal(fast(x_of(2, 6)), model(x_of(2, 6)))
    assert len(double.builds) == 1


def test_unseen_shapes_can_be_built_on_first_sight(dispatch, model, double, small):
    fast = dispatch(small, on_unseen="build")
    for _ in range(2):
        assert torch.equal(fast(x_of(2, 4)), 2 * model(x_of(2, 4)))
    assert [build.shape.label() for build in double.builds] == [small.label(), "2x4x16 h2 f24 l2 causal"]


def test_unseen_shapes_can_be_an_error(dispatch, small):
    fast = dispatch(small, on_unseen="error")
    with pytest.raises(OptimizeError, match=r"no built forward takes this call: x is \(2, 4, 16\)"):
        fast(x_of(2, 4))
    with pytest.raises(OptimizeError, match="needs gradients"):
        fast(x_of(3, 5).requires_grad_())


def test_the_least_recently_used_forward_is_freed(dispatch, model, double, small, monkeypatch):
    forwards = []

    class Forward:
        def __init__(self, model):
            self.model = model

        def __call__(self, x, mask):
            return 2 * self.model(x, mask)

    def build(model, shape, device, **options):
        forward = Forward(model)
        forwards.append((shape.seq_len, weakref.ref(forward)))
        return forward

    monkeypatch.setattr(double, "build", build)
    fast = dispatch(small, on_unseen="build", cache_size=2)
    for length in (6, 5, 7):  # 5 was used after 6, so 7 pushes 6 out
        fast(x_of(3, length))
    assert [length for length, alive in forwards if alive() is not None] == [5, 7]
    fast(x_of(3, 6))
    assert [length for length, alive in forwards if alive() is not None] == [7, 6]
    assert torch.equal(fast(x_of(3, 5)), 2 * model(x_of(3, 5)))
    assert [length for length, _ in forwards] == [5, 6, 7, 6, 5]


def test_a_shape_that_was_asked_for_comes_back_after_others_pushed_it_out(dispatch, model, small):
    fast = dispatch([small, replace(small, seq_len=6)], cache_size=2)
    fast.to("cpu")
    for length in (5, 6, 5):
        assert torch.equal(fast(x_of(3, length)), 2 * model(x_of(3, length)))


def test_a_shape_no_family_takes_is_not_tried_twice(dispatch, model, double, small):
    fast = dispatch(small, on_unseen="build")
    double.refuses = "a reason"
    with pytest.warns(UserWarning, match="shape 2x4 .* finds no family .* a reason"):
        assert torch.equal(fast(x_of(2, 4)), model(x_of(2, 4)))
    double.refuses = None
    assert torch.equal(fast(x_of(2, 4)), model(x_of(2, 4)))


def test_an_empty_batch_gives_an_empty_output(dispatch, model, small):
    assert dispatch(small, on_unseen="error")(x_of(3, 5)[:0]).shape == (0, 5, 16)


def test_a_strided_input_is_served(dispatch, model, small):
    x = x_of(5, 3).transpose(0, 1)
    assert torch.equal(dispatch(small)(x), 2 * model(x))


@pytest.mark.parametrize(
    ("shapes", "options", "complaint"),
    [
        ([], {}, "0 shapes are asked for"),
        ([x_of(1, 1), x_of(2, 1)], {"cache_size": 1}, "2 shapes are asked for and cache_size is 1"),
        (x_of(1, 1), {"on_unseen": "guess"}, "on_unseen is 'guess'; accepted: fallback, build, error"),
        (x_of(1, 1)[0], {}, r"an example input is a tensor .batch, sequence, width.; got \(1, 16\)"),
        (x_of(1, 1).half(), {}, r"the example input is \(1, 1, 16\) of torch.float16; the model takes"),
        ("published.csv", {}, "shape is a str; give a Shape, an example input, or a list of either"),
        (x_of(1, 1), {"mapping": "gpt2"}, "mapping is a str; give a BlockMapping, such as GPT2_BLOCK"),
        ([3], {}, "sizes alone leave out heads and layers: give a rooflane Shape, or an example input"),
        (x_of(1, 1)[:0], {}, "the example call cannot be optimised: .*batch_size is 0"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(dispatch, shapes, options, complaint):
    with pytest.raises(OptimizeError, match=complaint):
        dispatch(shapes, **options)


def test_optimising_twice_starts_from_the_model_itself(dispatch, model, double, small, write_rules):
    again = optimize(dispatch(small), small, rules=write_rules(RULES))
    x = x_of(3, 5)
    assert torch.equal(again(x), 2 * model(x))
