"""What a report is made of: cells, rows, headlines and the summary that holds them; computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rooflane.eval.check.verify import SPENT
from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.record.records import BIN_EDGES, EAGER, TILE, Record, RunMeta, TruthCheck
from rooflane.eval.stats.estimator import ShapeEstimate
from rooflane.eval.stats.mean import Interval
from rooflane.eval.stats.rounds import Contamination
from rooflane.eval.stats.verdict import Floor, Verdict
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from rooflane.eval.stats.headline import Place
    from rooflane.eval.stats.host_pace import HostPace

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
        return (self.input, f"{self.use:.3g}", f"{self.headroom:.3g}x", f"{self.max_ratio:.2f}", rms, tile, self.rows)

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


NULL = "identity"
REFERENCE = "chunked_reference"
# Eager is launch-bound when a call lasts this many times longer than the device needs with the host kept ahead.
LAUNCH_SHARE = 1.3
FAILED = ("incorrect", "error", "oom", "unsupported", "refused")
# The kinds that are judged. A failing control, copy, no-op or anchor is a finding, not a failure.
JUDGED_KINDS = ("baseline", "candidate", "reference")
# Tampering by these kinds condemns the run; a copy runs the candidate's own code.
TRUSTED_KINDS = (*JUDGED_KINDS, "copy")


@dataclass(frozen=True)
class Spread:
    """A time in milliseconds with its range over processes.

    `centre` is the geometric mean over processes for event time, which speedups divide, and the median for the others.
    """

    centre: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One arm on one shape, over all processes; figures are None where nothing was timed.

    `base_ms` is what the arm is compared with, eager or the chunked reference, in the same processes and blocks as
    `event_ms`: `base_ms / event_ms.centre` is the centre of `speedup`.
    """

    arm: str
    kind: str
    status: str
    reason: str = ""
    processes: int = 0
    event_ms: Spread | None = None
    base_ms: float | None = None
    host_ms: Spread | None = None
    device_ms: Spread | None = None
    idle_ms: Spread | None = None
    cold_ms: Spread | None = None
    rotating_ms: Spread | None = None
    harness_ms: Spread | None = None
    speedup: Interval | None = None
    estimate: ShapeEstimate | None = None
    floor: Floor | None = None
    verdict: str = Verdict.NONE
    why: str = ""
    dividend: float | None = None
    launch_share: float | None = None
    hidden_ms: float | None = None
    use: float | None = None
    setup_s: float | None = None
    break_even_calls: float | None = None
    counts: str = ""
    shrunk: bool = False
    family: str = ""
    rule: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    contract: str = ""
    contract_class: str = ""
    integrity: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    predicted_ms: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    tokens_per_s: float | None = None
    price_per_1e9_tokens: float | None = None
    price: Interval | None = None

    @property
    def depends_on_contract(self) -> bool:
        """Whether the arm is right only under a contract: declared, or a promise seen broken."""
        return bool(self.findings or self.contract or self.contract_class == "contract-dependent")

    @property
    def contract_reason(self) -> str:
        """The first promise seen broken, or the declared contract."""
        return next(filter(None, (*self.findings, self.contract)), "a promise to the caller is not kept")


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
    # The regime and `predicted_ms` come from a run of eager before the campaign, and predict nothing.
    profiled: bool = False

    @property
    def eager(self) -> Cell:
        """The baseline's cell."""
        return self.cells[EAGER]


@dataclass(frozen=True)
class Headline:
    """A candidate's geometric mean over the shapes that count, or the reason why there is none.

    A shape counts when eager was timed on it in every process. The mean exists only when the candidate's output was
    right and timed on every one of them in every process: a failed shape takes the mean away, it never leaves it.
    `penalised` is the second figure then: the mean with every failed shape at 1x, or at its own ratio where lower.
    `ratio_verdict` is what the times alone say; `verdict` puts the facts about the outputs before it. `partial` counts
    the shapes timed in some processes only: the clock chose what is left, so the verdict over it is held to the strict
    level. `lost` are the processes in which every block of some shape was disturbed, each with those shapes.
    """

    candidate: str
    passed: int
    shapes: int
    geomean: Interval | None
    per_process: tuple[float, ...]
    null: Interval | None
    verdict: str
    why: str
    copy_null: Interval | None = None
    floor: Floor | None = None
    ratio_verdict: str = Verdict.NONE
    sign_flip_p: float | None = None
    penalised: Interval | None = None
    dividend: float | None = None
    mix_tokens_per_s: Interval | None = None
    mix_price: Interval | None = None
    partial: int = 0
    oversize: int = 0
    not_run: int = 0
    lost: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """A run in figures."""

    meta: RunMeta
    rows: tuple[ShapeRow, ...]
    headlines: tuple[Headline, ...]
    environment: dict[str, Any]
    missing: int
    contamination: Contamination = field(default_factory=Contamination)
    ranking: tuple[Place, ...] = ()
    accuracy: tuple[AccuracyLine, ...] = ()
    tick_ns: int | None = None
    host: HostPace | None = None

    def row(self, shape_id: str) -> ShapeRow:
        """Return a shape's row."""
        return next(row for row in self.rows if row.shape.id == shape_id)

    def failures(self) -> list[tuple[ShapeRow, Cell]]:
        """Return the cells of eager and the candidates that failed; a failing control is a finding, not a failure."""
        return [(row, cell) for row, cell in self._cells(JUDGED_KINDS) if cell.status in FAILED]

    def unchecked(self) -> list[tuple[ShapeRow, Cell]]:
        """Return the cells of eager and the candidates of which checks were not run."""
        return [(row, cell) for row, cell in self._cells(JUDGED_KINDS) if cell.missed]

    def problems(self) -> list[str]:
        """Return one clear line per failed cell: what, where, why."""
        lines = [
            f"shape {row.shape.id} ({row.shape.label()}): {cell.arm} is {_SAID[cell.status]}: {cell.reason}"
            for row, cell in self.failures()
        ]
        lines += [
            f"shape {row.shape.id} ({row.shape.label()}): {cell.arm} shows evidence of manipulation: {text}"
            for row, cell in self._cells(TRUSTED_KINDS)
            for text in cell.integrity
        ]
        lines += [
            f"shape {row.shape.id} ({row.shape.label()}): {missed_text(cell.missed)} of {cell.arm}"
            + ("; a longer `--time-budget` leaves more time for checks" if cell.missed[0].endswith(SPENT) else "")
            for row, cell in self.unchecked()
        ]
        if self.missing:
            rows = "row is" if self.missing == 1 else "rows are"
            lines.append(f"{self.missing} planned {rows} missing; `rooflane eval --resume` measures them")
        if self.unmeasured and not lines:
            lines.append("nothing was measured: every shape was skipped; the report has the reasons")
        return lines

    @property
    def state(self) -> str:
        """What the run amounts to, in one line for a reader."""
        code = self.exit_code()
        if code == ExitCode.INCOMPLETE and (unchecked := self.unchecked()):
            count = sum(len(cell.missed) for _, cell in unchecked)
            shapes = ", ".join(dict.fromkeys(row.shape.id for row, _ in unchecked))
            text = f"{count} {'check was' if count == 1 else 'checks were'} not run, on shape {shapes}"
            failed = any((self.failures(), self.missing, self.unmeasured))
            return f"{_STATES[code]}; {text}" if failed else f"incomplete: {text}"
        if code != ExitCode.COMPLETE:
            return _STATES[code]
        if self.not_run:
            ran = len(self.rows) - len(self.not_run)
            return f"every checked output correct on {ran} of {len(self.rows)} shapes; {len(self.not_run)} not run"
        return "complete, every checked output correct"

    @property
    def not_run(self) -> tuple[str, ...]:
        """The shapes on which neither eager nor any candidate has a time, by id."""
        arms = (EAGER, *self.meta.candidates)
        return tuple(row.shape.id for row in self.rows if not any(row.cells[arm].event_ms for arm in arms))

    @property
    def unmeasured(self) -> bool:
        """Whether no output of any candidate was checked."""
        return all(cell.status in ("skipped", "infeasible") for _, cell in self._cells(("candidate",)))

    def exit_code(self, require: str = "complete", accept_contract: bool = False) -> ExitCode:
        """Return the run's exit status; facts about outputs come before what is missing, that before the times.

        `require` is `complete`, `faster` or `equivalent` (which faster meets too).
        """
        failed = {cell.status for _, cell in self.failures()}
        verdicts = {
            headline.ratio_verdict if accept_contract and headline.verdict == Verdict.CONTRACT else headline.verdict
            for headline in self.headlines
        }
        if any(cell.integrity for _, cell in self._cells(TRUSTED_KINDS)):
            return ExitCode.INTEGRITY
        if "incorrect" in failed:
            return ExitCode.INCORRECT
        if failed or self.missing or self.unmeasured:
            return ExitCode.INCOMPLETE
        if not accept_contract and any(cell.depends_on_contract for _, cell in self._cells(("candidate",))):
            return ExitCode.CONTRACT
        if self.unchecked():
            return ExitCode.INCOMPLETE
        if Verdict.CONTAMINATED in verdicts:
            return ExitCode.CONTAMINATED
        return required(verdicts, require)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "run": self.meta.id,
            "device": self.meta.device,
            "quick": self.meta.settings["quick"],
            "processes": self.meta.settings["processes"],
            "headlines": [asdict(headline) for headline in self.headlines],
            "shapes": [asdict(row) for row in self.rows],
            "ranking": [asdict(place) for place in self.ranking],
            "accuracy": [line.as_dict() for line in self.accuracy],
            "missing_rows": self.missing,
            "calls_per_window": 1,
            "clock_tick_ns": self.tick_ns,
            "host": asdict(self.host) if self.host else None,
            "blocks": {
                "total": self.contamination.total,
                "dropped": self.contamination.count,
                "reasons": dict(self.contamination.reasons),
            },
            "problems": self.problems(),
            "environment": self.environment,
        }

    def _cells(self, kinds: tuple[str, ...]) -> list[tuple[ShapeRow, Cell]]:
        return [(row, cell) for row in self.rows for cell in row.cells.values() if cell.kind in kinds]


# Checks named where they are counted; the report's findings list all.
SHOWN_CHECKS = 3


def missed_text(missed: Sequence[str]) -> str:
    """Return how many checks were not run, the first of them by name, and why the first one was not."""
    names, reason = [line.split(": ")[0] for line in missed], missed[0].partition(": ")[2]
    more = f" and {len(names) - SHOWN_CHECKS} more" if len(names) > SHOWN_CHECKS else ""
    checks = "check was" if len(names) == 1 else "checks were"
    return f"{len(names)} {checks} not run ({', '.join(names[:SHOWN_CHECKS])}{more}: {reason})"


_STATES = {
    ExitCode.INCORRECT: "a candidate's output is wrong",
    ExitCode.CONTRACT: "correct, but a candidate breaks a promise to its caller",
    ExitCode.INCOMPLETE: "incomplete: planned rows are missing or failed",
    ExitCode.INTEGRITY: "there is evidence of manipulation",
    ExitCode.CONTAMINATED: "the machine was disturbed too much for a verdict",
}
_SAID = {
    "incorrect": "wrong",
    "error": "in error",
    "oom": "out of memory",
    "unsupported": "not supported",
    "refused": "refused",
}


def required(verdicts: set[str], require: str) -> ExitCode:
    """Return the exit status of the verdicts on times under what exit 0 is required to stand for."""
    good = {"faster": {Verdict.FASTER}, "equivalent": {Verdict.FASTER, Verdict.EQUIVALENT}}.get(require)
    if good is None or (verdicts and verdicts <= good):
        return ExitCode.COMPLETE
    if Verdict.SLOWER in verdicts:
        return ExitCode.SLOWER
    if verdicts and verdicts <= {Verdict.FASTER, Verdict.EQUIVALENT}:
        return ExitCode.EQUIVALENT
    return ExitCode.INCONCLUSIVE
