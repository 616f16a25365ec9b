"""How each kind of module is read: refusals, weights as a baseline's, calls. Loads no torch before one is asked for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rooflane.dispatch.adapters.mapping import GPT2_BLOCK, BlockMapping, WeightsAt, weights_at
from rooflane.dispatch.request import OptimizeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rooflane.dispatch.dispatched import Dispatched

__all__ = ["GPT2_BLOCK", "BlockMapping", "WeightsAt", "find_adapter", "weights_at"]

TAKES = (
    "it takes a BaselineTransformer, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, transformers' "
    "GPT2Block, and other pre-norm blocks with mapping=BlockMapping(...)"
)


def find_adapter(model: nn.Module, mapping: BlockMapping | None) -> Callable[..., Dispatched]:
    """Return the dispatched class that reads modules like `model`; raises `OptimizeError` for a kind none reads."""
    from torch import nn

    from rooflane.dispatch.adapters.baseline import DispatchedTransformer, is_baseline
    from rooflane.dispatch.adapters.blocks import DispatchedBlocks
    from rooflane.dispatch.adapters.encoder import DispatchedEncoder, DispatchedEncoderLayer

    if mapping is not None:
        return partial(DispatchedBlocks, mapping=mapping)
    if isinstance(model, nn.TransformerEncoder):
        return DispatchedEncoder
    if isinstance(model, nn.TransformerEncoderLayer):
        return DispatchedEncoderLayer
    if is_baseline(model):
        return DispatchedTransformer
    name = type(model).__name__
    if name == "GPT2Block" and type(model).__module__.startswith("transformers."):
        return partial(DispatchedBlocks, mapping=GPT2_BLOCK)
    if isinstance(model, (nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.Transformer)):
        raise OptimizeError(f"{name} has cross attention, which no family computes; optimize() refuses it: {TAKES}")
    raise OptimizeError(f"{name} is no module that optimize() can read: {TAKES}")
