"""What a call changes of the inputs and weights it was given: contents, dtype, place."""

import pytest
import torch

from rooflane.eval.check.tamper import GivenInputs, GivenWeights


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, 3, generator=generator), torch.rand(2, 4, generator=generator) > 0.5


CHANGES = {
    "contents": lambda x, mask: x[0, 0].zero_(),
    "mask": lambda x, mask: mask.logical_not_(),
    "dtype": lambda x, mask: setattr(x, "data", x.half()),
    "storage": lambda x, mask: setattr(x, "data", x.clone()),
    "strides": lambda x, mask: x.transpose_(0, 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_input_is_told(change):
    cases = [draw(seed) for seed in (5, 6)]
    given = GivenInputs(cases, (5, 6))
    assert [given.change(draw, chosen) for chosen in range(8)] == [""] * 8
    CHANGES[change](*cases[1])
    said = {given.change(draw, chosen) for chosen in range(8)}
    # Contents are compared of one call alone, and which one it is cannot be foretold.
    assert said - {""} and ("" in said) == (change in ("contents", "mask"))


def test_no_mask_is_no_change():
    x, _ = draw(5)
    assert GivenInputs([(x, None)], [5]).change(lambda seed: (draw(seed)[0], None), 1) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: None, []),
        (lambda model: model.half(), ["weight is torch.float16, was torch.float32"]),
        (lambda model: model.bias.data.add_(1e-7), ["bias holds other values"]),
        (lambda model: setattr(model.weight, "data", model.weight.data.clone()), ["weight lies elsewhere in memory"]),
        (lambda model: model.register_buffer("more", torch.zeros(1)), ["names have come or gone"]),
    ],
)
def test_a_change_of_weights_is_told(change, said):
    model = torch.nn.Linear(3, 4)
    given = GivenWeights(model)
    change(model)
    assert given.changes() == said
