"""What the markers of a test mean: the gate's tolerance, and shape files as parameters.

A tolerance comes from the call, else the marker, else the command line, else the gate itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import rooflane.shapes
from rooflane.shapes import Shape, ShapeError, load_shapes

MARKER = "rooflane"


@dataclass(frozen=True)
class Tolerance:
    """What is set so far; None leaves it to the gate's own."""

    atol: float | None = None
    rtol: float | None = None

    def overridden(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Return the tolerance with what is given in place."""
        for name, value in (("atol", atol), ("rtol", rtol)):
            problem = None if value is None else _problem(value)
            if problem:
                raise ValueError(f"{name} {problem}")
        return Tolerance(self.atol if atol is None else atol, self.rtol if rtol is None else rtol)


_current: ContextVar[Tolerance | None] = ContextVar("rooflane_tolerance", default=None)


def current_tolerance() -> Tolerance:
    """Return the tolerance of the test that is running, an empty one outside of pytest."""
    return _current.get() or Tolerance()


@contextmanager
def use_tolerance(tolerance: Tolerance) -> Iterator[None]:
    """Make a tolerance the current one."""
    token = _current.set(tolerance)
    try:
        yield
    finally:
        _current.reset(token)


def tolerance_of(item: pytest.Item, complain: bool) -> Tolerance:
    """Return the tolerance of a test; a marker that cannot be read fails the test, or is passed over."""
    options = item.config.option
    found = Tolerance(options.rooflane_atol, options.rooflane_rtol)
    # From the outermost in: a test's own marker wins over its class's and its module's, each value by itself.
    for marker in reversed(list(item.iter_markers(MARKER))):
        problem = _marker_problem(marker)
        if problem is None:
            found = found.overridden(marker.kwargs.get("atol"), marker.kwargs.get("rtol"))
        elif complain:
            pytest.fail(f"{item.nodeid}: @pytest.mark.{MARKER} {problem}", pytrace=False)
    return found


def read_tolerance(option: str, text: str) -> float:
    """Return a tolerance given on the command line."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, such as 0.002") from None
    if problem := _problem(value):
        raise argparse.ArgumentTypeError(f"{option} {problem}")
    return value


def _marker_problem(marker: pytest.Mark) -> str | None:
    unknown = [name for name in marker.kwargs if name not in ("atol", "rtol")]
    if marker.args or unknown or not marker.kwargs:
        extra = ", ".join([*map(repr, marker.args), *unknown]) or "nothing"
        return f"takes atol=NUMBER and rtol=NUMBER, by name, and was given {extra}"
    problems = (f"{name} {_problem(value)}" for name, value in marker.kwargs.items() if _problem(value))
    return next(problems, None)


def _problem(value: object) -> str | None:
    """Return why a value is no tolerance, None when it is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {value!r}; it must be a number of at least 0"
    if not math.isfinite(value) or value < 0:
        return f"is {value:g}; a tolerance is a finite number of at least 0"
    return None


def uses_rooflane(item: pytest.Function) -> bool:
    """Return whether a test takes a fixture of ours, or its module imports from rooflane.

    Other projects have markers of the same names. Their tests do neither, and their markers are left alone.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    modules = [definition.func.__module__ for definitions in fixtures for definition in definitions[-1:]]
    names = vars(item.module).values()
    modules += [
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in names
    ]
    return any(isinstance(name, str) and name.split(".")[0] == "rooflane" for name in modules)


def shapes_of(marker: pytest.Mark, metafunc: pytest.Metafunc, *, ours: bool) -> list[Shape]:
    """Return the shapes a marker names; anything it cannot mean fails the collection in one paragraph.

    The file is looked for beside the test, then in pytest's root, then among those that ship. A marker that is not
    `ours` for certain names no shapes where the test gets its `shape` otherwise, or where it cannot be read.
    """
    if not ours:
        try:
            return [] if _gets_shape(metafunc) else shapes_of(marker, metafunc, ours=True)
        except pytest.fail.Exception:
            return []
    name = metafunc.definition.nodeid
    given = _arguments(marker)
    if isinstance(given, str):
        pytest.fail(f"{name}: @pytest.mark.shapes {given}", pytrace=False)
    if "shape" not in metafunc.fixturenames:
        pytest.fail(f"{name}: is marked with shapes and takes no argument `shape` to hand them to", pytrace=False)
    file, ids = given
    places = [metafunc.definition.path.parent, metafunc.config.rootpath, Path(rooflane.shapes.__file__).parent]
    path = next((folder / file for folder in places if (folder / file).is_file()), None)
    if path is None:
        looked = ", ".join(dict.fromkeys(map(str, places)))
        pytest.fail(f"{name}: there is no shape file {file}; looked in {looked}", pytrace=False)
    try:
        shapes = {shape.id: shape for shape in load_shapes(path)}
    except ShapeError as error:
        pytest.fail(f"{name}: {error}", pytrace=False)
    unknown = [wanted for wanted in ids or () if wanted not in shapes]
    if unknown:
        has = ", ".join(shapes)
        pytest.fail(f"{name}: {path} holds no shape {', '.join(map(repr, unknown))}; its ids: {has}", pytrace=False)
    return [shapes[wanted] for wanted in ids] if ids is not None else list(shapes.values())


def _gets_shape(metafunc: pytest.Metafunc) -> bool:
    """Return whether the project itself hands a test its `shape`."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize") if mark.args]
    named = [name.strip() for names in given for name in (names.split(",") if isinstance(names, str) else names)]
    return "shape" in named or "shape" in metafunc.definition._fixtureinfo.name2fixturedefs


def _arguments(marker: pytest.Mark) -> tuple[str, list[str] | None] | str:
    """Return the file and the ids, or what is wrong with them."""
    values = dict(zip(("file", "ids"), marker.args, strict=False)) | marker.kwargs
    file, ids = values.pop("file", None), values.pop("ids", None)
    if values or len(marker.args) > 2 or not isinstance(file, (str, Path)):
        return 'takes a shape file and ids=[...], such as shapes("published.csv", ids=["2"])'
    if ids is None:
        return str(file), None
    if isinstance(ids, str) or not ids:
        return f"ids is {ids!r}; give a list with at least one id, such as ids=['2']"
    return str(file), [str(wanted) for wanted in ids]
