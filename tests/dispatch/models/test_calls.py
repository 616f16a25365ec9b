"""Calls beside the plain ones: masks of any kind, other positions, another attention implementation."""

from __future__ import annotations

import copy

import pytest
import torch

from rooflane.dispatch import optimize, served

B, S = 3, 9
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
# Two sequences packed into one, each with its own tokens alone; and a window of three tokens.
PACKED = torch.arange(S)[:, None] // 5 == torch.arange(S) // 5
WINDOW = (torch.arange(S)[:, None] - torch.arange(S)).abs() < 3
MASKS = {
    "packed": PACKED.expand(B, 1, S, S),
    "window": WINDOW.expand(B, 1, S, S),
    "one for each": torch.stack([PACKED, WINDOW, PACKED & WINDOW])[:, None],
}


def build(models, name):
    torch.manual_seed(0)
    return models[name].build().eval()


def both(model, **inputs):
    """Return a model's own output and that of a taken copy, with the stack that served it."""
    fast = optimize(copy.deepcopy(model))
    with torch.inference_mode():
        return model(**inputs).last_hidden_state, fast(**inputs).last_hidden_state, served(fast)[0].stack


@pytest.mark.usefixtures("warnings_are_errors")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "GPT-2"])
def test_a_mask_of_any_kind_is_added_to_the_scores(name, kind, attention, models):
    pytest.importorskip("transformers")
    model, mask = build(models, name), MASKS[kind]
    model.set_attn_implementation(attention)
    if attention == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    own, found, stack = both(model, **models[name].inputs(B), attention_mask=mask)
    torch.testing.assert_close(found, own, **CLOSE)
    assert len(stack.routes) == 1


@pytest.mark.usefixtures("warnings_are_errors")
def test_a_mask_through_a_model_of_timm(vision, models):
    model, x = build(models, "ViT of timm"), models["ViT of timm"].inputs(B)["x"]
    visible = torch.rand(17, 17, generator=torch.Generator().manual_seed(1)) < 0.7
    visible.fill_diagonal_(True)
    fast = optimize(copy.deepcopy(model))
    with torch.inference_mode():
        for mask in (visible, torch.randn(B, 4, 17, 17, generator=torch.Generator().manual_seed(2))):
            own = model.forward_features(x, attn_mask=mask)
            torch.testing.assert_close(fast.forward_features(x, attn_mask=mask), own, **CLOSE)
    assert served(fast)[0].stack.routes


def test_rotary_positions_of_the_callers_run_the_models_own_code(models):
    pytest.importorskip("transformers")
    model, inputs = build(models, "ESM-2"), models["ESM-2"].inputs(B)
    with pytest.warns(UserWarning, match="its rotary positions are not 0 to 8 at base 10000"):
        own, found, stack = both(model, **inputs, position_ids=torch.arange(S).flip(0).expand(B, S))
    torch.testing.assert_close(found, own, rtol=0, atol=0)
    assert not stack.routes


def test_a_model_of_another_attention_is_refused_by_name(models):
    pytest.importorskip("transformers")
    model = build(models, "BERT")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attention implementation 'flex_attention'; the calls of eager and sdpa"):
        optimize(model)
