"""Find the families: the entry points of the group `rooflane.families`, in this package and in others."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from rooflane.families.spec import FamilySpec

GROUP = "rooflane.families"


class FamilyError(ValueError):
    """A family that is unknown, broken, or unable to take the request; the message gives the reason."""


@cache
def load_families() -> dict[str, FamilySpec]:
    """Return every registered family by name, in the order of registration.

    Raises `FamilyError` when an entry point cannot be loaded or two packages register one name.
    """
    families: dict[str, FamilySpec] = {}
    for entry in entry_points(group=GROUP):
        spec = _load(entry)
        if spec.name in families and families[spec.name] is not spec:
            raise FamilyError(f"two packages register the family {spec.name!r}; uninstall one of them")
        families[spec.name] = spec
    return families


def _load(entry: EntryPoint) -> FamilySpec:
    """Return the spec that an entry point names; raises `FamilyError` where it names none."""
    origin = entry.dist.name if entry.dist else "an unknown package"
    what = f"family {entry.name!r} of {origin} ({entry.value})"
    try:
        # A spec that lacks an abstract method fails here: its module cannot make the instance.
        spec = entry.load()
    except Exception as error:
        raise FamilyError(f"{what} cannot be loaded: {error}; fix or uninstall that package") from error
    if not isinstance(spec, FamilySpec):
        kind = f"the class {spec.__name__}" if isinstance(spec, type) else f"a {type(spec).__name__}"
        raise FamilyError(f"{what} is {kind}; it must be an instance of a subclass of rooflane.families.FamilySpec")
    missing = [name for name in ("name", "summary") if not isinstance(getattr(spec, name, None), str)]
    if missing:
        raise FamilyError(f"{what} does not set {' and '.join(missing)}; each must be a string")
    return spec


def get_family(name: str) -> FamilySpec:
    """Return the family of that name; raises `FamilyError` listing what exists."""
    families = load_families()
    if name not in families:
        raise FamilyError(f"no family is called {name!r}; there are: {', '.join(sorted(families))}")
    return families[name]
