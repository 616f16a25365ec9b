"""The models that optimize() takes whole: small ones with random weights, and what each is called with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

S = 9
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SMALL | {"intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 48}
# 12 of 12 pixels in patches of 3, and the class token: 17 tokens, an odd number.
IMAGE = SMALL | {"intermediate_size": 48, "image_size": 12, "patch_size": 3}
PIXELS = (3, 12, 12)
# 40 positions after two convolutions, the second of stride 2.
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 40,
    "vocab_size": 50,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
# 165 samples of sound make 15 frames of the features.
WAV2VEC2 = SMALL | {
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}


@dataclass(frozen=True)
class Model:
    """A model: how it is built, the inputs it is called with, and which of its outputs count.

    `build()` returns it with weights drawn at random, `inputs(batch)` its arguments. `padding` is the side on which it
    takes padded tokens by an `attention_mask [B, S]`: "right", "left", "samples" where S counts more than the tokens,
    or "" where it takes none.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    padding: str = "right"
    output: Callable[[Any], Tensor] = lambda out: out.last_hidden_state


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (batch, S), generator=_generator())}


def normal(name: str, *shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda batch: {name: torch.randn(batch, *shape, generator=_generator())}


def hf(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return how a model of transformers is built; nothing is imported before it is called."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def whisper_encoder() -> nn.Module:
    return hf("WhisperModel", "WhisperConfig", **WHISPER)().encoder


def timm_vit(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(
            img_size=12, patch_size=3, embed_dim=32, depth=2, num_heads=4, num_classes=5, mlp_ratio=1.5, **settings
        )

    return build


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(12, 3, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # all 0 at first, and so would be the output
    return model


def encoder_layer() -> nn.TransformerEncoderLayer:
    """The defaults but for batch_first: post-norm, ReLU, with dropout."""
    return nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)


class Text(nn.Module):
    """Tokens into an nn.TransformerEncoder, whose padding mask is the other way about."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        return self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)


class Table(nn.Module):
    """A table as TabPFN reads it: rows are tokens, and none sees a test row, those after the first 6."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.bool, device=rows.device)
        hidden[:, 6:] = True
        return self.head(self.encoder(self.embedding(rows), mask=hidden))


def itself(out: Tensor) -> Tensor:
    return out


MINILM = TEXT | {"num_attention_heads": 2, "intermediate_size": 128}
MODELS = {
    "BERT": Model(hf("BertModel", "BertConfig", **TEXT), tokens),
    "MiniLM": Model(hf("BertModel", "BertConfig", **MINILM), tokens),
    "RoBERTa": Model(hf("RobertaModel", "RobertaConfig", **TEXT), tokens),
    "XLM-RoBERTa": Model(hf("XLMRobertaModel", "XLMRobertaConfig", **TEXT), tokens),
    "DistilBERT": Model(
        hf("DistilBertModel", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=50), tokens
    ),
    "ELECTRA": Model(hf("ElectraModel", "ElectraConfig", embedding_size=16, **TEXT), tokens),
    "ViT": Model(hf("ViTModel", "ViTConfig", **IMAGE), normal("pixel_values", *PIXELS), ""),
    "ViT of timm": Model(timm_vit(), normal("x", *PIXELS), "", itself),
    "ViT of timm, LayerScale": Model(timm_vit(init_values=0.3, qkv_bias=False), normal("x", *PIXELS), "", itself),
    "DeiT": Model(hf("DeiTModel", "DeiTConfig", **IMAGE), normal("pixel_values", *PIXELS), ""),
    "DINOv2": Model(
        hf("Dinov2Model", "Dinov2Config", layerscale_value=0.3, mlp_ratio=2, **SMALL, image_size=12, patch_size=3),
        normal("pixel_values", *PIXELS),
        "",
    ),
    "CLIP vision": Model(hf("CLIPVisionModel", "CLIPVisionConfig", **IMAGE), normal("pixel_values", *PIXELS), ""),
    "CLIP text": Model(
        hf("CLIPTextModel", "CLIPTextConfig", **TEXT, pad_token_id=1, bos_token_id=0, eos_token_id=2), tokens
    ),
    "Whisper encoder": Model(whisper_encoder, normal("input_features", 8, 80), ""),
    "wav2vec2 base": Model(hf("Wav2Vec2Model", "Wav2Vec2Config", **WAV2VEC2), normal("input_values", 165), "samples"),
    "wav2vec2 stable": Model(
        hf("Wav2Vec2Model", "Wav2Vec2Config", **WAV2VEC2, do_stable_layer_norm=True, feat_extract_norm="layer"),
        normal("input_values", 165),
        "samples",
    ),
    "ESM-1b": Model(
        hf("EsmModel", "EsmConfig", **TEXT, position_embedding_type="absolute", pad_token_id=1, mask_token_id=2), tokens
    ),
    "ESM-2": Model(
        hf("EsmModel", "EsmConfig", **TEXT, position_embedding_type="rotary", pad_token_id=1, mask_token_id=2), tokens
    ),
    "GPT-2": Model(
        hf(
            "GPT2Model",
            "GPT2Config",
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=48,
            vocab_size=50,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        ),
        tokens,
        "left",
    ),
    "ViT of torchvision": Model(torchvision_vit, normal("x", *PIXELS), "", itself),
    "nn.TransformerEncoder": Model(Text, tokens, "right", itself),
    "TabPFN-like": Model(Table, normal("rows", 11, 5), "", itself),
}


@pytest.fixture(scope="session")
def vision() -> Iterator[None]:
    """Make timm and torchvision importable, from the folder that ROOFLANE_VISION names where they are not installed."""
    folder = os.environ.get("ROOFLANE_VISION")
    if folder:
        sys.path.append(folder)
        # No torchvision loads its compiled operators beside the CPU build of torch; two are asked for when it loads.
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in ("torchvision", "timm"):
        pytest.importorskip(name, reason="needs timm and torchvision: pip install 'rooflane[models]'")
    # The definitions live as long as their library.
    yield


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    return MODELS


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Model:
    if " of t" in request.param:
        request.getfixturevalue("vision")
    elif not request.param.startswith(("nn.", "Tab")):
        pytest.importorskip("transformers", reason="needs transformers: pip install 'rooflane[models]'")
    return MODELS[request.param]
