"""The rule table: which family serves which shape, read from TOML and checked before it is used.

A table of the user's is laid over ours: its rows are tried first, ours follow. Where it is found: the file named by the
caller, else the environment's ROOFLANE_RULES, else `[tool.rooflane] rules` in the nearest pyproject.toml.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rooflane.dispatch.allowed import Allowed
from rooflane.dispatch.conditions import FIELDS, parse_condition
from rooflane.dispatch.rule_source import SHIPPED, find_user_table
from rooflane.dispatch.toml_source import header_lines, key_line, parse_toml, read_text

SHIPPED_RULES = Path(__file__).parent / "rules.toml"


class RuleError(ValueError):
    """A rule table that cannot be used; the text names file and line and says how to mend it."""


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
    def conditions(self) -> dict[str, Allowed]:
        """The values each condition allows, by field."""
        return {name: parse_condition(name, raw) for name, raw in self.when.items()}

    def allows(self, field: str) -> Allowed:
        """Return the values of a field this rule takes; without a condition on it, all there are."""
        return self.conditions.get(field, FIELDS[field].domain)

    def mismatch(self, facts: dict[str, Any]) -> str | None:
        """Return None when every condition holds, else the first that does not, in words."""
        for name, allowed in self.conditions.items():
            if not allowed.contains(facts[name]):
                return f"{name} is {show_value(facts[name])}, the rule wants {show_condition(self.when[name])}"
        return None

    @property
    def impossible(self) -> str | None:
        """The field whose conditions contradict each other, or None."""
        return next((name for name, allowed in self.conditions.items() if allowed.empty), None)

    def covers(self, other: Rule) -> bool:
        """Return whether this rule matches wherever `other` does, condition by condition."""
        return all(allowed.covers(other.allows(name)) for name, allowed in self.conditions.items())

    @property
    def catches_all(self) -> bool:
        """Whether the rule matches every shape."""
        return all(allowed.covers(FIELDS[name].domain) for name, allowed in self.conditions.items())

    def to_toml(self) -> str:
        """Return the row as the text `load_rules` reads."""
        from rooflane.dispatch.rule_text import row_text

        return row_text(self.model_dump(mode="json"))


@dataclass(frozen=True)
class RuleTable:
    """The rules in the order they are tried, with the file and the line each stands on.

    `path` is the file whose rows come first; `source` says how it was found; `left_out` names our rows whose place a
    row of the user's takes by having the same name; `faults` holds what kept a row from being read.
    """

    rules: tuple[Rule, ...]
    path: Path
    lines: tuple[int, ...]
    files: tuple[Path, ...]
    source: str = SHIPPED
    left_out: tuple[str, ...] = ()
    faults: tuple[Any, ...] = ()

    def where(self, index: int) -> str:
        """Return the file and line of a row."""
        return f"{self.files[index]}:{self.lines[index]}"

    def layers(self) -> list[tuple[int, int]]:
        """Return the user's rows and ours as index ranges; one range where there is one file."""
        own = sum(file == self.path for file in self.files)
        ends = [(0, own), (own, len(self.rules))]
        return [(first, last) for first, last in ends if first < last]

    def lint(self) -> list[Any]:
        """Return what is wrong with the table as `LintFinding`s, in the order of its rows; see `lint.lint`."""
        from rooflane.dispatch.lint import lint

        return lint(self)

    def title(self) -> str:
        """Return what the table is made of, without the folders it lies in."""
        if self.path == SHIPPED_RULES:
            return "the shipped rules"
        alone = all(file == self.path for file in self.files)
        return f"{self.path.name} {'in place of' if alone else 'over'} the shipped rules"

    def place(self, index: int) -> str:
        """Return where a row comes from, for a reader: file and line, `shipped` for the file of ours."""
        return f"shipped:{self.lines[index]}" if self.files[index] == SHIPPED_RULES else self.where(index)

    def text(self) -> str:
        """Return the whole table as the text of one file that needs no other, in the order it is tried."""
        return "replace = true\n\n" + "\n".join(rule.to_toml() for rule in self.rules)

    def digest(self) -> str:
        """Return the SHA-256 of the table's rows: two tables with one digest choose alike."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def load_rules(path: str | Path | None = None, strict: bool = True) -> RuleTable:
    """Return the rule table in force: the user's rows, if there are any, over the shipped ones.

    `path` names the user's table, `"shipped"` asks for ours alone; None looks at ROOFLANE_RULES, then at the nearest
    pyproject.toml with a `[tool.rooflane]` table. A file with `replace = true` stands alone. Raises `RuleError` with
    file and line for malformed TOML and, unless `strict` is off, for every error `RuleTable.lint` finds.
    """
    found, source = find_user_table(path, RuleError)
    path = SHIPPED_RULES if found is None else found
    if not path.is_file() and source != "given":
        raise RuleError(f"{path}: no such file, and {source} names it as the rule table; mend or remove that")
    table, alone = _parse(read_text(path, RuleError), path, source)
    if not alone and not path.samefile(SHIPPED_RULES):
        table = _over_ours(table)
    return checked(table) if strict else table


def parse_rules(text: str, name: str, source: str = "given") -> RuleTable:
    """Return the table a text holds, over ours unless it says `replace = true`, unchecked; `name` is its path."""
    table, alone = _parse(text, Path(name), source)
    return table if alone else _over_ours(table)


def checked(table: RuleTable) -> RuleTable:
    """Return the table; raises `RuleError` with every error found in it."""
    errors = [finding for finding in table.lint() if finding.severity == "error"]
    if errors:
        raise RuleError("; ".join(map(str, errors)))
    return table


def _over_ours(table: RuleTable) -> RuleTable:
    """Return the table with our rows behind its own, less those it gives a row of the same name."""
    ours, _ = _parse(read_text(SHIPPED_RULES, RuleError), SHIPPED_RULES, SHIPPED)
    taken = {rule.name for rule in table.rules}
    kept = [index for index, rule in enumerate(ours.rules) if rule.name not in taken]
    return replace(
        table,
        rules=table.rules + tuple(ours.rules[index] for index in kept),
        lines=table.lines + tuple(ours.lines[index] for index in kept),
        files=table.files + tuple(ours.files[index] for index in kept),
        left_out=tuple(rule.name for rule in ours.rules if rule.name in taken),
    )


def _parse(text: str, path: Path, source: str) -> tuple[RuleTable, bool]:
    """Return one file's rows, and whether they stand alone."""
    from rooflane.dispatch.lint import read_row

    data = parse_toml(text, path, RuleError)
    rows, alone = data.pop("rule", []), data.pop("replace", False)
    if data:
        raise RuleError(
            f"{path}:1: unknown key {next(iter(data))!r}; the file holds [[rule]] rows and, to stand alone, "
            "`replace = true`"
        )
    if not isinstance(alone, bool):
        raise RuleError(f"{path}:1: replace is {alone!r}; it is true (our rows are left out) or false (they follow)")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RuleError(f"{path}:1: `rule` is not a list of tables; head each row with [[rule]]")
    lines = header_lines(text, "[[rule]]")
    if len(lines) != len(rows):
        raise RuleError(f"{path}:1: rows are not headed by [[rule]] lines of their own; write each row under one")
    rules, kept, faults = [], [], []
    for row, line in zip(rows, lines, strict=True):
        rule, wrong = read_row(row, lambda place, line=line: f"{path}:{key_line(text, line, place)}")
        faults += wrong
        if rule:
            rules.append(rule)
            kept.append(line)
    table = RuleTable(tuple(rules), path, tuple(kept), (path,) * len(rules), source, faults=tuple(faults))
    return table, alone


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
