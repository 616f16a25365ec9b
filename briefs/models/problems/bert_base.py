"""BERT-base's encoder at batch 16, 128 tokens, with random weights."""

import torch
from torch import nn
from transformers import BertConfig, BertModel

BATCH, LENGTH = 16, 128
SETTINGS = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


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
