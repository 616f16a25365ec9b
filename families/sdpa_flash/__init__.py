"""Attention-dominated shapes: scores stay on the chip."""

from rooflane.families.sdpa_flash.spec import SPEC

__all__ = ["SPEC"]
