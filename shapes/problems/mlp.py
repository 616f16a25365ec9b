"""A gated feed-forward: down(silu(gate(x)) * up(x))."""

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, WIDTH, HIDDEN = 512, 256, 704


class Model(nn.Module):
    """Three linear layers without bias and a SiLU gate, `[tokens, width]` in and out."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward's output."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def get_inputs() -> list[Tensor]:
    """Return x."""
    return [torch.randn(TOKENS, WIDTH)]


def get_init_inputs() -> list[int]:
    """Return width and hidden width."""
    return [WIDTH, HIDDEN]
