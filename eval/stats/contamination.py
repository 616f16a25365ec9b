"""Disturbed blocks: found from the anchor, the no-op and telemetry, never from the times of the arms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rooflane.eval.record.records import ANCHOR, EAGER, NOOP
from rooflane.eval.stats.rounds import TICK_NS, Place, Rounds

# With a larger share of dropped blocks the campaign has no verdict.
MOST_DROPPED = 0.2
# A block counts as slowed when its clock is under this share of the campaign's median.
LEAST_CLOCK = 0.75
MADS = 5
# A block this near to the median is not disturbed, however steady the other blocks are: no verdict rests on 2%, and
# a no-op may fall on either side of a tick.
LEAST_SHARE = 0.02
# Reasons a driver reports for a clock that was chosen, not forced down.
CHOSEN_CLOCKS = {"ApplicationsClocksSetting", "DisplayClockSetting", "GpuIdle", "None", "SyncBoost"}
# The board's power limit: what heavy work meets by itself, unlike heat or a slowdown from outside.
POWER_CAP = {"SwPowerCap"}
POWER_LIMIT = "the power limit"


@dataclass(frozen=True)
class Contamination:
    """The dropped blocks by shape and process, the number of all blocks, and the number dropped by each reason."""

    dropped: Mapping[Place, frozenset[int]] = field(default_factory=dict)
    total: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of dropped blocks."""
        return sum(map(len, self.dropped.values()))

    @property
    def too_much(self) -> bool:
        """Whether so many were dropped that the campaign is contaminated."""
        return self.count > MOST_DROPPED * self.total

    def at(self, shape: str, process: int) -> frozenset[int]:
        """Return the dropped blocks of a shape in a process."""
        return self.dropped.get((shape, process), frozenset())

    def describe(self) -> str:
        """Return what was dropped, and why, in words; empty when nothing was."""
        if not self.count:
            return ""
        why = ", ".join(f"{count} by {reason}" for reason, count in sorted(self.reasons.items()))
        left = "" if self.count < self.total else "; nothing is left"
        several = ", some by more than one" if sum(self.reasons.values()) > self.count else ""
        return f"{self.count} of {self.total} blocks dropped for every arm ({why}{several}){left}"


def find_contamination(rounds: Rounds, *, power_limit: bool = True) -> Contamination:
    """Return the disturbed blocks; a campaign without anchor, no-op and telemetry has none.

    `power_limit` counts blocks that met the board's power limit among them.
    """
    places = rounds.places()
    found: dict[Place, set[int]] = {}
    reasons: Counter[str] = Counter()

    def drop(place: Place, block: int, reason: str) -> None:
        found.setdefault(place, set()).add(block)
        reasons[reason] += 1

    for arm in (ANCHOR, NOOP):
        for place, block in _outliers(rounds, arm, places):
            drop(place, block, f"the {'no-op' if arm == NOOP else arm}")
    clock = _median_clock(rounds, places)
    for place in places:
        for block, state in enumerate(rounds.telemetry.get(place, ())):
            for reason in _states(state, clock):
                if power_limit or reason != POWER_LIMIT:
                    drop(place, block, reason)
    total = sum(len(rounds.of(shape, EAGER)[process]) // 2 for shape, process in places)
    return Contamination({place: frozenset(blocks) for place, blocks in found.items()}, total, dict(reasons))


def _outliers(rounds: Rounds, arm: str, places: list[Place]) -> list[tuple[Place, int]]:
    """Return the blocks in which a watching arm lies beyond the campaign's median by 5 MAD.

    Each block is first divided by the lower quartile of its shape over the campaign. The work before a shape leaves a
    different cache state for each shape, which is no disturbance. A quartile, because a disturbance slows, possibly in
    half of the few blocks of a shape.
    """
    blocks: dict[str, dict[tuple[int, int], float]] = {}
    for shape, process in places:
        medians = rounds.of(shape, arm).get(process, ())
        for block in range(len(medians) // 2):
            first, second = medians[2 * block : 2 * block + 2]
            if first is not None and second is not None:
                blocks.setdefault(shape, {})[process, block] = (first + second) / 2
    usual = {shape: sorted(values.values())[len(values) // 4] for shape, values in blocks.items()}
    scaled = {
        (shape, process, block): value / usual[shape]
        for shape, values in blocks.items()
        for (process, block), value in values.items()
    }
    if not scaled:
        return []
    centre = median(scaled.values())
    spread = median(abs(value - centre) for value in scaled.values())
    tick = TICK_NS if arm == NOOP else 0
    return [
        ((shape, process), block)
        for (shape, process, block), value in scaled.items()
        if abs(value - centre) > max(MADS * spread, LEAST_SHARE * centre, tick / usual[shape])
    ]


def _median_clock(rounds: Rounds, places: list[Place]) -> float | None:
    """Return the campaign's median SM clock, None where none was read."""
    clocks = [state["sm_mhz"] for place in places for state in rounds.telemetry.get(place, ()) if state.get("sm_mhz")]
    return median(clocks) if clocks else None


def _states(state: Mapping[str, Any], clock: float | None) -> list[str]:
    """Return the reasons in a block's telemetry to drop the block."""
    throttle = state.get("throttle") or ()
    forced = set(throttle) - CHOSEN_CLOCKS if isinstance(throttle, (list, tuple)) else throttle
    found = [POWER_LIMIT if forced == POWER_CAP else "throttling"] if forced else []
    if clock and state.get("sm_mhz") and state["sm_mhz"] < LEAST_CLOCK * clock:
        found.append("a slow clock")
    if state.get("other_processes"):
        found.append("another process")
    return found
