"""A run: its folder, its page and its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.records import RECORDS_FILE, RUN_FILE, Record, RunMeta, append_records, read_records

if TYPE_CHECKING:
    from rooflane.eval.summary import Summary


@dataclass
class Run:
    """One evaluation on disk; `interrupted` is set while it was ended by Ctrl-C."""

    folder: Path
    meta: RunMeta
    interrupted: bool = False

    def records(self) -> list[Record]:
        """Return the rows written so far."""
        return read_records(self.folder / RECORDS_FILE)

    def append(self, records: Sequence[Record]) -> None:
        """Write rows."""
        append_records(self.folder / RECORDS_FILE, records)

    def summary(self) -> Summary:
        """Return every figure of the report, computed from the rows."""
        from rooflane.eval.summary import summarise

        return summarise(self.meta, self.records())

    def resume_hint(self) -> str:
        """Return the line that tells how to go on."""
        count = len(self.records())
        return f"interrupted; {count} rows are kept. Go on with: rooflane eval --resume {self.folder}"


def create_run(runs_dir: Path, meta: RunMeta) -> Run:
    """Make the folder of a new run and write its page."""
    folder = runs_dir / meta.id
    try:
        folder.mkdir(parents=True)
        (folder / RUN_FILE).write_text(meta.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{folder}: the run's folder cannot be written ({error}); name another place") from None
    return Run(folder, meta)


def open_run(folder: str | Path) -> Run:
    """Return the run in a folder; raises `EvaluationError` when there is none, or of another version."""
    folder = Path(folder)
    path = folder / RUN_FILE
    try:
        meta = RunMeta.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvaluationError(
            f"{folder}: not a run, there is no {RUN_FILE} in it; name a folder that `rooflane eval` wrote"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EvaluationError(
            f"{path}: not a run of this version ({where}: {first['msg']}); read it with the rooflane that wrote it"
        ) from None
    return Run(folder, meta)
