"""Other pre-norm blocks, read through a BlockMapping."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import TransformerConfig
from rooflane.dispatch.adapters.checks import check_activation, check_eps, check_eval, check_hooks, check_same_forward
from rooflane.dispatch.adapters.mapping import BlockMapping, Call
from rooflane.dispatch.adapters.view import PROJECTIONS, LayerView, StackView, blocks_of
from rooflane.dispatch.dispatched import Dispatched
from rooflane.dispatch.errors import OptimizeError
from rooflane.dispatch.request import Sizes

# Largest difference allowed when a mapping is tried in float64, in units of what the module adds to x: a softmax that
# the module takes in float32 passes; the tanh form of GELU, at about 1e-4, does not.
TRIAL_TOLERANCE = 1e-5
TRIAL_TOKENS = (2, 5)


class DispatchedBlocks(Dispatched):
    """A mapped module whose forward is the routed family's, sharing the given module's submodules."""

    def __init__(self, model: nn.Module, *args: Any, mapping: BlockMapping) -> None:
        self.__dict__["_mapping"] = mapping
        super().__init__(model, *args)
        self._returns_tuple = _try_mapping(self)

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

    def view(self, config: TransformerConfig) -> Any:
        """Return the module's weights as a baseline's."""
        return StackView(self._model, self._mapping, config)

    def _causal_alone(self) -> bool:
        causal = self._mapping.causal
        return causal(self._model) if callable(causal) else causal


def _describe(model: nn.Module, mapping: BlockMapping) -> Sizes:
    """Check the blocks one by one and return their common sizes."""
    norms: dict[str, nn.Module] = {}
    found = []
    blocks = blocks_of(model, mapping)
    if not blocks:
        raise OptimizeError(f"{type(model).__name__}.{mapping.layers} holds no block; there is nothing to optimise")
    for index, block in enumerate(blocks):
        where = f"{mapping.layers}.{index}." if mapping.layers else ""
        reason = mapping.refuse(block)
        if reason:
            raise OptimizeError(f"{where}{type(block).__name__} {reason}")
        if mapping.activation:
            check_activation(block, attrgetter(mapping.activation)(block))
        for path in (mapping.norm1, mapping.norm2):
            norms[where + path] = attrgetter(path)(block)
        view = LayerView(block, mapping)
        width, heads, ffn = view.attention.q_proj.weight.shape[1], view.attention.num_heads, view.ffn_in.weight.shape[0]
        _check_sizes(view, width, heads, ffn, where)
        found.append((width, heads, ffn))
    if len(set(found)) > 1:
        raise OptimizeError(f"the blocks of {type(model).__name__} differ in size; the families take equal ones")
    if mapping.final_norm:
        norms[mapping.final_norm] = attrgetter(mapping.final_norm)(model)
    for path, norm in norms.items():
        check_same_forward(norm, nn.LayerNorm, ("forward",), path)
    check_eps(norms)
    check_eval(model)
    check_hooks(model)
    return Sizes(*found[0], len(blocks), None, bool(mapping.final_norm))


def _check_sizes(view: LayerView, width: int, heads: int, ffn: int, where: str) -> None:
    """Refuse weights that are not `[out, in]` of one width, which a wrong part or transpose makes them."""
    if width % heads:
        raise OptimizeError(f"{where or 'the block'}: width {width} is not divisible by {heads} heads")
    attention = view.attention
    for name in PROJECTIONS:
        shape = tuple(getattr(attention, name).weight.shape)
        if shape != (width, width):
            raise OptimizeError(
                f"{where}{name} is mapped to a weight {shape}, expected {(width, width)}; see WeightsAt"
            )
    for name, expected in (("ffn_in", (ffn, width)), ("ffn_out", (width, ffn))):
        shape = tuple(getattr(view, name).weight.shape)
        if shape != expected:
            raise OptimizeError(f"{where}{name} is mapped to a weight {shape}, expected {expected}; see WeightsAt")


def _try_mapping(module: DispatchedBlocks) -> bool:
    """Compare the module's own output with the mapped weights' on a small input; return whether it is a tuple.

    Both run on a float64 copy on the CPU, where nothing but a difference in function shows.
    """
    sizes, name = module._sizes, type(module._model).__name__
    x = torch.randn(*TRIAL_TOKENS, sizes.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = TransformerConfig(
        *TRIAL_TOKENS, sizes.d_model, sizes.num_heads, sizes.ffn_dim, sizes.num_layers, module._causal_alone()
    )
    try:
        model = copy.deepcopy(module._model).to("cpu", torch.float64)
        with torch.no_grad():
            own = model(x)
    except Exception as error:  # the module is the user's and may raise anything
        raise OptimizeError(
            f"{name} cannot be tried as module(x) on a float64 copy of it ({type(error).__name__}: {error}); that is "
            "how a mapping is checked before it is used"
        ) from None
    returns_tuple = isinstance(own, tuple)
    own = own[0] if returns_tuple else own
    with torch.no_grad():
        mapped = StackView(model, module._mapping, config)(x)
    difference = float((own - mapped).abs().max() / (own - x).abs().max().clamp_min(1e-6))
    if not difference <= TRIAL_TOLERANCE:
        raise OptimizeError(
            f"the mapping does not describe {name}: on a small input the mapped weights' output differs by "
            f"{difference:.2g} of what the module adds to x; look at the parts of packed weights, `transposed`, "
            "`causal` and the activation"
        )
    return returns_tuple
