"""The commands of the ladders: `rooflane ladder gemm` and `rooflane ladder reduce`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rooflane.eval.commands.output import AsJson, Group, console, print_json, remark, say
from rooflane.eval.device.ladder import (
    COPY,
    DEFAULT_SIZES,
    LIBRARY,
    SM90_FLOPS,
    Examined,
    Timed,
    as_plain,
    examine,
    find_rungs,
    measured_before,
    read_sizes,
    time_ladder,
)
from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.report.table import NONE, Table, number, print_table
from rooflane.families.ladder.rungs import Rung

app = Group(
    name="ladder",
    no_args_is_help=True,
    help="Climb a ladder of kernels: a matrix product or the reductions, one idea a rung.",
)
T = 1e12
NOT_MEASURED = "not measured yet"
PLOT_SUFFIXES = (".svg", ".png")

Names = Annotated[
    list[str] | None, typer.Option("--rung", metavar="NAME", help="One rung, or several; all by default.")
]
Size = Annotated[str | None, typer.Option("--size", metavar="SIZES", help="Sizes, separated by commas.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timed ladder under its roofs, .svg or .png.")]


@app.command("gemm")
def gemm_command(size: Size = None, rung: Names = None, plot: Plot = None, as_json: AsJson = False) -> None:
    """Check and time the rungs of C = A B^T at M,N,K; without an H100 or H200, compile and examine them."""
    _climb("gemm", size, rung, plot, as_json)


@app.command("reduce")
def reduce_command(size: Size = None, rung: Names = None, plot: Plot = None, as_json: AsJson = False) -> None:
    """Check and time the reductions at ROWS,COLUMNS; without an H100 or H200, compile and examine them."""
    _climb("reduce", size, rung, plot, as_json)


def _climb(ladder: str, size: str | None, names: list[str] | None, plot: Path | None, as_json: bool) -> None:
    rungs, sizes = find_rungs(ladder, names or ()), read_sizes(ladder, size)
    if plot and plot.suffix not in PLOT_SUFFIXES:
        raise EvaluationError(f"{plot}: a plot is written as {' or '.join(PLOT_SUFFIXES)}; give such a name")
    obstacle = gpu_obstacle()
    if plot and obstacle:
        raise EvaluationError(f"--plot draws times, and {obstacle}; run it on an H100 or H200")
    with console(stderr=True).status(f"compiling {len(rungs)} rungs"):
        examined = {rung.name: examine(rung) for rung in rungs}
    report: dict[str, Any] = {"ladder": ladder, "sizes": list(sizes), "arms": {}}
    if obstacle:
        remark(f"the rungs are compiled and examined, not timed: {obstacle}")
    else:
        with console(stderr=True).status("checking and timing"):
            report = time_ladder(rungs, sizes)
    if plot:
        from rooflane.eval.device.ladder_plot import plot_ladder

        plot_ladder(report, plot)
        remark(f"ladder drawn to {plot}")
    if as_json:
        print_json(as_plain(report) | {"rungs": {name: asdict(one) for name, one in examined.items()}})
    elif obstacle:
        _print_examined(rungs, examined, measured_before(ladder))
    else:
        _print_timed(report, rungs, examined)
    faults = _say_faults(examined, report, to_stderr=as_json)
    if faults:
        raise typer.Exit(ExitCode.INCORRECT)


def gpu_obstacle() -> str:
    """Return why the kernels cannot run here, "" when they can."""
    import torch

    from rooflane.families.runtime.host import missing_compiler

    if not torch.cuda.is_available():
        return "torch reaches no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"the kernels are for compute capability 9.0, and {torch.cuda.get_device_name()} has another"
    missing = missing_compiler()
    return f"NVRTC cannot be used ({missing})" if missing else ""


def _resources(one: Examined) -> tuple[str, str, str]:
    found = one.resources
    return (str(found.registers), str(found.spill_bytes), str(found.blocks_per_sm)) if found else (NONE,) * 3


def _print_examined(rungs: list[Rung], examined: Mapping[str, Examined], before: Mapping[str, Any]) -> None:
    ladder, unit = rungs[0].LADDER, rungs[0].UNIT
    ideas, codes = [], []
    for rung in rungs:
        one, known = examined[rung.name], before.get("arms", {}).get(rung.name)
        measured = number(known["rate"] / T) if known else NOT_MEASURED
        ideas.append((rung.name, number(rung.predicted), measured, f"{rung.idea}; predicted: {rung.reason}"))
        conflicts = max((access.repeats for access in rung.accesses), default=None)
        code = "; ".join(one.faults) or (NONE if one.note else "as expected")
        codes.append((rung.name, rung.mode, *_resources(one), number(conflicts), code))
    title = f"The {ladder} ladder: {unit} predicted for an H200 at {' x '.join(map(str, DEFAULT_SIZES[ladder]))}"
    if before:
        title += f", and measured on {before['device']} at {' x '.join(map(str, before['sizes']))}"
    print_table(Table(title, ("rung", "predicted", "measured", "idea"), ideas, 1, prose=True), console())
    columns = ("rung", "mode", "registers", "spilled", "blocks an SM", "bank passes", "code")
    note = "bank passes: the worst access of shared memory over one without conflicts"
    print_table(Table("Compiled for sm_90a", columns, codes, 2, note), console())


def _print_timed(report: Mapping[str, Any], rungs: list[Rung], examined: Mapping[str, Examined]) -> None:
    arms: Mapping[str, Timed] = report["arms"]
    by_name = {rung.name: rung for rung in rungs}
    # A task's rungs have a call of the library of their own.
    others = list(dict.fromkeys(_short(other) for arm in arms.values() for other in arm.shares))
    rows = []
    for name, arm in arms.items():
        rung, shares = by_name.get(name), {_short(other): share for other, share in arm.shares.items()}
        rows.append(
            (
                name,
                number(rung.predicted) if rung else NONE,
                number(arm.rate / T),
                f"{number(arm.low / T)}-{number(arm.high / T)}",
                *(f"{shares[other].centre:.1%}" if other in shares else NONE for other in others),
                f"{arm.roof:.1%}" if arm.roof else NONE,
                f"{arm.error:.1e}",
                *(_resources(examined[name]) if rung else (NONE,) * 3),
            )
        )
    columns = (
        "rung", "predicted", rungs[0].UNIT, "range", *(f"of {other}" for other in others), "of roof", "error",
        "registers", "spilled", "blocks an SM",
    )  # fmt: skip
    title = f"The {report['ladder']} ladder at {' x '.join(map(str, report['sizes']))} on {report['device']}"
    note = "device time, median of interleaved rounds; error: normwise, against float64"
    print_table(Table(title, columns, rows, 1, note, optional=("range", "spilled")), console())
    say(*(f"{name} is left out: {reason}" for name, reason in report["refused"].items()))


def _short(other: str) -> str:
    """Return the heading of a share: a mode of the library, "library" for a task's own call, or the copy."""
    mode = other.removeprefix(LIBRARY)
    return other if mode in (*SM90_FLOPS, COPY) else LIBRARY.strip()


def _say_faults(examined: Mapping[str, Examined], report: Mapping[str, Any], to_stderr: bool) -> int:
    """Print what is wrong and what was not looked at; return how many rungs are wrong."""
    tell = remark if to_stderr else say
    for note in dict.fromkeys(one.note for one in examined.values() if one.note):
        tell(note)
    wrong = {name: list(one.faults) for name, one in examined.items() if one.faults}
    for name, arm in report["arms"].items():
        if not arm.passed:
            wrong.setdefault(name, []).append(arm.why)
    for name, faults in wrong.items():
        tell(f"{name} FAILS: {'; '.join(faults)}")
    return len(wrong)
