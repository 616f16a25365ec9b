"""What is taken beside an arm's windows: the other clocks, the other cache states, the script's own rounds.

Loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.eval.launch import Crash
from rooflane.eval.records import EAGER
from rooflane.eval.verify import CallFailed, WrongOutput, checked

if TYPE_CHECKING:
    from rooflane.eval.arm_row import ArmRow
    from rooflane.eval.shape_timing import ShapeTiming

STATE_KINDS = ("baseline", "candidate", "control")
STATES = {"harness_ns", "device_ns", "idle_ns", "cold_ns", "rotating_ns"}
# Calls by each of the other clocks and in each of the other cache states.
STATE_CALLS = {"cuda": 20, "cpu": 7}
BARE = {"bare_ns", "bare_eager_ns"}


class OtherClocks:
    """Asks for them once a shape's blocks are timed."""

    def __init__(self, timing: ShapeTiming) -> None:
        self.timing = timing
        self.work = timing.work

    def take(self) -> dict[str, dict[str, Any]]:
        """Return fields of `Timing` by arm: states in the first process, the script's rounds with fixed inputs."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.timing.samples}
        rows = [self.timing.rows[name] for name in found]
        if self.work.context.process == 0:
            for row in rows:
                found[row.name] |= self._states(row)
        if self.work.settings.inputs == "fixed":
            # Last: what eager leaves behind in a candidate's process is the answer to the timed input.
            for row in rows:
                found[row.name] |= self._script_rounds(row)
        return found

    def _states(self, row: ArmRow) -> dict[str, Any]:
        """Return an arm's times by the other clocks and in the other cache states."""
        if row.kind not in STATE_KINDS or row.worker not in self.work.team:
            return {}
        last = next(part for part in reversed(self.timing.samples[row.name].rounds) if part.event_ns)
        found = self._ask(
            row,
            "states",
            "the other clocks",
            seed=self.work.seed("states"),
            calls=STATE_CALLS[self.work.context.device],
            budget_s=self.timing.budget_of(row),
            host_ns=max(last.host_ns, default=0),
            call_ns=self.timing.lanes[row.name].call_ns,
        )
        return self._whole(row, found, set(found) <= STATES and all(map(_are_times, found.values())))

    def _script_rounds(self, row: ArmRow) -> dict[str, Any]:
        """Return a candidate's times and eager's in its process, by the organiser's own protocol."""
        timing = self.timing
        if row.kind != "candidate" or row.worker not in self.work.team or EAGER not in timing.samples:
            return {}
        sides = (EAGER, row.name)
        rounds, repeats = self.work.settings.rounds, min(timing.samples[name].counts.repeats for name in sides)
        found = self._ask(
            row,
            "script_rounds",
            "the script's rounds",
            seed=self.work.seed("timing"),
            warmups=min(timing.warmups[name] for name in sides),
            repeats=repeats,
            rounds=rounds,
        )
        whole = set(found) == BARE and all(
            isinstance(side, list) and len(side) == rounds and all(_are_times(part, repeats) for part in side)
            for side in found.values()
        )
        return self._whole(row, found, whole)

    def _ask(self, row: ArmRow, op: str, what: str, /, **values: Any) -> dict[str, Any]:
        """Ask an arm's worker; a call that raises is noted and costs the arm nothing more, a lost worker the row."""
        try:
            return checked(self.work.ask(row.worker, op, f"clocks of {row.name}", arm=row.name, **values))
        except (CallFailed, WrongOutput) as error:
            row.verification = row.verification and row.verification.model_copy(
                update={"notes": [*row.verification.notes, f"{what} were not taken: {error}"]}
            )
            self.work.check_device(row)
        except Crash as crash:
            self.timing.failed(row, crash)
        return {}

    def _whole(self, row: ArmRow, found: dict[str, Any], whole: bool) -> dict[str, Any]:
        """Return what was found when it is what was asked for; anything else was not written by the harness."""
        if found and not whole:
            self.timing.failed(row, Crash(f"the worker's clocks of {row.name} are not those that were asked for"))
            return {}
        return found


def _are_times(values: Any, count: int | None = None) -> bool:
    """Tell whether values are nanoseconds above 0, as many as were asked for."""
    return (
        isinstance(values, list)
        and all(type(value) is int and value > 0 for value in values)
        and count in (None, len(values))
    )
