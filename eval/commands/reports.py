"""Read runs again: report and compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rooflane.eval.commands.evaluate import Require
from rooflane.eval.commands.output import AsJson, console, print_json
from rooflane.eval.commands.statistics import NullsPath

TABLE = "table"


def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a record folder under briefs/records.")],
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the full report as Markdown.")] = None,
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Renew the table between the markers in this file.")
    ] = None,
    nulls: NullsPath = None,
    as_json: AsJson = False,
) -> None:
    """Show a run from its records: the table, or Markdown, or the README's table. Refuses a changed record."""
    from rooflane.eval import open_run, render_json, render_markdown, render_readme_table, render_terminal
    from rooflane.eval import update_between_markers as update
    from rooflane.eval.nulls import read_nulls

    opened = open_run(run)
    summary = opened.summary(None if nulls is None else read_nulls(nulls))
    remarks = sys.stderr if as_json else sys.stdout
    if not opened.sealed:
        print(
            f"{run}: not sealed, so it is still in progress or was interrupted; its figures may change", file=sys.stderr
        )
    if markdown:
        markdown.write_text(render_markdown(summary), encoding="utf-8")
        print(f"report written to {markdown}", file=remarks)
    if readme:
        changed = update(readme, TABLE, render_readme_table(summary))
        print(f"{readme}: {'table renewed' if changed else 'the table was up to date'}", file=remarks)
    if as_json:
        print(render_json(summary))
    elif not (markdown or readme):
        render_terminal(summary, console())


def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="RUN, or RUN::ARM for one arm of it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What A is compared with: RUN or RUN::ARM.")],
    margin: Annotated[str, typer.Option(help="Within this of 1 the two count as equivalent.")] = "1%",
    require: Annotated[Require, typer.Option(help="What exit status 0 stands for.")] = Require.COMPLETE,
    as_json: AsJson = False,
) -> None:
    """Compare two candidates by latency, shape by shape, with intervals, noise floor and a verdict.

    Arms of one run are paired process by process; arms of two runs are compared by Welch's interval.
    """
    from rooflane.eval.comparison import compare
    from rooflane.eval.comparison_text import render_comparison
    from rooflane.eval.power import parse_share

    comparison = compare(a, b, margin=parse_share(margin))
    if as_json:
        print_json(comparison.as_dict())
    else:
        render_comparison(comparison, console())
    raise typer.Exit(comparison.exit_code(require.value))
