"""Blocks of any making, read through a BlockMapping."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import TransformerConfig
from rooflane.dispatch.adapters.checks import (
    activation_of,
    check_eval,
    check_hooks,
    check_norms,
    check_parameters,
    drops,
    eps_of,
)
from rooflane.dispatch.adapters.mapping import BlockMapping, Call, OptimizeError, Sizes, WeightsAt
from rooflane.dispatch.adapters.reference import reference_stack
from rooflane.dispatch.dispatched import Built, Dispatched, Key
from rooflane.shapes import Form

# Largest difference allowed when a mapping is tried in float64, in units of what the module adds to x: a softmax that
# the module takes in float32 passes; the tanh form of GELU, at about 1e-4, does not.
TRIAL_TOLERANCE = 1e-5
LEAST_LENGTH = 5
# A trial on longer sequences takes a CPU about a second for these operations; none is longer than this.
TRIAL_FLOP = 10**10
LONGEST = 2048
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class DispatchedBlocks(Dispatched):
    """A mapped module whose forward is the routed family's, sharing the given module's submodules."""

    def __init__(self, model: nn.Module, *args: Any, mapping: BlockMapping) -> None:
        self.__dict__["_mapping"] = mapping
        super().__init__(model, *args)
        self._tried = 0
        self.confirm()

    @staticmethod
    def drops(module: nn.Module) -> bool:
        """Return whether a module may compute something else while it trains: a class that is not torch's may."""
        return drops(module) or not type(module).__module__.startswith("torch.nn.modules.")

    def confirm(self) -> None:
        """Try the mapping again, on as many tokens as were tried before."""
        self._returns_tuple = _try_mapping(self, max(self._tried, LEAST_LENGTH))
        self._tried = max(self._tried, LEAST_LENGTH)

    def sample(self) -> nn.Module:
        """Return the module that the mapping is tried on."""
        return self._model

    def describe(self, model: nn.Module) -> Sizes:
        """Return the module's sizes; raises `OptimizeError` when the mapping or the function does not fit."""
        mapping = self._mapping
        try:
            return _describe(model, mapping)
        except AttributeError as error:
            raise OptimizeError(
                f"the mapping does not fit {type(model).__name__}: {error}; its paths start at the block, `layers` and "
                "`final_norm` at the module"
            ) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns for these arguments."""
        return self._serve(*args, **kwargs)

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """Return the call as the families take it."""
        return self._mapping.read(self._model, self._causal_alone(), *args, **kwargs)

    def wrap(self, out: Tensor) -> Any:
        """Return the output the way the module does: alone, or first in a tuple."""
        return (out,) if self._returns_tuple else out

    def view(self, config: TransformerConfig, form: Form) -> Any:
        """Return the module's weights as a baseline's."""
        return StackView(self._model, self._mapping, config, form)

    def _build(self, key: Key) -> Built:
        """Build for a shape; one of longer sequences than were tried is tried first, for windows and positions."""
        most = TRIAL_FLOP // (2 * sum(parameter.numel() for parameter in self._model.parameters()))
        length = min(key[1], max(LEAST_LENGTH, most), LONGEST)
        if length > self._tried:
            _try_mapping(self, length)
            self._tried = length
        return super()._build(key)

    def _causal_alone(self) -> bool:
        causal = self._mapping.causal
        return causal(self._model) if callable(causal) else causal


def _describe(model: nn.Module, mapping: BlockMapping) -> Sizes:
    blocks = blocks_of(model, mapping)
    if not blocks:
        raise OptimizeError(f"{type(model).__name__}.{mapping.layers} holds no block; there is nothing to optimise")
    norms: dict[str, nn.Module] = {}
    found = []
    for index, block in enumerate(blocks):
        where = f"{mapping.layers}.{index}." if mapping.layers else ""
        reason = mapping.refuse(block)
        if reason:
            raise OptimizeError(f"{where}{type(block).__name__} {reason}")
        for path in (mapping.norm1, mapping.norm2):
            norms[where + path] = attrgetter(path)(block)
        found.append(_describe_block(block, mapping, where))
    if len(set(found)) > 1:
        raise OptimizeError(
            f"the blocks of {type(model).__name__} differ in size or form; the families take equal ones"
        )
    sizes = replace(found[0], num_layers=len(blocks))
    if mapping.final_norm:
        norms[mapping.final_norm] = attrgetter(mapping.final_norm)(model)
    norm = check_norms(norms, sizes.d_model)
    check_eval(model)
    check_hooks(model)
    check_parameters(model)
    return replace(sizes, form=replace(sizes.form, norm=norm, final_norm=bool(mapping.final_norm)))


def _describe_block(block: nn.Module, mapping: BlockMapping, where: str) -> Sizes:
    view = layer_view(block, mapping)
    attention = view.attention
    width, heads, ffn = attention.q_proj.weight.shape[1], attention.num_heads, view.ffn_in.weight.shape[0]
    _check_sizes(view, width, ffn, where)
    activation = activation_of(block, attrgetter(mapping.activation)(block)) if mapping.activation else "gelu"
    head_dim = None if attention.head_dim * heads == width else attention.head_dim
    norm_first, theta = (_asked(value, block) for value in (mapping.norm_first, mapping.rotary_theta))
    form = Form(norm_first, activation, head_dim=head_dim, rotary_theta=theta)
    return Sizes(width, heads, ffn, 1, None, form)


def _asked(value: Any, block: nn.Module) -> Any:
    """Return a value of a mapping, or what it says of the block."""
    return value(block) if callable(value) else value


def _check_sizes(view: SimpleNamespace, width: int, ffn: int, where: str) -> None:
    """Refuse weights that are not `[out, in]` of one width, which a wrong part or transpose makes them."""
    attention = view.attention
    rows, heads = attention.q_proj.weight.shape[0], attention.num_heads
    if rows % heads:
        raise OptimizeError(f"{where or 'the block'}: q has {rows} rows, not divisible by {heads} heads")
    if width % heads:
        raise OptimizeError(f"{where or 'the block'}: width {width} is not divisible by {heads} heads")
    expected = dict.fromkeys(PROJECTIONS[:3], (rows, width)) | {"out_proj": (width, rows)}
    for name, shape in expected.items():
        own = tuple(getattr(attention, name).weight.shape)
        if own != shape:
            raise OptimizeError(f"{where}{name} is mapped to a weight {own}, expected {shape}; see WeightsAt")
    for name, shape in (("ffn_in", (ffn, width)), ("ffn_out", (width, ffn))):
        own = tuple(getattr(view, name).weight.shape)
        if own != shape:
            raise OptimizeError(f"{where}{name} is mapped to a weight {own}, expected {shape}; see WeightsAt")


def _try_mapping(module: DispatchedBlocks, length: int) -> bool:
    """Compare the module's own output with the mapped weights' on an input `[1, length, D]`; return if it is a tuple.

    Both run on a float64 copy on the CPU, where nothing but a difference in function shows. Its parameters and buffers
    are drawn at random, so that a part that is the identity today, such as an adapter whose last matrix is 0, shows.
    """
    sizes, name = module._sizes, type(module._model).__name__
    generator = torch.Generator("cpu").manual_seed(0)
    config = TransformerConfig(
        1, length, sizes.d_model, sizes.num_heads, sizes.ffn_dim, sizes.num_layers, module._causal_alone()
    )
    # Modules make masks and positions on the default device, which may be another one here.
    with torch.device("cpu"):
        x = torch.randn(1, length, sizes.d_model, generator=generator, dtype=torch.float64)
        try:
            model = copy.deepcopy(module.sample()).to("cpu", torch.float64)
            _draw(model, generator)
            with torch.no_grad():
                own = model(x, **_arguments(model, module._mapping, x))
        except Exception as error:  # the module is the user's and may raise anything
            raise OptimizeError(
                f"{name} cannot be tried as module(x) on a float64 copy of it ({type(error).__name__}: {error}); that "
                "is how a mapping is checked before it is used"
            ) from None
        returns_tuple = isinstance(own, tuple)
        own = own[0] if returns_tuple else own
        view = StackView(model, module._mapping, config, sizes.form)
        with torch.no_grad():
            mapped = view(x)
    difference = float((own - mapped).abs().max() / (own - x).abs().max().clamp_min(1e-6))
    if not difference <= TRIAL_TOLERANCE:
        unread = _unread(model, module._mapping)
        parts = f"what it does not read ({', '.join(unread)}), the " if unread else "the "
        raise OptimizeError(
            f"the mapping does not describe {name}: on an input of {length} tokens and weights drawn at random the "
            f"mapped weights' output differs by {difference:.2g} of what the module adds to x; check {parts}parts of "
            "packed weights, `transposed`, `causal`, the activation, windows and positions"
        )
    return returns_tuple


def _arguments(model: nn.Module, mapping: BlockMapping, x: Tensor) -> Mapping[str, Any]:
    """Return what a call of the module passes beside x."""
    return mapping.call(blocks_of(model, mapping)[0], x) if callable(mapping.call) else mapping.call


def _draw(model: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter and floating-point buffer values of its own, none 0 or 1."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                tensor.copy_(drawn / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.7 + 0.3 * drawn)


def _unread(model: nn.Module, mapping: BlockMapping) -> list[str]:
    """Return the names of the parameters and buffers that a mapping does not read."""
    read = set()
    for block in blocks_of(model, mapping):
        for where in (mapping.q, mapping.k, mapping.v, mapping.out, mapping.ffn_in, mapping.ffn_out):
            read |= {id(_found(block, path)) for path in (where.weight, where.bias, where.scale) if path}
        for path in (mapping.norm1, mapping.norm2):
            read |= {id(tensor) for tensor in attrgetter(path)(block).parameters()}
    if mapping.final_norm:
        read |= {id(tensor) for tensor in attrgetter(mapping.final_norm)(model).parameters()}
    return [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) not in read]


def _found(block: nn.Module, path: str) -> Tensor | None:
    try:
        return attrgetter(path)(block)
    except AttributeError:
        return None


class LinearView:
    """A projection `[out, in]` with its bias `[out]`, zeros where the module has none."""

    def __init__(self, block: nn.Module, where: WeightsAt) -> None:
        self._block, self._where = block, where

    @property
    def weight(self) -> Tensor:
        """The projection's rows of the stored weight."""
        stored = attrgetter(self._where.weight)(self._block)
        part = self._part(stored.t() if self._where.transposed else stored)
        part = part if self.factor is None else part * self.factor[:, None]
        # Packers take contiguous weights, as every nn.Linear's are; they run when weights change, not at every call.
        return part.contiguous()

    @property
    def bias(self) -> Tensor:
        """The projection's part of the stored bias."""
        stored = _found(self._block, self._where.bias)
        if stored is None:
            weight = self.weight
            return weight.new_zeros(weight.shape[0])
        return self._part(stored) if self.factor is None else self._part(stored) * self.factor

    @property
    def factor(self) -> Tensor | None:
        """The factor `[out]` on the output features, None where there is none."""
        return _found(self._block, self._where.scale) if self._where.scale else None

    def _part(self, stored: Tensor) -> Tensor:
        index, count = self._where.part
        return stored.chunk(count)[index]


class NormView:
    """A norm's scale and shift `[D]`: ones and zeros where the module has none."""

    def __init__(self, owner: nn.Module, path: str) -> None:
        self._owner, self._path = owner, path

    @property
    def norm(self) -> nn.Module:
        """The module's own norm."""
        return attrgetter(self._path)(self._owner)

    @property
    def eps(self) -> float:
        """The number added to the variance or the mean square."""
        return eps_of(self.norm)

    @property
    def weight(self) -> Tensor:
        """The scale."""
        return self._tensor("weight", 1.0)

    @property
    def bias(self) -> Tensor:
        """The shift."""
        return self._tensor("bias", 0.0)

    def _tensor(self, name: str, missing: float) -> Tensor:
        norm = self.norm
        own = getattr(norm, name, None)
        if own is not None:
            return own
        shape = getattr(norm, "normalized_shape", None) or norm.weight.shape
        return next(self._owner.parameters()).new_full(shape, missing)


def layer_view(block: nn.Module, mapping: BlockMapping) -> SimpleNamespace:
    """Return one block under the names of a baseline layer."""
    q, k, v, out, ffn_in, ffn_out = (
        LinearView(block, where)
        for where in (mapping.q, mapping.k, mapping.v, mapping.out, mapping.ffn_in, mapping.ffn_out)
    )
    heads: int = attrgetter(mapping.num_heads)(block)
    width = q.weight.shape[0] // heads
    return SimpleNamespace(
        norm1=NormView(block, mapping.norm1),
        attention=SimpleNamespace(
            q_proj=q, k_proj=k, v_proj=v, out_proj=out, num_heads=heads, head_dim=width, scale=width**-0.5
        ),
        norm2=NormView(block, mapping.norm2),
        ffn_in=ffn_in,
        ffn_out=ffn_out,
    )


class StackView:
    """A whole module as a baseline: `layers`, `final_norm` (None where it has none), `config`, `form`, `parameters()`.

    `folded` says that a weight is computed from others, so that views of the module's memory do not follow it. `packed`
    holds the copies that built forwards of several shapes share. Called, it computes the stack's function.
    """

    def __init__(self, module: nn.Module, mapping: BlockMapping, config: TransformerConfig, form: Form) -> None:
        self.config = config
        self.form = form
        self.packed: dict[torch.dtype, Any] = {}
        self._module = module
        self.layers = [layer_view(block, mapping) for block in blocks_of(module, mapping)]
        scaled = [part for layer in self.layers for part in (layer.attention.out_proj, layer.ffn_out)]
        self.folded = any(part.factor is not None for part in scaled)
        self.final_norm = NormView(module, mapping.final_norm) if mapping.final_norm else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the module's own parameters: what a packed copy must watch."""
        return self._module.parameters()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the module and its parts, whose settings a built forward depends on."""
        return self._module.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module and its parts with their names."""
        return self._module.named_modules()

    def __call__(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the reference output `[B, S, D]` of the viewed weights."""
        return reference_stack(self, x, valid, causal=self.config.causal)


def blocks_of(module: nn.Module, mapping: BlockMapping) -> list[nn.Module]:
    """Return the module's blocks in order."""
    return list(attrgetter(mapping.layers)(module)) if mapping.layers else [module]
