"""What a module must be for its function to be the baseline's; each check raises `OptimizeError` with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from rooflane.dispatch.adapters.mapping import OptimizeError

# Largest difference from the exact GELU on [-6, 6] in float32; the tanh form differs by 4.7e-4.
GELU_TOLERANCE = 1e-5
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_hooks(model: nn.Module) -> None:
    """Refuse forward hooks: a built forward never calls the submodules they hang on."""
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            where = f"submodule {name!r}" if name else "module itself"
            raise OptimizeError(
                f"{type(model).__name__} has a forward hook on the {where} ({type(module).__name__}), which a built "
                "forward would never call; remove the hook before optimize()"
            )


def check_eval(model: nn.Module) -> None:
    """Refuse training mode: dropout and gradients are the module's own business."""
    dropping = [name for name, module in model.named_modules() if drops(module) and module.training]
    if model.training or dropping:
        what = f"with dropout in {dropping[0] or 'itself'}" if dropping else "and built forwards compute no gradients"
        raise OptimizeError(
            f"{type(model).__name__} is in training mode {what}; call model.eval() before optimize(), which is for "
            "inference"
        )


def drops(module: nn.Module) -> bool:
    """Return whether a module drops values while it trains."""
    chance = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0)
    return isinstance(chance, (int, float)) and chance > 0


def check_activation(model: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
    """Refuse any activation but the exact GELU, found by its values."""
    x = torch.linspace(-6, 6, 1201, dtype=torch.float32, device="cpu")
    name = getattr(activation, "__name__", None) or repr(activation)
    try:
        with torch.no_grad():
            difference = float((activation(x.clone()) - functional.gelu(x)).abs().max())
    except Exception as error:  # a callable of the user's may raise anything
        raise OptimizeError(
            f"the activation {name} of {type(model).__name__} cannot be tried on a float32 CPU vector ({error}); "
            "only the exact GELU is supported"
        ) from None
    if not difference <= GELU_TOLERANCE:
        raise OptimizeError(
            f"the activation {name} of {type(model).__name__} differs from the exact (erf) GELU by {difference:.2g}; "
            "no family computes another one, such as relu or the tanh form"
        )


def check_same_forward(part: nn.Module, kind: type[nn.Module], names: Iterable[str], where: str) -> None:
    """Refuse a part that is not of the kind, or a subclass with methods of its own."""
    own = [name for name in names if getattr(type(part), name, None) is not getattr(kind, name)]
    own += [name for name in names if name in vars(part)]
    if not isinstance(part, kind) or own:
        how = f"overrides {', '.join(own)}" if isinstance(part, kind) else f"is no {kind.__name__}"
        raise OptimizeError(
            f"{where} is a {type(part).__name__}, which {how}; optimize() knows only {kind.__name__}'s own"
        )


def check_norms(norms: dict[str, nn.Module], width: int) -> None:
    """Refuse norms other than a LayerNorm over the last axis, `[width]`, all with one eps."""
    for where, norm in norms.items():
        check_norm(norm, width, where)
    check_eps(norms)


def check_norm(norm: nn.Module, width: int, where: str) -> None:
    """Refuse a norm other than a LayerNorm over the last axis, `[width]`."""
    check_same_forward(norm, nn.LayerNorm, ("forward",), where)
    if tuple(norm.normalized_shape) != (width,):
        raise OptimizeError(
            f"{where} normalises over {tuple(norm.normalized_shape)}; the families normalise each token's ({width},) "
            "alone"
        )


def check_parameters(model: nn.Module) -> None:
    """Refuse weights that are computed at each call, and tensor subclasses, such as quantised or sharded ones."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise OptimizeError(
                f"{name or type(model).__name__} has a parametrization, which is computed at every call; bake it in "
                "before optimize(), with torch.nn.utils.parametrize.remove_parametrizations(module, name)"
            )
    for name, parameter in model.named_parameters():
        if type(parameter) not in (nn.Parameter, Tensor):
            raise OptimizeError(f"{name} is a {type(parameter).__name__}; the families read plain tensors")


def check_eps(norms: dict[str, Any]) -> None:
    """Refuse LayerNorms of different eps: a family takes one for all."""
    first, *rest = norms
    for name in rest:
        if norms[name].eps != norms[first].eps:
            raise OptimizeError(
                f"the LayerNorms differ in eps ({first} has {norms[first].eps:g}, {name} {norms[name].eps:g}); the "
                "families take one eps for all: give every LayerNorm the same"
            )
