"""A rule table as data: the fields a row may name, its conditions, the rows, where each stands, and its text.

A condition is a value (`"launch"`, `128`, `true`), a list of values, or a table of comparisons that must all hold
(`{ ge = 512, lt = 4096 }`). No condition is evaluated as code. The rows of the user's table are tried first, the
shipped rows after them.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rooflane.dispatch.classify import REGIMES, Classification
from rooflane.dispatch.profile import Profile
from rooflane.shapes import DTYPE_BYTES, SIZE_FIELDS, Shape

SHIPPED_RULES = Path(__file__).parent / "rules.toml"
SHIPPED = "shipped"
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
WARNINGS = ("impossible", "unreachable", "shadowed", "overlap", "hides-shipped")
ORDER_OPS = ("lt", "le", "gt", "ge")
EQUALITY_OPS = ("eq", "ne")
SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=", "ne": "!="}
OPS = {name: getattr(operator, name) for name in (*ORDER_OPS, *EQUALITY_OPS)}
# Stands for every text that no condition names.
OTHER_TEXT = "(another)"


@dataclass(frozen=True)
class FieldKind:
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


def _choice(*choices: Any) -> FieldKind:
    return FieldKind(type(choices[0]), choices=choices)


WORDS = FieldKind(str)
SHARE = FieldKind(float, 0, 1)
FIELDS: dict[str, FieldKind] = {
    **{name: FieldKind(int, 1) for name in (*SIZE_FIELDS, "head_dim", "tokens")},
    "id": WORDS,
    "causal": _choice(True, False),
    "dtype": _choice(*DTYPE_BYTES),
    "padding_ratio": FieldKind(float, 0, 1, open_ends=(1,)),
    "regime": _choice(*REGIMES),
    "borderline": _choice(True, False),
    "margin": FieldKind(float, 1),
    "launch_ratio": FieldKind(float, 0, open_ends=(0,)),
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


def _check_value(name: str, field: FieldKind, value: Any) -> None:
    """Refuse a value of another type than the field's, or a choice that the field does not have."""
    if field.numeric:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}: {value!r} is not a number")
    elif field.choices:
        if not isinstance(value, field.kind) or value not in field.choices:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, field.choices))}")
    elif not isinstance(value, field.kind):
        raise ValueError(f"{name}: {value!r} is not a string")


class RuleError(ValueError):
    """A rule table that cannot be used; the text names file and line and says how to fix it."""


class Rule(BaseModel):
    """One row of the table: when it applies, which family it sends the shape to, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    when: dict[str, Any]
    family: str = Field(min_length=1)
    options: dict[str, Any] = {}
    because: str = Field(min_length=1)

    @field_validator("when")
    @classmethod
    def _conditions_parse(cls, when: dict[str, Any]) -> dict[str, Any]:
        for name, raw in when.items():
            parse_condition(name, raw)
        return when

    @cached_property
    def conditions(self) -> dict[str, Condition]:
        """The conditions by field."""
        return {name: parse_condition(name, raw) for name, raw in self.when.items()}

    def mismatch(self, facts: dict[str, Any]) -> str | None:
        """Return None when every condition holds, else the first that does not, in words."""
        for name, condition in self.conditions.items():
            if not condition.holds(facts[name]):
                return f"{name} is {show_value(facts[name])}, the rule wants {show_condition(self.when[name])}"
        return None

    @property
    def impossible(self) -> str | None:
        """The field whose comparisons contradict each other, or None."""
        return next((name for name, results in self._results() if not any(results)), None)

    @property
    def catches_all(self) -> bool:
        """Whether the rule matches every shape."""
        return all(all(results) for _, results in self._results())

    def _results(self) -> Iterator[tuple[str, list[bool]]]:
        for name, condition in self.conditions.items():
            yield name, [condition.holds(value) for value in corner_values(name, [condition])]

    def to_toml(self) -> str:
        """Return the row as the text `load_rules` reads."""
        return row_text(self.model_dump(mode="json"))


@dataclass(frozen=True)
class LintFinding:
    """One fault of a row; an error makes the table unusable, a warning marks a row that may never act."""

    kind: str
    rule: str
    where: str
    message: str

    @property
    def severity(self) -> str:
        """Either "error" or "warning", by the kind."""
        return "warning" if self.kind in WARNINGS else "error"

    def as_dict(self) -> dict[str, str]:
        """Return the finding as plain values, for JSON."""
        return {"kind": self.kind, "severity": self.severity} | vars(self)

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class RuleTable:
    """The rules in the order they are tried, with the file and the line each stands on.

    `path` is the file whose rows come first; `source` says how it was found; `left_out` names the shipped rows that are
    replaced by a user's row of the same name; `faults` holds what kept a row from being read.
    """

    rules: tuple[Rule, ...]
    path: Path
    lines: tuple[int, ...]
    files: tuple[Path, ...]
    source: str = SHIPPED
    left_out: tuple[str, ...] = ()
    faults: tuple[LintFinding, ...] = ()

    def where(self, index: int) -> str:
        """Return the file and line of a row."""
        return f"{self.files[index]}:{self.lines[index]}"

    def layers(self) -> list[tuple[int, int]]:
        """Return the user's rows and the shipped ones as index ranges; one range where there is one file."""
        own = sum(file == self.path for file in self.files)
        ends = [(0, own), (own, len(self.rules))]
        return [(first, last) for first, last in ends if first < last]

    def title(self) -> str:
        """Return what the table is made of, without the folders it lies in."""
        if self.path == SHIPPED_RULES:
            return "the shipped rules"
        alone = all(file == self.path for file in self.files)
        return f"{self.path.name} {'in place of' if alone else 'over'} the shipped rules"

    def place(self, index: int) -> str:
        """Return where a row comes from, for a reader: file and line, `shipped` for the shipped file."""
        return f"shipped:{self.lines[index]}" if self.files[index] == SHIPPED_RULES else self.where(index)

    def text(self) -> str:
        """Return the whole table as the text of one file that needs no other, in the order it is tried."""
        return "replace = true\n\n" + "\n".join(rule.to_toml() for rule in self.rules)

    def digest(self) -> str:
        """Return the SHA-256 of the table's rows: two tables with one digest choose alike."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def row_text(row: dict[str, Any]) -> str:
    """Return a row as TOML, its keys in the order of the shipped table."""
    lines = [f"{key} = {toml_value(row[key])}" for key in Rule.model_fields if key != "options" or row.get(key)]
    return "\n".join(["[[rule]]", *lines]) + "\n"


def toml_value(value: Any) -> str:
    """Return a plain value as TOML."""
    if isinstance(value, dict):
        keys = (key if BARE_KEY.fullmatch(key) else toml_value(key) for key in value)
        inner = ", ".join(f"{key} = {toml_value(part)}" for key, part in zip(keys, value.values(), strict=True))
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        # A JSON string is a TOML one, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def show_value(value: Any) -> str:
    """Return a field's value as the table would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show_condition(raw: Any) -> str:
    """Return a condition in words."""
    if isinstance(raw, dict):
        return " and ".join(f"{SIGNS[op]} {show_value(value)}" for op, value in raw.items())
    return " or ".join(map(show_value, raw)) if isinstance(raw, list) else show_value(raw)
