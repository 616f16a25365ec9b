"""The barriers of the persistent rung as a protocol: blocks of a cluster, producers and warpgroups in random order.

It is run as the kernel's comment states it, with barriers that tell phases apart by their parity alone. A wait that
passes too early reads another step's tile; an arrival too many or too few is a deadlock; both are found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest


class Barrier:
    """A phase ends with its arrivals and its copies. `passed(parity)` is the hardware's wait."""

    def __init__(self, arrivals: int, copies: int = 0) -> None:
        self.arrivals, self.copies = arrivals, copies
        self.left, self.due, self.phase = arrivals, 0, 0

    def arrive(self) -> None:
        self.left -= 1
        self.settle()

    def expect(self) -> None:
        self.due += self.copies
        self.arrive()

    def copied(self) -> None:
        self.due -= 1
        self.settle()

    def settle(self) -> None:
        assert self.left >= 0, "an arrival too many"
        if self.left == 0 and self.due == 0:
            self.left, self.phase = self.arrivals, self.phase + 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Cluster:
    """A run of `turns` tiles of `steps` steps; each wait is a condition that the scheduler polls."""

    stages: int
    steps: int
    turns: int
    blocks: int
    pingpong: bool
    turned: bool = True  # whether warpgroups wait for their turn
    flights: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        users = self.blocks * (1 if self.pingpong else 2)
        self.full = [[Barrier(1, 1 + self.blocks) for _ in range(self.stages)] for _ in range(self.blocks)]
        self.empty = [[Barrier(users) for _ in range(self.stages)] for _ in range(self.blocks)]
        self.memory = [[[-1] * (1 + self.blocks) for _ in range(self.stages)] for _ in range(self.blocks)]
        self.turn = [0] * self.blocks

    def place(self, step: int) -> tuple[int, int]:
        return step % self.stages, step // self.stages % 2

    def land(self, block: int, slot: int, part: int, step: int) -> Callable[[], None]:
        def copy() -> None:
            self.memory[block][slot][part] = step
            self.full[block][slot].copied()

        return copy

    def produce(self, block: int) -> Iterator[Callable[[], bool]]:
        for step in range(self.turns * self.steps):
            slot, parity = self.place(step)
            yield lambda slot=slot, parity=parity: self.empty[block][slot].passed(parity ^ 1)
            self.full[block][slot].expect()
            self.flights.append(self.land(block, slot, 0, step))
            self.flights += [self.land(other, slot, 1 + block, step) for other in range(self.blocks)]

    def consume(self, block: int, group: int) -> Iterator[Callable[[], bool]]:
        def free(step: int) -> None:
            slot, _ = self.place(step)
            assert set(self.memory[block][slot]) == {step}, "a tile in use was overwritten"
            for other in range(self.blocks):
                self.empty[other][slot].arrive()

        for turn in range(group if self.pingpong else 0, self.turns, 2 if self.pingpong else 1):
            if self.pingpong and self.turned:
                yield lambda turn=turn: self.turn[block] >= turn
            for step in range(turn * self.steps, (turn + 1) * self.steps):
                slot, parity = self.place(step)
                yield lambda slot=slot, parity=parity: self.full[block][slot].passed(parity)
                assert set(self.memory[block][slot]) == {step}, "another step's tile"
                if step > turn * self.steps:
                    yield lambda: True  # the products of the step before end at any time
                    free(step - 1)
            self.turn[block] = turn + 1
            yield lambda: True
            free((turn + 1) * self.steps - 1)

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        actors = [self.produce(block) for block in range(self.blocks)]
        actors += [self.consume(block, group) for block in range(self.blocks) for group in range(2)]
        waiting = {actor: (lambda: True) for actor in actors}
        while waiting or self.flights:
            ready = [actor for actor, condition in waiting.items() if condition()]
            assert ready or self.flights, "a deadlock"
            # Copies land in any order, as late as all else waits.
            if not ready or (self.flights and chance.random() < 0.3):
                self.flights.pop(chance.randrange(len(self.flights)))()
                continue
            actor = chance.choice(ready)
            condition = next(actor, None)
            if condition is None:
                del waiting[actor]
            else:
                waiting[actor] = condition


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("stages", "steps", "turns"), [(4, 1, 9), (4, 7, 5), (5, 3, 6), (6, 16, 4), (2, 5, 3)])
def test_every_step_is_read_whole_and_the_run_ends(pingpong, blocks, stages, steps, turns):
    for seed in range(20):
        cluster = Cluster(stages, steps, turns, blocks, pingpong)
        cluster.run(seed)
        # Each phase was used once: full and empty end level.
        total = steps * turns
        for slot in range(stages):
            uses = (total - slot + stages - 1) // stages
            assert all(cluster.full[block][slot].phase == uses for block in range(blocks))
            assert all(cluster.empty[block][slot].phase == uses for block in range(blocks))


def test_without_turns_a_parity_lets_a_warpgroup_through_too_early():
    """Two phases ahead, the parity is the same: the second warpgroup takes the first tile's steps for its own."""
    with pytest.raises(AssertionError, match="another step's tile"):
        for seed in range(20):
            Cluster(4, 8, 2, 1, pingpong=True, turned=False).run(seed)


def test_a_block_that_does_not_wait_for_its_neighbour_overwrites_a_tile():
    cluster = Cluster(2, 9, 2, 2, pingpong=False)
    for slots in cluster.empty:
        for slot, _ in enumerate(slots):
            slots[slot] = Barrier(2)  # the own warpgroups alone
    with pytest.raises(AssertionError, match="overwritten|another|too many|deadlock"):
        for seed in range(20):
            cluster.run(seed)
