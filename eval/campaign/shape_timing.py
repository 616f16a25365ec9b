"""The timing of one shape's arms: estimates, blocks, the other clocks, and what the clocks say against each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any

from rooflane.eval.campaign.blocks import Counts, Samples, choose_counts, time_blocks
from rooflane.eval.campaign.busy_wait import awake
from rooflane.eval.campaign.lanes import Lane, Schedule
from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.other_clocks import OtherClocks
from rooflane.eval.campaign.team import REFERENCE, ReferenceLost
from rooflane.eval.check.integrity import hidden_time, impossible_times, physical_floor_ns
from rooflane.eval.check.promises import PROMISES
from rooflane.eval.check.verify import CallFailed, WrongOutput, checked
from rooflane.eval.record.records import EAGER, NOOP, Timing, Verification

if TYPE_CHECKING:
    from rooflane.eval.campaign.arm_row import ArmRow
    from rooflane.eval.campaign.session import ShapeDesk

LEAST_BUDGET_S = 0.05
# Controls give context, not the headline: half an arm's seconds are enough. No-op and anchor are short by design.
BUDGET_SHARES = {"control": 0.5, "noop": 0.1, "anchor": 0.1}
FULL_BUDGET = ("identity",)
# An estimate this many times too long bought an arm too few calls.
RECOUNT = 2


class ShapeTiming:
    """Times the arms of a shape that are ready; the result is noted in each row."""

    def __init__(self, work: ShapeDesk, rows: list[ArmRow]) -> None:
        self.work = work
        self.rows = {row.name: row for row in rows}
        self.lanes: dict[str, Lane] = {}
        self.samples: dict[str, Samples] = {}
        self.warmups: dict[str, int] = {}
        self.blocks: list[dict[str, Any] | None] = []

    def run(self) -> None:
        """Warm every arm up, time the blocks, then take the other clocks."""
        work, settings = self.work, self.work.settings
        schedule = Schedule(work.seed, work.shape.padding_ratio, settings.inputs == "fixed")
        share = (work.deadline - monotonic()) / max(1, len(self.rows))
        self.budget_s = max(LEAST_BUDGET_S, min(settings.budget_s, share))
        counts: dict[str, Counts] = {}
        with work.team.spending("warm-up"):
            for row in self.rows.values():
                counts |= self._warm_up(row, schedule)
        if EAGER not in counts:
            for name in counts:
                self.rows[name].status, self.rows[name].reason = "skipped", "eager could not be timed beside it"
            return
        for lane in self.lanes.values():
            lane.reference_ns = self.lanes[EAGER].call_ns
        workers = list(dict.fromkeys(self.rows[name].worker for name in counts))
        with work.team.spending("verification"):
            for worker in workers:
                self._settle(worker)
        with awake(work, workers), work.team.spending("measurement"):
            failures = self._time(counts)
            for name, error in failures.items():
                self.failed(self.rows[name], error)
            states = OtherClocks(self).take()
        if any(self.blocks):
            work.telemetry["blocks"] = self.blocks
        for name, samples in self.samples.items():
            row = self.rows[name]
            if row.ready:
                row.timing = self._timing(row, samples, states[name])
            if self.lanes[name].overwritten and row.verification:
                row.verification = with_overwritten(row.verification)

    def _time(self, counts: dict[str, Counts]) -> dict[str, Exception]:
        """Time the blocks; return what the arms that fell out raised."""
        work, settings = self.work, self.work.settings
        self.samples, failures = time_blocks(
            self.lanes,
            counts,
            rounds=settings.rounds,
            order_seed=work.seed("order"),
            recount=self._recount,
            on_block=lambda block: self.blocks.append(work.context.telemetry()),
            fatal=(ReferenceLost,),
            # The null is held against in every block; no-op and anchor tell which blocks the machine spoilt.
            sparse={name for name in counts if self.rows[name].kind == "control" and name not in FULL_BUDGET},
        )
        return failures

    def findings(self, row: ArmRow) -> list[str]:
        """Return what the clocks say against an arm's own times, and what its windows showed."""
        lane = self.lanes.get(row.name)
        if lane is None:
            return []
        samples = self.samples.get(row.name)
        times = [value for part in samples.rounds for value in part.event_ns] if samples else []
        noop = self.samples.get(NOOP)
        nothing = [value for part in noop.rounds for value in part.event_ns] if noop else []
        profile, tokens = self.work.context.profile, row.timing.valid_tokens if row.timing else 0.0
        floor_ns, basis = physical_floor_ns(self.work.shape, profile, tokens)
        return [
            *lane.integrity,
            *hidden_time(lane.walls, self.lanes[EAGER].walls),
            *impossible_times(times, nothing, floor_ns, basis),
        ]

    def _warm_up(self, row: ArmRow, schedule: Schedule) -> dict[str, Counts]:
        """Estimate an arm's call, warm it up, and make its lane; nothing when it fails."""
        work = self.work
        ask = self._asker(row.worker)
        try:
            found = checked(
                ask(
                    "estimate",
                    stage=f"time of {row.name}",
                    arm=row.name,
                    seed=work.seed(f"warm-up {row.name}"),
                    warmups=work.settings.warmups,
                    budget_s=self.budget_of(row) / 5,
                )
            )
        except (Crash, CallFailed, WrongOutput) as error:
            self.failed(row, error)
            return {}
        self.warmups[row.name] = found["warmups"]
        self.lanes[row.name] = Lane(
            row.name,
            ask,
            schedule,
            capacity=self._capacity(row.worker),
            call_ns=found["call_ns"],
            judge=work.judge_of(row) if row.kind in ("candidate", "copy") else None,
        )
        return {row.name: self._counts(row, found["call_ns"])}

    def _counts(self, row: ArmRow, call_ns: float) -> Counts:
        settings = self.work.settings
        return choose_counts(
            call_ns,
            warmups=settings.warmups,
            repeats=settings.repeats,
            rounds=settings.rounds,
            budget_s=self.budget_of(row),
        )

    def _recount(self, arm: str, before: Counts, call_ns: float) -> Counts:
        """Return more calls for an arm whose calls have become much quicker than its estimate."""
        now = self._counts(self.rows[arm], call_ns)
        return now if now.repeats > RECOUNT * before.repeats else before

    def budget_of(self, row: ArmRow) -> float:
        """Return an arm's seconds of timed calls."""
        share = 1.0 if row.name in FULL_BUDGET else BUDGET_SHARES.get(row.kind, 1.0)
        return max(LEAST_BUDGET_S / 2, self.budget_s * share) if share < 1 else self.budget_s

    def _timing(self, row: ArmRow, samples: Samples, states: dict[str, Any]) -> Timing:
        settings, lane = self.work.settings, self.lanes[row.name]
        counts = samples.counts
        return Timing(
            clock="cuda-events" if self.work.context.device == "cuda" else "perf-counter",
            event_ns=[part.event_ns for part in samples.rounds],
            host_ns=[part.host_ns for part in samples.rounds if part.host_ns],
            loop_ns=[part.loop_ns for part in samples.rounds if part.event_ns],
            warmups=self.warmups[row.name],
            repeats=counts.repeats,
            shrunk=self.warmups[row.name] < settings.warmups or counts.repeats < settings.repeats,
            inputs=settings.inputs,
            valid_tokens=fmean(lane.tokens),
            **states,
        )

    def _settle(self, worker: str) -> None:
        with suppress(Crash):  # the arms' own windows tell of it
            self.work.ask(worker, "settle", f"time of {EAGER if worker == REFERENCE else worker}")

    def failed(self, row: ArmRow, error: Exception) -> None:
        """Note how an arm fell out of the timing."""
        row.fail(error, "timing it")
        if isinstance(error, CallFailed):
            self.work.check_device(row)

    def _capacity(self, worker: str) -> int:
        return self.work.capacities.get(worker, 1)

    def _asker(self, worker: str) -> Callable[..., dict[str, Any]]:
        return lambda op, stage, **values: self.work.ask(worker, op, stage, **values)


def with_overwritten(verification: Verification) -> Verification:
    """Return a verification that knows an output was overwritten while it was kept, seen in the timed calls."""
    finding = PROMISES["kept output"].finding
    if finding in verification.contract or verification.status != "ok":
        return verification
    return verification.model_copy(
        update={"contract": [*verification.contract, finding], "contract_class": "contract-dependent"}
    )
