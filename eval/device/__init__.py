"""The device at hand: probe, doctor and the per-operation profile."""
