"""Find the families: entry points of the group `rooflane.families`, ours and other packages' alike."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from rooflane.families.spec import FamilySpec

GROUP = "rooflane.families"


class FamilyError(ValueError):
    """A family that is unknown, broken, or unable to take the request; the text says why and what exists."""


@cache
def load_families() -> dict[str, FamilySpec]:
    """Return every registered family by name, in the order of registration.

    Raises `FamilyError` when two packages register one name or an entry point cannot be loaded.
    """
    families: dict[str, FamilySpec] = {}
    for entry in entry_points(group=GROUP):
        try:
            spec = entry.load()
        except Exception as error:
            origin = entry.dist.name if entry.dist else "an unknown package"
            raise FamilyError(
                f"family {entry.name!r} of {origin} ({entry.value}) cannot be loaded: {error}; "
                "mend or uninstall that package"
            ) from error
        if not isinstance(spec, FamilySpec):
            raise FamilyError(f"family {entry.name!r} ({entry.value}) lacks part of the FamilySpec interface")
        if spec.name in families and families[spec.name] is not spec:
            raise FamilyError(f"two packages register the family {spec.name!r}; uninstall one of them")
        families[spec.name] = spec
    return families


def get_family(name: str) -> FamilySpec:
    """Return the family of that name; raises `FamilyError` listing what exists."""
    families = load_families()
    if name not in families:
        raise FamilyError(f"no family is called {name!r}; there are: {', '.join(sorted(families))}")
    return families[name]
