"""Every kind of weight change is detected; an unchanged model is never packed twice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from rooflane.baseline import build_baseline
from rooflane.families.lean.lean import TORCH_OPS, lean_weights
from rooflane.families.runtime.watch import ModelWatch
from rooflane.families.runtime.weights import CHANGED, UNCHANGED, PackedWeights
from rooflane.shapes import Shape

SHAPE = Shape("a", 1, 4, 16, 2, 16, 1)


def in_place(model):
    with torch.no_grad():
        model.layers[0].ffn_in.weight.mul_(2)


def load(model):
    model.load_state_dict(build_baseline(SHAPE, "cpu", seed=9).state_dict())


def load_part(model):
    model.final_norm.load_state_dict(nn.LayerNorm(16).state_dict())


def load_assign(model):
    model.load_state_dict(build_baseline(SHAPE, "cpu", seed=9).state_dict(), assign=True)


def replace(model):
    model.layers[0].attention.q_proj = nn.Linear(16, 16)


def replace_parameter(model):
    model.final_norm.weight = nn.Parameter(torch.zeros(16))


def cast(model):
    model.half()


def optimiser_step(model):
    model(torch.randn(1, 4, 16)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES = [in_place, load, load_part, load_assign, replace, replace_parameter, cast, optimiser_step]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_detected_once(change):
    model = build_baseline(SHAPE, "cpu", seed=1)
    watch = ModelWatch(model)
    assert not watch.changed()
    change(model)
    assert watch.changed()
    assert not watch.changed()


def test_other_models_do_not_matter():
    watch = ModelWatch(build_baseline(SHAPE, "cpu", seed=1))
    in_place(build_baseline(SHAPE, "cpu", seed=2))
    assert not watch.changed()


def test_inference_mode_weights_count_as_changed_every_time():
    with torch.inference_mode():
        model = build_baseline(SHAPE, "cpu", seed=1)
    watch = ModelWatch(model)
    assert watch.changed() and watch.changed()


def test_refresh_keeps_the_memory_and_packs_only_on_change():
    model = build_baseline(SHAPE, "cpu", seed=1)
    packs = []

    def pack(source):
        packs.append(1)
        return {"bias": source.final_norm.bias.detach().clone()}

    packed = PackedWeights(model, pack)
    address = packed.tensors["bias"].data_ptr()
    packed.refresh()
    assert len(packs) == 1
    with torch.no_grad():
        model.final_norm.bias.fill_(3)
    packed.refresh()
    assert len(packs) == 2
    assert packed.tensors["bias"].data_ptr() == address and packed.tensors["bias"].eq(3).all()


def test_forwards_of_several_shapes_share_what_a_view_packs():
    model = build_baseline(Shape("s", 2, 5, 16, 2, 24, 2), "cpu", 0)
    model.packed = {}
    ops = dataclasses.replace(TORCH_OPS)  # other ops than torch's own read packed copies
    first, second = (lean_weights(model, torch.float16, ops) for _ in range(2))
    assert first is second and lean_weights(model, torch.bfloat16, ops) is not first
    with torch.no_grad():
        model.layers[0].ffn_in.bias.add_(1)
    assert first.refresh() == CHANGED and second.refresh() == UNCHANGED
    assert torch.equal(second.tensors["0.ffn_in.bias"], model.layers[0].ffn_in.bias.half())
