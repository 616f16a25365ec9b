"""Checks of the values of families' options; no torch.

`FamilySpec.option_checks` names the check of each option. An option without one takes any value.
"""

from __future__ import annotations

import math
from typing import Any

from rooflane.families.spec import FamilySpec

OPERANDS = ("float16", "bfloat16")


def operands(value: Any) -> str | None:
    """Return None for the name of a half-precision type, else what the value must be."""
    return None if value in OPERANDS else " or ".join(OPERANDS)


def true_or_false(value: Any) -> str | None:
    """Return None for a bool, else what the value must be."""
    return None if isinstance(value, bool) else "true or false"


def positive(value: Any) -> str | None:
    """Return None for a finite number above 0, else what the value must be."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if number and math.isfinite(value) and value > 0 else "a number above 0"


def option_fault(spec: FamilySpec, name: str, value: Any) -> str | None:
    """Return None when a family's option may have the value, else what the value must be."""
    check = spec.option_checks.get(name)
    return check(value) if check else None
