"""What optimize() and a dispatched module say when a module or a call does not fit. No torch."""

from __future__ import annotations


class OptimizeError(ValueError):
    """A module, shape or call that cannot be dispatched; the text says what differs and how to mend it."""


class Unserved(Exception):
    """A call that no built forward takes; `about` names the kind of obstacle, which is warned of once."""

    def __init__(self, about: str, reason: str) -> None:
        super().__init__(reason)
        self.about = about
