"""What models pass to their blocks beside x: attention masks of every kind, and rotary positions."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rooflane.dispatch.adapters.mapping import Call, Unserved


def read_mask(x: Tensor, mask: Tensor, heads: int, *, padding: bool) -> Call:
    """Return the call of `x [B, S, D]` with a mask that broadcasts to `[B, heads, S, S]`.

    A mask is bool (True = visible) or added to the scaled scores, where -inf and its dtype's most negative number hide.
    `padding` says that keys which no row sees are padding, whose own rows count for nothing. Then a mask that hides
    such keys, alone or together with the future, becomes `valid` and causality. Every other mask becomes `bias`.
    Telling them apart waits for the device once a call, which costs less than the launches that a captured forward
    saves. A bool mask of keys alone, `[B, 1, 1, S]` or expanded from it, is known without that. While a CUDA graph is
    captured nothing is read. Raises `Unserved` for a mask of another shape, dtype or device.
    """
    full = (*x.shape[:1], heads, *x.shape[1:2] * 2)
    whole = mask[(None,) * (4 - mask.dim())]
    fits = whole.dim() == 4 and whole.shape[3] == full[3] and all(map(_broadcasts, whole.shape, full))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise Unserved(
            "mask",
            f"the attention mask is {tuple(mask.shape)} of {mask.dtype}; served: bool and floating-point masks that "
            f"broadcast to {full}",
        )
    if mask.device != x.device:
        raise Unserved("mask", f"x is on {x.device}, the attention mask on {mask.device}")
    if padding and whole.shape[1] == 1 and x.shape[1]:
        rows = whole[:, 0]
        if mask.dtype == torch.bool and (rows.shape[1] == 1 or rows.stride(1) == 0):
            return Call(x, rows[:, 0].expand(x.shape[:2]), False)
        if not _capturing(x):
            valid, keys_alone, with_future, padded = _kind(rows)
            if keys_alone or with_future:
                return Call(x, valid.expand(x.shape[:2]) if padded else None, not keys_alone)
    return Call(x, None, False, whole)


def _capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph is captured now, in which no value can be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _broadcasts(own: int, full: int) -> bool:
    return own in (1, full)


def _kind(rows: Tensor) -> tuple[Tensor, bool, bool, bool]:
    """Return the real tokens `[B, S]` of a mask `[B, S or 1, S]`, and whether it hides padding, and the future too.

    The last number says whether any token is padding.
    """
    visible, strange = rows, False
    if rows.dtype != torch.bool:
        visible = rows == 0
        strange = ~visible & (rows > torch.finfo(rows.dtype).min)
    # The last token sees every real one, in masks of both kinds.
    valid = visible[:, -1]
    keys = valid[:, None]
    past = keys & torch.ones(rows.shape[1:], dtype=torch.bool, device=rows.device).tril()
    wrong = [((visible != wanted) | strange).any() for wanted in (keys, past)]
    not_keys, not_past, all_real = torch.stack([*wrong, valid.all()]).tolist()
    return valid, not not_keys, not not_past, not all_real


def check_rotary(x: Tensor, given: tuple[Tensor, Tensor], theta: float) -> None:
    """Raise `Unserved` unless the cosines and sines `[1 or B, S, head_dim]` are those of the positions 0, 1, 2, ...

    Only their values tell, so this waits for the device once a call, and refuses a call in a captured CUDA graph.
    """
    if _capturing(x):
        raise Unserved("positions", "its rotary positions cannot be read while a CUDA graph is captured")
    own = torch.stack(tuple(given))
    length = x.shape[1]
    if own.shape[-2] == length:
        # float32 angles differ by their rounding, which grows with the position.
        tolerance = torch.finfo(own.dtype).eps + 1e-6 * length
        known = rotary_tables(length, own.shape[-1], theta, own.dtype, own.device)
        if bool(((own - known[:, None]).abs() <= tolerance).all()):
            return
    raise Unserved(
        "positions",
        f"its rotary positions are not 0 to {length - 1} at base {theta:g}, which are those that the families compute",
    )


@lru_cache(maxsize=8)
def rotary_tables(length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the cosines and sines `[2, S, width]`, kept so that a call computes none of them."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).to(device, dtype)
