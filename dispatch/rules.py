"""A rule table as data: its rows, where each stands, and its text.

The rows of the user's table are tried first, the shipped rows after them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rooflane.dispatch.conditions import Condition, corner_values, parse_condition

SHIPPED_RULES = Path(__file__).parent / "rules.toml"
SHIPPED = "shipped"
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
Severity = Literal["error", "warning"]


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
    severity: Severity
    rule: str
    where: str
    message: str

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
        signs = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=", "ne": "!="}
        return " and ".join(f"{signs[op]} {show_value(value)}" for op, value in raw.items())
    return " or ".join(map(show_value, raw)) if isinstance(raw, list) else show_value(raw)
