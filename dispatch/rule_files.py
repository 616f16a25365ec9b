"""Rule tables on disk: which one is in force, read and checked, and rows written into one.

The user's table is named by the caller, else by the variable ROOFLANE_RULES, else by `[tool.rooflane] rules` in the
nearest pyproject.toml.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooflane.dispatch.lint import lint, read_row
from rooflane.dispatch.rules import FIELDS, SHIPPED, SHIPPED_RULES, SIGNS, RuleError, RuleTable, row_text
from rooflane.dispatch.toml_source import header_lines, key_line, parse_toml, read_text

VARIABLE = "ROOFLANE_RULES"
PROJECT_FILE = "pyproject.toml"
SECTION = "tool.rooflane"
COMPARISON = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
OPS = {sign: name for name, sign in SIGNS.items() if sign != "="}
HEADER = """\
# Rules of your own, tried from the top, before the shipped ones (`rooflane rules list` shows all of them).
# A row with the name of a shipped one takes that one out of use; `replace = true` as the first line takes out all.
# Fields: {fields}
"""


def load_rules(path: str | Path | None = None, strict: bool = True) -> RuleTable:
    """Return the rule table in force: the user's rows, if there are any, over the shipped ones.

    `path` names the user's table, `"shipped"` asks for the shipped rules alone; None reads ROOFLANE_RULES, then the
    nearest pyproject.toml with a `[tool.rooflane]` table. A file with `replace = true` is used alone. Raises
    `RuleError` with file and line for malformed TOML and, unless `strict` is off, for every error `lint` finds.
    """
    found, source = find_user_table(path)
    path = SHIPPED_RULES if found is None else found
    if not path.is_file() and source != "given":
        raise RuleError(f"{path}: no such file, and {source} names it as the rule table; correct or remove that")
    table, alone = _parse(read_text(path, RuleError), path, source)
    if not alone and not path.samefile(SHIPPED_RULES):
        table = _over_shipped(table)
    return checked(table) if strict else table


def find_user_table(given: str | Path | None) -> tuple[Path | None, str]:
    """Return the user's table and what named it, or None for the shipped rules alone.

    The first that names one wins: `given`, the variable ROOFLANE_RULES, the nearest pyproject.toml at or above the
    working directory that has a `[tool.rooflane]` table (its `rules` is a path relative to that file). The word
    `shipped` in any of the three asks for the shipped rules alone. Raises `RuleError` for an unreadable section.
    """
    if given is not None:
        return _named(str(given), Path(), "given")
    if os.environ.get(VARIABLE):
        return _named(os.environ[VARIABLE], Path(), VARIABLE)
    here = Path.cwd()
    for folder in (here, *here.parents):
        project = folder / PROJECT_FILE
        named = _project_rules(project) if project.is_file() else None
        if named:
            return _named(named, folder, f"[{SECTION}] of {project}")
    return None, SHIPPED


def _named(text: str, folder: Path, source: str) -> tuple[Path | None, str]:
    return (None, f"{SHIPPED}, by {source}") if text == SHIPPED else (folder / Path(text).expanduser(), source)


def _project_rules(project: Path) -> str | None:
    """Return what the section's `rules` says; None for a project file without the section."""
    text = read_text(project, RuleError)
    # Most project files do not name rooflane. Only one that does has to be valid TOML here.
    if SECTION not in text:
        return None
    section = parse_toml(text, project, RuleError).get("tool", {}).get("rooflane")
    if section is None:
        return None
    if not isinstance(section, dict) or set(section) - {"rules"}:
        raise RuleError(f'{project}: [{SECTION}] holds one key, rules = "FILE"; remove the others')
    named = section.get("rules", SHIPPED)
    if not isinstance(named, str) or not named:
        raise RuleError(f"{project}: [{SECTION}] rules is {named!r}; it is the path of a rule table, in quotes")
    return named


def parse_rules(text: str, name: str, source: str = "given") -> RuleTable:
    """Return the table in a text, unchecked, with the shipped rows after it unless it says `replace = true`.

    `name` is its path, for messages.
    """
    table, alone = _parse(text, Path(name), source)
    return table if alone else _over_shipped(table)


def checked(table: RuleTable) -> RuleTable:
    """Return the table; raises `RuleError` with every error found in it."""
    errors = lint(table, warnings=False)
    if errors:
        raise RuleError("; ".join(map(str, errors)))
    return table


def _over_shipped(table: RuleTable) -> RuleTable:
    """Return the table with the shipped rows after its own, except those whose name a row of the user's has."""
    shipped, _ = _parse(read_text(SHIPPED_RULES, RuleError), SHIPPED_RULES, SHIPPED)
    taken = {rule.name for rule in table.rules}
    kept = [index for index, rule in enumerate(shipped.rules) if rule.name not in taken]
    return replace(
        table,
        rules=table.rules + tuple(shipped.rules[index] for index in kept),
        lines=table.lines + tuple(shipped.lines[index] for index in kept),
        files=table.files + tuple(shipped.files[index] for index in kept),
        left_out=tuple(rule.name for rule in shipped.rules if rule.name in taken),
    )


def _parse(text: str, path: Path, source: str) -> tuple[RuleTable, bool]:
    data = parse_toml(text, path, RuleError)
    rows, alone = data.pop("rule", []), data.pop("replace", False)
    if data:
        raise RuleError(
            f"{path}:1: unknown key {next(iter(data))!r}; the file holds [[rule]] rows and, to stand alone, "
            "`replace = true`"
        )
    if not isinstance(alone, bool):
        raise RuleError(
            f"{path}:1: replace is {alone!r}; it is true (the shipped rules are left out) or false (they follow)"
        )
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


def parse_when(texts: list[str]) -> dict[str, Any]:
    """Return conditions written as `seq_len<=128`, `d_model=64,128` or `causal=true` as a row's `when`.

    Several comparisons of one field hold together. Raises `RuleError` naming what cannot be read, and what can.
    """
    when: dict[str, Any] = {}
    for text in texts:
        match = COMPARISON.fullmatch(text)
        if not match or not match[3]:
            raise RuleError(
                f"condition {text!r} is not FIELD, one of < <= > >= = !=, and a value, such as seq_len<=128 or "
                "regime=launch,bandwidth"
            )
        name, sign, raw = match.groups()
        if name not in FIELDS:
            raise RuleError(f"condition {text!r}: no field is called {name!r}; fields: {', '.join(FIELDS)}")
        if sign in OPS:
            table = when.setdefault(name, {})
            if not isinstance(table, dict) or OPS[sign] in table:
                raise RuleError(f"condition {text!r}: {name} is already asked for its {sign}; give each only once")
            table[OPS[sign]] = _value(name, raw)
        elif name in when:
            raise RuleError(f"condition {text!r}: {name} already has a condition; list its values as {name}=A,B")
        else:
            values = [_value(name, part.strip()) for part in raw.split(",")]
            when[name] = values[0] if len(values) == 1 else values
    return when


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Return options written as `key=value`; raises `RuleError` on anything else."""
    options = {}
    for text in texts:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not (key and equals and raw):
            raise RuleError(f"option {text!r} is not key=value, such as operand_dtype=bfloat16")
        options[key] = _plain(raw)
    return options


def insert_row(text: str, row: dict[str, Any], path: Path, before: str | None = None) -> tuple[str, RuleTable]:
    """Return a table's text with one row more, and the table it makes; every other line stays as it was.

    The row goes before the row named, with the comment above that one; by default to the end, or before a last row
    that matches everything. `text` may be empty. Raises `RuleError` when the outcome would not be usable, or no row
    has the name `before`.
    """
    rule = row_text(row)
    old = parse_rules(text, str(path))
    own = [name for name, file in zip((r.name for r in old.rules), old.files, strict=True) if file == path]
    at = None
    if before in own:
        at = own.index(before)
    elif before is not None and before not in {other.name for other in old.rules}:
        raise RuleError(f"{path}: has no row {before!r} to put the new one before; it has: {', '.join(own) or 'none'}")
    elif own and old.rules[len(own) - 1].catches_all:
        at = len(own) - 1
    if at is None:
        head = text or HEADER.format(fields=", ".join(FIELDS))
        new = head.rstrip("\n") + "\n\n" + rule
    else:
        lines = text.splitlines(keepends=True)
        line = old.lines[at] - 1
        while line and lines[line - 1].lstrip().startswith("#") and _belongs(lines, line - 1):
            line -= 1
        new = "".join(lines[:line]) + rule + "\n" + "".join(lines[line:])
    return new, checked(parse_rules(new, str(path)))


def _belongs(lines: list[str], index: int) -> bool:
    """Return whether a comment line is part of a row's own comment: not of the block the file begins with."""
    while index and lines[index - 1].lstrip().startswith("#"):
        index -= 1
    return index > 0


def _value(name: str, raw: str) -> Any:
    """Return a condition's value in the type of its field, the raw text where it has none of it."""
    kind = FIELDS[name].kind
    if kind is str:
        return raw
    value = _plain(raw)
    return float(value) if kind is float and type(value) is int else value


def _plain(raw: str) -> Any:
    if raw in ("true", "false"):
        return raw == "true"
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            continue
    return raw
