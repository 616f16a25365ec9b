"""The registry of known blocks: its names exist, its refusals name what is in the way, its calls are read."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from rooflane.dispatch.adapters.known import KNOWN, REFUSED, known_of
from rooflane.dispatch.adapters.mapping import Unserved

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'rooflane[models]'")

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def found(name: str) -> type[nn.Module]:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def block(name: str, kind: str = "", **settings) -> nn.Module:
    """Return a block of transformers, such as `bert.BertLayer`, under a configuration of the model's kind."""
    model = name.split(".")[0]
    config = transformers.AutoConfig.for_model(kind or model, **{"attn_implementation": "sdpa"} | settings)
    return found(f"transformers.models.{model}.modeling_{name}")(config).eval()


def test_every_name_is_that_of_a_class(vision):
    for name in (*(known.name for known in KNOWN), *REFUSED):
        assert issubclass(found(name), nn.Module), name


def test_a_subclass_is_not_known():
    layer = block("bert.BertLayer", **SMALL)
    assert known_of(layer).label == "BERT, MiniLM"
    assert known_of(type("Mine", (type(layer),), {})(layer.attention.self.config)) is None


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("bert.BertLayer", SMALL | {"is_decoder": True, "add_cross_attention": True}, "has cross attention"),
        (
            "bert.BertLayer",
            SMALL | {"attn_implementation": "flex_attention"},
            "attention implementation 'flex_attention'",
        ),
        ("dinov2.Dinov2Layer", SMALL | {"use_swiglu_ffn": True}, "has a gated feed-forward"),
        ("wav2vec2.Wav2Vec2EncoderLayerStableLayerNorm", SMALL | {"adapter_attn_dim": 8}, "has an adapter layer"),
        ("gpt2.GPT2Block", {"n_embd": 32, "n_head": 4, "add_cross_attention": True}, "has cross attention"),
        ("gpt2.GPT2Block", {"n_embd": 32, "n_head": 4, "scale_attn_weights": False}, "scales its scores otherwise"),
    ],
)
def test_what_a_block_may_have_and_no_family_computes(name, settings, reason):
    given = block(name, **settings)
    assert reason in known_of(given).mapping.refuse(given)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"qk_norm": True}, "has norms on its queries and keys"),
        ({"scale_attn_norm": True}, "has a norm inside its attention"),
        ({"scale_mlp_norm": True}, "has a norm inside its feed-forward"),
        ({"mlp_layer": "SwiGLU"}, "has a gated feed-forward"),
        ({"mlp_layer": "GluMlp"}, "has a gated feed-forward"),
    ],
)
def test_what_a_block_of_timm_may_have(vision, settings, reason):
    from timm import layers
    from timm.models.vision_transformer import Block

    settings = settings | {name: getattr(layers, kind) for name, kind in settings.items() if isinstance(kind, str)}
    given = Block(32, 4, **settings)
    assert reason in known_of(given).mapping.refuse(given)


@pytest.fixture
def x():
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def read(given, *args, **kwargs):
    mapping = known_of(given).mapping
    return mapping.read(given, mapping.causal(given) if callable(mapping.causal) else mapping.causal, *args, **kwargs)


def test_a_block_reads_its_own_arguments(x):
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    mask = real[:, None, None]
    layer = block("bert.BertLayer", **SMALL)
    for call in (
        read(layer, x, mask, None),
        read(layer, hidden_states=x, attention_mask=mask, cache=None, position_ids=x),
    ):
        assert call.x is x and torch.equal(call.valid, real) and not call.causal and call.bias is None
    with pytest.raises(Unserved, match="it passes encoder_hidden_states; served: hidden_states and attention_mask"):
        read(layer, x, mask, x)
    with pytest.raises(Unserved, match="it passes output_attentions"):
        read(layer, x, output_attentions=True)
    with pytest.raises(Unserved, match="it passes 7 positional arguments"):
        read(layer, x, *[None] * 6)


@pytest.mark.parametrize(("implementation", "causal"), [("sdpa", True), ("eager", False)])
def test_causality_is_the_implementations_own(implementation, causal, x):
    """sdpa takes the call's flag, or the module's; eager attention knows none but the mask."""
    layer = block("clip.CLIPEncoderLayer", "clip_text_model", **SMALL, attn_implementation=implementation)
    assert read(layer, x, None, is_causal=True).causal is causal and not read(layer, x, None).causal
    layer = block("gpt2.GPT2Block", n_embd=32, n_head=4, attn_implementation=implementation)
    assert read(layer, x).causal is causal


def test_a_cache_is_refused_with_the_way_out(x):
    layer = block("gpt2.GPT2Block", n_embd=32, n_head=4)
    with pytest.raises(Unserved, match="it passes cache; .*pass use_cache=False to the model"):
        read(layer, x, transformers.DynamicCache(), use_cache=True)
    assert read(layer, x, use_cache=True).causal


def test_an_implementation_set_later_is_left_to_the_block(x):
    layer = block("bert.BertLayer", **SMALL)
    layer.attention.self.config._attn_implementation = "flash_attention_2"
    with pytest.raises(Unserved, match="the block has the attention implementation 'flash_attention_2'"):
        read(layer, x)


def test_rotary_positions_come_with_the_call(x):
    settings = {"vocab_size": 9, "mask_token_id": 1, "pad_token_id": 0}
    layer = block("esm.EsmLayer", **SMALL, **settings, position_embedding_type="rotary")
    assert read(layer, x, **known_of(layer).mapping.call(layer, x)).x is x
    shifted = tuple(table.roll(1, 1) for table in known_of(layer).mapping.call(layer, x)["position_embeddings"])
    with pytest.raises(Unserved, match="not 0 to 4 at base 10000"):
        read(layer, x, position_embeddings=shifted)
    layer = block("esm.EsmLayer", **SMALL, **settings, position_embedding_type="absolute")
    assert read(layer, x, position_embeddings=None).x is x and known_of(layer).mapping.call(layer, x) == {}


def test_a_block_of_timm_takes_any_mask_as_it_is(vision, x):
    from timm.models.vision_transformer import Block

    given = Block(32, 4)
    keys = torch.tensor([True, True, False, False, False]).expand(2, 1, 1, 5)
    assert read(given, x, attn_mask=keys).bias is not None, "its rows of hidden keys count"
    assert read(given, x, is_causal=True).causal and not read(given, x).causal
    with pytest.raises(Unserved, match="is_causal=True and attn_mask"):
        read(given, x, keys, True)
