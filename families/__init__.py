"""How a forward is made fast: one folder per family, found through a registry."""

from rooflane.families.registry import FamilyError, get_family, load_families
from rooflane.families.spec import FamilySpec, Limits

__all__ = ["FamilyError", "FamilySpec", "Limits", "get_family", "load_families"]
