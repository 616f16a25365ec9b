"""The dispatched module: the family's forward where the call allows it, the model's own everywhere else."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import BaselineTransformer, torch_dtype
from rooflane.dispatch.optimize import OptimizeError
from rooflane.dispatch.profile import Profile, ProfileError, host_profile, match_profile
from rooflane.dispatch.route import Route, RouteError, route
from rooflane.dispatch.rules import RuleTable
from rooflane.families import registry
from rooflane.shapes import Shape

WEIGHT_FIELDS = ("d_model", "num_heads", "ffn_dim", "num_layers", "causal")


def check_model(model: nn.Module, shape: Shape) -> nn.Parameter:
    """Return the model's first parameter; raises `OptimizeError` when the model is not one of the shape."""
    missing = [name for name in ("config", "layers", "final_norm") if not hasattr(model, name)]
    if missing:
        raise OptimizeError(
            f"{type(model).__name__} has no {', '.join(missing)}; optimize() takes a BaselineTransformer or a model "
            "with its submodules"
        )
    for name in WEIGHT_FIELDS:
        if getattr(model.config, name) != getattr(shape, name):
            raise OptimizeError(
                f"shape {shape.id} has {name} {getattr(shape, name)}, the model {getattr(model.config, name)}; "
                "pass a shape with the model's own sizes"
            )
    parameter = next(model.parameters())
    if parameter.dtype != torch_dtype(shape.dtype):
        raise OptimizeError(
            f"shape {shape.id} is {shape.dtype}, the model's weights are {parameter.dtype}; cast the model or set the "
            "shape's dtype"
        )
    return parameter


def profile_of(device: torch.device) -> Profile:
    """Return the profile of a torch device; raises `ProfileError` when there is none."""
    if device.type == "cpu":
        return host_profile()
    if device.type != "cuda":
        raise ProfileError(f"no profile describes devices of type {device.type!r}; use cuda or cpu")
    if not torch.cuda.is_available():
        raise ProfileError(f"the device asked for is {device}, but torch finds no CUDA device; use cpu")
    return match_profile(torch.cuda.get_device_name(device))


class DispatchedTransformer(BaselineTransformer):
    """A baseline whose forward is the routed family's, sharing the given model's submodules."""

    def __init__(
        self, model: nn.Module, shape: Shape, rules: RuleTable, profile: Profile | None, device: torch.device
    ) -> None:
        nn.Module.__init__(self)
        self.config = model.config
        self.layers = model.layers
        self.final_norm = model.final_norm
        self.training = model.training
        self.shape = shape
        # The model itself, kept out of the submodules so that state_dict keys stay the baseline's: it is the forward
        # to fall back to, and what a family packs its weights from without ever calling back into this module.
        self.__dict__["_model"] = model
        self._rules = rules
        self._profile = profile
        self._x_shape = torch.Size((shape.batch_size, shape.seq_len, shape.d_model))
        self._mask_shape = self._x_shape[:2]
        self._dtype = torch_dtype(shape.dtype)
        self._warned: set[str] = set()
        self._forget()
        self._route_for(device)
        weights_on = next(model.parameters()).device
        if weights_on.type == device.type:
            self._build(weights_on)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """Return the stack's output `[B, S, D]` for `x [B, S, D]` and `valid_token_mask [B, S]` bool or None."""
        obstacle = self._obstacle(x, valid_token_mask)
        if obstacle is None:
            return self._built(x, valid_token_mask)
        about, reason = obstacle
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"this call runs the baseline forward: {reason}", stacklevel=4)
        return self._model(x, valid_token_mask)

    def _obstacle(self, x: Tensor, mask: Tensor | None) -> tuple[str, str] | None:
        """Return what keeps the built forward from taking this call, as (subject, reason); build it if missing."""
        if x.shape != self._x_shape:
            return "shape", f"x is {tuple(x.shape)}, the dispatched forward was built for {tuple(self._x_shape)}"
        if x.dtype != self._dtype:
            return "dtype", f"x is {x.dtype}, the dispatched forward was built for {self._dtype}"
        if mask is not None and (mask.shape != self._mask_shape or mask.dtype != torch.bool):
            return "mask", f"the mask is {tuple(mask.shape)} of {mask.dtype}, not {tuple(self._mask_shape)} of bool"
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return "gradients", "it needs gradients, which no family computes; call under torch.inference_mode()"
        if x.device != self._device:
            self._rebuild(x.device)
        return self._blocked

    def _rebuild(self, device: torch.device) -> None:
        """Build where the module has moved to, or note what keeps it from being built there."""
        self._forget()
        weight = next(self.parameters())
        if weight.device != device:
            self._blocked = "device", f"x is on {device}, the weights are on {weight.device}"
        elif weight.dtype != self._dtype:
            self._blocked = "weights", f"the weights are {weight.dtype}, the shape asked for is {self._dtype}"
        else:
            try:
                if device.type != self._routed_type:
                    self._route_for(device)
                self._build(device)
            except (ProfileError, RouteError) as error:
                self._blocked = "device", str(error)

    def _route_for(self, device: torch.device) -> None:
        given = self._profile
        profile = given if given is not None and given.kind == device.type else profile_of(device)
        self.route: Route = route(self.shape, profile, self._rules)
        self._routed_type = device.type

    def _build(self, device: torch.device) -> None:
        spec = registry.load_families()[self.route.family]
        # Past nn.Module's own bookkeeping: a built forward that is a module must not join the state_dict.
        self.__dict__["_built"] = spec.build(self._model, self.shape, device, **self.route.options)
        self._device = device

    def _forget(self) -> None:
        """Drop the built forward; the next call builds it where the weights are then."""
        self.__dict__["_built"] = None
        self._device: torch.device | None = None
        self._blocked: tuple[str, str] | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move or cast the weights as any module does, and drop what was built from the old ones."""
        self._forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the built forward out of copies and pickles: it holds graphs and device memory of its own."""
        return self.__dict__ | {"_built": None, "_device": None, "_blocked": None}
