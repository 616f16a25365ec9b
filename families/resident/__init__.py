"""Short, narrow sequences: the whole forward on the SM. Importing this loads no torch."""

from rooflane.families.resident.spec import SPEC

__all__ = ["SPEC"]
