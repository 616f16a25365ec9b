"""A candidate: the shipped rules less the row of the resident family, to measure what that family adds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from rooflane.dispatch import load_profile, load_rules, route
from rooflane.families import get_family
from rooflane.shapes import Shape


def build(model: nn.Module, shape: Shape, device: torch.device):
    """Return the forward of the family the remaining rows choose."""
    table = load_rules("shipped")
    rest = replace(table, rules=tuple(rule for rule in table.rules if rule.family != "resident"))
    found = route(shape, load_profile("auto"), rest)
    return get_family(found.family).build(model, shape, device, **found.options)
