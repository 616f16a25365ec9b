"""The rungs of the reductions, from the slowest on."""

from rooflane.families.ladder.rungs import ReduceRung

RUNGS: tuple[ReduceRung, ...] = ()
