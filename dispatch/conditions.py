"""Conditions of a rule: which values of a field they allow, and whether one set of values holds another.

A condition is a value (`"launch"`, `128`, `true`), a list of values, or a table of comparisons that must all hold
(`{ ge = 512, lt = 4096 }`). Nothing in it is evaluated as code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rooflane.dispatch.classify import REGIMES, Classification
from rooflane.dispatch.profile import Profile
from rooflane.shapes import DTYPE_BYTES, SIZE_FIELDS, Shape

ORDER_OPS = ("lt", "le", "gt", "ge")
EQUALITY_OPS = ("eq", "ne")
INFINITY = math.inf


@dataclass(frozen=True)
class Span:
    """Numbers between two bounds, without the holes; whole numbers only when `whole`.

    A bound is (value, nudge): `low` (5, 0) is >= 5 and (5, 1) is > 5, `high` (5, 0) is <= 5 and (5, -1) is < 5, so
    that bounds compare as tuples.
    """

    low: tuple[float, int] = (-INFINITY, 0)
    high: tuple[float, int] = (INFINITY, 0)
    holes: frozenset[float] = frozenset()
    whole: bool = False

    def contains(self, value: float) -> bool:
        """Return whether a number is allowed."""
        return self.low <= (value, 0) <= self.high and value not in self.holes

    def narrowed(self, op: str, value: float) -> Span:
        """Return the part of the span for which the comparison holds too."""
        if op == "ne":
            return self._tight(holes=self.holes | {value})
        low, high = self.low, self.high
        if op in ("gt", "ge", "eq"):
            low = max(low, (value, int(op == "gt")))
        if op in ("lt", "le", "eq"):
            high = min(high, (value, -int(op == "lt")))
        return self._tight(low=low, high=high)

    def _tight(self, **changes: Any) -> Span:
        """Return the span with bounds of whole numbers moved onto the nearest allowed one."""
        span = replace(self, **changes)
        if not self.whole:
            return span
        (low, above), (high, below) = span.low, span.high
        if math.isfinite(low):
            low = math.floor(low) + 1 if above else math.ceil(low)
        if math.isfinite(high):
            high = math.ceil(high) - 1 if below else math.floor(high)
        while low <= high and low in span.holes:
            low += 1
        while low <= high and high in span.holes:
            high -= 1
        holes = frozenset(hole for hole in span.holes if low < hole < high and hole == int(hole))
        return replace(span, low=(low, 0), high=(high, 0), holes=holes)

    @property
    def empty(self) -> bool:
        """Whether no number is allowed."""
        return self.low > self.high or (self.low == self.high and self.low[0] in self.holes)

    def covers(self, other: Span) -> bool:
        """Return whether every number `other` allows is allowed here."""
        if other.empty:
            return True
        inside = self.low <= other.low and other.high <= self.high
        return inside and not any(other.contains(hole) for hole in self.holes)


@dataclass(frozen=True)
class Allowed:
    """The values a condition allows: spans of numbers, or words listed or (when `inverted`) excluded."""

    spans: tuple[Span, ...] = ()
    words: frozenset[Any] = frozenset()
    inverted: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether the field may have that value."""
        if self.spans:
            return any(span.contains(value) for span in self.spans)
        return (value in self.words) != self.inverted

    @property
    def empty(self) -> bool:
        """Whether no value is allowed."""
        if self.spans:
            return all(span.empty for span in self.spans)
        return not self.words and not self.inverted

    def covers(self, other: Allowed) -> bool:
        """Return whether every value `other` allows is allowed here.

        Spans are compared one by one: two adjoining spans of a list are not seen to hold a third across their border.
        """
        if self.spans:
            return all(any(mine.covers(theirs) for mine in self.spans) for theirs in other.spans)
        if self.inverted:
            return self.words <= other.words if other.inverted else not self.words & other.words
        return not other.inverted and other.words <= self.words


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
