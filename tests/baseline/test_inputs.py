"""Inputs are drawn the way the benchmark draws them."""

from __future__ import annotations

import pytest
import torch

from rooflane.baseline import config_of, generate_random_case
from rooflane.shapes import Shape

SHAPE = Shape("a", 64, 40, 8, 1, 8, 1)
CONFIG = config_of(SHAPE)


def test_x_is_the_generators_first_normal_draw_scaled():
    generator = torch.Generator().manual_seed(7)
    expected = torch.randn(64, 40, 8, generator=generator) * 0.1
    x, mask = generate_random_case(CONFIG, "cpu", torch.float32, 7, input_scale=0.1)
    assert torch.equal(x, expected)
    assert mask.dtype == torch.bool and mask.all()


def test_padding_zeroes_a_suffix_and_leaves_the_rest_as_drawn():
    plain, _ = generate_random_case(CONFIG, "cpu", torch.float32, 7)
    x, mask = generate_random_case(CONFIG, "cpu", torch.float32, 7, padding_ratio=0.3)
    lengths = mask.sum(1)
    assert torch.equal(mask, torch.arange(40)[None, :] < lengths[:, None]), "valid tokens are a prefix"
    assert lengths.min() >= 28 and lengths.max() <= 40, "round(40 * 0.7) = 28 is the shortest row"
    assert torch.equal(x, plain * mask[:, :, None])


def test_lengths_are_drawn_after_x_from_the_same_generator():
    generator = torch.Generator().manual_seed(3)
    torch.randn(64, 40, 8, generator=generator)
    expected = torch.randint(20, 41, (64,), generator=generator)
    _, mask = generate_random_case(CONFIG, "cpu", torch.float32, 3, padding_ratio=0.5)
    assert torch.equal(mask.sum(1), expected)


@pytest.mark.parametrize(("length", "ratio", "shortest"), [(5, 0.5, 2), (7, 0.5, 4), (3, 0.99, 1), (100, 0.001, 100)])
def test_shortest_row_rounds_half_to_even_and_is_never_empty(length, ratio, shortest):
    config = config_of(Shape("a", 400, length, 1, 1, 1, 1))
    _, mask = generate_random_case(config, "cpu", torch.float32, 1, padding_ratio=ratio)
    assert mask.sum(1).min() == shortest


def test_global_random_state_is_untouched():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    generate_random_case(CONFIG, "cpu", torch.float32, 1, 0.5)
    assert torch.equal(torch.rand(3), expected)
