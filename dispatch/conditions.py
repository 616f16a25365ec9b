"""Conditions of a rule: which values of a field satisfy them.

A condition is a value (`"launch"`, `128`, `true`), a list of values, or a table of comparisons that must all hold
(`{ ge = 512, lt = 4096 }`). No condition is evaluated as code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rooflane.dispatch.classify import REGIMES, Classification
from rooflane.dispatch.profile import Profile
from rooflane.shapes import DTYPE_BYTES, SIZE_FIELDS, Shape

ORDER_OPS = ("lt", "le", "gt", "ge")
EQUALITY_OPS = ("eq", "ne")
OPS = {name: getattr(operator, name) for name in (*ORDER_OPS, *EQUALITY_OPS)}
# Stands for every text that no condition names.
OTHER_TEXT = "(another)"


@dataclass(frozen=True)
class Field:
    """A field that a condition may name: its type, and the values it can have.

    A number lies between `low` and `high`; `open_ends` holds the ends that it never reaches. `choices` lists the
    values of a field that has few.
    """

    kind: type
    low: float = -math.inf
    high: float = math.inf
    open_ends: tuple[float, ...] = ()
    choices: tuple[Any, ...] = ()

    @property
    def numeric(self) -> bool:
        """Whether the field is a number."""
        return self.kind in (int, float)

    def has(self, value: Any) -> bool:
        """Return whether the field can have the value."""
        if self.numeric:
            return self.low <= value <= self.high and value not in self.open_ends
        return value in self.choices if self.choices else isinstance(value, self.kind)


def _choice(*choices: Any) -> Field:
    return Field(type(choices[0]), choices=choices)


WORDS = Field(str)
SHARE = Field(float, 0, 1)
FIELDS: dict[str, Field] = {
    **{name: Field(int, 1) for name in (*SIZE_FIELDS, "head_dim", "tokens")},
    "id": WORDS,
    "causal": _choice(True, False),
    "dtype": _choice(*DTYPE_BYTES),
    "padding_ratio": Field(float, 0, 1, open_ends=(1,)),
    "regime": _choice(*REGIMES),
    "borderline": _choice(True, False),
    "margin": Field(float, 1),
    "launch_ratio": Field(float, 0, open_ends=(0,)),
    "compute_share": SHARE,
    "attention_share": SHARE,
    "device_kind": _choice("cuda", "cpu"),
    "profile": WORDS,
}


@dataclass(frozen=True)
class Condition:
    """What a rule asks of one field: a list of accepted `values`, or `comparisons` (name, bound) that must all hold."""

    values: tuple[Any, ...] = ()
    comparisons: tuple[tuple[str, Any], ...] = ()

    def holds(self, value: Any) -> bool:
        """Return whether the value satisfies the condition."""
        if self.values:
            return value in self.values
        return all(OPS[op](value, bound) for op, bound in self.comparisons)

    @property
    def stated(self) -> tuple[Any, ...]:
        """The values that the condition names. Its result changes only at these."""
        return self.values or tuple(bound for _, bound in self.comparisons)


def facts(shape: Shape, profile: Profile, classification: Classification) -> dict[str, Any]:
    """Return the value of every field of `FIELDS` for one request."""
    values = {"device_kind": profile.kind, "profile": profile.name}
    for name in FIELDS.keys() - values.keys():
        values[name] = getattr(shape if hasattr(shape, name) else classification, name)
    return values


def corner_values(name: str, conditions: Iterable[Condition]) -> tuple[Any, ...]:
    """Return values of a field that show every combination of results the conditions can give.

    These are the stated values, their neighbours and the ends of the field. Between two of them no result changes.
    """
    field = FIELDS[name]
    stated = {value for condition in conditions for value in condition.stated}
    if field.choices:
        return field.choices
    if not field.numeric:
        return (*sorted(stated), OTHER_TEXT)
    bounds = stated | {end for end in (field.low, field.high) if math.isfinite(end)}
    if field.kind is int:
        # The whole numbers around a bound, which may itself be a fraction.
        found = {
            near for bound in bounds for at in (math.floor(bound), math.ceil(bound)) for near in (at - 1, at, at + 1)
        }
    else:
        ordered = sorted(bounds)
        between = {(low + high) / 2 for low, high in zip(ordered, ordered[1:], strict=False)}
        found = bounds | between | {ordered[0] - 1, ordered[-1] + 1}
    return tuple(sorted(filter(field.has, found)))


def parse_condition(name: str, raw: Any) -> Condition:
    """Return what a rule asks of a field; raises `ValueError` naming the fault and what is accepted."""
    if name not in FIELDS:
        meant = get_close_matches(name, FIELDS, n=1)
        hint = f", did you mean {meant[0]!r}?" if meant else ";"
        raise ValueError(f"no field is called {name!r}{hint} fields: {', '.join(FIELDS)}")
    field = FIELDS[name]
    if not isinstance(raw, dict):
        values = raw if isinstance(raw, list) else [raw]
        for value in values:
            _check_value(name, field, value)
        if not values:
            raise ValueError(f"{name}: the list is empty, so the rule could never match; name at least one value")
        return Condition(values=tuple(values))
    accepted = (*ORDER_OPS, *EQUALITY_OPS) if field.numeric else EQUALITY_OPS
    if not raw:
        raise ValueError(f"{name}: the table is empty; give at least one of {', '.join(accepted)}")
    for op, value in raw.items():
        if op not in accepted:
            raise ValueError(f"{name}: no comparison is called {op!r}; accepted here: {', '.join(accepted)}")
        _check_value(name, field, value)
    return Condition(comparisons=tuple(raw.items()))


def _check_value(name: str, field: Field, value: Any) -> None:
    """Refuse a value of another type than the field's, or a choice that the field does not have."""
    if field.numeric:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}: {value!r} is not a number")
    elif field.choices:
        if not isinstance(value, field.kind) or value not in field.choices:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, field.choices))}")
    elif not isinstance(value, field.kind):
        raise ValueError(f"{name}: {value!r} is not a string")
