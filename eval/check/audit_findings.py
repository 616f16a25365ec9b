"""What an audit of the gate found: which faults the checks notice, and the stress inputs that close the gap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pydantic import BaseModel, ConfigDict

from rooflane.eval.check.stresses import KEPT

# A catch is sure at this use: one nearer to the limit may be lost with other weights, inputs or sizes.
SURE_USE = 10.0

_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

# A shape's id and an ablation's name.
Fault = tuple[str, str]


class Finding(BaseModel):
    """One ablation under one condition on one shape: the least use over the seeds, above 1 where all catch it."""

    model_config = _CONFIG

    shape: str
    condition: str
    ablation: str
    use: float
    same: bool


class Audit(BaseModel):
    """An audit's findings and what follows from them.

    `always` names the conditions that every verification runs anyway, `stresses` those a set may be picked from,
    `asked` those shown on request only.
    """

    model_config = _CONFIG

    shapes: dict[str, str]
    seeds: int
    window: int
    tf32: bool
    always: tuple[str, ...]
    stresses: tuple[str, ...]
    asked: tuple[str, ...]
    findings: tuple[Finding, ...]

    def best(self, conditions: Sequence[str]) -> dict[Fault, float]:
        """Return the largest use that some of the conditions reach for each fault; 0 where none shows it."""
        best: dict[Fault, float] = {}
        for finding in self.findings:
            if finding.condition in (*self.always, *self.stresses) and not finding.same:
                use = finding.use if finding.condition in conditions else 0.0
                fault = (finding.shape, finding.ablation)
                best[fault] = max(best.get(fault, 0.0), use)
        return best

    def unseen(self, stresses: Sequence[str] = ()) -> list[Fault]:
        """Return the faults that pass the checks run anyway and these stresses."""
        return [fault for fault, use in self.best((*self.always, *stresses)).items() if use <= 1]

    def lost(self, stresses: Sequence[str]) -> list[Fault]:
        """Return the faults that these stresses catch less surely than the whole catalogue can."""
        wanted = self.best((*self.always, *self.stresses))
        reached = self.best((*self.always, *stresses))
        return [fault for fault, use in wanted.items() if use > 1 and reached[fault] < min(use, SURE_USE)]

    def pick(self) -> tuple[str, ...]:
        """Return the smallest set of stresses that catches every fault as surely as the whole catalogue can.

        Every subset is tried, small ones first; of one size, the one whose weakest catch is the strongest is taken.
        """
        for size in range(len(self.stresses) + 1):
            covers = [chosen for chosen in combinations(self.stresses, size) if not self.lost(chosen)]
            if covers:
                return max(covers, key=self._weakest)
        raise AssertionError("the whole catalogue loses nothing against itself")

    def needed_for(self, stress: str) -> list[Fault]:
        """Return the faults that the picked set would lose without one of its stresses."""
        return self.lost([name for name in self.pick() if name != stress])

    def verified(self) -> tuple[str, ...]:
        """Return the set that verification should run: the picked stresses and those kept whatever is picked."""
        picked = self.pick()
        return tuple(name for name in self.stresses if name in picked or name in KEPT)

    def same_everywhere(self) -> list[str]:
        """Return the ablations that are the reference's own function under every condition of every shape."""
        names = dict.fromkeys(finding.ablation for finding in self.findings)
        changed = {finding.ablation for finding in self.findings if not finding.same}
        return [name for name in names if name not in changed]

    def _weakest(self, stresses: Sequence[str]) -> float:
        """Return the least use that a set reaches among the faults it catches."""
        return min((use for use in self.best((*self.always, *stresses)).values() if use > 1), default=0.0)
