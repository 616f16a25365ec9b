"""The command line: commands, and the form of an error. Loads no torch until a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from rooflane.eval.commands import (
    audit,
    device,
    evaluate,
    export,
    ladder,
    models,
    plan,
    reports,
    rules,
    statistics,
    submit,
)
from rooflane.eval.commands.output import Group, remark
from rooflane.eval.exit_codes import ExitCode

DEBUG = "--debug"

app = Group(
    name="rooflane",
    no_args_is_help=True,
    # In rich's own markup `[dispatched]` is a style: help would lose every default in brackets.
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Predict what limits a transformer forward, route it to a fast family, and prove the speedup.",
)
app.command("eval")(evaluate.eval_command)
app.command("classify")(plan.classify_command)
app.command("route")(plan.route_command)
app.add_typer(rules.app, name="rules")
app.add_typer(export.new_app, name="new")
app.command("families")(plan.families_command)
app.command("models")(models.models_command)
app.command("problems")(plan.problems_command)
app.command("probe")(device.probe_command)
app.command("profile")(device.profile_command)
app.add_typer(ladder.app, name="ladder")
app.command("submit")(submit.submit_command)
app.command("export")(export.export_command)
app.command("report")(reports.report_command)
app.command("compare")(reports.compare_command)
app.command("plan")(statistics.plan_command)
app.command("price")(statistics.price_command)
app.command("audit-gate")(audit.audit_gate_command)
app.command("doctor")(device.doctor_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rooflane {version('rooflane')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error; accepted anywhere.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options before a command; `main` acts on --debug."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status; every error is one paragraph on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    try:
        app(args=[argument for argument in given if argument != DEBUG], prog_name="rooflane")
    except Exception as error:
        if debug:
            raise
        paragraph, status = explain_error(error)
        remark(f"rooflane: {paragraph}")
        sys.exit(status)


def explain_error(error: Exception) -> tuple[str, ExitCode]:
    """Return an error as one paragraph, and the exit status it means.

    An error class of rooflane carries its own paragraph: what, where, how to fix it. A missing library and a file the
    system refuses are explained here; any other error is reported as a fault of rooflane.
    """
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("rooflane."):
        return text, ExitCode.USAGE
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("rooflane"):
        return (
            f"this command needs {error.name}, which cannot be imported; install it (pip install {error.name}). "
            "classify, route, rules, families and doctor work without torch",
            ExitCode.USAGE,
        )
    if isinstance(error, OSError):
        return f"{text}; check that the path exists and may be written", ExitCode.USAGE
    return f"unexpected {type(error).__name__}: {text}; run again with {DEBUG} for the traceback", ExitCode.ERROR
