"""What the page and the plots take from a run: the one module of theirs that knows summaries and records."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rooflane.dispatch import Profile
from rooflane.eval.record.records import EAGER, RECORDS_FILE, RUN_FILE, Record
from rooflane.eval.report import tables
from rooflane.eval.stats.figures import REFERENCE, Cell, Headline, ShapeRow, Spread, Summary
from rooflane.eval.stats.run import Run

number, size, NONE = tables.number, tables.size, tables.NONE
CONTROL_TITLES = {**tables.CONTROL_TITLES, REFERENCE: "chunked reference"}


@dataclass(frozen=True)
class Truth:
    """One input on which an arm was compared with fp64, the worst over processes; errors are absolute."""

    name: str
    passed: bool
    within_gate: bool
    error: float
    eager_error: float

    @property
    def ratio(self) -> float:
        """The error in units of eager's own; infinite where eager is exact and the arm is not."""
        if self.eager_error > 0:
            return self.error / self.eager_error
        return math.inf if self.error > 0 else 0.0


@dataclass(frozen=True)
class ArmPlace:
    """One arm on one shape. Times are milliseconds; None where nothing was timed."""

    arm: str
    kind: str
    status: str
    reason: str
    event: Spread | None
    predicted_ms: float | None
    speedup: str
    use: float | None
    ragged_use: float | None
    truth: tuple[Truth, ...]
    tokens_per_s: float | None
    price: float | None


@dataclass(frozen=True)
class ShapePlace:
    """One shape; `dispatch_ms` and `device_ms` are the predicted host and device parts of the eager forward."""

    id: str
    label: str
    regime: str
    borderline: bool
    measured_regime: str | None
    flops: float
    bytes: float
    predicted_ms: float
    dispatch_ms: float
    device_ms: float
    measured_host_ms: float | None
    measured_device_ms: float | None
    dtype: str
    arms: dict[str, ArmPlace]

    @property
    def name(self) -> str:
        """The id with the dimensions."""
        return f"{self.id}: {self.label}"


@dataclass(frozen=True)
class PageData:
    """A run as the page shows it."""

    run: Run
    summary: Summary
    device: str
    candidates: tuple[str, ...]
    controls: tuple[str, ...]
    shapes: tuple[ShapePlace, ...]
    bandwidth: float
    peaks: dict[str, tuple[str, float]]
    state: str
    integrity: tuple[tuple[str, str, str], ...]

    @property
    def headlines(self) -> tuple[Headline, ...]:
        """One for each candidate."""
        return self.summary.headlines

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm that has a place somewhere: eager, the candidates, the controls, the reference."""
        names = (EAGER, *self.candidates, *self.controls, REFERENCE)
        return tuple(name for name in names if any(name in shape.arms for shape in self.shapes))


def read_page(run: Run, summary: Summary | None = None) -> PageData:
    """Read a run's records and return what the page shows; `summary` is the run's own where it is already there."""
    summary, meta = summary or run.summary(), run.meta
    by_cell: dict[tuple[str, str], list[Record]] = {}
    for record in run.records():
        by_cell.setdefault((record.shape_id, record.arm), []).append(record)
    facts, profile = summary.environment, Profile.model_validate(meta.profile)
    return PageData(
        run=run,
        summary=summary,
        device=facts.get("gpu") or facts.get("cpu") or meta.device,
        candidates=tuple(meta.candidates),
        controls=tuple(meta.controls),
        shapes=tuple(_shape(run, row, by_cell) for row in summary.rows),
        bandwidth=profile.copy_bytes_per_s,
        peaks=matrix_rates(profile, {shape.dtype for shape in meta.shape_list()}, meta.device),
        state=summary.state,
        integrity=tuple(
            (shape, arm, text)
            for (shape, arm), rows in by_cell.items()
            for text in dict.fromkeys(text for row in rows for text in row.integrity)
        ),
    )


def report_tables(summary: Summary) -> list[tuple[str, tables.Table]]:
    """Return the report's tables, each with its title less the candidate's name."""
    found = []
    for table in tables.all_tables(summary):
        owner = next((name for name in summary.meta.candidates if table.title.startswith(f"{name}: ")), "")
        found.append((table.title.removeprefix(f"{owner}: ") if owner else table.title, table))
    return found


def headline_texts(summary: Summary) -> list[str]:
    """Return each candidate's line of the report."""
    return tables.headline_lines(summary)


def condition_texts(summary: Summary) -> list[str]:
    """Return where and how the run was made, a line each."""
    return [tables.environment_line(summary), *tables.conditions(summary)]


def matrix_rates(profile: Profile, dtypes: set[str], device: str) -> dict[str, tuple[str, float]]:
    """Return the name and value of each dtype's matrix rate, and of float16 where that is the highest.

    Families use half precision in their matrix products, whatever the model's dtype. On CUDA the rate of float32
    models is the TF32 rate, unless the profile states that the card has none.
    """
    rates = {dtype: (dtype, profile.matmul_flops(dtype)) for dtype in sorted({*dtypes, "float16"})}
    if "float32" in rates and device == "cuda" and "no TF32" not in profile.matmul_float32.source:
        rates["float32"] = ("TF32", rates["float32"][1])
    if "float16" not in dtypes and rates["float16"][1] <= max(rates[dtype][1] for dtype in dtypes):
        del rates["float16"]
    return rates


_FILES = (
    (RECORDS_FILE, "the records, one JSON line each"),
    (RUN_FILE, "settings, shapes, predictions"),
    ("digest.json", "the seal of the finished run"),
)


def raw_files(run: Run) -> list[tuple[str, Path, str]]:
    """Return each stored file of a run: what it is, its path and its SHA-256 digest."""
    paths = [(text, run.folder / name) for name, text in _FILES]
    return [(text, path, hashlib.sha256(path.read_bytes()).hexdigest()) for text, path in paths if path.is_file()]


def _shape(run: Run, row: ShapeRow, by_cell: dict[tuple[str, str], list[Record]]) -> ShapePlace:
    """Return one shape."""
    predicted = run.meta.prediction(row.shape.id).classification
    eager = row.eager
    return ShapePlace(
        id=row.shape.id,
        label=row.shape.label(),
        regime=row.regime,
        borderline=row.borderline,
        measured_regime=row.measured_regime,
        flops=predicted["flops"],
        bytes=predicted["bytes"],
        predicted_ms=row.predicted_ms,
        dispatch_ms=predicted["launch_s"] * 1e3,
        device_ms=predicted["device_s"] * 1e3,
        measured_host_ms=eager.host_ms.centre if eager.host_ms else None,
        measured_device_ms=eager.device_ms.centre if eager.device_ms else None,
        dtype=row.shape.dtype,
        arms={name: _arm(cell, by_cell.get((row.shape.id, name), [])) for name, cell in row.cells.items()},
    )


def _arm(cell: Cell, records: Iterable[Record]) -> ArmPlace:
    """Return one arm on one shape."""
    checks = [record.verification for record in records if record.verification]
    ragged = [gate.use for check in checks for gate in check.ragged.values()]
    return ArmPlace(
        arm=cell.arm,
        kind=cell.kind,
        status=cell.status,
        reason=cell.reason,
        event=cell.event_ms,
        predicted_ms=cell.predicted_ms,
        speedup=f"{tables.times(cell.speedup.centre)}x" if cell.speedup else "",
        use=cell.use,
        ragged_use=max(ragged, default=None),
        truth=_truth(found for check in checks for found in check.truth),
        tokens_per_s=cell.tokens_per_s,
        price=cell.price_per_1e9_tokens,
    )


def _truth(checks: Iterable) -> tuple[Truth, ...]:
    """Return the worst of each input's comparisons, by the error in eager's own."""
    worst: dict[str, Truth] = {}
    for check in checks:
        found = Truth(check.name, check.passed, check.gate.passed, check.gate.max_abs, check.eager_max_abs)
        known = worst.get(check.name)
        if known is None or (not found.passed, found.ratio) > (not known.passed, known.ratio):
            worst[check.name] = found
    return tuple(worst.values())
