"""Blocks: in which order arms are measured, how often, and what becomes of one that fails. Loads no torch.

A block is two rounds, the second in the reverse order of the first, so a linear drift of the machine cancels within
it. Which arm stands first is drawn at random for each block. One worker measures at a time; the others wait.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol, TypeVar

from rooflane.eval.campaign.launch import Crash
from rooflane.eval.campaign.turns import TurnWatch, cpu_times
from rooflane.eval.check.cases import Case
from rooflane.eval.check.integrity import WindowWall
from rooflane.eval.check.verify import WrongOutput, require
from rooflane.eval.record.records import REFERENCE, ArmId
from rooflane.eval.worker import protocol

if TYPE_CHECKING:
    from rooflane.eval.campaign.session import ArmJudge, ShapeSession


# Of an arm's seconds, what warm-up calls may take.
WARM_SHARE = 0.2
# Of three blocks, arms that give context stand in the first: their intervals need no more.
SPARSE_EVERY = 3


@dataclass(frozen=True)
class Counts:
    """Calls of one arm: warm-ups, calls per round, and whether the budget reduced either."""

    warmups: int
    repeats: int
    shrunk: bool


@dataclass(frozen=True)
class Round:
    """What one round of an arm gave."""

    event_ns: list[int]
    host_ns: list[int] = field(default_factory=list)
    loop_ns: int = 0


class TimedArm(Protocol):
    """One arm as the schedule sees it."""

    def measure(self, round_index: int, calls: int) -> Round:
        """Time one round of calls."""


@dataclass
class Samples:
    """Rounds of one arm as they come in."""

    counts: Counts
    rounds: list[Round] = field(default_factory=list)


def choose_counts(call_ns: float, *, warmups: int, repeats: int, rounds: int, budget_s: float) -> Counts:
    """Return counts that keep an arm's calls within its budget: a fifth for warm-ups, the rest for the rounds."""
    calls = budget_s * 1e9 / max(1, call_ns)
    warm = max(1, min(warmups, int(calls * WARM_SHARE)))
    timed = max(1, min(repeats, int(calls * (1 - WARM_SHARE) / rounds)))
    return Counts(warm, timed, warm < warmups or timed < repeats)


def time_blocks(
    arms: dict[str, TimedArm],
    counts: dict[str, Counts],
    *,
    rounds: int,
    order_seed: int,
    recount: Callable[[str, Counts, float], Counts] | None = None,
    on_block: Callable[[int], None] = lambda block: None,
    on_arm: Callable[[str], None] = lambda arm: None,
    fatal: tuple[type[Exception], ...] = (),
    sparse: Collection[str] = (),
) -> tuple[dict[str, Samples], dict[str, Exception]]:
    """Time the arms interleaved; return the rounds of those that stood, and what the others raised.

    `rounds` must be even, or an arm would stand first more often than last. `recount` is asked after each block for
    the counts that an arm's median call now allows: a slow start does not buy a short measurement. Exceptions of a
    `fatal` kind are not an arm's own and end the whole. Arms in `sparse` stand in every third block, and leave an
    empty round elsewhere.
    """
    if rounds < 2 or rounds % 2:
        raise ValueError(f"{rounds} rounds cannot be mirrored; use an even number")
    shuffle = random.Random(order_seed)
    samples = {arm: Samples(counts[arm]) for arm in arms}
    failures: dict[str, Exception] = {}
    names = list(arms)
    for index in range(rounds):
        if index % 2 == 0:
            on_block(index // 2)
            shuffle.shuffle(names)
        else:
            names.reverse()
        for arm in names:
            if arm in failures:
                continue
            if arm in sparse and index // 2 % SPARSE_EVERY:
                samples[arm].rounds.append(Round([]))
                continue
            on_arm(arm)
            try:
                samples[arm].rounds.append(arms[arm].measure(index, samples[arm].counts.repeats))
            except fatal:
                raise
            except Exception as error:  # an arm may fail in any way; the others go on
                failures[arm] = error
        if index % 2 and recount:
            for arm, found in samples.items():
                if arm not in failures and found.rounds[-1].event_ns:
                    found.counts = recount(arm, found.counts, median(found.rounds[-1].event_ns))
    return {arm: found for arm, found in samples.items() if arm not in failures}, failures


A = TypeVar("A")

# Calls ahead of a window's timed ones: the device was another worker's a moment ago. None where calls are long.
LEAD_CALLS = 2
LEAD_NS_MAX = 5_000_000
# Where a reference call is longer, a block has one check in full and no other: both together would cost more calls
# than are timed.
LONG_REFERENCE_NS = 100_000_000
# Two windows of one round never share a seed: no window has as many calls.
WINDOW_SEEDS = 1 << 20
# From here on a window's seeds belong to its call on a held stream.
HELD_SEED = WINDOW_SEEDS // 2
BYTES_A_MARK = 4


@dataclass(frozen=True)
class Schedule:
    """What every timer of one shape shares: seeds by purpose, padding, and the mode of the inputs."""

    seed: Callable[[str], int]
    padding: float
    fixed: bool

    def window(self, round_index: int, part: int) -> int:
        """Return the seed of a window's inputs."""
        return self.seed("timing") if self.fixed else self.seed(f"timing {round_index}") + part * WINDOW_SEEDS

    def case(self, round_index: int, part: int, number: int) -> Case:
        """Return the case of a timed call."""
        return Case(self.window(round_index, part) + (0 if self.fixed else number), self.padding)


@dataclass
class ArmTimer:
    """One arm in its worker. `judge` is None for arms that live beside the reference and need no check."""

    arm: ArmId
    work: ShapeSession
    schedule: Schedule
    capacity: int
    call_ns: int = 0
    judge: ArmJudge | None = None
    reference_ns: int = 0
    walls: list[WindowWall] = field(default_factory=list)
    overwritten: bool = False
    tokens: list[float] = field(default_factory=list)
    integrity: list[str] = field(default_factory=list)
    checks: int = 0
    watch: TurnWatch = field(default_factory=TurnWatch)

    def measure(self, round_index: int, calls: int) -> Round:
        """Time one round; raises `WrongOutput` when an output of a timed call is not what it must be."""
        lead = LEAD_CALLS if self.call_ns < LEAD_NS_MAX and self.capacity > 2 * LEAD_CALLS else 0
        room = max(1, self.capacity - lead)
        event_ns: list[int] = []
        host_ns: list[int] = []
        loops: list[int] = []
        parts = -(-calls // room)
        checked_part = random.Random(self.schedule.seed(f"part {round_index}")).randrange(parts)
        for part in range(parts):
            count = min(room, calls - len(event_ns))
            found = self._window(round_index, part, count, lead)
            event_ns += found.event_ns
            host_ns += found.host_ns
            loops.append(found.loop_ns)
            if self.judge and part == checked_part:
                self._check(round_index, part, found)
        self._ask(protocol.Release())
        return Round(event_ns, host_ns, round(median(loops)))

    def _ask(self, request: protocol.Request[A], what: str = "time") -> A:
        return self.work.ask(self.arm.worker, request, what, self.arm)

    def _window(self, round_index: int, part: int, calls: int, lead: int) -> protocol.Window:
        """Run one window and check what needs no judge."""
        seed, mark_seed = self.schedule.window(round_index, part), self._mark_seed(round_index, part)
        judged = self.judge is not None
        self._ask(protocol.Prepare(self.arm, seed, calls, lead, mark_seed, self.schedule.fixed, judged))
        pid = self.work.team.pid(self.arm.worker)
        cpu = cpu_times(pid)
        before = perf_counter_ns()
        self._ask(protocol.Go())
        wall = perf_counter_ns() - before
        self.watch.add(round_index // 2, str(self.arm), self.arm.worker, wall, cpu, cpu_times(pid))
        found = self._ask(protocol.Finish())
        if self.arm.worker == REFERENCE:
            self.watch.disturb(round_index // 2, found.outside)
        if len(found.event_ns) != calls:
            raise Crash("the worker's times are not one for each call that was asked for")
        self.walls.append(WindowWall(wall, calls + lead, calls, sum(found.event_ns)))
        if self.judge and found.fault:
            self._tampered(f"timed calls returned something else than the verified ones: {found.fault}")
        if found.changed:
            self._tampered(f"timed calls changed what they were given: {found.changed}")
        if self.judge and found.deferred:
            self._tampered(
                f"the output of timed call {found.deferred[0] + 1} of {calls} changed after its stream passed it: "
                "work was left to be done outside the clock"
            )
        self.tokens.append(found.tokens)
        self.overwritten = self.overwritten or found.overwritten
        return found

    def _check(self, round_index: int, part: int, found: protocol.Window) -> None:
        """Have the judge check one call of a window. The call is chosen after the window has run."""
        block, half = divmod(round_index, 2)
        in_full = random.Random(self.schedule.seed(f"check {block}")).randrange(2) == half
        chosen = random.Random(self.schedule.seed(f"call {round_index} {part}"))
        if in_full and found.kept:
            self._compare_kept(round_index, part, chosen.choice(found.kept), found)
        elif self.reference_ns < LONG_REFERENCE_NS:
            self._compare_marks(round_index, part, chosen.randrange(len(found.event_ns)), found)
        # Last: one more call of a candidate with one output buffer overwrites what the window kept.
        if in_full and self.work.context.device == "cuda":
            self._hold_stream(round_index, part)

    def _hold_stream(self, round_index: int, part: int) -> None:
        """Check one more call, with its stream held: work left to another stream is not finished when it is read."""
        seed = self.schedule.window(round_index, part) + HELD_SEED
        held = self._ask(protocol.Hold(seed), "check")
        if held.fault:
            self._tampered(f"a call on a held stream returned something else than the verified ones: {held.fault}")
        if held.deferred:
            self._tampered(
                f"the output of a call after round {round_index + 1} changed after its stream passed it: work was left "
                "on another stream"
            )
        if self.reference_ns < LONG_REFERENCE_NS:
            case = Case(seed + held.number, self.schedule.padding)
            ratio = self.judge.compare_marks(case, held.marks, self._mark_seed(round_index, part))
            if not ratio <= 1:
                self._tampered(
                    f"a call on a held stream after round {round_index + 1} gives another answer than the reference, "
                    f"{ratio:.3g} times the limit: it does not wait for its input on the stream it is called on"
                )

    def _compare_kept(self, round_index: int, part: int, number: int, found: protocol.Window) -> None:
        case, marks = self.schedule.case(round_index, part, number), self._marks(found, number)
        output = self._ask(protocol.Ship(number), "check")
        compared = self.judge.compare_kept(case, output, marks, self._mark_seed(round_index, part))
        self.checks += 1
        if not compared.gate.passed:
            self.integrity.append("an output of a timed call is wrong although the verified ones were right")
        require(compared.gate, f"timed call {number + 1} of round {round_index + 1}")
        if not compared.same:
            self._tampered(
                f"the bytes handed over for timed call {number + 1} of round {round_index + 1} are not those its "
                "fingerprint was taken of"
            )

    def _compare_marks(self, round_index: int, part: int, number: int, found: protocol.Window) -> None:
        case, marks = self.schedule.case(round_index, part, number), self._marks(found, number)
        ratio = self.judge.compare_marks(case, marks, self._mark_seed(round_index, part))
        self.checks += 1
        if not ratio <= 1:
            self._tampered(
                f"the output of timed call {number + 1} of round {round_index + 1} has another fingerprint than the "
                f"reference's answer, {ratio:.3g} times the limit, although the verified outputs were right"
            )

    def _tampered(self, line: str) -> None:
        """Note a finding, and take the arm out of the timing."""
        self.integrity.append(line)
        raise WrongOutput(line)

    def _mark_seed(self, round_index: int, part: int) -> int:
        return self.schedule.seed(f"marks {round_index} {part}")

    def _marks(self, found: protocol.Window, number: int) -> str:
        """Return one call's fingerprint of a window's."""
        try:
            data = base64.b64decode(found.marks, validate=True)
        except ValueError:
            data = b"?"
        size = len(data) // len(found.event_ns)
        if not size or size % BYTES_A_MARK or size * len(found.event_ns) != len(data):
            raise Crash("the worker's fingerprints are not one for each call that was asked for")
        return base64.b64encode(data[number * size : (number + 1) * size]).decode()
