"""Where the user's rule table is named: by the caller, in the environment, or in the project's pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from rooflane.dispatch.toml_source import parse_toml, read_text

SHIPPED = "shipped"
VARIABLE = "ROOFLANE_RULES"
PROJECT_FILE = "pyproject.toml"
SECTION = "tool.rooflane"


def find_user_table(given: str | Path | None, error: type[ValueError]) -> tuple[Path | None, str]:
    """Return the user's table and what named it, or None for the shipped rules alone.

    The first that names one wins: `given`, the variable ROOFLANE_RULES, the nearest pyproject.toml at or above the
    working directory that has a `[tool.rooflane]` table (its `rules` is a path relative to that file). The word
    `shipped` in any of the three asks for our rules alone. Raises `error` for a section that cannot be read.
    """
    if given is not None:
        return _named(str(given), Path(), "given")
    if os.environ.get(VARIABLE):
        return _named(os.environ[VARIABLE], Path(), VARIABLE)
    here = Path.cwd()
    for folder in (here, *here.parents):
        project = folder / PROJECT_FILE
        named = _project_rules(project, error) if project.is_file() else None
        if named:
            return _named(named, folder, f"[{SECTION}] of {project}")
    return None, SHIPPED


def _named(text: str, folder: Path, source: str) -> tuple[Path | None, str]:
    return (None, f"{SHIPPED}, by {source}") if text == SHIPPED else (folder / Path(text).expanduser(), source)


def _project_rules(project: Path, error: type[ValueError]) -> str | None:
    """Return what the section's `rules` says; None for a project file without the section."""
    text = read_text(project, error)
    # Most project files are none of ours: only one that names the section has to be valid TOML for us.
    if SECTION not in text:
        return None
    section = parse_toml(text, project, error).get("tool", {}).get("rooflane")
    if section is None:
        return None
    if not isinstance(section, dict) or set(section) - {"rules"}:
        raise error(f'{project}: [{SECTION}] holds one key, rules = "FILE"; remove the others')
    named = section.get("rules", SHIPPED)
    if not isinstance(named, str) or not named:
        raise error(f"{project}: [{SECTION}] rules is {named!r}; it is the path of a rule table, in quotes")
    return named
