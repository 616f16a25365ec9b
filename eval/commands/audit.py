"""`rooflane audit-gate`: which faults the checks miss, the inputs that catch them, and what narrow operands cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rooflane.eval.commands.output import AsJson, console, find_shapes, print_json
from rooflane.eval.report.files import write_file
from rooflane.eval.report.table import Table, number, print_table

if TYPE_CHECKING:
    from rooflane.eval.check.audit import Audit, Fault
    from rooflane.eval.check.precision import Cost, Precision
    from rooflane.shapes import Shape

DEFAULT_WINDOW = 256


def audit_gate_command(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="Shape file; without one, three small shapes; with --precision, the published."
        ),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this shape; repeatable.")] = None,
    scale: Annotated[
        list[float] | None, typer.Option(help="Also try this input scale, such as 300; repeatable.")
    ] = None,
    window: Annotated[int, typer.Option(help="Keys a windowed attention reads.")] = DEFAULT_WINDOW,
    seeds: Annotated[int, typer.Option(help="Draws of weights and inputs; the least use of them counts.")] = 1,
    tf32: Annotated[bool, typer.Option("--tf32", help="Round the baseline's products as a GPU's TF32 does.")] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the picked stress set, as eval/check/stress_set.json is.")
    ] = None,
    precision: Annotated[
        bool, typer.Option("--precision", help="Show what narrow operands of the products cost in error instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Break the reference in two dozen ways and show which checks notice, on this CPU.

    A figure is the worst error in units of what the check allows: above 1 the fault is caught. Masks and plain inputs
    are judged by the gate against the baseline, stress inputs by both sides' errors against fp64.

    With --precision, round the operands of the matrix products to TF32, fp16, bf16, FP8, INT8 and INT4 instead, and
    show which formats the gate lets pass.
    """
    if precision:
        if scale or record or tf32 or window != DEFAULT_WINDOW:
            raise typer.BadParameter(
                "--precision breaks nothing and compares with eager in float32 and in TF32: leave out --scale, "
                "--window, --record and --tf32"
            )
        _measure_precision(find_shapes(file or "published.csv", shape or ()), seeds, as_json)
        return
    from rooflane.eval.check.audit import DEFAULT_SHAPES, audit_gate

    if file is None and shape:
        shapes = [found for found in DEFAULT_SHAPES if found.id in shape]
        if unknown := set(shape) - {found.id for found in shapes}:
            ids = ", ".join(found.id for found in DEFAULT_SHAPES)
            raise typer.BadParameter(f"no built-in shape {', '.join(map(repr, sorted(unknown)))}; there are: {ids}")
    else:
        shapes = DEFAULT_SHAPES if file is None else find_shapes(file, shape or ())
    with follow_cases() as on_stage:
        audit = audit_gate(shapes, seeds=seeds, window=window, scales=scale or (), tf32=tf32, on_stage=on_stage)
    if record:
        write_file(record, json.dumps(stress_record(audit), indent=1) + "\n")
        console(stderr=True).print(f"stress set written to {record}")
    if as_json:
        print_json(json.loads(audit.model_dump_json()) | {"verdict": stress_record(audit)})
    else:
        _show(audit)


@contextmanager
def follow_cases() -> Iterator[Callable[[int, int, str], None]]:
    """Show a live bar on a terminal; elsewhere print a line on standard error for every tenth of the cases."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        tenths: set[int] = set()

        def print_tenth(done: int, total: int, text: str) -> None:
            if (tenth := 10 * done // total) not in tenths:
                tenths.add(tenth)
                print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield print_tenth
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("building", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)


def stress_record(audit: Audit) -> dict[str, Any]:
    """Return what the audit decided, in the form of eval/check/stress_set.json."""
    return {
        "made_by": "rooflane audit-gate --record",
        "shapes": audit.shapes,
        "seeds": audit.seeds,
        "tf32": audit.tf32,
        "picked": {name: _by_ablation(audit.needed_for(name)) for name in audit.pick()},
        "stresses": list(audit.verified()),
        "unseen": _by_ablation(audit.unseen(audit.stresses)),
        "same_function": audit.same_everywhere(),
    }


def _measure_precision(shapes: list[Shape], seeds: int, as_json: bool) -> None:
    from rooflane.eval.check.precision import measure_precision

    with follow_cases() as on_stage:
        found = measure_precision(shapes, seeds=seeds, on_stage=on_stage)
    if as_json:
        print_json(json.loads(found.model_dump_json()))
        return
    out = console()
    for table in precision_tables(found):
        print_table(table, out)
    for reason in found.left_out.values():
        out.print(f"Left out: {reason}.")


def precision_tables(found: Precision) -> list[Table]:
    """Return the share of the gate, the failing elements and the error, each by format and shape."""
    cases: dict[tuple[str, str], list[Cost]] = {}
    for cost in found.costs:
        cases.setdefault((cost.products, cost.format), []).append(cost)

    def table(title: str, figure: Callable[[Cost], str], blank: tuple[str, ...] = (), note: str = "") -> Table:
        rows = [(*case, *map(figure, costs), *("" for _ in blank)) for case, costs in cases.items()]
        return Table(title, ("products", "format", *found.shapes, *blank), rows, 2, note)

    def used(cost: Cost, eager: str) -> str:
        return number(cost.use[eager]) + (" !" if cost.failing[eager] else "")

    eagers = found.costs[0].use
    labels = "; ".join(f"{ids}: {label}" for ids, label in found.shapes.items())
    note = f"{labels}; seeds: {found.seeds}; gain in time is blank: no kernel of that format was timed here"
    return [
        *(
            table(
                f"Share of the gate used against eager in {eager}, by shape; ! fails",
                partial(used, eager=eager),
                blank=("gain in time",),
            )
            for eager in eagers
        ),
        *(
            table(
                f"Elements failing the gate against eager in {eager}",
                lambda cost, eager=eager: f"{cost.failing[eager]:.3%}",
            )
            for eager in eagers
        ),
        table("Error against float64, normwise", lambda cost: f"{cost.error:.1e}", note=note),
    ]


def render_precision(found: Precision) -> str:
    """Return the tables in Markdown, for a page."""
    from rooflane.eval.report.report import markdown_table

    return "\n\n".join(f"{table.title}:\n\n{markdown_table(table)}" for table in precision_tables(found))


def _show(audit: Audit) -> None:
    out, conditions = console(), [*audit.always, *audit.stresses, *audit.asked]
    for shape, findings in groupby(audit.findings, key=lambda finding: finding.shape):
        rows: dict[str, dict[str, str]] = {}
        for finding in findings:
            use = f"({finding.use:.3g})" if finding.use <= 1 else f"{finding.use:.3g}"
            rows.setdefault(finding.ablation, {})[finding.condition] = "same" if finding.same else use
        title = f"{shape} ({audit.shapes[shape]}): use of what each check allows, in brackets where the fault passes"
        for part in _parts(conditions, rows):
            figures = [(name, *map(cells.get, part)) for name, cells in rows.items()]
            print_table(Table(title, ("ablation", *part), figures, 1), out)
            title = ""
    out.print(f"Always run: {', '.join(audit.always)}. Unseen by these: {_said(audit.unseen())}.")
    for name in audit.pick():
        out.print(f"Needed: {name}, for {_said(audit.needed_for(name))}.")
    if not audit.pick():
        out.print("No stress input is needed on these shapes.")
    out.print(f"Every verification should run: {', '.join(audit.verified())}.")
    out.print(f"Unseen whatever is run: {_said(audit.unseen(audit.stresses))}.")
    if same := audit.same_everywhere():
        out.print(f"No fault on these shapes, the function is the same: {', '.join(same)}.")


def _parts(conditions: list[str], rows: dict[str, dict[str, str]]) -> list[list[str]]:
    """Return the conditions in as few groups as a table of the console's width can hold."""
    room = console().width - max(map(len, rows))
    parts, left = [], 0
    for name in conditions:
        width = 3 + max(len(name), *(len(cells[name]) for cells in rows.values()))
        if width > left or not parts:
            parts.append([])
            left = room
        parts[-1].append(name)
        left -= width
    return parts


def _said(faults: list[Fault]) -> str:
    found = _by_ablation(faults)
    return "; ".join(f"{name} ({', '.join(shapes)})" for name, shapes in found.items()) or "nothing"


def _by_ablation(faults: list[Fault]) -> dict[str, list[str]]:
    """Return the shapes of each ablation among some faults."""
    found: dict[str, list[str]] = {}
    for shape, ablation in faults:
        found.setdefault(ablation, []).append(shape)
    return found
