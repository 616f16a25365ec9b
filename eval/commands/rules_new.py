"""Add a rule: `rules new` asks for what it was not told, and writes nothing that would not work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rooflane.dispatch import RuleError, parse_rules
from rooflane.dispatch.conditions import FIELDS
from rooflane.dispatch.rule_source import find_user_table
from rooflane.dispatch.rule_text import insert_row, parse_options, parse_when
from rooflane.dispatch.rules import SHIPPED_RULES
from rooflane.eval.commands.output import console
from rooflane.families import FamilyError, get_family, load_families

DEFAULT_FILE = "my_rules.toml"


def new_command(
    name: Annotated[
        str | None, typer.Option(help="The row's name; a shipped row of that name goes out of use.")
    ] = None,
    when: Annotated[
        list[str] | None, typer.Option(metavar="COND", help="seq_len<=128, d_model=64,128, causal=true; repeatable.")
    ] = None,
    always: Annotated[bool, typer.Option("--always", help="No condition: the row matches every shape.")] = False,
    family: Annotated[
        str | None, typer.Option(help="Where it sends the shape; `rooflane families` lists them.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the family; repeatable.")
    ] = None,
    because: Annotated[str | None, typer.Option(help="Why: what the shape gains there.")] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Your table, made if missing.  [the one in force, or {DEFAULT_FILE}]"),
    ] = None,
    before: Annotated[
        str | None, typer.Option(metavar="ROW", help="Put it before this row.  [last, but before a row for everything]")
    ] = None,
) -> None:
    """Write a row into a table of your own; on a terminal it asks for what the options leave open.

    The row is checked first: an unknown field, family or option leaves the file as it was.
    """
    if always and when:
        raise RuleError("--always and --when contradict each other; leave one out")
    asks = sys.stdin.isatty()
    missing = [flag for flag, value in (("--name", name), ("--family", family), ("--because", because)) if not value]
    missing += [] if when or always else ["--when (or --always)"]
    if missing and not asks:
        raise RuleError(f"rules new lacks {', '.join(missing)}; give them, or run it on a terminal, where it asks")
    row: dict[str, Any] = {
        "name": name or _ask("name of the row", str.strip),
        "when": parse_when(when) if when else {} if always else _ask_when(),
        "family": _family(family) if family else _ask(f"family ({', '.join(load_families())})", _family),
        "options": parse_options(option or []),
        "because": because or _ask("because", str.strip),
    }
    path = into or _own_table()
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    known = {(finding.kind, finding.rule) for finding in parse_rules(old, str(path)).lint()}
    text, table = insert_row(old, row, path, before)
    path.write_text(text, encoding="utf-8")
    index = [rule.name for rule in table.rules].index(row["name"])
    print(f"{table.where(index)}: row {row['name']!r} written, number {index + 1} of {len(table.rules)} that are tried")
    for finding in table.lint():
        if (finding.kind, finding.rule) not in known:
            print(f"{finding.severity}: {finding}")
    if find_user_table(None, RuleError)[0] != path:
        console(stderr=True).print(
            f"to use it: --rules {path}, or ROOFLANE_RULES={path}, or in pyproject.toml [tool.rooflane] rules = "
            f'"{path}"',
            markup=False,
        )


def _own_table() -> Path:
    """Return the user's table in force, or where a first one goes."""
    found, _ = find_user_table(None, RuleError)
    return Path(DEFAULT_FILE) if found is None or found == SHIPPED_RULES else found


def _ask(question: str, read: Callable[[str], Any]) -> Any:
    """Ask until the answer can be read, saying each time why it could not."""
    while True:
        try:
            return read(typer.prompt(question))
        except (RuleError, FamilyError) as error:
            console(stderr=True).print(str(error), markup=False)


def _ask_when() -> dict[str, Any]:
    """Ask for conditions, one a line, until an empty one."""
    print(f"conditions such as seq_len<=128 or regime=launch, one a line, an empty line ends; on {', '.join(FIELDS)}")
    given: list[str] = []

    def read(text: str) -> bool:
        if text:
            parse_when([*given, text])
            given.append(text)
        return bool(text)

    while _ask_optional("condition", read):
        pass
    return parse_when(given)


def _ask_optional(question: str, read: Callable[[str], bool]) -> bool:
    try:
        return read(typer.prompt(question, default="", show_default=False).strip())
    except RuleError as error:
        console(stderr=True).print(str(error), markup=False)
        return True


def _family(name: str) -> str:
    return get_family(name.strip()).name
