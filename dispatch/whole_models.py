"""optimize() on a whole model: find its stacks of known blocks, serve them in place, list them, undo it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rooflane.dispatch.adapters.checks import InPlace
from rooflane.dispatch.adapters.encoder import DispatchedEncoder, EncoderForward
from rooflane.dispatch.adapters.known import ENCODER, REFUSED, Known, known_of, qualified_name
from rooflane.dispatch.adapters.mapping import OptimizeError, Request
from rooflane.dispatch.adapters.stack import DispatchedStack, Step
from rooflane.dispatch.dispatched import Dispatched


@dataclass(frozen=True)
class Found:
    """A list of blocks in a model: its path, how many blocks it has, what is known of them, why they are not served.

    `stack` is the served stack, None where the blocks run their own code.
    """

    path: str
    blocks: int
    block: str
    known: Known | None
    reason: str = ""
    stack: Dispatched | None = None

    def explain(self) -> str:
        """Return the place, the blocks, and what serves them or why nothing does, on lines."""
        head = f"{self.path or 'the model itself'}: {self.blocks} x {self.block.rpartition('.')[2]}"
        if self.stack is None:
            return f"{head}: not served: {self.reason}"
        form = ", ".join(self.stack.form.differences()) or "pre-norm, exact GELU, a final norm"
        lines = [f"{head}: served ({form})"]
        for built in self.stack.routes:
            lines.append(f"  {built.shape.label()}: {built.family}")
        return "\n".join(lines)


def find_stacks(model: nn.Module) -> Iterator[tuple[Found, nn.Module]]:
    """Yield every list of blocks in a model, as it is served now, and the module that holds it."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        known = ENCODER if isinstance(module, nn.TransformerEncoder) else _known_blocks(module)
        if known is None and not _is_list_of_blocks(module):
            continue
        inside = (*inside, f"{path}." if path else "")
        blocks = module.layers if known is ENCODER else module
        forward: Any = vars(module if known is ENCODER else module[0]).get("forward")
        # A later block's step is not at the head of a stack, though its first block may have been deleted.
        heads = isinstance(forward, EncoderForward) or (isinstance(forward, Step) and forward.index == 0)
        stack = forward.stack if heads else None
        block = "torch.nn.TransformerEncoderLayer" if known is ENCODER else qualified_name(module[0])
        reason = "" if stack else REFUSED.get(block, "optimize() was not called, or refused the blocks")
        yield Found(path, len(blocks), block, known, reason, stack), module


def _known_blocks(module: nn.Module) -> Known | None:
    blocks = list(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    return known_of(blocks[0]) if len(set(map(type, blocks))) == 1 else None


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a list of modules looks like a stack: several of one class, each with attention inside."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
        return False
    kinds = {type(block) for block in module}
    if len(kinds) > 1:
        return False
    names = (name.lower() for name, _ in module[0].named_modules())
    return any("attn" in name or "attention" in name for name in names)


def serve(model: nn.Module, request: Request) -> list[Found]:
    """Serve every stack of a model in place; return all stacks found, those that are refused with their reasons.

    Raises `OptimizeError` when none can be served.
    """
    found = [_serve_one(place, module, request) for place, module in find_stacks(model)]
    refused = [one for one in found if one.stack is None]
    if len(refused) == len(found):
        seen = "; ".join(one.explain() for one in refused) or _children(model)
        raise OptimizeError(
            f"{type(model).__name__} has no stack of blocks that optimize() can serve: {seen}. `rooflane models` lists "
            "the blocks that it knows; others are described by mapping=BlockMapping(...)"
        )
    for one in refused:
        warnings.warn(f"these blocks run their own code: {one.explain()}", stacklevel=3)
    return found


def _serve_one(place: Found, module: nn.Module, request: Request) -> Found:
    if place.stack is not None:
        return place
    if place.known is None:
        unknown = "optimize() does not know this block; describe it with mapping=BlockMapping(...)"
        return replace(place, reason=REFUSED.get(place.block, unknown))
    try:
        if place.known is ENCODER:
            stack: Dispatched = DispatchedEncoder(module, request)
            module.forward = EncoderForward(stack)
        else:
            stack = DispatchedStack(module, request, place.known.mapping)
    except OptimizeError as error:
        return replace(place, reason=str(error))
    return replace(place, reason="", stack=stack)


def served(model: nn.Module) -> list[Found]:
    """Return the stacks of a model: those that are served with their routes, the others with the reason."""
    return [place for place, _ in find_stacks(model)]


def restore(model: nn.Module) -> nn.Module:
    """Undo optimize() on a whole model: every block runs its class's own code again. Return the model."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), InPlace):
            del module.forward
    return model


def _children(model: nn.Module) -> str:
    kinds = Counter(type(module).__name__ for module in model.modules() if module is not model)
    common = ", ".join(f"{count} {name}" for name, count in kinds.most_common(5))
    return f"it has no list of blocks with attention, but {common or 'no parts'}"
