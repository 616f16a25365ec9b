"""Attention over packed QKV, shared by the families that run layer by layer. Importing this loads no torch."""
