"""How the calls of a known block are read, and which of its parts no family computes. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rooflane.dispatch.adapters.mapping import Call, Unserved

if TYPE_CHECKING:
    from torch import nn

IMPLEMENTATIONS = ("sdpa", "eager")
# Passed down to every block by some models. The first two are read by none whose attention is eager or sdpa, the last
# by none without a cache, which is an argument of its own.
NO_EFFECT = ("position_ids", "cache_position", "use_cache")
CACHES = ("cache", "past_key_values")
CACHE = "; a whole sequence needs no cache: pass use_cache=False to the model"
# Parts that some blocks of a known class have, by their paths; None and nn.Identity count as absent.
REFUSED_PARTS = {
    "crossattention": "cross attention",
    "adapter_layer": "an adapter layer",
    "mlp.gate_proj": "a gated feed-forward",
    "mlp.fc1_g": "a gated feed-forward",
    "mlp.chunk_dim": "a gated feed-forward",
    "mlp.norm": "a norm inside its feed-forward",
    "attn.q_norm": "norms on its queries and keys",
    "attn.norm": "a norm inside its attention",
    "attn.gate": "a gate on its attention",
}


@dataclass(frozen=True)
class Calls:
    """Read the calls of one class of block; `heads` is the path of its number of heads.

    `x` and `mask` are the names of the block's own arguments. `attention` is the path of a transformers attention
    module: its `config` names the implementation, its `is_causal` says what a call without a mask means. Blocks of
    other libraries have none, and are causal where a call says so. `theta(block)` is the base of rotary positions,
    which such blocks get with every call.
    """

    heads: str
    attention: str = ""
    x: str = "hidden_states"
    mask: str = "attention_mask"
    theta: Callable[[nn.Module], float | None] | None = None

    def causal(self, block: nn.Module) -> bool:
        """Return whether the block attends causally when a call has no mask; eager attention never does."""
        if not self.attention:
            return False
        attention = attrgetter(self.attention)(block)
        # In this order: a config of transformers takes microseconds to answer, at every call.
        return bool(attention.is_causal) and attention.config._attn_implementation == "sdpa"

    def refuse(self, block: nn.Module) -> str | None:
        """Return why the block does not fit, or None."""
        for path, name in REFUSED_PARTS.items():
            if type(_part(block, path)).__name__ not in ("NoneType", "Identity"):
                return f"has {name}, which no family computes"
        if self._implementation(block) not in ("", *IMPLEMENTATIONS):
            return f"has {self._unread(block)}"
        return None

    def read(self, block: nn.Module, causal: bool, *args: Any, **kwargs: Any) -> Call:
        """Return a call as the families take it; raises `Unserved` where they cannot take it.

        Arguments that are None or False are ignored, as these are the defaults of all optional ones.
        """
        from rooflane.dispatch.adapters.masks import check_rotary, read_mask

        names = _positional(type(block))
        given = dict(zip(names, args, strict=False)) | kwargs
        x, mask, flag = given.pop(self.x, None), given.pop(self.mask, None), given.pop("is_causal", None)
        theta = self.theta(block) if self.theta else None
        rotary = given.pop("position_embeddings", None) if theta else None
        extra = [
            name for name, value in given.items() if name not in NO_EFFECT and value is not None and value is not False
        ]
        if extra or x is None or len(args) > len(names):
            passed = ", ".join(extra) or f"{len(args)} positional arguments"
            hint = CACHE * any(name in CACHES for name in extra)
            raise Unserved("arguments", f"it passes {passed}; served: {self.x} and {self.mask}{hint}")
        implementation = self._implementation(block)
        if implementation not in ("", *IMPLEMENTATIONS):
            raise Unserved("attention", f"the block has {self._unread(block)}")
        # An example call may leave the positions out, which every call of the model has.
        if rotary is not None:
            check_rotary(x, rotary, theta)
        if mask is not None and flag and not implementation:
            raise Unserved("mask", f"it passes is_causal=True and {self.mask}, which attention takes one at a time")
        if mask is not None:
            # transformers makes masks from padding; those of other libraries come from the caller, for any purpose.
            return read_mask(x, mask, attrgetter(self.heads)(block), padding=bool(self.attention))
        # Eager attention takes a call's `is_causal` and ignores it.
        return Call(x, None, causal if flag is None or implementation == "eager" else flag)

    def _implementation(self, block: nn.Module) -> str:
        return attrgetter(self.attention)(block).config._attn_implementation or "eager" if self.attention else ""

    def _unread(self, block: nn.Module) -> str:
        return (
            f"the attention implementation {self._implementation(block)!r}; the calls of eager and sdpa ones are read"
        )


@lru_cache
def _positional(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a class's positional arguments, whose order differs between versions of transformers."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)


def _part(block: nn.Module, path: str) -> Any:
    try:
        return attrgetter(path)(block)
    except AttributeError:
        return None
