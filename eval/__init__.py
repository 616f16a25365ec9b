"""Whether it is true: gates, timing, statistics, runs in fresh processes, records, reports."""

from importlib import import_module
from typing import Any

# Loaded on first use: `rooflane classify` starts in this package and must answer in under a second.
_HOMES = {
    "campaign.campaign": ("Event", "evaluate", "resume"),
    "stats.comparison": ("Comparison", "compare"),
    "exit_codes": ("EvaluationError", "ExitCode"),
    "check.gate": ("ATOL", "RTOL", "check_gate"),
    "report.report": (
        "render_comparison",
        "render_json",
        "render_markdown",
        "render_readme_table",
        "render_terminal",
        "update_between_markers",
    ),
    "record.records": ("GateResult",),
    "record.settings": ("Settings",),
    "stats.run": ("Run", "open_run"),
    "stats.summary": ("Summary", "summarise"),
    "stats.verdict": ("Verdict",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rooflane.eval.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
