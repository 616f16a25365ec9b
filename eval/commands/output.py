"""What commands share: their help, the console, JSON, the profile and the shape file named on the command line."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

import rooflane.shapes
from rooflane.dispatch import Profile, load_profile
from rooflane.dispatch.device import AUTO, kept_note
from rooflane.eval.report.escape import plain
from rooflane.shapes import Problem, Shape, ShapeError, load_problems, load_shapes

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


class PlainConsole(Console):
    """A console on which texts are text: neither rich's markup nor a terminal's codes in them have an effect."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, with each text made plain."""
        super().print(*(plain(item) if isinstance(item, str) else item for item in objects), **options)


def console(stderr: bool = False) -> PlainConsole:
    """Return a console for tables, or for progress and remarks on standard error."""
    stream = sys.stderr if stderr else sys.stdout
    # Names and reasons come from the user: brackets and colons in them are not markup.
    width = None if stream.isatty() else PIPE_WIDTH
    return PlainConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines of plain text at once, on the standard output or `to`."""
    for line in lines:
        print(plain(line), file=to or sys.stdout, flush=True)


def remark(*lines: str) -> None:
    """Print lines of plain text on standard error, beside a command's output."""
    say(*lines, to=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def refuse_beside_resume(context: typer.Context, allowed: Container[str], why: str) -> None:
    """Refuse the options that have no effect beside --resume: all that were given, except the allowed ones."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
    if names := ", ".join(name.replace("_", "-") for name in given if name not in allowed):
        raise typer.BadParameter(f"--resume {why}; leave out: {names}", context)


def find_profile(name: str, kind: str | None = None) -> Profile:
    """Return the profile of that name, and report on standard error when `auto` means a kept one."""
    report_kept_profile(name, kind)
    return load_profile(name, kind)


def report_kept_profile(name: str, kind: str | None = None) -> None:
    """Print the kept profile and its age on standard error if the profile is `auto` and means one."""
    if name.lower() == AUTO and (note := kept_note(kind)):
        remark(note)


def find_shapes(name: str, only: Sequence[str] = ()) -> list[Shape]:
    """Return the shapes of a file, or of the shipped file of that bare name; `only` picks by id."""
    path, shipped = Path(name), Path(rooflane.shapes.__file__).parent / name
    if not path.exists() and path.name == name and shipped.is_file():
        path = shipped
    return _pick(load_shapes(path), only, f"{path}: holds no shape")


def find_problems(
    name: str, only: Sequence[str] = (), atol: float | None = None, rtol: float | None = None
) -> list[Problem]:
    """Return the problems of a file, a folder or a shipped name; `only` picks by id."""
    return _pick(load_problems(name, atol, rtol), only, f"{name}: holds no problem")


def _pick(requests: list[Any], only: Sequence[str], lacking: str) -> list[Any]:
    """Return the requests with these ids, all where none is named."""
    unknown = [wanted for wanted in only if wanted not in {one.id for one in requests}]
    if unknown:
        ids = ", ".join(one.id for one in requests)
        raise ShapeError(f"{lacking} {', '.join(map(repr, unknown))}; its ids are: {ids}")
    return [one for one in requests if not only or one.id in only]
