"""A module seen as a baseline: what the families' packers read of it is what they would read of the baseline itself."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from torch import nn

from rooflane.baseline import BaselineTransformer, TransformerConfig
from rooflane.dispatch.adapters.blocks import StackView
from rooflane.dispatch.adapters.mapping import BlockMapping, weights_at
from rooflane.families.lean.lean import pack_lean
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import PUBLISHED, Form

B, S, D, H, F, L = 2, 5, 16, 2, 24, 2
CONFIG = TransformerConfig(B, S, D, H, F, L, True)


class Projection(nn.Module):
    """A weight stored [in, out]."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.randn(out))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(D), nn.LayerNorm(D, elementwise_affine=False)
        self.qkv, self.out = Projection(D, 3 * D), nn.Linear(D, D, bias=False)
        self.up, self.down = Projection(D, F), Projection(F, D)
        self.heads = H


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(L)), nn.LayerNorm(D)


MAPPING = BlockMapping(
    norm1="a",
    norm2="b",
    q=weights_at("qkv", (0, 3), transposed=True),
    k=weights_at("qkv", (1, 3), transposed=True),
    v=weights_at("qkv", (2, 3), transposed=True),
    out=weights_at("out"),
    ffn_in=weights_at("up", transposed=True),
    ffn_out=weights_at("down", transposed=True),
    num_heads="heads",
    causal=True,
    layers="blocks",
    final_norm="norm",
)


@pytest.fixture
def stack():
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def twin(stack):
    """A baseline with the viewed weights, loaded strictly: the names are the baseline's own."""
    view, model = StackView(stack, MAPPING, CONFIG, PUBLISHED), BaselineTransformer(CONFIG)
    state = {}
    for name in model.state_dict():
        path, kind = name.rsplit(".", 1)
        index = path.split(".")[1] if path.startswith("layers.") else ""
        part = view.layers[int(index)] if index else view
        state[name] = getattr(attrgetter(path.removeprefix(f"layers.{index}."))(part), kind)
    model.load_state_dict(state)
    return model


def packs(model):
    from rooflane.families.resident.config import layout_of
    from rooflane.families.resident.pack import pack_padded
    from rooflane.shapes import Shape

    layout = layout_of(Shape("s", B, S, D, H, F, L), 16)
    return pack_lean(model, torch.float16) | pack_padded(model, layout, torch.float16)


def test_the_packers_read_a_view_as_they_read_a_baseline(stack, twin):
    found, expected = packs(StackView(stack, MAPPING, CONFIG, PUBLISHED)), packs(twin)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_view_computes_the_baselines_function(stack, twin):
    x = torch.randn(B, S, D)
    mask = torch.arange(S) < torch.tensor([[S], [2]])
    view = StackView(stack, MAPPING, CONFIG, PUBLISHED)
    torch.testing.assert_close(view(x, mask), twin(x, mask))


def test_without_a_final_norm_the_packers_leave_it_out(stack):
    bare = BlockMapping(**{**vars(MAPPING), "final_norm": ""})
    view = StackView(stack, bare, CONFIG, Form(final_norm=False))
    assert view.final_norm is None
    assert not any(name.startswith("norm.") for name in pack_lean(view, torch.float32))


def test_packed_weights_watch_the_modules_own_parameters(stack):
    weights = PackedWeights(StackView(stack, MAPPING, CONFIG, PUBLISHED), lambda view: pack_lean(view, torch.float32))
    before = weights.tensors["1.qkv.weight"].clone()
    with torch.no_grad():
        stack.blocks[1].qkv.weight[:, D:] *= 2
    weights.refresh()
    after = weights.tensors["1.qkv.weight"]
    assert torch.equal(after[:D], before[:D]) and torch.equal(after[D:], 2 * before[D:])
    stack.blocks[1].qkv.weight = nn.Parameter(torch.zeros(D, 3 * D))
    weights.refresh()
    assert not weights.tensors["1.qkv.weight"].any()
