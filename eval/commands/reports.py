"""Read runs again: report and compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rooflane.eval.commands.output import AsJson, console, print_json

TABLE = "table"


def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a record folder under briefs/records.")],
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the full report as Markdown.")] = None,
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Renew the table between the markers in this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run from its records: the table, or Markdown, or the README's table."""
    from rooflane.eval import open_run, render_json, render_markdown, render_readme_table, render_terminal
    from rooflane.eval import update_between_markers as update

    summary = open_run(run).summary()
    remarks = sys.stderr if as_json else sys.stdout
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
    as_json: AsJson = False,
) -> None:
    """Compare two candidates by latency, shape by shape, with intervals and a verdict."""
    from rooflane.eval.comparison import compare, render_comparison

    comparison = compare(a, b)
    if as_json:
        print_json(comparison.as_dict())
    else:
        render_comparison(comparison, console())
