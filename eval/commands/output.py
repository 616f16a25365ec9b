"""What commands share: their help, the console, JSON, tables, units, and the shape file named on the command line."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rooflane.shapes
from rooflane.dispatch import Profile, load_profile
from rooflane.dispatch.device import AUTO, kept_note
from rooflane.shapes import Shape, ShapeError, load_shapes

# A pipe has no width, and at rich's default of 80 columns tables would wrap.
PIPE_WIDTH = 160

ShapeFile = Annotated[str, typer.Argument(metavar="FILE", help="Shape file; a shipped one by its bare name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ProfileName = Annotated[str, typer.Option("--profile", help="Device profile: a name, a TOML file, or auto.")]
RulesFile = Annotated[
    str | None,
    typer.Option("--rules", metavar="FILE", help="Your rules, tried before the shipped ones; `shipped`: those alone."),
]


class Group(typer.Typer):
    """Typer keeps a docstring's line breaks inside a paragraph; here each paragraph is one line, for rich to wrap."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable], Callable]:
        """Register a command with its docstring as help."""

        def register(function: Callable) -> Callable:
            paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            return super(Group, self).command(name, help=text, **options)(function)

        return register


def console(stderr: bool = False) -> Console:
    """Return a console for tables, or for progress and remarks on standard error."""
    stream = sys.stderr if stderr else sys.stdout
    # Names and reasons come from the user: brackets and colons in them are not markup.
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    left: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """Print a table: figures to the right, the columns named in `left` and the first to the left.

    No cell is broken: where the table is wider than the console, the columns of `drop` are left out one by one; a
    table that is still too wide is printed as one block of lines for each row. An empty title prints none.
    """
    out = console()
    if title:
        out.print(title, style="italic")
    widths = [max(map(_width, cells)) for cells in zip(columns, *rows, strict=True)]
    shown = list(range(len(columns)))
    for name in (*drop, None):
        if sum(widths[at] + 2 for at in shown) - 2 <= out.width:
            break
        if name is None:
            _print_blocks(out, columns, rows)
            return
        shown.remove(columns.index(name))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at in shown:
        table.add_column(columns[at], justify="left" if columns[at] in left or at == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    out.print(table)


def _print_blocks(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print each row as its first cell, then one line for every other cell; long text wraps between words."""
    for first, *cells in rows:
        out.print(Text("\n") + Text(str(first), style="bold"))
        block = Table.grid(padding=(0, 2))
        block.add_column(no_wrap=True)
        block.add_column()
        for name, cell in zip(columns[1:], cells, strict=True):
            block.add_row(f"  {name}", cell)
        out.print(block)


def _width(cell: str | Text) -> int:
    return max(map(cell_len, str(cell).splitlines()), default=0)


def find_profile(name: str, kind: str | None = None) -> Profile:
    """Return the profile of that name, and report on standard error when `auto` means a kept one."""
    report_kept_profile(name, kind)
    return load_profile(name, kind)


def report_kept_profile(name: str, kind: str | None = None) -> None:
    """Print the kept profile and its age on standard error if the profile is `auto` and means one."""
    if name.lower() == AUTO and (note := kept_note(kind)):
        print(note, file=sys.stderr)


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
