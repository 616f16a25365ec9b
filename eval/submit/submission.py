"""A submission on disk: its page, and one JSON line per shape and process with the raw printed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import SUBMISSION_FILE
from rooflane.eval.submit.parse import Figures, Outcome
from rooflane.shapes import Shape

SCHEMA_VERSION = 1
ROWS_FILE = "rows.jsonl"
_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

Key = tuple[int, str]


class SubmitMeta(BaseModel):
    """What was submitted: the script, the candidate, the shapes, the flags and the plan for each shape."""

    model_config = _CONFIG

    schema_version: int = SCHEMA_VERSION
    id: str
    started_at: str
    command: str
    rooflane_version: str
    commit: str | None
    organiser: str
    sha256: str
    known: str
    candidate: str
    candidate_sha256: str
    device: str
    profile: str
    arguments: list[str]
    processes: int
    time_limit_s: float
    shapes: list[dict[str, Any]]
    plans: dict[str, dict[str, Any]]
    infeasible: dict[str, str]

    def shape_list(self) -> list[Shape]:
        """Return the shapes, in file order."""
        return [Shape(**fields) for fields in self.shapes]


class SubmitRow(BaseModel):
    """One run of the script on one shape: what it was given, how it ended, what it printed."""

    model_config = _CONFIG

    schema_version: int = SCHEMA_VERSION
    submission: str
    process: int
    shape: str
    outcome: Outcome
    reason: str = ""
    exit_status: int | None
    arguments: list[str]
    figures: Figures | None = None
    expected: bool = False  # an end that was predicted, such as a baseline that does not fit the memory
    stdout: str
    stderr: str
    wall_s: float
    environment: dict[str, Any] = {}
    measured_at: str

    @property
    def key(self) -> Key:
        """What identifies a row."""
        return self.process, self.shape


@dataclass
class Submission:
    """One submission's folder; `interrupted` is set when it was ended by Ctrl-C."""

    folder: Path
    meta: SubmitMeta
    interrupted: bool = False

    def rows(self) -> list[SubmitRow]:
        """Return the rows written so far; a line torn off by an interruption is left out.

        Raises `EvaluationError` on any other line that is no row.
        """
        path = self.folder / ROWS_FILE
        rows: dict[Key, SubmitRow] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                row = SubmitRow.model_validate_json(line)
            except ValidationError as error:
                if number == len(lines):
                    continue
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "the line"
                raise EvaluationError(
                    f"{path}:{number}: not a row of this version ({where}: {first['msg']}); read it with the rooflane "
                    "that wrote it, or remove the line"
                ) from None
            rows[row.key] = row
        return list(rows.values())

    def append(self, row: SubmitRow) -> None:
        """Write one row, ending a line that an interruption left torn."""
        path = self.folder / ROWS_FILE
        if path.exists():
            whole, newline, _ = path.read_bytes().rpartition(b"\n")
            path.write_bytes(whole + newline)
        with path.open("ab") as file:
            file.write(row.model_dump_json().encode() + b"\n")

    def missing(self) -> Sequence[Key]:
        """Return the keys that have no row yet, one process after the other, shapes in file order."""
        done = {row.key for row in self.rows()}
        keys = [(process, shape["id"]) for process in range(self.meta.processes) for shape in self.meta.shapes]
        return [key for key in keys if key not in done]

    def resume_hint(self) -> str:
        """Return the line that tells how to go on."""
        rows = len(self.rows())
        return f"interrupted; {rows} runs are kept. Go on with: rooflane submit --resume {self.folder}"


def create_submission(folder: Path, meta: SubmitMeta) -> Submission:
    """Make the folder of a new submission and write its page."""
    folder = folder / meta.id
    try:
        folder.mkdir(parents=True)
        (folder / SUBMISSION_FILE).write_text(meta.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{folder}: the submission's folder cannot be written ({error}); name another") from None
    return Submission(folder, meta)


def open_submission(folder: str | Path) -> Submission:
    """Return the submission in a folder; raises `EvaluationError` when there is none, or of another version."""
    path = Path(folder) / SUBMISSION_FILE
    try:
        meta = SubmitMeta.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise EvaluationError(
            f"{folder}: not a submission, there is no {SUBMISSION_FILE} in it; name a folder that `rooflane submit` "
            "wrote"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EvaluationError(
            f"{path}: not a submission of this version ({where}: {first['msg']}); read it with the rooflane that "
            "wrote it"
        ) from None
    return Submission(Path(folder), meta)
