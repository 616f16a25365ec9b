"""The rule table: which family serves which shape, read from TOML and checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rooflane.dispatch.conditions import FIELDS, Allowed, parse_condition
from rooflane.dispatch.toml_source import complaints, header_lines, read_toml
from rooflane.families import FamilySpec, registry

SHIPPED_RULES = Path(__file__).parent / "rules.toml"
Severity = Literal["error", "warning"]
CATCH_ALL = "a row with `when = {}` as the last one"


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
        return all(
            allowed.covers(other.conditions.get(name, FIELDS[name].domain)) for name, allowed in self.conditions.items()
        )

    @property
    def catches_all(self) -> bool:
        """Whether the rule matches every shape."""
        return all(allowed.covers(FIELDS[name].domain) for name, allowed in self.conditions.items())


@dataclass(frozen=True)
class LintFinding:
    """One thing wrong with a row; an error makes the table unusable, a warning marks a row that may never act."""

    kind: str
    severity: Severity
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class RuleTable:
    """The rules in order, with the file and the line each stands on."""

    rules: tuple[Rule, ...]
    path: Path
    lines: tuple[int, ...]

    def lint(self) -> list[LintFinding]:
        """Return what is wrong with the table, in the order of its rows.

        Errors: unknown-family, unknown-option, duplicate-name, missing-catch-all. Warnings: impossible (conditions
        contradict each other), unreachable (behind a row that matches everything), shadowed (wherever the row
        matches, one earlier row does): such a row acts only where the earlier row's family refuses the shape.
        """
        findings: list[LintFinding] = []
        families = registry.load_families()
        for index, rule in enumerate(self.rules):
            where = f"{self.path}:{self.lines[index]}"
            for kind, severity, message in _check_row(rule, self.rules[:index], families):
                findings.append(LintFinding(kind, severity, rule.name, where, f"rule {rule.name!r} {message}"))
        if not (self.rules and self.rules[-1].catches_all):
            line = self.lines[-1] if self.lines else 1
            name = self.rules[-1].name if self.rules else ""
            message = f"the table ends without a catch-all, so some shapes would find no rule; add {CATCH_ALL}"
            findings.append(LintFinding("missing-catch-all", "error", name, f"{self.path}:{line}", message))
        return findings


def _check_row(
    rule: Rule, earlier: tuple[Rule, ...], families: dict[str, FamilySpec]
) -> Iterator[tuple[str, Severity, str]]:
    """Yield what is wrong with one row as (kind, severity, end of the sentence)."""
    if any(rule.name == other.name for other in earlier):
        yield "duplicate-name", "error", "has the name of an earlier row; give it its own"
    if rule.family not in families:
        yield "unknown-family", "error", f"names the unknown family {rule.family!r}; there are: {_names(families)}"
    else:
        known = families[rule.family].options
        for option in rule.options.keys() - known.keys():
            takes = _names(known) or "no option"
            yield "unknown-option", "error", f"sets the unknown option {option!r}; {rule.family} takes: {takes}"
    if rule.impossible:
        yield "impossible", "warning", f"can never match: what it asks of {rule.impossible} contradicts itself"
        return
    cover = next((other for other in earlier if other.covers(rule)), None)
    if cover is None:
        return
    same = (cover.family, cover.options) == (rule.family, rule.options)
    effect = "it can be removed" if same else f"it acts only where {cover.family} refuses the shape"
    if cover.catches_all:
        yield "unreachable", "warning", f"stands behind {cover.name!r}, which matches everything: {effect}"
    else:
        yield "shadowed", "warning", f"matches only where {cover.name!r} already does: {effect}"


def load_rules(path: str | Path | None = None, strict: bool = True) -> RuleTable:
    """Read a rule table, the shipped one by default.

    Raises `RuleError` with file and line for malformed TOML, an unknown key, field, comparison or value, and, unless
    `strict` is off, for every error `RuleTable.lint` finds.
    """
    path = SHIPPED_RULES if path is None else Path(path)
    data, text = read_toml(path, RuleError)
    rows = data.pop("rule", [])
    if data:
        raise RuleError(f"{path}:1: unknown key {next(iter(data))!r}; the file holds [[rule]] rows only")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RuleError(f"{path}:1: `rule` is not a list of tables; head each row with [[rule]]")
    lines = header_lines(text, "[[rule]]")
    if len(lines) != len(rows):
        raise RuleError(f"{path}:1: rows are not headed by [[rule]] lines of their own; write each row under one")
    rules = tuple(_parse_row(row, f"{path}:{line}") for row, line in zip(rows, lines, strict=True))
    table = RuleTable(rules, path, tuple(lines))
    errors = [finding for finding in table.lint() if finding.severity == "error"] if strict else []
    if errors:
        raise RuleError("; ".join(map(str, errors)))
    return table


def _parse_row(row: dict[str, Any], where: str) -> Rule:
    try:
        return Rule.model_validate(row)
    except ValidationError as error:
        place, sentence = complaints(error)[0]
        named = f"rule {row['name']!r}" if isinstance(row.get("name"), str) else "an unnamed rule"
        at = ".".join(map(str, place))
        raise RuleError(f"{where}: {named}: {at}: {sentence}; a row has {', '.join(Rule.model_fields)}") from None


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


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
