"""The block classes that optimize() takes without being told how, by their qualified names. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooflane.dispatch.adapters.known import layouts
from rooflane.dispatch.adapters.known.layouts import GPT2_BLOCK
from rooflane.dispatch.adapters.mapping import BlockMapping

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ENCODER", "GPT2_BLOCK", "KNOWN", "REFUSED", "Known", "known_of", "qualified_name"]


@dataclass(frozen=True)
class Known:
    """A block class by its module path and name, the models made of it, their usual form in words, its mapping.

    PyTorch's encoder has no mapping: an adapter of its own reads it.
    """

    name: str
    label: str
    form: str
    mapping: BlockMapping | None

    @property
    def library(self) -> str:
        """The package that the class comes from."""
        return self.name.partition(".")[0]


def _hf(path: str, label: str, form: str, mapping: BlockMapping) -> Known:
    model, kind = path.split(".")
    return Known(f"transformers.models.{model}.modeling_{model}.{kind}", label, form, mapping)


ENCODER = Known("torch.nn.TransformerEncoder", "nn.TransformerEncoder", "post- or pre-norm, ReLU or GELU", None)
KNOWN = (
    _hf("bert.BertLayer", "BERT, MiniLM", "post-norm, GELU", layouts.BERT),
    _hf("roberta.RobertaLayer", "RoBERTa", "post-norm, GELU", layouts.BERT),
    _hf("xlm_roberta.XLMRobertaLayer", "XLM-RoBERTa", "post-norm, GELU", layouts.BERT),
    _hf("electra.ElectraLayer", "ELECTRA", "post-norm, GELU", layouts.BERT),
    _hf("distilbert.TransformerBlock", "DistilBERT", "post-norm, GELU", layouts.DISTILBERT),
    _hf("vit.ViTLayer", "ViT", "pre-norm, GELU", layouts.VIT),
    _hf("deit.DeiTLayer", "DeiT", "pre-norm, GELU", layouts.VIT),
    _hf("dinov2.Dinov2Layer", "DINOv2", "pre-norm, GELU, LayerScale", layouts.DINOV2),
    _hf("clip.CLIPEncoderLayer", "CLIP vision and text", "pre-norm, quick GELU", layouts.CLIP),
    _hf("whisper.WhisperEncoderLayer", "Whisper encoder", "pre-norm, GELU", layouts.WHISPER),
    _hf("wav2vec2.Wav2Vec2EncoderLayer", "wav2vec2 base", "post-norm, GELU", layouts.WAV2VEC2),
    _hf("wav2vec2.Wav2Vec2EncoderLayerStableLayerNorm", "wav2vec2 stable", "pre-norm, GELU", layouts.WAV2VEC2_STABLE),
    _hf("esm.EsmLayer", "ESM-1b, ESM-2", "pre-norm, GELU, rotary positions in ESM-2", layouts.ESM),
    _hf("gpt2.GPT2Block", "GPT-2", "pre-norm, tanh GELU, causal", GPT2_BLOCK),
    Known("timm.models.vision_transformer.Block", "ViT of timm", "pre-norm, GELU", layouts.TIMM_BLOCK),
    Known(
        "torchvision.models.vision_transformer.EncoderBlock",
        "ViT of torchvision",
        "pre-norm, GELU",
        layouts.TORCHVISION_BLOCK,
    ),
)
_BY_NAME = {known.name: known for known in KNOWN}
# What stands in the way of blocks that are often asked for, by qualified name.
REFUSED = {
    f"transformers.models.{name.partition('.')[0]}.modeling_{name}": reason
    for name, reason in {
        "patchtst.PatchTSTEncoderLayer": "takes [batch, channels, patches, width], and may normalise over the batch",
        "t5.T5Block": "adds relative positions to scores that it does not scale",
        "deberta_v2.DebertaV2Layer": "scores relative positions against queries and keys",
        "swin.SwinLayer": "attends within windows of an image",
        "modernbert.ModernBertEncoderLayer": "has a gated feed-forward",
        "llama.LlamaDecoderLayer": "has a gated feed-forward",
        "whisper.WhisperDecoderLayer": "has cross attention",
        "bart.BartDecoderLayer": "has cross attention",
    }.items()
}


def qualified_name(module: nn.Module) -> str:
    """Return a module's class by its module path and name."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def known_of(module: nn.Module) -> Known | None:
    """Return what is known of a module's class, or None. A subclass may compute something else, and is not known."""
    return _BY_NAME.get(qualified_name(module))
