"""A causal transformer of six layers, d_model 128, written out as in a textbook: what launches cost is most of it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 16, 256, 128, 4, 6


class Block(nn.Module):
    """Attention and a feed-forward, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, 4 * width)
        self.ffn_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output `[batch, length, width]`."""
        x = x + self.attend(self.norm1(x))
        return x + self.ffn_out(functional.gelu(self.ffn_in(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        """Return causal self-attention with the scores written out."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        probs = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return self.proj((probs @ v).transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    """The blocks, then a last LayerNorm."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states `[batch, length, width]`."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def get_inputs() -> list[Tensor]:
    """Return x."""
    return [torch.randn(BATCH, LENGTH, WIDTH)]


def get_init_inputs() -> list[int]:
    """Return width, heads and layers."""
    return [WIDTH, HEADS, LAYERS]
