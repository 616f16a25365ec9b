"""Notice that a module's weights may have been written, or that the module computes another function now."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rooflane.families.runtime.host import host_module

# What every module keeps of its own. What else stands in a module's dictionary was set by its class or its user.
PLAIN = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
# The attributes that the functions of torch's own modules depend on; of other classes, every attribute counts.
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    nn.Linear: (),
    nn.LayerNorm: ("eps",),
    nn.Dropout: ("p",),
    nn.GELU: ("approximate",),
    nn.Identity: (),
    nn.ModuleList: (),
    nn.ModuleDict: (),
    nn.Sequential: (),
    nn.MultiheadAttention: ("num_heads", "batch_first", "add_zero_attn", "dropout", "_qkv_same_embed_dim"),
    nn.TransformerEncoderLayer: ("norm_first", "activation"),
    nn.TransformerEncoder: (),
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CONTENTS = ("_modules", "_parameters", "_buffers")

_values = methodcaller("values")
_version = attrgetter("_version")
_writes = 0
_watches: WeakSet[ModelWatch] = WeakSet()


class StructureChanged(RuntimeError):
    """The module's parts or settings are no longer those that a forward was built from."""


def note_writes() -> None:
    """Make every watch report its weights as changed once: for writes that nothing in torch records."""
    global _writes
    _writes += 1


def _note_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Note an optimiser's step with the watches of its parameters: fused steps raise no version."""
    if _watches:
        stepped = {_storage(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for watch in _watches:
            watch.note_step(stepped)


register_optimizer_step_post_hook(_note_step)


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which views of a flat parameter share; 0 where there is none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class ModelWatch:
    """Detect whether a module's weights may have changed, and whether its function has.

    A check compares objects: the module's parts, parameters and settings by identity, and the parameters' versions,
    addresses and strides. Where these differ, the exact structure decides between other weights and another function.
    An optimiser's step is reported by torch. Writes to the same memory that pass by all of these are not seen: those
    through `.data`, views of numpy or DLPack, a replayed graph. Parameters made under `torch.inference_mode` have no
    version, so they count as changed on every check. For a model on a GPU the comparison is in C++.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        module = host_module() if next(model.parameters()).is_cuda else None
        self._native = None if module is None else module.Watch
        self._structure = _structure(model)
        self._writes = _writes
        self._take()
        _watches.add(self)

    def note_step(self, stepped: set[int]) -> None:
        """Note an optimiser's step on tensors of these storages."""
        # A storage of address 0 is unknown: it may be one of these.
        self._written = self._written or not stepped.isdisjoint(self._storages)

    def repeat(self) -> None:
        """Report the last change once more."""
        self._written = True

    def changed(self) -> bool:
        """Return whether the weights may differ from those of the last check.

        Raises `StructureChanged` when the module computes another function than at the first check, each time until
        it is as it was.
        """
        found = self._sign() if self._compared is None else self._compared.sign()
        if found is None:
            self._compare()
            return True
        if found == self._found and not self._written and self._writes == _writes and self._tracked:
            return False
        self._found, self._written, self._writes = found, False, _writes
        return True

    def _compare(self) -> None:
        now = _structure(self._model)
        if now != self._structure:
            names = [name for name in now | self._structure if now.get(name) != self._structure.get(name)]
            raise StructureChanged(
                f"{', '.join(name or 'the module itself' for name in names[:3])}: parts or settings were changed after "
                "the forward was built; build it again"
            )
        self._take()

    def _take(self) -> None:
        """Keep the objects that the next checks compare with."""
        modules = list(self._model.modules())
        own = [vars(module) for module in modules]
        self._types = [type(module) for module in modules]
        self._modules = modules
        self._counted = [*own, *(one[name] for one in own for name in HOOKS)]
        self._filled = [one[name] for one in own for name in CONTENTS]
        self._counts = [*map(len, self._counted), *map(len, self._filled)]
        self._contents = list(chain.from_iterable(map(_values, self._filled)))
        self._named = [
            (one, name, one.get(name)) for module, one in zip(modules, own, strict=True) for name in _attributes(module)
        ]
        settings = [value for _, _, value in self._named]
        self._tensors = [value for value in chain(self._contents, settings) if isinstance(value, Tensor)]
        self._tracked = not any(tensor.is_inference() for tensor in self._tensors)
        self._storages = {*map(_storage, self._tensors), 0}
        self._compared = None
        if self._native is not None and self._tracked:
            self._compared = self._native(
                modules, self._types, self._counted + self._filled, self._counts, self._filled, self._contents,
                self._named, self._tensors,
            )  # fmt: skip
        self._found, self._written, self._writes = self._sign(), False, _writes

    def _sign(self) -> object:
        """Return a value that differs when the parameters' memory does, None when an object is another one."""
        if self._compared is not None:
            return self._compared.sign()
        same = (
            self._types == list(map(type, self._modules))
            and self._counts == [*map(len, self._counted), *map(len, self._filled)]
            and all(map(is_, chain.from_iterable(map(_values, self._filled)), self._contents))
            and all(owner.get(name) is value for owner, name, value in self._named)
        )
        if not same:
            return None
        if not self._tracked:
            return ()
        tensors = self._tensors
        return (*map(_version, tensors), *[tensor.data_ptr() for tensor in tensors], *map(Tensor.stride, tensors))


def _attributes(module: nn.Module) -> list[str]:
    """Return the names of the attributes that a module's function may depend on."""
    known = ATTRIBUTES.get(type(module))
    own = vars(module)
    return [name for name in own if name not in PLAIN] if known is None else [name for name in known if name in own]


def _structure(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return what a module's function depends on besides the values of its parameters, by the names of its parts."""
    return {name: _part(module) for name, module in model.named_modules()}


def _part(module: nn.Module) -> tuple[object, ...]:
    own = vars(module)
    parameters = tuple((name, *_kind(tensor)) for name, tensor in module._parameters.items())
    # The values of a buffer may steer the function, so a buffer that was written is another one.
    buffers = tuple((name, *_kind(tensor), _written(tensor)) for name, tensor in module._buffers.items())
    settings = tuple((name, _setting(own[name])) for name in _attributes(module))
    hooks = tuple(len(own[name]) for name in HOOKS)
    return type(module), tuple(module._modules), parameters, buffers, settings, hooks, _setting(own.get("forward"))


def _kind(tensor: Tensor | None) -> tuple[object, ...]:
    """Return what must stay the same of a parameter; functional_call puts plain tensors in the place of parameters."""
    if tensor is None:
        return (None,)
    return Tensor if isinstance(tensor, nn.Parameter) else type(tensor), tensor.shape


def _written(tensor: Tensor | None) -> object:
    return None if tensor is None or tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _setting(value: object) -> object:
    """Return a value to compare a setting by: plain ones by value, a tensor with its version, others by identity."""
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return value
    return id(value), _written(value) if isinstance(value, Tensor) else None
