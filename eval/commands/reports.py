"""Read runs again: report and compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from rooflane.eval.commands.evaluate import Require
from rooflane.eval.commands.output import AsJson, console, print_json, remark, say
from rooflane.eval.commands.statistics import NullsPath
from rooflane.eval.report.escape import csv_cell
from rooflane.eval.report.files import STDOUT, write_file

if TYPE_CHECKING:
    from pandas import DataFrame

    from rooflane.eval import Summary

TABLE = "table"


def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a record folder under briefs/records.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Draw a plot into KIND.svg, KIND.png or NAME-KIND.svg; repeatable. "
            "Kinds: latency, roofline, regimes, tolerance, fp64.",
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the full report as Markdown.")] = None,
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Renew the table between the markers in this file.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every timed call as CSV, one line a call.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print every table of the report.")] = False,
    nulls: NullsPath = None,
    as_json: AsJson = False,
) -> None:
    """Show a run from its records: its table, or write the report, the page, plots, the calls or the README's table."""
    from rooflane.eval import open_run, render_json, render_markdown, render_readme_table, render_terminal
    from rooflane.eval import update_between_markers as update
    from rooflane.eval.stats.run import find_nulls

    opened = open_run(run)
    summary = opened.summary(None if nulls is None else find_nulls(nulls))
    remarks = sys.stderr if as_json or STDOUT in (markdown, csv, html, *(plot or ())) else sys.stdout
    if not opened.sealed:
        remark(f"{run}: not sealed, so it is still in progress or was interrupted; its figures may change")
    if markdown:
        write_file(markdown, render_markdown(summary))
        say(f"report written to {markdown}", to=remarks)
    if csv:
        write_file(csv, render_csv(opened.frame()))
        say(f"calls written to {csv}", to=remarks)
    if readme:
        changed = update(readme, TABLE, render_readme_table(summary))
        say(f"{readme}: {'table renewed' if changed else 'the table was up to date'}", to=remarks)
    if html or plot:
        _write_pictures(run, summary, html, plot or [], remarks)
    if as_json:
        print(render_json(summary))
    elif details or not (markdown or csv or readme or html or plot):
        render_terminal(summary, console(), details)


def render_csv(calls: DataFrame) -> str:
    """Return timed calls as CSV, with no text that a spreadsheet takes for a formula."""
    from pandas.api.types import is_numeric_dtype

    texts = {name: calls[name].map(csv_cell) for name in calls if not is_numeric_dtype(calls[name])}
    return calls.assign(**texts).to_csv(index=False)


def _write_pictures(run: Path, summary: Summary, html: Path | None, plots: list[Path], remarks: TextIO) -> None:
    """Write the page and the plots, every plot's name checked before any of them is written."""
    from rooflane.eval import open_run
    from rooflane.eval.report.page import plot_kind, read_page, write_page, write_plot

    for path in plots:
        plot_kind(path)
    data = read_page(open_run(run), summary)
    if html:
        write_page(data, html)
        say(f"page written to {html}", to=remarks)
    for path in plots:
        write_plot(data, path)
        say(f"plot drawn to {path}", to=remarks)


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
    from rooflane.eval.report.report import render_comparison
    from rooflane.eval.stats.comparison import compare
    from rooflane.eval.stats.power import parse_share

    comparison = compare(a, b, margin=parse_share(margin))
    if as_json:
        print_json(comparison.as_dict())
    else:
        render_comparison(comparison, console())
    raise typer.Exit(comparison.exit_code(require.value))
