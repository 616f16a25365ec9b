"""Stress inputs: what they are, and the recorded set that every verification runs. Loads no torch.

The accuracy trials and the mask checks always run. `rooflane audit-gate` finds what they miss, picks from
this catalogue and records its choice in stress_set.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SHARPEN = 8.0
SPIKE = 30.0
SPIKE_EVERY = 1021  # a prime, so that spikes do not fall into one column
# A power of two, so that every number type holds the widened weights exactly. Hidden rows reach 1e5 on fresh weights.
WIDEN = 2.0**17

STRESS_SET = Path(__file__).with_name("stress_set.json")


@dataclass(frozen=True)
class Stress:
    """One stress input: how it is drawn, and which weights are changed in place for the time of the call."""

    name: str
    scale: float = 1.0
    spikes: bool = False
    sharpen: bool = False  # every query projection times 8
    norms: bool = False  # LayerNorm weights and biases drawn at random: fresh ones are 1 and 0, and hide their absence
    wide: bool = False  # every ffn_in times 2^17 and every ffn_out weight times 2^-17: float16 ends at 65504

    @property
    def touches(self) -> tuple[str, ...]:
        """The parameter names, each a part of the full name, that the stress changes."""
        return ("q_proj",) * self.sharpen + ("norm",) * self.norms + ("ffn_in", "ffn_out.weight") * self.wide

    def suits(self, dtype: str) -> bool:
        """Return whether a model of this dtype can compute the stress: a float16 model overflows as its kernels do."""
        return not (self.wide and dtype == "float16")


# Scaling weights sharpens attention; scaling inputs does not, since the residual stream swamps each block.
CATALOGUE = (
    Stress("q_proj x 8", sharpen=True),
    Stress("norms drawn", norms=True),
    Stress("input x 0.1", scale=0.1),
    Stress("input x 3", scale=3.0),
    Stress("spikes", spikes=True),
    Stress("wide range", wide=True),
)
# Always kept: they show faults that depend on magnitudes (overflow, a narrow format, a path chosen from the data),
# which no ablation of the reference shows.
KEPT = ("input x 0.1", "input x 3", "spikes", "wide range")


def load_stress_set(path: Path = STRESS_SET) -> tuple[Stress, ...]:
    """Return the recorded set in the catalogue's order."""
    names = json.loads(path.read_text(encoding="utf-8"))["stresses"]
    unknown = set(names) - {stress.name for stress in CATALOGUE}
    if unknown:
        raise ValueError(f"{path}: no stress input is called {', '.join(map(repr, sorted(unknown)))}")
    return tuple(stress for stress in CATALOGUE if stress.name in names)
