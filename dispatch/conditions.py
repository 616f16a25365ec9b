"""Conditions of a rule: which values of a field they allow, and whether one set of values holds another.

A condition is a value (`"launch"`, `128`, `true`), a list of values, or a table of comparisons that must all hold
(`{ ge = 512, lt = 4096 }`). Nothing in it is evaluated as code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rooflane.dispatch.allowed import INFINITY, Allowed, Span
from rooflane.dispatch.classify import REGIMES, Classification
from rooflane.dispatch.profile import Profile
from rooflane.shapes import DTYPE_BYTES, SIZE_FIELDS, Shape

ORDER_OPS = ("lt", "le", "gt", "ge")
EQUALITY_OPS = ("eq", "ne")


@dataclass(frozen=True)
class Field:
    """One field a condition may name: its type and the values it can have at all."""

    kind: type
    domain: Allowed
    choices: tuple[Any, ...] = ()


def _numeric(kind: type, low: tuple[float, int], high: tuple[float, int] = (INFINITY, 0)) -> Field:
    return Field(kind, Allowed(spans=(Span(low, high, whole=kind is int),)))


def _choice(*choices: Any) -> Field:
    return Field(type(choices[0]), Allowed(words=frozenset(choices)), choices)


WORDS = Field(str, Allowed(inverted=True))
SHARE = _numeric(float, (0, 0), (1, 0))
FIELDS: dict[str, Field] = {
    **{name: _numeric(int, (1, 0)) for name in (*SIZE_FIELDS, "head_dim", "tokens")},
    "id": WORDS,
    "causal": _choice(True, False),
    "dtype": _choice(*DTYPE_BYTES),
    "padding_ratio": _numeric(float, (0, 0), (1, -1)),
    "regime": _choice(*REGIMES),
    "borderline": _choice(True, False),
    "margin": _numeric(float, (1, 0)),
    "launch_ratio": _numeric(float, (0, 1)),
    "compute_share": SHARE,
    "attention_share": SHARE,
    "device_kind": _choice("cuda", "cpu"),
    "profile": WORDS,
}


def facts(shape: Shape, profile: Profile, classification: Classification) -> dict[str, Any]:
    """Return the value of every field of `FIELDS` for one request."""
    values = {"device_kind": profile.kind, "profile": profile.name}
    for name in FIELDS.keys() - values.keys():
        values[name] = getattr(shape if hasattr(shape, name) else classification, name)
    return values


def parse_condition(name: str, raw: Any) -> Allowed:
    """Return the values a condition allows; raises `ValueError` saying what is wrong and what is accepted."""
    if name not in FIELDS:
        raise ValueError(f"no field is called {name!r}; fields: {', '.join(FIELDS)}")
    field = FIELDS[name]
    numeric = field.kind in (int, float)
    if isinstance(raw, dict):
        comparisons = raw
    else:
        values = raw if isinstance(raw, list) else [raw]
        for value in values:
            _check_value(name, field, value)
        if not values:
            raise ValueError(f"{name}: the list is empty, so the rule could never match; name at least one value")
        if not numeric:
            return Allowed(words=frozenset(values))
        return Allowed(spans=tuple(field.domain.spans[0].narrowed("eq", value) for value in values))

    accepted = (*ORDER_OPS, *EQUALITY_OPS) if numeric else EQUALITY_OPS
    if not comparisons:
        raise ValueError(f"{name}: the table is empty; give at least one of {', '.join(accepted)}")
    allowed = field.domain
    for op, value in comparisons.items():
        if op not in accepted:
            raise ValueError(f"{name}: no comparison is called {op!r}; accepted here: {', '.join(accepted)}")
        _check_value(name, field, value)
        allowed = _narrowed(allowed, field, op, value)
    return allowed


def _narrowed(allowed: Allowed, field: Field, op: str, value: Any) -> Allowed:
    if allowed.spans:
        return Allowed(spans=(allowed.spans[0].narrowed(op, value),))
    if op == "eq":
        return Allowed(words=frozenset({value}) if allowed.contains(value) else frozenset())
    if field.choices or not allowed.inverted:
        return replace(allowed, words=allowed.words - {value})
    return replace(allowed, words=allowed.words | {value})


def _check_value(name: str, field: Field, value: Any) -> None:
    """Refuse a value of another type than the field's, or one the field can never have."""
    if field.kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}: {value!r} is not a number")
    elif field.choices:
        if not isinstance(value, field.kind) or value not in field.choices:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, field.choices))}")
    elif not isinstance(value, field.kind):
        raise ValueError(f"{name}: {value!r} is not a string")
