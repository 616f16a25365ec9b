"""What a module must be for its function to be the baseline's; each check raises `OptimizeError` with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from rooflane.dispatch.adapters.mapping import OptimizeError
from rooflane.dispatch.adapters.reference import ACTIVATIONS

# Largest difference on [-6, 6] in float32; the tanh form of GELU differs from the exact one by 4.7e-4.
ACTIVATION_TOLERANCE = 1e-5
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


# What transformers hangs on every block once hidden states were asked for; it does nothing while none are collected.
COLLECTORS = ("transformers.utils.output_capturing",)


class InPlace:
    """Mark a forward that optimize() set on a module, which is no other function of the module's own."""


def check_hooks(model: nn.Module) -> None:
    """Refuse forward hooks: a built forward never calls the submodules they hang on."""
    for name, module in model.named_modules():
        hanging = (hook for hooks in HOOKS for hook in getattr(module, hooks).values())
        if any(getattr(hook, "__module__", "") not in COLLECTORS for hook in hanging):
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


def activation_of(model: nn.Module, activation: Callable[[Tensor], Tensor]) -> str:
    """Return which of `shapes.ACTIVATIONS` a callable computes, found by its values; refuse any other."""
    x = torch.linspace(-6, 6, 1201, dtype=torch.float32, device="cpu")
    name = getattr(activation, "__name__", None) or repr(activation)
    try:
        with torch.no_grad():
            own = activation(x.clone())
            far = {kind: float((own - function(x)).abs().max()) for kind, function in ACTIVATIONS.items()}
    except Exception as error:  # a callable of the user's may raise anything
        raise OptimizeError(
            f"the activation {name} of {type(model).__name__} cannot be tried on a float32 CPU vector ({error}); "
            f"served: {', '.join(ACTIVATIONS)}"
        ) from None
    nearest = min(far, key=far.__getitem__)
    if not far[nearest] <= ACTIVATION_TOLERANCE:
        raise OptimizeError(
            f"the activation {name} of {type(model).__name__} differs from {nearest}, the nearest that the families "
            f"compute, by {far[nearest]:.2g}; served: {', '.join(ACTIVATIONS)}"
        )
    return nearest


def check_same_forward(part: nn.Module, kind: type[nn.Module], names: Iterable[str], where: str) -> None:
    """Refuse a part that is not of the kind, or a subclass with methods of its own."""
    own = [name for name in names if getattr(type(part), name, None) is not getattr(kind, name)]
    own += [name for name in names if name in vars(part) and not isinstance(vars(part)[name], InPlace)]
    if not isinstance(part, kind) or own:
        how = f"overrides {', '.join(own)}" if isinstance(part, kind) else f"is no {kind.__name__}"
        raise OptimizeError(
            f"{where} is a {type(part).__name__}, which {how}; optimize() knows only {kind.__name__}'s own"
        )


def check_norms(norms: dict[str, nn.Module], width: int) -> str:
    """Return the one kind of all norms, over the last axis `[width]` and with one eps; refuse others."""
    kinds = {where: norm_of(norm, width, where) for where, norm in norms.items()}
    first, *rest = kinds
    for name in rest:
        if kinds[name] != kinds[first]:
            raise OptimizeError(f"{first} is a {kinds[first]} norm and {name} a {kinds[name]} norm; a family takes one")
    check_eps(norms)
    return kinds[first]


def norm_of(norm: nn.Module, width: int, where: str) -> str:
    """Return which of `shapes.NORMS` a norm over the last axis `[width]` computes; refuse any other."""
    shape = tuple(getattr(norm, "normalized_shape", (width,)))
    if shape != (width,):
        raise OptimizeError(f"{where} normalises over {shape}; the families normalise each token's ({width},) alone")
    for kind, own in (("layer", nn.LayerNorm), ("rms", nn.RMSNorm)):
        if type(norm).forward is own.forward and "forward" not in vars(norm):
            return kind
    return _norm_by_values(norm, width, where)


def _norm_by_values(norm: nn.Module, width: int, where: str) -> str:
    """Try a norm of another class on drawn weights, in float32 as some of them compute in no other type."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        x = 1 + torch.randn(4, width, generator=generator)
        try:
            copied = copy.deepcopy(norm).to("cpu", torch.float32)
            for tensor in copied.parameters():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            weight, bias, eps = copied.weight, getattr(copied, "bias", None), eps_of(copied)
            own = copied(x)
            known = {
                "layer": functional.layer_norm(x, (width,), weight, bias, eps),
                "rms": functional.rms_norm(x, (width,), weight, eps) + (0 if bias is None else bias),
            }
            found = [kind for kind, value in known.items() if torch.allclose(own, value, rtol=1e-5, atol=1e-5)]
        except Exception:  # the class is the user's and may raise anything
            found = []
    if not found:
        raise OptimizeError(
            f"{where} is a {type(norm).__name__}, which computes neither LayerNorm nor RMSNorm over the last axis"
        )
    return found[0]


def eps_of(norm: Any) -> float:
    """Return the number that a norm adds to the variance or the mean square."""
    eps = getattr(norm, "eps", None)
    eps = getattr(norm, "variance_epsilon", None) if eps is None else eps
    # RMSNorm's default is the rounding of its input's type.
    return torch.finfo(norm.weight.dtype).eps if eps is None else eps


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
    """Refuse norms of different eps: a family takes one for all."""
    first, *rest = norms
    for name in rest:
        own, other = eps_of(norms[first]), eps_of(norms[name])
        if own != other:
            raise OptimizeError(
                f"the norms differ in eps ({first} has {own:g}, {name} {other:g}); the families take one eps for all: "
                "give every norm the same"
            )
