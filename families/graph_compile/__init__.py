"""Launch-bound shapes: compile, then capture."""

from rooflane.families.graph_compile.spec import SPEC

__all__ = ["SPEC"]
