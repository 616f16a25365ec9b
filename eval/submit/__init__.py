"""Run the organiser's script, unchanged, over a shape table with the candidate as its model."""

from importlib import import_module
from typing import Any

# Loaded on first use: the worker needs the launcher's neighbours, not pydantic or rich.
_HOMES = {
    "runs": ("SubmitEvent", "resume_submission", "submit"),
    "organiser": ("read_organiser",),
    "parse": ("Figures", "parse_output"),
    "submission": ("Submission", "SubmitRow", "open_submission", "render_json", "summarise_submission"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rooflane.eval.submit.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
