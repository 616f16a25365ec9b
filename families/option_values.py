"""What the values of families' options must be; no torch.

A spec names the check of each of its options in `option_checks`; one without is taken as it comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

OPERANDS = ("float16", "bfloat16")

Check = Callable[[Any], str | None]


def operands(value: Any) -> str | None:
    """Return what the value must be unless it names a half-precision type."""
    return None if value in OPERANDS else " or ".join(OPERANDS)


def true_or_false(value: Any) -> str | None:
    """Return what the value must be unless it is a bool."""
    return None if isinstance(value, bool) else "true or false"


def positive(value: Any) -> str | None:
    """Return what the value must be unless it is a finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if number and math.isfinite(value) and value > 0 else "a number above 0"


def option_fault(spec: Any, name: str, value: Any) -> str | None:
    """Return what a family's option must be where the value is not that, else None."""
    check: Check | None = getattr(spec, "option_checks", {}).get(name)
    return check(value) if check else None
