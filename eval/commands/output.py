"""What every command shares: the console, JSON, tables, units and the shape file named on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import rooflane.shapes
from rooflane.shapes import Shape, ShapeError, load_shapes

# A pipe or a log has no width of its own; at rich's 80 columns the tables would wrap.
PIPE_WIDTH = 160

ShapeFile = Annotated[str, typer.Argument(metavar="FILE", help="Shape file; a shipped one by its bare name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ProfileName = Annotated[str, typer.Option("--profile", help="Device profile: a name, a TOML file, or auto.")]
RulesFile = Annotated[
    str | None, typer.Option("--rules", metavar="FILE", help="Your rules, tried before ours; shipped: ours alone.")
]


def console(stderr: bool = False) -> Console:
    """Return a console for tables, or for progress and remarks on standard error."""
    stream = sys.stderr if stderr else sys.stdout
    # Names and reasons are the user's: brackets and colons in them are no markup.
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> None:
    """Print a table: figures to the right, the columns named in `left` and the first to the left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        aligned = "left" if column in left or column == columns[0] else "right"
        table.add_column(column, justify=aligned, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def find_shapes(name: str, only: Sequence[str] = ()) -> list[Shape]:
    """Return the shapes of a file, or of the shipped file of that bare name; `only` picks by id."""
    path, shipped = Path(name), Path(rooflane.shapes.__file__).parent / name
    if not path.exists() and path.name == name and shipped.is_file():
        path = shipped
    shapes = load_shapes(path)
    unknown = [wanted for wanted in only if wanted not in {shape.id for shape in shapes}]
    if unknown:
        ids = ", ".join(shape.id for shape in shapes)
        raise ShapeError(f"{path}: holds no shape {', '.join(map(repr, unknown))}; its ids are: {ids}")
    return [shape for shape in shapes if not only or shape.id in only]


def duration(seconds: float) -> str:
    """Return seconds in the unit that reads best, three digits."""
    if seconds == 0:
        return "0"
    units = ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (3600, 1, "s"), (float("inf"), 1 / 3600, "h"))
    scale, unit = next((scale, unit) for limit, scale, unit in units if seconds < limit)
    value = seconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def rough_duration(seconds: float) -> str:
    """Return seconds as a person says them: 45 s, 4 min, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def size(count: float) -> str:
    """Return bytes in the unit that reads best, three digits."""
    for limit, unit, scale in ((1e6, "kB", 1e3), (1e9, "MB", 1e6), (1e12, "GB", 1e9)):
        if count < limit:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e12:.3g} TB"
