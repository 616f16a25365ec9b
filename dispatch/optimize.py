"""optimize(): a module and a shape in, a dispatched module out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflane.dispatch.adapters.known import REFUSED, known_of, qualified_name
from rooflane.dispatch.adapters.mapping import BlockMapping, OptimizeError, Request, Unserved
from rooflane.dispatch.profile import Profile
from rooflane.dispatch.rule_files import load_rules
from rooflane.dispatch.rules import RuleTable
from rooflane.shapes import Shape, ShapeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.dispatch.dispatched import Dispatched
    from rooflane.dispatch.whole_models import Found

ON_UNSEEN = ("fallback", "build", "error")
CACHE_SIZE = 8
TAKES = (
    "it takes a BaselineTransformer, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, the blocks that "
    "`rooflane models` lists, and others with mapping=BlockMapping(...)"
)


def optimize(
    model: nn.Module,
    shape: Shape | Tensor | Sequence[Shape | Tensor] | None = None,
    device: torch.device | str | None = None,
    rules: RuleTable | str | Path | None = None,
    profile: Profile | None = None,
    *,
    mask: Tensor | None = None,
    mapping: BlockMapping | None = None,
    on_unseen: str | None = None,
    cache_size: int = CACHE_SIZE,
) -> nn.Module:
    """Return a module that computes what `model` does, built by the families the rules choose.

    `model` is a `BaselineTransformer`, `nn.TransformerEncoder`, `nn.TransformerEncoderLayer`, a block of a known class,
    or what `mapping` describes. `shape` is a `Shape`, an example input `[B, S, D]` (`mask` is then the second argument
    of the example call), or several of either. The result shares the model's submodules: same state_dict keys, same
    forward signature; padded rows of its output are 0.

    Any other model is searched for stacks of known blocks. These are served in place and the model itself is returned;
    `restore(model)` undoes it, `served(model)` lists them. Such a model is called without a shape.

    Calls that no built forward takes (another shape or mask, gradients, dropout in training) run the model's own
    forward and warn once a kind. `on_unseen="build"` builds unseen shapes at their first call and is the default
    without a shape, `"error"` raises `OptimizeError` instead of falling back. At most `cache_size` built forwards are
    kept, the least recently used is freed first. `device` defaults to the model's; when it is another, nothing is built
    before the module is moved there. `profile` defaults to that of the device. `.route` holds the first shape's choice
    and its reasons.

    Raises `OptimizeError` when the model or shape does not fit, `ProfileError` for an unknown device, `RouteError`
    when no rule can serve.
    """
    import torch

    from rooflane.dispatch.dispatched import Dispatched

    on_unseen = on_unseen or ("build" if shape is None else "fallback")
    if on_unseen not in ON_UNSEEN:
        raise OptimizeError(f"on_unseen is {on_unseen!r}; accepted: {', '.join(ON_UNSEEN)}")
    if mapping is not None and not isinstance(mapping, BlockMapping):
        raise OptimizeError(f"mapping is a {type(mapping).__name__}; give a BlockMapping, such as GPT2_BLOCK")
    asked = _asked(shape, cache_size)
    if isinstance(model, Dispatched):
        model = model._model
    adapter = _find_adapter(model, mapping)
    where = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    table = rules if isinstance(rules, RuleTable) else load_rules(rules)
    wanted = where if device is None else torch.device(device)
    may_compile = shape is not None or rules is not None
    request = Request(table, profile, wanted, on_unseen, cache_size, may_compile)
    if adapter is None:
        return _serve_in_place(model, asked, request)
    module = adapter(model, request)
    module.ask([(one, False) if isinstance(one, Shape) else _shape_of_example(module, one, mask) for one in asked])
    return module


def restore(model: nn.Module) -> nn.Module:
    """Undo optimize() on a whole model: every block runs its class's own code again. Return the model."""
    from rooflane.dispatch.whole_models import restore

    return restore(model)


def served(model: nn.Module) -> list[Found]:
    """Return the stacks of blocks in a model: those served with their routes, the others with the reason."""
    from rooflane.dispatch.whole_models import served

    return served(model)


def _asked(shape: Any, cache_size: int) -> list[Any]:
    """Return the shapes and examples of a request in a list."""
    import torch

    if shape is None:
        return []
    if not isinstance(shape, (Shape, torch.Tensor, list, tuple)):
        raise OptimizeError(f"shape is a {type(shape).__name__}; give a Shape, an example input, or a list of either")
    if isinstance(shape, (list, tuple)) and any(isinstance(one, int) for one in shape):
        raise OptimizeError(
            f"shape is {shape!r}; sizes alone leave out heads and layers: give a rooflane Shape, or an example input "
            "such as torch.empty(B, S, D)"
        )
    asked = [shape] if isinstance(shape, (Shape, torch.Tensor)) else list(shape)
    if not asked or len(asked) > cache_size:
        raise OptimizeError(
            f"{len(asked)} shapes are asked for and cache_size is {cache_size}; give a shape, and room for all of them"
        )
    return asked


def _serve_in_place(model: nn.Module, asked: list[Any], request: Request) -> nn.Module:
    from rooflane.dispatch.whole_models import serve

    if asked:
        raise OptimizeError(
            f"{type(model).__name__} is no module that optimize() can read with a shape: {TAKES}. A whole model is "
            "given without a shape, and each shape is built at its first call"
        )
    serve(model, request)
    return model


def takes_shape(model: nn.Module) -> bool:
    """Return whether a model is one stack of layers, for which optimize() takes a shape or an example."""
    return _find_adapter(model, None) is not None


def _find_adapter(model: nn.Module, mapping: BlockMapping | None) -> Callable[..., Dispatched] | None:
    """Return the dispatched class that reads modules like `model`, None for a whole model."""
    from torch import nn

    from rooflane.dispatch.adapters.blocks import DispatchedBlocks
    from rooflane.dispatch.adapters.encoder import DispatchedEncoder, DispatchedEncoderLayer
    from rooflane.dispatch.dispatched import DispatchedTransformer

    if mapping is not None:
        return partial(DispatchedBlocks, mapping=mapping)
    if isinstance(model, nn.TransformerEncoder):
        return DispatchedEncoder
    if isinstance(model, nn.TransformerEncoderLayer):
        return DispatchedEncoderLayer
    if all(hasattr(model, name) for name in ("config", "layers", "final_norm")):
        return DispatchedTransformer
    known = known_of(model)
    if known is not None:
        return partial(DispatchedBlocks, mapping=known.mapping)
    name = type(model).__name__
    if qualified_name(model) in REFUSED:
        raise OptimizeError(f"{name} {REFUSED[qualified_name(model)]}; no family computes that")
    if isinstance(model, (nn.TransformerDecoder, nn.TransformerDecoderLayer)):
        raise OptimizeError(f"{name} has cross attention, which no family computes; optimize() refuses it: {TAKES}")
    return None


def _shape_of_example(module: Any, x: Tensor, mask: Tensor | None) -> tuple[Shape, bool]:
    """Return the shape of an example call and whether it has a bias; raises `OptimizeError` when none could take it."""
    import torch

    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.is_nested:
        raise OptimizeError(f"an example input is a tensor [batch, sequence, width]; got {_kind(x)}")
    weight = next(module.parameters())
    if x.dtype != weight.dtype or x.shape[2] != module._sizes.d_model:
        raise OptimizeError(
            f"the example input is {_kind(x)}; the model takes [batch, sequence, {module._sizes.d_model}] of "
            f"{weight.dtype}"
        )
    try:
        call = module.read(x) if mask is None else module.read(x, mask)
        return module.shape_of(x, call.causal), call.bias is not None
    except (Unserved, ShapeError) as error:
        raise OptimizeError(f"the example call cannot be optimised: {error}") from None


def _kind(x: object) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None or getattr(x, "is_nested", False) else f"{tuple(shape)} of {x.dtype}"
