"""Read and check rule tables: rules list, check, explain."""

from __future__ import annotations

from typing import Annotated

import typer

from rooflane.dispatch import (
    Profile,
    RouteError,
    Rule,
    RuleError,
    classify,
    load_profile,
    load_rules,
    refusal,
    route,
    show_condition,
)
from rooflane.dispatch.conditions import facts
from rooflane.eval.commands.output import (
    AsJson,
    ProfileName,
    RulesFile,
    ShapeFile,
    console,
    find_shapes,
    print_json,
    print_table,
)
from rooflane.families import get_family
from rooflane.shapes import Shape

app = typer.Typer(no_args_is_help=True, help="List, check and explain the rules that choose a family.")


@app.command("list")
def list_command(rules: RulesFile = None, as_json: AsJson = False) -> None:
    """Show the table in the order it is tried; the first rule that matches wins."""
    table = load_rules(rules, strict=False)
    if as_json:
        print_json([rule.model_dump(mode="json") for rule in table.rules])
        return
    rows = []
    for rule in table.rules:
        when = [f"{name} {_condition(raw)}" for name, raw in rule.when.items()]
        options = "".join(f" {name}={value}" for name, value in rule.options.items())
        rows.append((rule.name, "\n".join(when) or "always", rule.family + options, rule.because))
    columns = ("rule", "when", "family", "because")
    print_table(f"rules of {table.path}", columns, rows, left=columns)


def _condition(raw: object) -> str:
    return show_condition(raw) if isinstance(raw, dict) else f"= {show_condition(raw)}"


@app.command("check")
def check_command(
    rules: Annotated[str | None, typer.Argument(metavar="FILE", help="Rule table; ours by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a table: unknown names, rows that can never act, a missing catch-all. Exit 2 when it cannot be used."""
    table = load_rules(rules, strict=False)
    findings = table.lint()
    errors = [finding for finding in findings if finding.severity == "error"]
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding}")
        print(f"{table.path}: {len(table.rules)} rules, {len(errors)} errors, {len(findings) - len(errors)} warnings")
    if errors:
        raise RuleError(f"{table.path}: the table cannot be used until its {len(errors)} error(s) are mended")


def _passed_over(rule: Rule, shape: Shape, device: Profile, taken: bool) -> str:
    """Return why a rule that matches was not chosen."""
    if taken:
        return "matches, but comes after the chosen rule"
    reason = refusal(get_family(rule.family), shape, device, rule.options)
    return f"matches, but its family {rule.family} cannot serve: {reason}"


@app.command("explain")
def explain_command(
    file: ShapeFile,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="ID", help="Only this shape; repeatable.")
    ] = None,
    profile: ProfileName = "auto",
    rules: RulesFile = None,
    as_json: AsJson = False,
) -> None:
    """Show each rule's verdict on each shape: chosen, or the condition that does not hold."""
    device, table = load_profile(profile), load_rules(rules)
    answers = []
    for item in find_shapes(file, shape or ()):
        known = facts(item, device, classify(item, device))
        try:
            chosen = route(item, device, table).rule.name
        except RouteError:
            chosen = None
        verdicts, taken = {}, False
        for rule in table.rules:
            if rule.name == chosen:
                taken, verdict = True, f"chosen: {rule.because}"
            else:
                verdict = rule.mismatch(known) or _passed_over(rule, item, device, taken)
            verdicts[rule.name] = verdict
        answers.append({"shape": item.id, "label": item.label(), "chosen": chosen, "rules": verdicts})
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        rows = [(name, verdict) for name, verdict in answer["rules"].items()]
        title = f"shape {answer['shape']} ({answer['label']}) on {device.title}"
        print_table(title, ("rule", "verdict"), rows, left=("rule", "verdict"))
        if answer["chosen"] is None:
            console(stderr=True).print(f"shape {answer['shape']}: no rule's family can serve it; see `rooflane route`")
