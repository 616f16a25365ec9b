"""From records to figures: everything a report shows is computed here, from raw nanoseconds, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.records import EAGER, Record, RunMeta
from rooflane.eval.stats import Interval, TimesError, median_ns, paired_log_ratio, t_interval
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.eval.ranking import Place

NULL = "identity"
REFERENCE = "chunked_reference"
# Eager is launch-bound when a call lasts this many times longer than the device needs with the host kept ahead.
LAUNCH_SHARE = 1.3
FAILED = ("incorrect", "error", "oom", "unsupported")
# An arm is as bad as its worst process: one failure among eight is a failure.
SEVERITY = ("ok", "skipped", "infeasible", "unsupported", "oom", "error", "incorrect")


@dataclass(frozen=True)
class Spread:
    """A time in milliseconds: the median over processes of the per-process medians, and their range."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One arm on one shape, over all processes; figures are None where nothing was timed."""

    arm: str
    kind: str
    status: str
    reason: str = ""
    processes: int = 0
    event_ms: Spread | None = None
    host_ms: Spread | None = None
    device_ms: Spread | None = None
    speedup: Interval | None = None
    use: float | None = None
    setup_s: float | None = None
    counts: str = ""
    shrunk: bool = False
    family: str = ""
    rule: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    contract: str = ""
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    predicted_ms: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    tokens_per_s: float | None = None
    price_per_1e9_tokens: float | None = None


@dataclass(frozen=True)
class ShapeRow:
    """One shape: what was predicted, what was measured, and every arm's cell."""

    shape: Shape
    regime: str
    borderline: bool
    predicted_ms: float
    predicted_peak_bytes: int
    measured_regime: str | None
    cells: dict[str, Cell]

    @property
    def eager(self) -> Cell:
        """The baseline's cell."""
        return self.cells[EAGER]


@dataclass(frozen=True)
class Headline:
    """A candidate's geometric mean over the shapes that count, or the reason why there is none.

    A shape counts when eager was timed on it in every process. The mean exists only when the candidate's output was
    right and timed on every one of them in every process: a failed shape takes the mean away, it never leaves it.
    """

    candidate: str
    passed: int
    shapes: int
    geomean: Interval | None
    per_process: tuple[float, ...]
    null: Interval | None
    verdict: str
    why: str


@dataclass(frozen=True)
class Summary:
    """A run in figures."""

    meta: RunMeta
    rows: tuple[ShapeRow, ...]
    headlines: tuple[Headline, ...]
    environment: dict[str, Any]
    missing: int
    ranking: tuple[Place, ...] = ()

    def row(self, shape_id: str) -> ShapeRow:
        """Return a shape's row."""
        return next(row for row in self.rows if row.shape.id == shape_id)

    def failures(self) -> list[tuple[ShapeRow, Cell]]:
        """Return the cells of eager and the candidates that failed; a failing control is a finding, not a failure."""
        return [
            (row, cell)
            for row in self.rows
            for cell in row.cells.values()
            if cell.status in FAILED and cell.kind != "control"
        ]

    def problems(self) -> list[str]:
        """Return one clear line per failed cell: what, where, why."""
        lines = [
            f"shape {row.shape.id} ({row.shape.label()}): {cell.arm} is {_SAID[cell.status]}: {cell.reason}"
            for row, cell in self.failures()
        ]
        if self.missing:
            lines.append(f"{self.missing} planned rows are missing; `rooflane eval --resume` measures them")
        return lines

    def exit_code(self, require: str = "complete", accept_contract: bool = False) -> ExitCode:
        """Return the run's exit status; wrong outputs come before missing rows, those before broken promises."""
        failed = {cell.status for _, cell in self.failures()}
        candidates = [cell for row in self.rows for cell in row.cells.values() if cell.kind == "candidate"]
        if "incorrect" in failed:
            return ExitCode.INCORRECT
        if failed or self.missing:
            return ExitCode.INCOMPLETE
        if not accept_contract and any(cell.findings or cell.contract for cell in candidates):
            return ExitCode.CONTRACT
        if require == "faster":
            verdicts = {headline.verdict for headline in self.headlines}
            if "slower" in verdicts:
                return ExitCode.SLOWER
            if verdicts != {"faster"}:
                return ExitCode.INCONCLUSIVE
        return ExitCode.COMPLETE

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "run": self.meta.id,
            "device": self.meta.device,
            "quick": self.meta.settings["quick"],
            "processes": self.meta.settings["processes"],
            "headlines": [asdict(headline) for headline in self.headlines],
            "ranking": [asdict(place) for place in self.ranking],
            "shapes": [asdict(row) for row in self.rows],
            "missing_rows": self.missing,
            "problems": self.problems(),
            "environment": self.environment,
        }


_SAID = {"incorrect": "wrong", "error": "in error", "oom": "out of memory", "unsupported": "not supported"}


def summarise(meta: RunMeta, records: Iterable[Record]) -> Summary:
    """Compute every figure of a run from its page and its rows; pure and deterministic."""
    from rooflane.eval.ranking import rank

    by_cell: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        by_cell.setdefault((record.shape_id, record.arm), {})[record.process] = record
    rows = tuple(_shape_row(meta, shape, by_cell) for shape in meta.shape_list())
    environments = [record.environment for cells in by_cell.values() for record in cells.values() if record.environment]
    return Summary(
        meta=meta,
        rows=rows,
        headlines=tuple(_headline(meta, candidate, rows, by_cell) for candidate in meta.candidates),
        environment=environments[-1] if environments else {},
        missing=sum(
            process not in by_cell.get((row.shape.id, arm), ())
            for row in rows
            for process in range(meta.settings["processes"])
            for arm in meta.planned(process, row.shape.id)
        ),
        ranking=rank(meta, rows, by_cell),
    )


def process_medians(records: dict[int, Record]) -> dict[int, float]:
    """Return each process's median event nanoseconds, over the rounds' medians; impossible times are left out."""
    medians = {}
    for process, record in records.items():
        try:
            medians[process] = median([median_ns(part) for part in record.timing.event_ns]) if record.timing else None
        except TimesError:
            medians[process] = None
    return {process: value for process, value in medians.items() if value is not None}


def log_ratios(base: dict[int, Record], arm: dict[int, Record]) -> dict[int, float]:
    """Return each process's log-ratio of two arms timed beside each other, positive where `arm` is faster.

    A process in which either was not timed, or shows an impossible time, has none.
    """
    ratios = {}
    for process in sorted(base.keys() & arm.keys()):
        first, second = base[process].timing, arm[process].timing
        if first is None or second is None:
            continue
        try:
            ratios[process] = paired_log_ratio(first.event_ns, second.event_ns)
        except TimesError:
            continue
    return ratios


def _shape_row(meta: RunMeta, shape: Shape, by_cell: dict[tuple[str, str], dict[int, Record]]) -> ShapeRow:
    """Return one shape's row."""
    classification = meta.prediction(shape.id).classification
    cells = {}
    eager = by_cell.get((shape.id, EAGER), {})
    names = [*meta.planned(0, shape.id), REFERENCE]
    for name in names:
        records = by_cell.get((shape.id, name), {})
        if records or name != REFERENCE:
            base = by_cell.get((shape.id, REFERENCE), {}) if not process_medians(eager) else eager
            cells[name] = _cell(meta, shape, name, records, base)
    return ShapeRow(
        shape=shape,
        regime=classification["regime"],
        borderline=classification["borderline"],
        predicted_ms=classification["predicted_s"] * 1e3,
        predicted_peak_bytes=classification["peak_bytes"],
        measured_regime=_measured_regime(cells[EAGER], classification),
        cells=cells,
    )


def _cell(meta: RunMeta, shape: Shape, name: str, records: dict[int, Record], base: dict[int, Record]) -> Cell:
    """Return one arm's figures on one shape."""
    kind = "baseline" if name == EAGER else "control" if name in meta.controls else "candidate"
    if not records:
        return Cell(name, "reference" if name == REFERENCE else kind, "error", "no row was written")
    rows = [records[process] for process in sorted(records)]
    worst = max(rows, key=lambda row: SEVERITY.index(row.status))
    gates = [row.verification.gate for row in rows if row.verification and row.verification.gate]
    setups = [row.setup_s for row in rows if row.setup_s is not None]
    timed = [row.timing for row in rows if row.timing]
    event = _spread(_whole_batch(records).values())
    tokens = price = None
    if event and worst.status == "ok" and (valid := fmean(timing.valid_tokens for timing in timed)) > 0:
        tokens = valid / (event.median / 1e3)
        price = meta.price_per_hour * 1e9 / (3600 * tokens) if meta.price_per_hour else None
    planned = next((row for row in rows if row.family), rows[0])
    status, reason = worst.status, worst.reason
    if status == "ok" and timed and len(process_medians(records)) < len(timed):
        status, reason = "error", "a call was timed at zero or less, which no real call takes"
    return Cell(
        arm=name,
        kind=worst.kind,
        status=status,
        reason=reason,
        processes=len(timed),
        event_ms=event,
        host_ms=_spread(median(sum(timing.host_ns, [])) for timing in timed if timing.host_ns),
        device_ms=_spread(median(timing.device_ns) for timing in timed if timing.device_ns),
        speedup=_speedup(name, records, base),
        use=max((gate.use for gate in gates), default=None),
        setup_s=max(setups, default=None),
        counts=_counts(timed),
        shrunk=any(timing.shrunk for timing in timed),
        family=planned.family,
        rule=planned.rule,
        options=planned.options,
        contract=planned.contract,
        findings=_distinct(finding for row in rows if row.verification for finding in row.verification.contract),
        notes=_distinct(note for row in rows if row.verification for note in row.verification.notes),
        predicted_ms=planned.predicted_s * 1e3 if planned.predicted_s is not None else None,
        predicted_peak_bytes=planned.predicted_peak_bytes,
        measured_peak_bytes=max((row.measured_peak_bytes or 0 for row in rows), default=0) or None,
        tokens_per_s=tokens,
        price_per_1e9_tokens=price,
    )


def _whole_batch(records: dict[int, Record]) -> dict[int, float]:
    """Return each process's nanoseconds of one call; of the chunked reference, the sum over all batch elements.

    Where not every element was timed, the mean of those that were stands for the rest.
    """
    whole = {}
    for process, value in process_medians(records).items():
        timing = records[process].timing
        elements = timing.elements_total
        whole[process] = fmean(timing.event_ns[0]) * elements if elements else value
    return whole


def _speedup(name: str, records: dict[int, Record], base: dict[int, Record]) -> Interval | None:
    """Return an arm's speedup with its interval: over eager by pairs, over the chunked reference by totals."""
    if name in (EAGER, REFERENCE):
        return None
    if any(record.arm == REFERENCE for record in base.values()):
        mine, totals = _whole_batch(records), _whole_batch(base)
        logs = {process: math.log(totals[process] / mine[process]) for process in mine.keys() & totals.keys()}
    else:
        logs = log_ratios(base, records)
    return t_interval([logs[process] for process in sorted(logs)]) if logs else None


def _spread(values: Iterable[float]) -> Spread | None:
    """Return nanoseconds, one value per process, as a spread in milliseconds."""
    found = sorted(values)
    return Spread(median(found) / 1e6, found[0] / 1e6, found[-1] / 1e6) if found else None


def _counts(timed: Sequence[Any]) -> str:
    """Return calls as `rounds x repeats`, the smallest repeats of any process."""
    if not timed:
        return ""
    return f"{len(timed[0].event_ns)}x{min(timing.repeats for timing in timed)}"


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts without repeats, in order."""
    return tuple(dict.fromkeys(texts))


def _measured_regime(eager: Cell, classification: dict[str, Any]) -> str | None:
    """Return the regime the clocks show, None where no device clock ran (a CPU, or nothing timed).

    Launch when a call lasts over 1.3 times what the device needs with the host kept ahead. Otherwise the device is
    the limit; which side of it cannot be read from a clock, so the ledger's larger share says.
    """
    if eager.event_ms is None or eager.device_ms is None:
        return None
    if eager.event_ms.median > LAUNCH_SHARE * eager.device_ms.median:
        return "launch"
    return "compute" if classification["compute_s"] >= classification["bandwidth_s"] else "bandwidth"


def _headline(
    meta: RunMeta, candidate: str, rows: Sequence[ShapeRow], by_cell: dict[tuple[str, str], dict[int, Record]]
) -> Headline:
    """Return a candidate's geometric mean and verdict."""
    processes = range(meta.settings["processes"])
    counted = [row for row in rows if row.eager.event_ms and row.eager.processes == len(processes)]
    passed = [row for row in counted if row.cells[candidate].status == "ok" and row.cells[candidate].event_ms]
    null = _geomean(NULL, counted, by_cell, processes) if NULL in meta.controls else None
    result = Headline(candidate, len(passed), len(counted), None, (), t_interval(null) if null else None, "none", "")
    if not counted:
        return replace(result, why="no shape was timed in every process")
    if len(passed) < len(counted):
        why = f"only {len(passed)} of {len(counted)} shapes passed; no mean is formed over the rest"
        return replace(result, why=why)
    logs = _geomean(candidate, counted, by_cell, processes)
    if logs is None:
        return replace(result, why="the candidate was not timed on every shape in every process")
    interval = t_interval(logs)
    verdict, why = _verdict(meta, interval, result.null)
    return replace(result, geomean=interval, per_process=tuple(map(math.exp, logs)), verdict=verdict, why=why)


def _geomean(
    arm: str,
    rows: Sequence[ShapeRow],
    by_cell: dict[tuple[str, str], dict[int, Record]],
    processes: Iterable[int],
) -> list[float] | None:
    """Return each process's mean log-ratio over the shapes; None when any shape lacks one in any process."""
    ratios = [log_ratios(by_cell[row.shape.id, EAGER], by_cell.get((row.shape.id, arm), {})) for row in rows]
    if not ratios or any(process not in found for found in ratios for process in processes):
        return None
    return [fmean(found[process] for found in ratios) for process in processes]


def _verdict(meta: RunMeta, interval: Interval, null: Interval | None) -> tuple[str, str]:
    """Return faster, slower, inconclusive or none, against this run's own noise floor."""
    if meta.settings["quick"]:
        return "none", "a quick run claims no verdict"
    if interval.low is None:
        return "none", "one process gives no interval"
    if null is None or null.low is None:
        return "inconclusive", "no identity null was timed to tell the noise floor"
    # Until nulls of other runs are stored, this run's own half-width stands for the floor (provisional).
    floor = (null.high - null.low) / 2
    if interval.low > 1 + floor:
        return "faster", f"the interval lies above the null's floor of {floor:.1%}"
    if interval.high < 1 - floor:
        return "slower", f"the interval lies below the null's floor of {floor:.1%}"
    return "inconclusive", f"the interval does not clear the null's floor of {floor:.1%}"
