"""How the package starts Python again: a user's file must not stand for one of Python's own modules."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package.

    Without `-P` the working folder would come first on the path: a candidate called `random.py` or `types.py` in it
    would be imported wherever the standard library means its own.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def add_working_folder() -> None:
    """Let a candidate import its neighbours in the working folder, behind everything that is installed."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
