"""The fused ops between GEMMs; importing it loads torch and triton."""

from rooflane.families.pointwise.pointwise import add_norm, gelu

__all__ = ["add_norm", "gelu"]
