"""GPT-2 small over whole sequences at batch 8, 512 tokens, with random weights."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

BATCH, LENGTH = 8, 512
SETTINGS = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.gpt2 = GPT2Model(GPT2Config(**settings))

    def forward(self, ids):
        return self.gpt2(ids, use_cache=False).last_hidden_state


def get_inputs():
    return [torch.randint(0, 1000, (BATCH, LENGTH))]


def get_init_inputs():
    return [SETTINGS]
