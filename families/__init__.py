"""Kernel families: ways to build a fast forward, one folder each, found through entry points."""

from rooflane.families.registry import FamilyError, get_family, load_families
from rooflane.families.spec import FamilySpec, Limits

__all__ = ["FamilyError", "FamilySpec", "Limits", "get_family", "load_families"]
