"""Blocks: in which order arms are measured, how often, and what becomes of one that fails. Loads no torch.

A block is two rounds, the second in the reverse order of the first, so a linear drift of the machine cancels within
it. Which arm stands first is drawn at random for each block. One worker measures at a time; the others wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

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
