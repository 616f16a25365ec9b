"""A campaign reduced to one median a round: the numbers every ratio, interval and verdict is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooflane.eval.record.records import EAGER, Record
from rooflane.eval.stats.intervals import TimesError, median_ns

Cell = tuple[str, str]  # shape, arm
Place = tuple[str, int]  # shape, process
# What is compared must have every round; what only watches the machine may sit out blocks of a long suite.
SPARSE_KINDS = ("control", "noop", "anchor")


@dataclass(frozen=True)
class Rounds:
    """Medians in ns by shape, arm and process, and each block's telemetry by shape and process.

    Rounds 2i and 2i + 1 are the mirrored halves of block i. A sparse arm has None where it sat out.
    """

    times: Mapping[Cell, Mapping[int, Sequence[float | None]]]
    telemetry: Mapping[Place, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def of(self, shape: str, arm: str) -> Mapping[int, Sequence[float | None]]:
        """Return an arm's medians on a shape by process; empty when it was not timed."""
        return self.times.get((shape, arm), {})

    def places(self) -> list[Place]:
        """Return the shapes and processes in which eager was timed, in order."""
        return sorted(
            (shape, process) for (shape, arm), found in self.times.items() if arm == EAGER for process in found
        )


def rounds_of(records: Iterable[Record]) -> Rounds:
    """Reduce rows to medians; an arm with an impossible time in a process has none there."""
    times: dict[Cell, dict[int, list[float | None]]] = {}
    telemetry: dict[Place, list[Mapping[str, Any]]] = {}
    for record in records:
        if record.timing is None:
            continue
        sparse = record.kind in SPARSE_KINDS
        try:
            medians = [None if sparse and not part else median_ns(part) for part in record.timing.event_ns]
        except TimesError:
            continue
        times.setdefault((record.shape_id, record.arm), {})[record.process] = medians
        blocks = record.telemetry.get("blocks")
        if blocks and (record.arm == EAGER or (record.shape_id, record.process) not in telemetry):
            # A reading that failed is no evidence either way.
            telemetry[record.shape_id, record.process] = [state or {} for state in blocks]
    return Rounds(times, telemetry)
