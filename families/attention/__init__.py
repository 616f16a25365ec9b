"""Attention over packed QKV, shared by the families that run layer by layer; importing it loads torch and triton."""

from rooflane.families.attention.attention import attention, mask_extent

__all__ = ["attention", "mask_extent"]
