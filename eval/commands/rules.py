"""Read and check rule tables: rules list, check, explain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rooflane.dispatch import (
    Profile,
    RouteError,
    RuleTable,
    classify,
    load_profile,
    load_rules,
    refusal,
    route,
    show_condition,
)
from rooflane.dispatch.conditions import facts
from rooflane.eval.commands.group import Group
from rooflane.eval.commands.output import (
    AsJson,
    ProfileName,
    RulesFile,
    console,
    find_shapes,
    print_json,
    print_table,
)
from rooflane.eval.commands.rules_new import new_command
from rooflane.eval.commands.rules_regret import regret_command
from rooflane.eval.exit_codes import ExitCode
from rooflane.families import get_family
from rooflane.shapes import Shape

PUBLISHED = "published.csv"

app = Group(no_args_is_help=True, help="List, check, explain, add and judge the rules that choose a family.")
app.command("new")(new_command)


@app.command("list")
def list_command(rules: RulesFile = None, as_json: AsJson = False) -> None:
    """Show the table in the order it is tried, with where each row comes from; the first that matches wins.

    Exit 2 when the table cannot be used.
    """
    table = load_rules(rules, strict=False)
    errors = [str(finding) for finding in table.lint() if finding.severity == "error"]
    if as_json:
        rows = [rule.model_dump(mode="json") for rule in table.rules]
        print_json([row | {"from": table.place(index)} for index, row in enumerate(rows)])
        print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr)
    else:
        _print_rules(table, errors)
    if errors:
        raise typer.Exit(ExitCode.USAGE)


def _print_rules(table: RuleTable, errors: list[str]) -> None:
    rows = []
    for index, rule in enumerate(table.rules):
        when = [f"{name} {_condition(raw)}" for name, raw in rule.when.items()]
        options = "".join(f" {name}={value}" for name, value in rule.options.items())
        rows.append((rule.name, "\n".join(when) or "always", rule.family + options, rule.because, table.place(index)))
    columns = ("rule", "when", "family", "because", "from")
    print_table(f"{table.title()} ({table.source})", columns, rows, left=columns)
    for line in _remarks(table, errors):
        print(line)


def _condition(raw: object) -> str:
    return show_condition(raw) if isinstance(raw, dict) else f"= {show_condition(raw)}"


def _remarks(table: RuleTable, errors: list[str]) -> list[str]:
    """Return what a reader of the rows alone would miss."""
    remarks = [f"error: {error}" for error in errors]
    if table.left_out:
        remarks.append(f"shipped rules out of use, a row of their name stands above: {', '.join(table.left_out)}")
    return remarks


@app.command("check")
def check_command(
    rules: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Rule table; the one in force by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a table: unknown names, rows that can never act, accidental overlaps. Exit 2 when it cannot be used."""
    table = load_rules(rules, strict=False)
    findings = table.lint()
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding}")
        if not findings:
            print(f"{table.title()}: {len(table.rules)} rules, nothing wrong")
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
    device, table = load_profile(profile), load_rules(rules)
    answers = [_explain(item, device, table) for item in _shapes(shapes, shape or [])]
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        places = answer["from"]
        rows = [(name, verdict, places[name]) for name, verdict in answer["rules"].items()]
        title = f"shape {answer['shape']} ({answer['label']}) on {device.title}"
        print_table(title, ("rule", "verdict", "from"), rows, left=("rule", "verdict", "from"))
        if answer["chosen"] is None:
            console(stderr=True).print(f"shape {answer['shape']}: no rule's family can serve it; see `rooflane route`")


def _shapes(text: str, only: list[str]) -> list[Shape]:
    """Return the shapes of a file, or the published shape of that id."""
    if not only and not Path(text).suffix and not Path(text).exists():
        return find_shapes(PUBLISHED, [text])
    return find_shapes(text, only)


def _explain(shape: Shape, device: Profile, table: RuleTable) -> dict[str, object]:
    """Return one shape's verdicts, by rule, and where each rule comes from."""
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


app.command("regret")(regret_command)
