"""Whisper-tiny's encoder at batch 8, 30 seconds of sound, with random weights."""

import torch
from torch import nn
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

BATCH = 8
SETTINGS = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.encoder = WhisperEncoder(WhisperConfig(**settings))

    def forward(self, features):
        return self.encoder(features).last_hidden_state


def get_inputs():
    return [torch.randn(BATCH, SETTINGS["num_mel_bins"], 2 * SETTINGS["max_source_positions"])]


def get_init_inputs():
    return [SETTINGS]
