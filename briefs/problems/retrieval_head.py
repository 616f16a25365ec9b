"""A scoring head over an embedding table: integer inputs, a product, and the ten best scores with their indices."""

import torch
from torch import Tensor, nn
from torch.nn import functional

ITEMS, WIDTH, BATCH, HISTORY, BEST = 100_000, 128, 256, 32, 10


class Model(nn.Module):
    """The mean of a history's embeddings, scored against every item."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(items, width)

    def forward(self, history: Tensor, best: int) -> dict[str, Tensor]:
        """Return the best scores `[batch, best]` and their margin over the mean score `[batch]`."""
        user = functional.normalize(self.table(history).mean(dim=1), dim=-1)
        scores = user @ self.table.weight.T
        values = scores.topk(best, dim=-1).values
        return {"scores": values, "margin": values[:, 0] - scores.mean(dim=-1)}


def get_inputs() -> list:
    """Return item indices `[batch, history]` and the number of best items."""
    return [torch.randint(0, ITEMS, (BATCH, HISTORY)), BEST]


def get_init_inputs() -> list[int]:
    """Return the number of items and the width."""
    return [ITEMS, WIDTH]
