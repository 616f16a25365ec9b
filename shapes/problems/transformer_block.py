"""One pre-norm transformer block with causal self-attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, HEADS = 4, 128, 128, 4


class Model(nn.Module):
    """Attention and a feed-forward, each behind a LayerNorm and added to its input, `[batch, length, width]`."""

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
        """Return the block's output."""
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


def get_inputs() -> list[Tensor]:
    """Return x."""
    return [torch.randn(BATCH, LENGTH, WIDTH)]


def get_init_inputs() -> list[int]:
    """Return width and number of heads."""
    return [WIDTH, HEADS]
