"""ViT-tiny at batch 64, images of 224 x 224 in patches of 16, with random weights."""

import torch
from torch import nn
from transformers import ViTConfig, ViTModel

BATCH = 64
SETTINGS = {
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 224,
    "patch_size": 16,
}


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.vit = ViTModel(ViTConfig(**settings), add_pooling_layer=False)

    def forward(self, pixels):
        return self.vit(pixels).last_hidden_state


def get_inputs():
    return [torch.randn(BATCH, 3, SETTINGS["image_size"], SETTINGS["image_size"])]


def get_init_inputs():
    return [SETTINGS]
