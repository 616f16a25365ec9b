"""Shapes that do not fit: batch and sequence chunks within a budget."""

from rooflane.families.chunked.spec import SPEC

__all__ = ["SPEC"]
