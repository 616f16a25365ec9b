"""The templates of reports and files that are written for the user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

# Read once, when this module is imported: a campaign imports it before its first candidate, and what a candidate may
# write into the folder afterwards stands in no report.
TEMPLATES = {
    path.name: path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parent / "templates").iterdir())
}


def render(name: str, **values: Any) -> str:
    """Return a template filled in; a value it needs and was not given is an error."""
    return make_environment().get_template(name).render(**values)


def make_environment(**options: Any) -> Environment:
    """Return the environment of the templates, with more of jinja2's options."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    common = dict.fromkeys(("trim_blocks", "lstrip_blocks", "keep_trailing_newline"), True)
    return Environment(loader=DictLoader(TEMPLATES), undefined=StrictUndefined, **common, **options)
