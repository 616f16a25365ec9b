"""The tolerance of a test: from the call, the marker, the command line or the gate itself, in that order."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import pytest

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
