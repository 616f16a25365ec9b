"""The timing of one shape's arms: estimates, blocks, the other clocks, and contradictions between the clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any

from rooflane.eval.campaign.blocks import ArmTimer, Counts, Samples, Schedule, choose_counts, time_blocks
from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.team import ReferenceLost
from rooflane.eval.campaign.turns import TurnWatch
from rooflane.eval.check.integrity import hidden_time, impossible_times
from rooflane.eval.check.promises import PROMISES
from rooflane.eval.check.verify import CallFailed, WrongOutput
from rooflane.eval.record.records import EAGER, EAGER_ARM, NOOP, REFERENCE, ArmId, Timing, Verification
from rooflane.eval.worker import protocol
from rooflane.eval.worker.cpu_pinning import core_shares, usable_cores

if TYPE_CHECKING:
    from rooflane.eval.campaign.session import ArmRow, ShapeSession


LEAST_BUDGET_S = 0.05
# Controls give context, not the headline, so they get half of an arm's seconds. A no-op or anchor call is short.
BUDGET_SHARES = {"control": 0.5, "noop": 0.1, "anchor": 0.1}
FULL_BUDGET = ("identity",)
# The kinds of arm that the other clocks time, and the calls for each clock.
STATE_KINDS = ("baseline", "candidate", "control")
STATE_CALLS = {"cuda": 20, "cpu": 7}
# An arm gets a new count when its calls now allow over this many times the repeats of its first estimate.
RECOUNT = 2


class ShapeTiming:
    """Times the arms of a shape that are ready; the result is noted in each row."""

    def __init__(self, work: ShapeSession, rows: list[ArmRow]) -> None:
        self.work = work
        self.rows = {str(row.arm): row for row in rows}
        self.timers: dict[str, ArmTimer] = {}
        self.samples: dict[str, Samples] = {}
        self.warmups: dict[str, int] = {}
        self.blocks: list[dict[str, Any] | None] = []
        self.watch = TurnWatch()

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
        for timer in self.timers.values():
            timer.reference_ns = self.timers[EAGER].call_ns
        workers = list(dict.fromkeys(self.rows[name].arm.worker for name in counts))
        with work.team.spending("verification"):
            for worker in workers:
                self._settle(worker)
        with busy_waiting(work, workers), work.team.spending("measurement"):
            failures = self._time(counts)
            for name, error in failures.items():
                self.failed(self.rows[name], error)
            states = {name: self._states(self.rows[name]) for name in self.samples}
        for block, state in enumerate(self.blocks):
            if eager := self.watch.state(block, EAGER):
                self.blocks[block] = {**(state or {}), "eager": eager}
        if any(self.blocks):
            work.telemetry["blocks"] = self.blocks
        for name, samples in self.samples.items():
            row = self.rows[name]
            if row.ready:
                row.timing = self._timing(row, samples, states[name])
            if self.timers[name].overwritten and row.verification:
                row.verification = with_overwritten(row.verification)

    def _time(self, counts: dict[str, Counts]) -> dict[str, Exception]:
        """Time the blocks; return what the arms that fell out raised."""
        work, settings = self.work, self.work.settings
        self.samples, failures = time_blocks(
            self.timers,
            counts,
            rounds=settings.rounds,
            order_seed=work.seed("order"),
            recount=self._recount,
            on_block=lambda block: self.blocks.append(work.context.telemetry()),
            fatal=(ReferenceLost,),
            # The null is compared in every block. The no-op and the anchor show which blocks were disturbed.
            sparse={name for name in counts if self.rows[name].arm.kind == "control" and name not in FULL_BUDGET},
        )
        return failures

    def findings(self, row: ArmRow) -> list[str]:
        """Return where other clocks contradict an arm's own times, and what its windows showed."""
        timer = self.timers.get(str(row.arm))
        if timer is None:
            return []
        samples = self.samples.get(str(row.arm))
        times = [value for part in samples.rounds for value in part.event_ns] if samples else []
        noop = self.samples.get(NOOP)
        nothing = [value for part in noop.rounds for value in part.event_ns] if noop else []
        profile, tokens = self.work.context.profile, row.timing.valid_tokens if row.timing else 0.0
        floor_ns, basis = self.work.requests.floor_ns(self.work.shape, profile, tokens)
        return [
            *timer.integrity,
            *hidden_time(timer.walls, self.timers[EAGER].walls),
            *impossible_times(times, nothing, floor_ns, basis),
        ]

    def _warm_up(self, row: ArmRow, schedule: Schedule) -> dict[str, Counts]:
        """Estimate an arm's call, warm it up, and make its timer; nothing when it fails."""
        work, name = self.work, str(row.arm)
        request = protocol.Estimate(
            row.arm, work.seed(f"warm-up {name}"), work.settings.warmups, self.budget_of(row) / 5
        )
        try:
            found = work.ask(row.arm.worker, request, "time", row.arm)
        except (Crash, CallFailed, WrongOutput) as error:
            self.failed(row, error)
            return {}
        self.warmups[name] = found.warmups
        self.timers[name] = ArmTimer(
            row.arm,
            work,
            schedule,
            capacity=work.capacities.get(row.arm.worker, 1),
            call_ns=found.call_ns,
            judge=work.judge_of(row) if row.arm.kind in ("candidate", "copy") else None,
            watch=self.watch,
        )
        return {name: self._counts(row, found.call_ns)}

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
        share = 1.0 if row.arm.name in FULL_BUDGET else BUDGET_SHARES.get(row.arm.kind, 1.0)
        return max(LEAST_BUDGET_S / 2, self.budget_s * share) if share < 1 else self.budget_s

    def _timing(self, row: ArmRow, samples: Samples, states: protocol.States | None) -> Timing:
        settings, name, counts = self.work.settings, str(row.arm), samples.counts
        return Timing(
            clock="cuda-events" if self.work.context.device == "cuda" else "perf-counter",
            event_ns=[part.event_ns for part in samples.rounds],
            host_ns=[part.host_ns for part in samples.rounds if part.host_ns],
            loop_ns=[part.loop_ns for part in samples.rounds if part.event_ns],
            warmups=self.warmups[name],
            repeats=counts.repeats,
            shrunk=self.warmups[name] < settings.warmups or counts.repeats < settings.repeats,
            inputs=settings.inputs,
            valid_tokens=fmean(self.timers[name].tokens),
            **(vars(states) if states else {}),
        )

    def _settle(self, worker: str) -> None:
        with suppress(Crash, CallFailed):  # the arms' own windows report it
            arm = EAGER_ARM if worker == REFERENCE else ArmId(worker, "candidate", worker)
            self.work.ask(worker, protocol.Settle(), "time", arm)

    def failed(self, row: ArmRow, error: Exception) -> None:
        """Note how an arm fell out of the timing."""
        row.fail(error, "timing it")
        if isinstance(error, CallFailed):
            self.work.check_device(row)

    def _states(self, row: ArmRow) -> protocol.States | None:
        """Return an arm's times by the other clocks and in the other cache states, in the first process alone."""
        work, name = self.work, str(row.arm)
        if work.context.process or row.arm.kind not in STATE_KINDS or row.arm.worker not in work.team:
            return None
        last = next(part for part in reversed(self.samples[name].rounds) if part.event_ns)
        request = protocol.TimeStates(
            row.arm,
            seed=work.seed("states"),
            calls=STATE_CALLS[work.context.device],
            budget_s=self.budget_of(row),
            host_ns=max(last.host_ns, default=0),
            call_ns=self.timers[name].call_ns,
        )
        try:
            return work.ask(row.arm.worker, request, "clocks", row.arm)
        except (CallFailed, WrongOutput) as error:
            row.note(f"the other clocks were not taken: {error}")
            work.check_device(row)
        except Crash as crash:
            self.failed(row, crash)
        return None


def with_overwritten(verification: Verification) -> Verification:
    """Return a verification that knows an output was overwritten while it was kept, seen in the timed calls."""
    finding = PROMISES["kept output"].finding
    if finding in verification.contract or verification.status != "ok":
        return verification
    return verification.model_copy(
        update={"contract": [*verification.contract, finding], "contract_class": "contract-dependent"}
    )


# Cores left for the parent and for the rest of the machine.
SPARE_CORES = 2


@contextmanager
def busy_waiting(work: ShapeSession, workers: Sequence[str]) -> Iterator[None]:
    """Let a GPU's workers busy-wait, each on cores of its own, where that leaves cores to spare.

    Not on a CPU: there the arms' threads need every core.
    """
    if work.context.device == "cpu" or usable_cores() < len(workers) + SPARE_CORES:
        workers = ()
    for worker, cores in zip(workers, core_shares(len(workers)), strict=True):
        _ask(work, worker, protocol.BusyWait(on=True, cores=cores))
    try:
        yield
    except Exception:
        _let_sleep(work, workers)
        raise
    # Not after Ctrl-C: the request would wait for a worker in the middle of a call, and the worker is ended anyway.
    _let_sleep(work, workers)


def _let_sleep(work: ShapeSession, workers: Sequence[str]) -> None:
    for worker in workers:
        if worker in work.team:
            _ask(work, worker, protocol.BusyWait(on=False, cores=[]))


def _ask(work: ShapeSession, worker: str, request: protocol.BusyWait) -> None:
    arm = EAGER_ARM if worker == REFERENCE else ArmId(worker, "candidate", worker)
    # The next request to a lost worker reports the loss, or the check of its process does.
    with suppress(Crash, CallFailed, ReferenceLost):
        work.ask(worker, request, "clocks", arm)
