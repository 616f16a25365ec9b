"""The main job: `rooflane eval`, with its progress display, its interruption and its exit code."""

from __future__ import annotations

import enum
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from rooflane.dispatch.units import rough_duration
from rooflane.eval.commands.output import (
    AsJson,
    RulesFile,
    console,
    find_problems,
    find_shapes,
    refuse_beside_resume,
    remark,
    report_kept_profile,
)
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.escape import plain

if TYPE_CHECKING:
    from rooflane.eval import Event, Run
    from rooflane.shapes import Problem, Shape

REPORT_FILE = "report.md"
# The options of settings that have another name.
SETTING_OPTIONS = {
    "memory_cap_bytes": "memory_cap",
    "budget_s": "budget",
    "time_budget_s": "time_budget",
    "controls": "control",
}
# Options that may be given with --resume: they change what is printed, not what is measured.
RESUME_OPTIONS = {"resume", "as_json", "require", "accept_contract", "details"}
BAR_WIDTH = 16
# There is an NVIDIA GPU where its driver has this; torch would say so too, after seconds.
GPU_DRIVER = Path("/dev/nvidiactl")
REQUIRE_HELP = (
    "The result that exit status 0 stands for: complete (every output correct), faster, or equivalent (or faster). "
    "A slower result then ends with 10, an equivalent one with 11, an unproven one with 12."
)
LONGEST = 120  # characters of a shape's outcome in a line of progress


class Inputs(enum.StrEnum):
    """The input that each timed call gets."""

    FRESH = "fresh"
    FIXED = "fixed"


class Require(enum.StrEnum):
    """The result that exit status 0 stands for."""

    COMPLETE = "complete"
    FASTER = "faster"
    EQUIVALENT = "equivalent"


def eval_command(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Shape file; a shipped one by its name. Or use --problem or --resume."),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="In place of FILE: a Python file with Model, get_inputs and get_init_inputs, a folder of them, or a "
            "shipped problem by its name.",
        ),
    ] = None,
    atol: Annotated[
        float | None, typer.Option(help="Absolute tolerance of every problem.  [ATOL of its file, else 0.002]")
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(help="Relative tolerance of every problem.  [RTOL of its file, else 0.02]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[
        str, typer.Option(help="Device profile: a name, a TOML file, or auto; on a CPU auto measures this host once.")
    ] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="3 processes: a verdict only where the interval at 99.9% shows it.")
    ] = False,
    processes: Annotated[int | None, typer.Option(help="Fresh processes each arm is measured in.  [8]")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this shape or problem; repeatable.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="dispatched, FAMILY, FAMILY:key=value,... or FILE.py[:name]; of a problem: optimize (the default), "
            "half, compile, FILE.py[:name], or a folder with a file for each problem; repeatable.  [dispatched]"
        ),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this control: identity, sdpa, compiled, compiled_reduce_overhead, or none; repeatable. Unnamed, "
            "--quick on a GPU takes identity and sdpa.  [every control]"
        ),
    ] = None,
    rules: RulesFile = None,
    inputs: Annotated[
        Inputs,
        typer.Option(help="fresh: a new input for each timed call; fixed: one input, as in the organiser's script."),
    ] = Inputs.FRESH,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Seconds of timed calls for each arm, shape and process.  [0.6 on a GPU, 1 on a CPU; with --quick "
            "0.25 and 0.5]"
        ),
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            help="Seconds for the whole run; the report lists what does not fit. A planned shape still runs with its "
            "fewest calls when they are spent, so a run may take longer.  [no limit; with --quick 270 on a GPU, 390 on "
            "a CPU]"
        ),
    ] = None,
    max_call_s: Annotated[
        float | None,
        typer.Option(
            help="Skip a shape or candidate whose call is predicted to take more seconds.  [60 on a GPU, 5 on a CPU]"
        ),
    ] = None,
    memory_cap: Annotated[
        float | None, typer.Option(help="Run as on a device with this much memory, in GB.  [the device's memory]")
    ] = None,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", help="Run a candidate's file without the sandbox; the report says so.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders go.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None,
    require: Annotated[Require, typer.Option(help=REQUIRE_HELP)] = Require.COMPLETE,
    accept_contract: Annotated[
        bool, typer.Option("--accept-contract", help="Ignore broken promises, declared or found, in the exit status.")
    ] = False,
    details: Annotated[bool, typer.Option("--details", help="Print every table of the report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Classify, route, verify, time and report every shape of FILE, or every problem of --problem; the main job.

    Exit status: 0 complete and correct, 1 an unexpected error, 2 a request that cannot be run, 20 incorrect, 21 a
    broken promise, 22 incomplete, 30 evidence of manipulation, 40 contaminated, 130 interrupted. With --require faster
    also 10 slower, 11 equivalent and 12 not proven. With --require equivalent also 10 and 12; equivalent is then 0.
    """
    from rooflane.eval import evaluate, open_run
    from rooflane.eval import resume as resume_run
    from rooflane.eval.campaign.build_ahead import start_host_build
    from rooflane.eval.campaign.forkserver import fork_server
    from rooflane.eval.campaign.requests import requests_of

    if resume is not None:
        refuse_beside_resume(context, RESUME_OPTIONS, "goes on with the run's own shapes and settings")
        with follow(open_run(resume).meta.shape_list()) as on_event:
            run = resume_run(resume, on_event=on_event)
        _finish(run, require, accept_contract, details, as_json)
        return
    if (file is None) == (problem is None):
        raise typer.BadParameter(
            "name either a shape file, such as shapes/published.csv, or a --problem, or --resume a run", context
        )
    if problem is None and (atol, rtol) != (None, None):
        raise typer.BadParameter("--atol and --rtol are for a --problem; shapes have the gate's own tolerance", context)
    requests = find_shapes(file, shape or ()) if file else find_problems(problem, shape or (), atol, rtol)
    if memory_cap is not None and not 0 < memory_cap < float("inf"):
        raise EvaluationError(f"--memory-cap {memory_cap:g}: it must be a number greater than 0, in GB")
    settings: dict[str, Any] = {
        "device": device,
        "profile": profile,
        "rules": rules,
        "controls": () if control == ["none"] else control,
        "processes": processes,
        "quick": quick,
        "inputs": inputs.value,
        "budget_s": budget,
        "time_budget_s": time_budget,
        "max_call_s": max_call_s,
        "memory_cap_bytes": None if memory_cap is None else int(memory_cap * 1e9),
        "sandbox": not no_sandbox,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    _check(settings, context)
    kind = requests_of(requests)
    parsed = [kind.parse(text) for text in candidate or kind.default_candidates]
    if device == "cuda" or (device == "auto" and GPU_DRIVER.exists()):
        # Both take long and need no answer yet: the imports of the workers, and the C++ call path's compiler.
        fork_server()
        start_host_build(parsed)
    _prepare_profile(profile, device)
    with follow(requests) as on_event:
        run = evaluate(
            requests,
            candidate,
            runs_dir=out,
            on_event=on_event,
            command=shlex.join(["rooflane", *sys.argv[1:]]),
            **settings,
        )
    _finish(run, require, accept_contract, details, as_json)


def _check(settings: dict[str, Any], context: typer.Context) -> None:
    """Refuse a wrong value before anything is measured, with the option's name and the unit the user gave."""
    from rooflane.eval.record.settings import SettingError, make_settings

    try:
        make_settings(**settings)
    except SettingError as error:
        option = SETTING_OPTIONS.get(error.field, error.field)
        shown = f"--{option.replace('_', '-')} {context.params[option]:g}"
        raise EvaluationError(f"{shown}: {error.why.replace('input should', 'it must')}") from None


def _prepare_profile(profile: str, device: str) -> None:
    """Measure a CPU host once and keep its profile where none is named; report a kept profile."""
    from rooflane.eval.device.probe import measure_once
    from rooflane.eval.record.environment import resolve_device

    kind = resolve_device(device)
    with console(stderr=True).status("measuring this host once, to predict from its own figures"):
        measure_once(profile, kind)
    report_kept_profile(profile, kind)


def _finish(run: Run, require: Require, accept_contract: bool, details: bool, as_json: bool) -> None:
    from rooflane.eval import ExitCode, render_json, render_markdown, render_terminal
    from rooflane.eval.report.files import write_file

    summary = run.summary()
    if as_json:
        print(render_json(summary))
    else:
        render_terminal(summary, console(), details=details)
    for problem in summary.problems():
        remark(problem)
    if run.interrupted:
        remark(run.resume_hint().replace("rooflane", spelled(), 1))
        raise typer.Exit(ExitCode.INTERRUPTED)
    report = run.folder / REPORT_FILE
    write_file(report, render_markdown(summary))
    program, folder = spelled(), shlex.quote(str(run.folder))
    remark(f"report: {report}")
    remark(f"next: {program} report {folder} --html page.html", f"      {program} report {folder} --details")
    raise typer.Exit(summary.exit_code(require.value, accept_contract))


def spelled() -> str:
    """Return how to call this program from the working folder.

    It is `rooflane` where that is this program on PATH, else the path or module it was started by.
    """
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m rooflane.eval"
    found = shutil.which("rooflane")
    if found and started.exists() and os.path.samefile(found, started):
        return "rooflane"
    return shlex.quote(min(str(started.absolute()), os.path.relpath(started), key=len))


@contextmanager
def follow(shapes: Sequence[Shape | Problem]) -> Iterator[Callable[[Event], None]]:
    """Show a run as it goes: one live bar on a terminal, elsewhere a line a shape and then a line a process."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield Lines(shapes)
        return
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(BAR_WIDTH),
        TextColumn("{task.fields[time]}", markup=False, table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=screen, transient=True, expand=True) as progress:
        task = progress.add_task("starting", total=None, time="")

        def on_event(event: Event) -> None:
            if event.kind in ("note", "skipped"):
                progress.console.print(event.text)
            parts = [f"process {event.process + 1}/{event.processes}"]
            parts += [f"shape {event.shape}"] if event.shape else []
            place = plain("  ".join([*parts, *filter(None, (event.arm, event.stage))]))
            spent = f"{rough_duration(event.elapsed_s)}{_left(event, ', ')}"
            progress.update(task, completed=event.done, total=event.total, description=place, time=spent)

        yield on_event


class Lines:
    """Print a run's progress as lines: each shape in the first process that is seen, then each process."""

    def __init__(self, shapes: Sequence[Shape | Problem]) -> None:
        self.labels = {shape.id: shape.brief for shape in shapes}
        self.first: int | None = None
        self.seen = 0
        self.last: Event | None = None

    def __call__(self, event: Event) -> None:
        """Print a line where the event is worth one."""
        if event.kind in ("run", "note", "skipped"):
            remark(event.text)
        elif event.kind == "shape":
            self._shape(event)

    def _shape(self, event: Event) -> None:
        if self.first is None:
            self.first = event.process
        place = f"process {event.process + 1} of {event.processes}{_left(event, ', ')}"
        if event.process == self.first:
            self.seen += 1
            count = event.shapes
            at = f"[{self.seen:>{len(str(count))}}/{count}] shape {event.shape} {self.labels[event.shape]}"
            # A failure's reason can be a compiler's whole message; the end of the run prints it in full.
            text = event.text if len(event.text) <= LONGEST else f"{event.text[:LONGEST]}…"
            remark(f"{at}: {text} ({place})")
        elif self.last.process != event.process:
            remark(f"{place[0].upper()}{place[1:]}")
        self.last = event


def _left(event: Event, before: str) -> str:
    return f"{before}about {rough_duration(event.left_s)} left" if event.left_s else ""
