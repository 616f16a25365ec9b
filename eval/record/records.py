"""Records: one JSON line per shape, arm and process, and the run folder they lie in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rooflane.dispatch.state_files import NotRegular, open_regular, read_regular
from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Problem, Shape, from_dict

SCHEMA_VERSION = 1
RUN_FILE = "run.json"
# Stands in its place in what `rooflane submit` writes.
SUBMISSION_FILE = "submission.json"
RECORDS_FILE = "records.jsonl"

EAGER = "eager"
NOOP = "noop"
ANCHOR = "anchor"
COPY_PREFIX = "copy of "
COMPILED_PREFIX = "compiled"
INFEASIBLE = "infeasible"
# In a classification, the basis of one that comes from a run and predicts nothing.
MEASURED = "measured"

Status = Literal["ok", "incorrect", "error", "oom", "unsupported", "infeasible", "skipped", "refused"]
Kind = Literal["baseline", "control", "candidate", "copy", "noop", "anchor", "reference"]
ContractClass = Literal["pure", "contract-dependent", "incorrect"]
Key = tuple[int, str, str]
Model = TypeVar("Model", bound=BaseModel)

TILE = 128
# Upper edges of the histogram's bins, in units of the tolerance; a last bin holds what lies above 1 and fails.
BIN_EDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)

_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class GateResult(BaseModel):
    """One comparison: elements failed, the worst errors, and the use of tolerance (above 1 fails).

    `use` is the largest over elements of `min(e / atol, e / (rtol |ref|))`, infinite where a value is not finite.
    A tile is 128 tokens x 128 columns; the worst one is that with the largest share of failing elements, then the
    largest mean error, so a local fault shows that a global figure would hide.
    """

    model_config = _CONFIG

    passed: bool
    total: int
    failed: int
    max_abs: float
    max_rel: float
    use: float
    worst_index: tuple[int, ...] = ()
    out_at_worst: float = 0.0
    ref_at_worst: float = 0.0
    worst_tile: tuple[int, int] = (0, 0)
    worst_tile_failed_share: float = 0.0
    worst_tile_mean_abs: float = 0.0
    dtype: str = ""
    device: str = ""
    reason: str = ""
    rms: float | None = Field(default=None, description="root mean square error; taken where a spread is asked for")
    bins: tuple[int, ...] = Field(default=(), description="elements by use of tolerance, edges BIN_EDGES, then above")

    @property
    def tile_of_worst(self) -> tuple[int, int]:
        """The tile (row block, column block) of `TILE` tokens x `TILE` columns that holds the worst element."""
        return self.worst_index[-2] // TILE, self.worst_index[-1] // TILE


class TruthCheck(BaseModel):
    """One input on which both sides are compared with fp64: the gate, or an error within `factor` of eager's own.

    `gate` holds the candidate's errors, with their root mean square and histogram; `eager_*` hold the baseline's.
    """

    model_config = _CONFIG

    name: str
    passed: bool
    gate: GateResult
    eager_max_abs: float
    factor: float
    rows: str = Field(description="the part of the batch that was compared")
    eager_rms: float | None = None
    eager_bins: tuple[int, ...] = ()

    @property
    def max_ratio(self) -> float:
        """The candidate's worst error in units of the baseline's own."""
        return _ratio(self.gate.max_abs, self.eager_max_abs)

    @property
    def rms_ratio(self) -> float | None:
        """The candidate's root mean square error in units of the baseline's own."""
        if self.gate.rms is None or self.eager_rms is None:
            return None
        return _ratio(self.gate.rms, self.eager_rms)

    @property
    def use(self) -> float:
        """The use of what this check allows, above 1 fails: of the gate, or of `factor` times eager's worst error."""
        if not math.isfinite(self.gate.max_abs):
            return math.inf
        return min(self.gate.use, self.max_ratio / self.factor)

    @property
    def headroom(self) -> float:
        """How many times the errors could grow before this check fails; below 1 it has failed."""
        return 1 / self.use if self.use else math.inf


class Verification(BaseModel):
    """Everything checked about one arm's outputs in one process."""

    model_config = _CONFIG

    status: Status
    reason: str = ""
    trials: int = 0
    gate: GateResult | None = None
    ragged: dict[str, GateResult] = {}
    truth: list[TruthCheck] = []
    contract: list[str] = Field(default=[], description="promises to the caller that were seen broken")
    contract_class: ContractClass | None = Field(default=None, description="None where the promises were not tried")
    notes: list[str] = []
    missed: list[str] = Field(
        default=[], description='checks that were not run, each as "check: reason"; the run is incomplete then'
    )


class Timing(BaseModel):
    """Raw nanoseconds of one arm in one process: `event_ns` and `host_ns` `[round][call]`, the others `[call]`.

    Rounds 2i and 2i + 1 are the two mirrored halves of block i; a control has empty ones where it sat out. The states
    beside the headline are taken in one process only: `harness_ns` is the organiser's loop on one fixed input object,
    `idle_ns` the event pair after a synchronisation, `cold_ns` with the caches overwritten before, `rotating_ns` over
    inputs of five times the cache. `loop_ns` `[round]` is a fixed loop of the interpreter ahead of each round.

    Only older records carry `bare_ns` and `bare_eager_ns` `[round][call]`: the candidate's calls and eager's, timed in
    turn in one further process as the organiser's script times them.
    """

    model_config = _CONFIG

    clock: Literal["cuda-events", "perf-counter", "synthetic"]
    event_ns: list[list[int]]
    host_ns: list[list[int]] = []
    bare_ns: list[list[int]] = []
    bare_eager_ns: list[list[int]] = []
    device_ns: list[int] = []
    harness_ns: list[int] = []
    idle_ns: list[int] = []
    cold_ns: list[int] = []
    rotating_ns: list[int] = []
    loop_ns: list[int] = []
    warmups: int
    repeats: int
    shrunk: bool = Field(description="the counts were reduced to keep to the time budget")
    inputs: Literal["fresh", "fixed"]
    valid_tokens: float = Field(description="tokens of one call that are not padding, the mean over the inputs")
    elements_total: int | None = Field(
        default=None, description="of the chunked reference: batch elements of the shape; event_ns has those timed"
    )


class Record(BaseModel):
    """One arm on one shape in one process; reports are made from these alone."""

    model_config = _CONFIG

    schema_version: int = SCHEMA_VERSION
    run: str
    process: int
    shape: dict[str, Any]
    arm: str
    kind: Kind
    status: Status
    reason: str = ""
    silent: bool = Field(default=False, description="its worker gave no answer in time and was ended")
    family: str = ""
    rule: str = ""
    options: dict[str, Any] = {}
    contract: str = ""
    integrity: list[str] = Field(default=[], description="evidence that outputs, clocks or state were tampered with")
    verification: Verification | None = None
    timing: Timing | None = None
    setup_s: float | None = None
    predicted_s: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    seeds: dict[str, int] = {}
    telemetry: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    measured_at: str = ""

    @property
    def shape_id(self) -> str:
        """The shape's name."""
        return self.shape["id"]

    @property
    def key(self) -> Key:
        """What identifies a row; of two rows with one key, the later one counts."""
        return self.process, self.shape_id, self.arm


class Prediction(BaseModel):
    """What was predicted of one shape before any of it ran."""

    model_config = _CONFIG

    shape: str
    classification: dict[str, Any]
    candidates: dict[str, dict[str, Any]]


class RulesUsed(BaseModel):
    """The rule table of a run: where it was found, the digest of its rows, and the rows themselves as TOML."""

    model_config = _CONFIG

    source: str
    digest: str
    text: str


class RunMeta(BaseModel):
    """The run's own page: settings, shapes, predictions and the profile they were made with."""

    model_config = _CONFIG

    schema_version: int = SCHEMA_VERSION
    id: str
    started_at: str
    command: str
    rooflane_version: str
    settings: dict[str, Any]
    device: str
    seed: int | None = Field(
        description="None until the run is complete; of a run that was interrupted, the seed of its last part"
    )
    seed_hash: str = Field(default="", description="only in older records: SHA-256 of the seed")
    shapes: list[dict[str, Any]]
    candidates: list[str]
    controls: list[str]
    extra_arms: list[str] = Field(default=[], description="copies of the candidates, the no-op and the anchor")
    overhead_share: float | None = Field(
        default=None,
        description="of the run's wall time, what was neither warm-up, measurement nor verification; None in a run "
        "that was interrupted and went on",
    )
    spent_s: dict[str, float] = Field(default={}, description="the run's wall seconds by what they were spent on")
    profile: dict[str, Any]
    price_per_hour: float | None
    predictions: list[Prediction]
    not_run: dict[str, str] | None = Field(
        default=None,
        description="shapes that eager fits and that the run leaves out, with the reason, decided before anything ran; "
        "None in older runs",
    )
    sandbox: str = Field(
        default="",
        description="whether a user's file ran in the sandbox, and what that held; empty without such a candidate and "
        "in older runs",
    )
    rules: RulesUsed | None = Field(default=None, description="None in runs of before tables were recorded")
    left_out: str = Field(default="", description="what a quick run leaves out by its settings, in one line")

    def shape_list(self) -> list[Shape | Problem]:
        """Return the run's shapes or problems, in file order."""
        return [from_dict(fields) for fields in self.shapes]

    def planned(self, process: int, shape_id: str) -> tuple[str, ...]:
        """Return the arms planned for a process, in the order they are built; controls only where eager fits."""
        if self.prediction(shape_id).classification["regime"] == INFEASIBLE:
            return (EAGER, *self.candidates)
        compiles = process < self.settings["compile_processes"]
        controls = [name for name in self.controls if compiles or not name.startswith(COMPILED_PREFIX)]
        return (EAGER, *self.candidates, *controls, *self.extra_arms)

    def prediction(self, shape_id: str) -> Prediction:
        """Return what was predicted of a shape."""
        return next(prediction for prediction in self.predictions if prediction.shape == shape_id)


def append_records(path: Path, records: Iterable[BaseModel]) -> bytes:
    """Append rows to a file of JSON lines, wait for the disk, and return the bytes written.

    All rows go in one write, so an interruption leaves whole rows and at most one torn line at the end; a torn line
    left by an earlier interruption is ended first.
    """
    text = "".join(record.model_dump_json() + "\n" for record in records)
    try:
        number = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise EvaluationError(f"{path}: no row can be written ({error})") from None
    with os.fdopen(number, "ab+") as file:
        if file.tell() and not _ends_with_newline(file):
            text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    return text.encode()


def create_folder(folder: Path, page: str, meta: BaseModel, what: str) -> None:
    """Make the folder of a new run or submission and write its page."""
    try:
        folder.mkdir(parents=True)
        (folder / page).write_text(meta.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(
            f"{folder}: the {what}'s folder cannot be written ({error}); name another place"
        ) from None


def parse_page(path: Path, kind: type[Model], what: str) -> Model:
    """Read the page of a run or submission; raises `OSError`, and `EvaluationError` for one of another version."""
    try:
        return kind.model_validate_json(read_regular(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from None
    except ValidationError as error:
        raise EvaluationError(
            f"{path}: not a {what} of this version ({first_problem(error, 'the file')}); read it with the rooflane "
            "that wrote it"
        ) from None


def read_records(path: Path) -> list[Record]:
    """Read a record file; see `read_rows`."""
    return read_rows(path, Record)


def read_rows(path: Path, kind: type[Model]) -> list[Model]:
    """Read a file of rows that have a `key`; of rows with one key the later one is kept, at the place of the first.

    A torn line (no newline followed it when it was written) is dropped. Raises `EvaluationError` on any other line
    that is not of this kind.
    """
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    except NotRegular as error:
        raise EvaluationError(f"{path}: no row can be read ({error})") from None
    rows: dict[Any, Model] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = kind.model_validate_json(line)
        except ValidationError as error:
            if _is_torn(line):
                continue
            raise EvaluationError(
                f"{path}:{number}: not a record of this version ({first_problem(error, 'the line')}); "
                f"read it with the rooflane that wrote it, or remove the line"
            ) from None
        rows[row.key] = row
    return list(rows.values())


def first_problem(error: ValidationError, whole: str) -> str:
    """Return the field and the text of the first problem; `whole` names the place of one that no field has."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def _is_torn(line: bytes) -> bool:
    """Return whether a line stops before its JSON object does."""
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _ends_with_newline(file: Any) -> bool:
    """Return whether the last byte of an open binary file is a newline."""
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _ratio(error: float, own: float) -> float:
    """Return an error in units of the baseline's own; 0 / 0 counts as equal."""
    if own:
        return error / own
    return math.inf if error else 1.0


# The worker that holds eager, the controls and the judge.
REFERENCE = "reference"


@dataclass(frozen=True)
class ArmId:
    """One arm of a run. A copy has the name of its candidate and lives in the same worker."""

    name: str
    kind: Kind
    worker: str = REFERENCE

    def __str__(self) -> str:
        """Return the text that stands in a record."""
        return COPY_PREFIX + self.name if self.kind == "copy" else self.name


EAGER_ARM = ArmId(EAGER, "baseline")
_PROBES = {NOOP: ArmId(NOOP, "noop"), ANCHOR: ArmId(ANCHOR, "anchor")}


def parse_arm(text: str, candidates: Collection[str]) -> ArmId:
    """Return the arm that a record's text names in a run of these candidates."""
    # A candidate first: its file may be called as a copy or a probe is.
    if text in candidates:
        return ArmId(text, "candidate", text)
    base = text.removeprefix(COPY_PREFIX)
    if base != text and base in candidates:
        return ArmId(base, "copy", base)
    return EAGER_ARM if text == EAGER else _PROBES.get(text) or ArmId(text, "control")
