"""PyTorch's encoder at its defaults (post-norm, ReLU), 512 wide, at batch 32, 128 tokens, with random weights."""

import torch
from torch import nn

BATCH, LENGTH = 32, 128
SETTINGS = {"d_model": 512, "nhead": 8, "dim_feedforward": 2048, "layers": 6}


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            settings["d_model"], settings["nhead"], settings["dim_feedforward"], batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, settings["layers"])

    def forward(self, x):
        return self.encoder(x)


def get_inputs():
    return [torch.randn(BATCH, LENGTH, SETTINGS["d_model"])]


def get_init_inputs():
    return [SETTINGS]
