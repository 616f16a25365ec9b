"""Read the masks of PyTorch's attention modules: causality from the attention mask, valid tokens from the padding."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflane.dispatch.errors import Unserved


def read_causal(mask: Tensor | None, is_causal: bool | None, x: Tensor) -> bool:
    """Return whether a call attends causally; raises `Unserved` for any other mask.

    `is_causal=True` is taken at its word, with a mask or without one; otherwise the values of the mask decide, which
    waits for the device once a call.
    """
    if mask is None:
        return bool(is_causal)
    length = x.shape[1] if x.dim() == 3 else -1
    if mask.shape != (length, length):
        raise Unserved("mask", f"the attention mask is {tuple(mask.shape)}; served: a causal one, [{length}, {length}]")
    if is_causal:
        return True
    hidden = _hidden(mask)
    future = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(diagonal=1)
    known = torch.ones((), dtype=torch.bool, device=mask.device) if hidden is mask else (hidden | (mask == 0)).all()
    known, causal, hides = torch.stack([known, (hidden == future).all(), hidden.any()]).tolist()
    if not known or (hides and not causal):
        raise Unserved("mask", "the attention mask is neither causal nor empty, the kinds the families compute")
    return hides or length == 1


def read_valid(padding: Tensor | None, x: Tensor) -> Tensor | None:
    """Return `[B, S]` bool, True = real token, from a key padding mask (True or -inf = padding)."""
    if padding is None:
        return None
    if padding.dtype == torch.bool:
        return ~padding
    hidden = _hidden(padding)
    if not bool((hidden | (padding == 0)).all()):
        raise Unserved("padding", "src_key_padding_mask holds numbers other than 0 and -inf, which the families ignore")
    return ~hidden


def _hidden(mask: Tensor) -> Tensor:
    """Return a PyTorch mask as bool, True = hidden."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise Unserved("mask", f"a mask is {mask.dtype}; PyTorch takes bool and floating-point masks")
    return mask == float("-inf")
