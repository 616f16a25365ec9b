"""What a record says about accuracy, as lines of a table: both sides' errors against fp64. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rooflane.eval.record.records import BIN_EDGES, TILE, Record, TruthCheck

COLUMNS = ("input", "use", "headroom", "max / eager's", "rms / eager's", "worst tile", "compared")


@dataclass(frozen=True)
class AccuracyLine:
    """One input of one arm on one shape, the process with the largest use.

    `use` is that of what the check allows, above 1 fails; `headroom` how many times the errors could grow before it
    does; the ratios are errors in units of the baseline's own. The worst tile, of `TILE` tokens x `TILE` columns,
    is (row block, column block) within the sequence that holds the worst element. The bins count elements by use of
    tolerance, upper edges `BIN_EDGES` and a last one above 1.
    """

    shape: str
    arm: str
    input: str
    use: float
    headroom: float
    max_abs: float
    eager_max_abs: float
    max_ratio: float
    rms_ratio: float | None
    worst_tile: tuple[int, int] | None
    bins: tuple[int, ...]
    eager_bins: tuple[int, ...]
    rows: str

    def cells(self) -> tuple[str, ...]:
        """Return the line under `COLUMNS`."""
        rms = "" if self.rms_ratio is None else f"{self.rms_ratio:.2f}"
        tile = "" if self.worst_tile is None else f"{self.worst_tile[0]}, {self.worst_tile[1]}"
        return (
            self.input,
            f"{self.use:.3g}",
            f"{self.headroom:.3g}x",
            f"{self.max_ratio:.2f}",
            rms,
            tile,
            self.rows,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with what the tile and the bins are counted in."""
        return asdict(self) | {"tile": TILE, "bin_edges": list(BIN_EDGES)}


def accuracy_lines(records: Iterable[Record]) -> list[AccuracyLine]:
    """Return one line for each shape, arm and input that was compared with fp64, in the order of the records."""
    worst: dict[tuple[str, str, str], TruthCheck] = {}
    for record in records:
        for check in record.verification.truth if record.verification else ():
            key = (record.shape_id, record.arm, check.name)
            worst[key] = max(check, worst.get(key, check), key=lambda one: one.use)
    return [_line(*key, check) for key, check in worst.items()]


def _line(shape: str, arm: str, name: str, check: TruthCheck) -> AccuracyLine:
    gate = check.gate
    return AccuracyLine(
        shape=shape,
        arm=arm,
        input=name,
        use=check.use,
        headroom=check.headroom,
        max_abs=gate.max_abs,
        eager_max_abs=check.eager_max_abs,
        max_ratio=check.max_ratio,
        rms_ratio=check.rms_ratio,
        worst_tile=gate.tile_of_worst if len(gate.worst_index) > 1 else None,
        bins=gate.bins,
        eager_bins=check.eager_bins,
        rows=check.rows,
    )
