"""chunked: batch and sequence chunks within a memory budget, for shapes whose eager forward does not fit."""

from rooflane.families.chunked.spec import SPEC

__all__ = ["SPEC"]
