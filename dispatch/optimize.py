"""optimize(): a model and a shape in, a dispatched module out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rooflane.dispatch.profile import Profile
from rooflane.dispatch.rules import RuleTable, load_rules
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import nn


class OptimizeError(ValueError):
    """A model that cannot be dispatched for the shape asked; the text says what differs."""


def optimize(
    model: nn.Module,
    shape: Shape,
    device: torch.device | str | None = None,
    rules: RuleTable | str | Path | None = None,
    profile: Profile | None = None,
) -> nn.Module:
    """Return a module that computes what `model` does, built for one shape by the family the rules choose.

    The module shares the model's submodules: same state_dict keys, same `forward(x [B, S, D], valid_token_mask
    [B, S] bool or None = None)`. Calls of another shape or dtype, and calls that need gradients, run the model's own
    forward and warn once. `device` defaults to the model's; when it is another, nothing is built before the module
    is moved there. `profile` defaults to that of the device. `.route` holds the choice and its reasons. Raises
    `OptimizeError` when the model does not have the shape's sizes, `ProfileError` for an unknown device, `RouteError`
    when no rule can serve.
    """
    import torch

    from rooflane.dispatch.dispatched import DispatchedTransformer, check_model

    parameter = check_model(model, shape)
    table = rules if isinstance(rules, RuleTable) else load_rules(rules)
    target = parameter.device if device is None else torch.device(device)
    return DispatchedTransformer(model, shape, table, profile, target)
