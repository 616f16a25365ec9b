"""`rooflane submit`: the organiser's own script over a shape file, with its progress, interruption and exit status."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rooflane.eval.commands.output import (
    AsJson,
    RulesFile,
    console,
    find_shapes,
    refuse_beside_resume,
    remark,
    report_kept_profile,
    say,
)
from rooflane.eval.report.escape import plain
from rooflane.eval.report.table import Table, print_table

if TYPE_CHECKING:
    from rooflane.eval.submit import Submission, SubmitEvent

# What may be given with --resume: how the result is shown, not how it is measured.
RESUME_OPTIONS = {"resume", "as_json"}
DEFAULT_SHAPES = "published.csv"


def submit_command(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="SHAPES", help="Shape file; a shipped one by its bare name.")
    ] = DEFAULT_SHAPES,
    organiser: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Your copy of the organiser's script; it is run, never changed.")
    ] = None,
    candidate: Annotated[
        str, typer.Option(help="dispatched, FAMILY, FAMILY:key=value,... or FILE.py[:name].")
    ] = "dispatched",
    shape: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this shape; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; another GPU by CUDA_VISIBLE_DEVICES.")] = "auto",
    profile: Annotated[str, typer.Option(help="Device profile to route by: a name, a TOML file, or auto.")] = "auto",
    rules: RulesFile = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs of each shape, for a spread.")] = 1,
    organiser_args: Annotated[
        str, typer.Option(metavar="FLAGS", help='Flags for the script, such as "--repeats 20 --warmup 5".')
    ] = "",
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="What one run may take.")] = 600.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where submission folders go.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Continue an interrupted submission.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the organiser's script, unchanged, over SHAPES with the candidate as its model.

    Every shape runs in a fresh process; the printed figures become rows, with the raw text, in a folder under --out.
    Exit status: 0 complete and accurate, 2 a request that cannot be run or a script that changed, 20 outside the
    tolerance, 22 a run failed, 130 interrupted.
    """
    from rooflane.eval.submit import resume_submission, submit

    if resume is not None:
        refuse_beside_resume(context, RESUME_OPTIONS, "keeps the submission's own settings")
    elif organiser is None:
        raise typer.BadParameter("name the organiser's script: --organiser PATH", context)
    if resume is not None:
        with follow() as on_event:
            submission = resume_submission(resume, on_event=on_event)
    else:
        shapes = find_shapes(file, shape or ())
        from rooflane.eval.record.environment import resolve_device
        from rooflane.eval.submit import read_organiser
        from rooflane.eval.submit.organiser import check_device

        check_device(device)
        report_kept_profile(profile, resolve_device(device.removesuffix(":0")))
        remark(read_organiser(organiser).note())
        with follow() as on_event:
            submission = submit(
                organiser,
                shapes,
                candidate,
                device=device,
                profile=profile,
                rules=rules,
                processes=processes,
                organiser_args=organiser_args,
                time_limit_s=time_limit,
                runs_dir=out,
                command=shlex.join(["rooflane", *sys.argv[1:]]),
                on_event=on_event,
            )
    _finish(submission, as_json)


def _finish(submission: Submission, as_json: bool) -> None:
    from rooflane.eval.submit.submission import remarks, render_json, submission_table, summarise_submission

    summary = summarise_submission(submission)
    lines = sys.stderr if as_json else sys.stdout
    if as_json:
        print(render_json(summary))
    else:
        columns, rows = submission_table(summary)
        print_table(Table("As the organiser's script prints it", columns, rows, 4), console())
    for line in remarks(summary):
        say(line, to=lines)
    remark(f"rows with the raw text: {submission.folder}")
    if submission.interrupted:
        remark(submission.resume_hint())
    raise typer.Exit(summary.exit_code())


@contextmanager
def follow() -> Iterator[Callable[[SubmitEvent], None]]:
    """Show a submission as it goes: a bar on a terminal, a line for each finished run elsewhere."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _print_row
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def on_event(event: SubmitEvent) -> None:
            place = plain(f"process {event.process + 1}/{event.processes}  shape {event.shape}")
            progress.update(task, completed=event.done, total=event.total, description=place)

        yield on_event


def _print_row(event: SubmitEvent) -> None:
    row = event.row
    if row is None:
        return
    timing = (
        f"{row.figures.optimized.median_ms:g} ms, {row.figures.speedup:g}x"
        if row.figures and row.figures.speedup
        else ""
    )
    text = ": ".join(filter(None, (row.outcome, timing or row.reason)))
    remark(f"[{event.done}/{event.total}] process {event.process + 1}  shape {row.shape}  {text}")
