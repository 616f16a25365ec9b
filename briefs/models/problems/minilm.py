"""MiniLM-L6's encoder at batch 64, 128 tokens, with random weights."""

import torch
from torch import nn
from transformers import BertConfig, BertModel

BATCH, LENGTH = 64, 128
SETTINGS = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.bert = BertModel(BertConfig(**settings), add_pooling_layer=False)

    def forward(self, ids):
        return self.bert(ids).last_hidden_state


def get_inputs():
    return [torch.randint(0, 1000, (BATCH, LENGTH))]


def get_init_inputs():
    return [SETTINGS]
