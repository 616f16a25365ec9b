"""The organiser's own protocol, timed as the organiser times it: in a process that has done nothing else.

A worker that has verified a candidate, kept outputs and run windows is no such process: on an H200 shape 13 took 1.3 %
less in one (briefs/process.md). So a further worker builds the candidate, runs the script's rounds, and is only then
asked for an output to judge. Loads no torch.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, Any

from rooflane.eval.campaign.busy_wait import awake
from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.other_clocks import are_times
from rooflane.eval.check.verify import CallFailed, WrongOutput, checked, verify
from rooflane.eval.record.records import EAGER

if TYPE_CHECKING:
    from rooflane.eval.campaign.arm_row import ArmRow
    from rooflane.eval.campaign.shape_timing import ShapeTiming

BARE = {"bare_ns", "bare_eager_ns"}


class FreshRounds:
    """Takes a candidate's times and eager's, in turn in one fresh process."""

    def __init__(self, timing: ShapeTiming) -> None:
        self.timing = timing
        self.work = timing.work

    def take(self, row: ArmRow) -> dict[str, Any]:
        """Return fields of `Timing`; what cannot be taken is noted, a process that is lost or wrong costs the row."""
        if row.kind != "candidate" or not row.ready or EAGER not in self.timing.samples:
            return {}
        work = self.work
        try:
            if monotonic() + work.context.setup_s.get(row.name, 0.0) > work.deadline:
                raise CallFailed("skipped", "the time budget was spent")
            with ExitStack() as stack:
                worker = self._begin(row, stack)
                found = self._rounds(row, worker)
                with work.team.spending("verification"):
                    self._judge(row, worker)
            return found
        except CallFailed as error:
            row.note(f"the script's rounds were not taken: {error}")
        except (Crash, WrongOutput) as error:
            self.timing.failed(row, error)
        return {}

    def _begin(self, row: ArmRow, stack: ExitStack) -> str:
        """Start the process, which lives as long as `stack`, and have it begin the shape; no candidate runs yet."""
        work = self.work
        try:
            worker = stack.enter_context(work.team.fresh(row.worker))
            with work.team.spending("set-up"):
                checked(work.ask(worker, "shape", f"build of {EAGER}", **work.beginning(worker)))
        except Crash as crash:
            raise CallFailed("error", str(crash)) from None
        return worker

    def _rounds(self, row: ArmRow, worker: str) -> dict[str, Any]:
        timing, work = self.timing, self.work
        sides = (EAGER, row.name)
        rounds, repeats = work.settings.rounds, min(timing.samples[name].counts.repeats for name in sides)
        with work.team.spending("set-up"):
            built = checked(work.ask(worker, "build", f"build of {row.name}", name=row.name))
            if built["status"] != "ok":
                raise CallFailed(built["status"], built["reason"])
            checked(work.ask(worker, "count_running", f"build of {row.name}"))
        with awake(work, [worker]), work.team.spending("measurement"):
            found = work.ask(
                worker,
                "script_rounds",
                f"clocks of {row.name}",
                arm=row.name,
                seed=work.seed("timing"),
                warmups=min(timing.warmups[name] for name in sides),
                repeats=repeats,
                rounds=rounds,
            )
        found = checked(found)
        if set(found) != BARE or not all(
            isinstance(side, list) and len(side) == rounds and all(are_times(part, repeats) for part in side)
            for side in found.values()
        ):
            raise Crash(f"the worker's clocks of {row.name} are not those that were asked for")
        return found

    def _judge(self, row: ArmRow, worker: str) -> None:
        """Check one output of the process that was timed, and what it can tell of tampering."""
        work = self.work
        verification = verify(
            lambda op, **values: work.ask(worker, op, f"verify of {row.name}", arm=row.name, **values),
            work.judge_of(row),
            work.shape,
            device=work.context.device,
            seed=work.seed(f"afresh {row.name}"),
            trials=1,
            level="trials",
        )
        answer = checked(work.ask(worker, "inspect", f"check of {row.name}"))
        row.integrity += answer.get("findings", ["its process did not say what it was checked for"])
        if verification.status == "incorrect":
            raise WrongOutput(f"in a fresh process: {verification.reason}")
        if verification.status != "ok":
            raise CallFailed(verification.status, f"no output of that process could be judged: {verification.reason}")
