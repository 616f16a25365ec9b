"""Attention over packed QKV for the families that run layer by layer. Importing this loads no torch."""
