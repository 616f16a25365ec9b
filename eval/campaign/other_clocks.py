"""What is taken beside an arm's windows: the other clocks and the other cache states. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.eval.campaign.launch import Crash
from rooflane.eval.check.verify import CallFailed, WrongOutput, checked

if TYPE_CHECKING:
    from rooflane.eval.campaign.arm_row import ArmRow
    from rooflane.eval.campaign.shape_timing import ShapeTiming

STATE_KINDS = ("baseline", "candidate", "control")
STATES = {"harness_ns", "device_ns", "idle_ns", "cold_ns", "rotating_ns"}
# Calls by each of the other clocks and in each of the other cache states.
STATE_CALLS = {"cuda": 20, "cpu": 7}


class OtherClocks:
    """Asks for them once a shape's blocks are timed."""

    def __init__(self, timing: ShapeTiming) -> None:
        self.timing = timing
        self.work = timing.work

    def take(self) -> dict[str, dict[str, Any]]:
        """Return fields of `Timing` by arm, in the first process alone."""
        first = self.work.context.process == 0
        return {name: self._states(self.timing.rows[name]) if first else {} for name in self.timing.samples}

    def _states(self, row: ArmRow) -> dict[str, Any]:
        """Return an arm's times by the other clocks and in the other cache states."""
        work = self.work
        if row.kind not in STATE_KINDS or row.worker not in work.team:
            return {}
        last = next(part for part in reversed(self.timing.samples[row.name].rounds) if part.event_ns)
        try:
            found = checked(
                work.ask(
                    row.worker,
                    "states",
                    f"clocks of {row.name}",
                    arm=row.name,
                    seed=work.seed("states"),
                    calls=STATE_CALLS[work.context.device],
                    budget_s=self.timing.budget_of(row),
                    host_ns=max(last.host_ns, default=0),
                    call_ns=self.timing.lanes[row.name].call_ns,
                )
            )
        except (CallFailed, WrongOutput) as error:
            row.note(f"the other clocks were not taken: {error}")
            work.check_device(row)
            return {}
        except Crash as crash:
            self.timing.failed(row, crash)
            return {}
        if set(found) <= STATES and all(map(are_times, found.values())):
            return found
        # Anything else was not written by the harness.
        self.timing.failed(row, Crash(f"the worker's clocks of {row.name} are not those that were asked for"))
        return {}


def are_times(values: Any, count: int | None = None) -> bool:
    """Tell whether values are nanoseconds above 0, as many as were asked for."""
    return (
        isinstance(values, list)
        and all(type(value) is int and value > 0 for value in values)
        and count in (None, len(values))
    )
