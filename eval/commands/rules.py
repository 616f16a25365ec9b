"""Rule tables: rules list, check, explain, new and regret."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooflane.dispatch import (
    Profile,
    RouteError,
    RuleError,
    RuleTable,
    classify,
    lint,
    load_rules,
    parse_rules,
    refusal,
    route,
    show_condition,
)
from rooflane.dispatch.rule_files import find_user_table, insert_row, parse_options, parse_when
from rooflane.dispatch.rules import FIELDS, SHIPPED_RULES, facts
from rooflane.dispatch.units import counted
from rooflane.eval.commands.output import (
    AsJson,
    Group,
    ProfileName,
    RulesFile,
    console,
    find_profile,
    find_shapes,
    print_json,
    remark,
    say,
)
from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.report.table import Table, interval, print_table, times
from rooflane.families import FamilyError, get_family, load_families
from rooflane.shapes import Shape

if TYPE_CHECKING:
    pass

PUBLISHED = "published.csv"
DEFAULT_FILE = "my_rules.toml"

app = Group(no_args_is_help=True, help="List, check, explain, add and judge the rules that choose a family.")


@app.command("list")
def list_command(rules: RulesFile = None, as_json: AsJson = False) -> None:
    """Show the table in the order it is tried, with where each row comes from; the first that matches wins.

    Exit 2 when the table cannot be used.
    """
    table = load_rules(rules, strict=False)
    errors = [str(finding) for finding in lint(table, warnings=False)]
    if as_json:
        rows = [rule.model_dump(mode="json") for rule in table.rules]
        print_json([row | {"from": table.place(index)} for index, row in enumerate(rows)])
        remark(*errors)
    else:
        _print_rules(table, errors)
    if errors:
        raise typer.Exit(ExitCode.USAGE)


def _print_rules(table: RuleTable, errors: list[str]) -> None:
    rows = []
    for index, rule in enumerate(table.rules):
        when = [
            f"{name} {'' if isinstance(raw, dict) else '= '}{show_condition(raw)}" for name, raw in rule.when.items()
        ]
        options = "".join(f" {name}={value}" for name, value in rule.options.items())
        rows.append((rule.name, ", ".join(when) or "always", rule.family + options, rule.because, table.place(index)))
    columns = ("rule", "when", "family", "because", "from")
    print_table(Table(f"{table.title()} ({table.source})", columns, rows, len(columns)), console())
    for error in errors:
        say(f"error: {error}")
    if table.left_out:
        say(f"shipped rules out of use, a row of their name stands above: {', '.join(table.left_out)}")


@app.command("check")
def check_command(
    rules: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Rule table; the one in force by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a table: unknown names, rows that can never act, accidental overlaps. Exit 2 when it cannot be used."""
    table = load_rules(rules, strict=False)
    findings = lint(table)
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            say(f"{finding.severity}: {finding}")
        if not findings:
            say(f"{table.title()}: {counted(len(table.rules), 'rule')}, nothing wrong")
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(ExitCode.USAGE)


@app.command("explain")
def explain_command(
    shapes: Annotated[str, typer.Argument(metavar="SHAPE", help=f"A shape file, or the id of a shape of {PUBLISHED}.")],
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="ID", help="Only this shape; repeatable.")
    ] = None,
    profile: ProfileName = "auto",
    rules: RulesFile = None,
    as_json: AsJson = False,
) -> None:
    """Show each rule's verdict on each shape: chosen, or the condition that does not hold."""
    device, table = find_profile(profile), load_rules(rules)
    verdicts = [_explain(item, device, table) for item in _shapes(shapes, shape or [])]
    if as_json:
        print_json(verdicts)
        return
    for found in verdicts:
        places = found["from"]
        rows = [(name, verdict, places[name]) for name, verdict in found["rules"].items()]
        title = f"shape {found['shape']} ({found['label']}) on {device.title}"
        print_table(Table(title, ("rule", "verdict", "from"), rows, 3, optional=("from",)), console())
        if found["chosen"] is None:
            console(stderr=True).print(f"shape {found['shape']}: no rule's family can serve it; see `rooflane route`")


def _shapes(text: str, only: list[str]) -> list[Shape]:
    if not only and not Path(text).suffix and not Path(text).exists():
        return find_shapes(PUBLISHED, [text])
    return find_shapes(text, only)


def _explain(shape: Shape, device: Profile, table: RuleTable) -> dict[str, object]:
    known = facts(shape, device, classify(shape, device))
    try:
        chosen = route(shape, device, table).rule.name
    except RouteError:
        chosen = None
    verdicts, taken = {}, False
    for rule in table.rules:
        if rule.name == chosen:
            taken, verdict = True, f"chosen, sends it to {rule.family}: {rule.because}"
        elif reason := rule.mismatch(known):
            verdict = reason
        elif taken:
            verdict = "matches, but comes after the chosen rule"
        else:
            refused = refusal(get_family(rule.family), shape, device, rule.options)
            verdict = f"matches, but its family {rule.family} cannot serve: {refused}"
        verdicts[rule.name] = verdict
    places = {rule.name: table.place(index) for index, rule in enumerate(table.rules)}
    return {"shape": shape.id, "label": shape.label(), "chosen": chosen, "rules": verdicts, "from": places}


@app.command("new")
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
    """Write a row into a table of your own; on a terminal it asks for what the options leave out.

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
    known = {(finding.kind, finding.rule) for finding in lint(parse_rules(old, str(path)))}
    text, table = insert_row(old, row, path, before)
    path.write_text(text, encoding="utf-8")
    index = [rule.name for rule in table.rules].index(row["name"])
    say(f"{table.where(index)}: row {row['name']!r} written, number {index + 1} of {len(table.rules)} that are tried")
    for finding in lint(table):
        if (finding.kind, finding.rule) not in known:
            say(f"{finding.severity}: {finding}")
    if find_user_table(None)[0] != path:
        console(stderr=True).print(
            f"to use it: --rules {path}, or ROOFLANE_RULES={path}, or in pyproject.toml [tool.rooflane] rules = "
            f'"{path}"'
        )


def _own_table() -> Path:
    found, _ = find_user_table(None)
    return Path(DEFAULT_FILE) if found is None or found == SHIPPED_RULES else found


def _ask(question: str, read: Callable[[str], Any]) -> Any:
    while True:
        try:
            return read(typer.prompt(question))
        except (RuleError, FamilyError) as error:
            console(stderr=True).print(str(error))


def _ask_when() -> dict[str, Any]:
    say(f"conditions such as seq_len<=128 or regime=launch, one a line, an empty line ends; on {', '.join(FIELDS)}")
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
        console(stderr=True).print(str(error))
        return True


def _family(name: str) -> str:
    return get_family(name.strip()).name


@app.command("regret")
def regret_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of several families beside each other.")],
    rules: RulesFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how much longer the table's choices take than the best family measured, with an interval.

    The best family of a shape is chosen for each process on the other processes, so that noise does not count as a
    better choice.
    """
    from rooflane.eval.stats.regret import regret
    from rooflane.eval.stats.run import open_run

    found = regret(open_run(run), load_rules(rules))
    if as_json:
        print_json(found.as_dict())
        return
    columns = ("id", "rule", "choice", "best of the others", "choice over best [95%]", "judged by itself")
    rows = [
        (row.shape, row.rule, row.choice, row.best, interval(row.regret), f"{times(row.apparent)}x")
        for row in found.shapes
    ]
    title, optional = f"regret of {found.rules}, run {found.run}", ("judged by itself", "rule")
    print_table(Table(title, columns, rows, 4, optional=optional), console())
    for shape, reason in found.left_out.items():
        say(f"shape {shape}: left out, {reason}")
    over = f"over {counted(len(found.shapes), 'shape')}"
    say(f"table over oracle: {interval(found.table)} {over}; {times(found.apparent)}x with the oracle judged by itself")
    for family, ratio in sorted(found.singles.items(), key=lambda item: item[1].centre):
        say(f"{family} for all, over oracle: {interval(ratio)}")
    if found.single_over_table:
        say(f"best one family for all, over the table: {interval(found.single_over_table)}")
    else:
        say("no family was right and timed on all of these shapes, so none can be compared over all of them")
