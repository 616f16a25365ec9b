"""A group of commands whose help reads as paragraphs, whatever line a docstring breaks at."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer


class Group(typer.Typer):
    """Typer keeps a docstring's line breaks inside a paragraph; here each paragraph is one line, for rich to wrap."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable], Callable]:
        """Register a command with its docstring as help."""

        def register(function: Callable) -> Callable:
            paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            return super(Group, self).command(name, help=text, **options)(function)

        return register
