"""Rows from a command line, and their insertion into a table that keeps its comments and its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rooflane.dispatch.conditions import FIELDS
from rooflane.dispatch.rule_files import checked, parse_rules
from rooflane.dispatch.rules import RuleError, RuleTable, row_text

COMPARISON = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
OPS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "!=": "ne"}
HEADER = """\
# Rules of your own, tried from the top, before the shipped ones (`rooflane rules list` shows all of them).
# A row with the name of a shipped one takes that one out of use; `replace = true` as the first line takes out all.
# Fields: {fields}
"""


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
