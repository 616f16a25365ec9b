"""Commands on the device at hand: probe, profile, doctor."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflane.dispatch import Profile, keep_profile
from rooflane.dispatch.device import device_at_hand
from rooflane.dispatch.units import duration
from rooflane.eval.commands.ladder import gpu_obstacle
from rooflane.eval.commands.output import (
    AsJson,
    ProfileName,
    RulesFile,
    ShapeFile,
    console,
    find_shapes,
    print_json,
    report_kept_profile,
    say,
)
from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.report.table import Table, number, print_table, print_text
from rooflane.families.ladder.hierarchy.probes import CLOCK, PROBES

if TYPE_CHECKING:
    from rooflane.eval.device.doctor import Finding
    from rooflane.eval.device.operations import ForwardProfile

PLOT_SUFFIXES = (".svg", ".png")

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def probe_command(
    device: Device = "auto",
    name: Annotated[str | None, typer.Option(help="Name of the profile; the device's own by default.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the profile: it is the meaning of `auto` on this device from now on.")
    ] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Write the profile, for --profile.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --save replace a file.")] = False,
    hierarchy: Annotated[
        bool, typer.Option("--hierarchy", help="Measure caches, barriers and instructions too, on an H100 or H200.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this device (seconds) and state its limits as a profile."""
    if save and save.exists() and not force:
        raise EvaluationError(f"{save}: exists already and is left as it is; add --force to replace it")
    from rooflane.eval.device.probe import measure_profile
    from rooflane.eval.record.environment import resolve_device

    kind = resolve_device(device)
    screen = console(stderr=True)
    with screen.status(f"measuring the {kind} device"):
        profile = measure_profile(kind, name)
    faults: list[str] = []
    if hierarchy:
        from rooflane.eval.device.hierarchy import examine_runs, measure_hierarchy

        obstacle = gpu_obstacle() if kind == "cuda" else "the device is a CPU"
        with screen.status("probing the hierarchy"):
            if obstacle:
                faults, note = examine_runs()
                code = note or "; ".join(faults) or "their machine code has the expected instructions"
                screen.print(f"the hierarchy's kernels are compiled for sm_90a, not measured: {obstacle}; {code}")
            else:
                profile = measure_hierarchy(profile)
    if save:
        profile.save(save)
        screen.print(f"profile written to {save}; use it with --profile {save}")
    if keep:
        path = keep_profile(profile, device_at_hand(kind))
        screen.print(f"profile kept in {path}: `auto` means it on this device from now on")
    if as_json:
        print_json(profile.model_dump(mode="json"))
    else:
        _print_profile(profile)
        if hierarchy:
            _print_hierarchy(profile)
    if faults:
        raise typer.Exit(ExitCode.INCORRECT)


def _print_profile(profile: Profile) -> None:
    figures = profile.figures()
    rows = [(field, f"{figure.value:.5g} {figure.unit}", figure.mark) for field, figure in figures.items()]
    print_table(Table(f"{profile.name}: {profile.title}", ("limit", "value", "mark"), rows, 3), console())
    fields: dict[tuple[str, str], list[str]] = {}
    for field, figure in figures.items():
        fields.setdefault((figure.mark, figure.source), []).append(field)
    widest = max(fields.values(), key=len)
    for (mark, source), named in sorted(fields.items(), key=lambda item: item[1] is widest):
        say(f"{mark}, {'all others' if named is widest else ', '.join(named)}: {source}")


def _print_hierarchy(profile: Profile) -> None:
    from rooflane.eval.device.hierarchy import in_time

    found, rows = profile.hierarchy, []
    for probe in PROBES:
        row = (probe.name, probe.reason, f"{number(probe.predicted)} {probe.unit}")
        if found:
            figure = found[probe.name]
            timed = in_time(figure.value, figure.unit, profile.units, found[CLOCK].value)
            row += (f"{number(figure.value)} {figure.unit}", timed)
        rows.append(row)
    columns = ("figure", "how", "predicted", "measured", "on the device")[: len(rows[0])]
    title = f"The hierarchy of {profile.title}" if found else "The hierarchy, as predicted for an H200"
    note = "rates count the bytes asked for; reported: published for an H100"
    print_table(Table(title, columns, rows, 2, note, optional=("how",)), console())


def profile_command(
    file: ShapeFile,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Which shape of FILE, one; the first by default.")
    ] = None,
    arm: Annotated[
        str, typer.Option(help="eager, a control, dispatched, FAMILY, FAMILY:key=value,... or FILE.py[:name].")
    ] = "eager",
    device: Device = "auto",
    profile: ProfileName = "auto",
    rules: RulesFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the roofline to an .svg or .png file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Profile one forward: time, FLOPs, bytes and place under the roofline, operation by operation."""
    if plot and plot.suffix not in PLOT_SUFFIXES:
        raise EvaluationError(f"{plot}: a plot is written as {' or '.join(PLOT_SUFFIXES)}; give such a name")
    if shape and len(shape) > 1:
        raise EvaluationError(f"--shape {' --shape '.join(shape)}: one forward at a time; name one shape")
    shapes = find_shapes(file, shape or ())
    from rooflane.eval.device.operations import profile_arm
    from rooflane.eval.record.environment import resolve_device

    report_kept_profile(profile, resolve_device(device))
    measured = profile_arm(shapes[0], arm, device, profile, rules)
    if plot:
        from rooflane.eval.device.roofline_plot import plot_roofline

        plot_roofline(measured, plot)
        console(stderr=True).print(f"roofline drawn to {plot}")
    if as_json:
        print_json(measured.as_dict())
    else:
        _print_forward(measured)


def _print_forward(measured: ForwardProfile) -> None:
    rows = []
    for operation in sorted(measured.operations, key=lambda operation: operation.seconds, reverse=True):
        roof = operation.roof(measured.profile, measured.shape.dtype)
        rows.append(
            (
                operation.name,
                operation.kind,
                str(operation.count),
                duration(operation.seconds),
                f"{operation.seconds / measured.busy_s:.1%}",
                _scaled(operation.flops, 1e9),
                _scaled(operation.bytes, 1e6),
                _scaled(operation.flops_per_s, 1e12),
                _scaled(operation.bytes_per_s, 1e12),
                f"{roof[1]:.0%} of {roof[0]}" if roof else "-",
            )
        )
    columns = ("operation", "kind", "count", "time", "share", "GFLOP", "MB", "TFLOP/s", "TB/s", "roof")
    shape = measured.shape
    title = f"{measured.arm} forward of shape {shape.id} ({shape.label()}) on {measured.profile.title}"
    optional = ("kind", "GFLOP", "MB", "TB/s", "TFLOP/s")
    print_table(Table(title, columns, rows, 2, optional=optional), console())
    useful, wall = measured.baseline_flops, measured.wall_s
    lines = [
        f"{measured.kernels} operations and {measured.copies} device-to-device copies are busy for "
        f"{duration(measured.busy_s)}; one call takes {duration(wall)} without the profiler.",
        f"That is {useful / wall / 1e12:.3g} TFLOP/s for the {useful / 1e9:.4g} GFLOP of the baseline's products.",
        "The times hold the profiler's own cost for each operation, so small operations look slower than they are.",
    ]
    if measured.note:
        lines.append(f"Note: {measured.note}.")
    say(*lines)


def _scaled(value: float | None, unit: float) -> str:
    return "-" if not value else f"{value / unit:.3g}"


def doctor_command(as_json: AsJson = False) -> None:
    """Check versions, GPU, clocks, compilers and where rooflane is imported from. Exit 1 when something is missing."""
    from rooflane.eval.device.doctor import examine

    findings = examine()
    if as_json:
        print_json(list(map(asdict, findings)))
    else:
        _print_findings(findings)
    if any(finding.status == "missing" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: list[Finding]) -> None:
    screen, widest = console(), max(len(finding.topic) for finding in findings)
    for finding in findings:
        head = f"{finding.topic:<{widest}}  {finding.status:<7}  "
        for text in filter(None, (finding.detail, finding.remedy and f"-> {finding.remedy}")):
            print_text(head + text, screen, indent=" " * len(head))
            head = " " * len(head)
