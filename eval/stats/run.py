"""A run: its folder, its page and its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rooflane.dispatch.state_files import replace_file
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.digest import WrittenFiles, is_sealed, seal, unseal, verify_seal
from rooflane.eval.record.nulls import NULLS_FILE, NullResult, append_nulls, matching, read_nulls, store_path
from rooflane.eval.record.records import (
    RECORDS_FILE,
    RUN_FILE,
    SUBMISSION_FILE,
    Record,
    RunMeta,
    append_records,
    create_folder,
    parse_page,
    read_records,
)
from rooflane.eval.stats.figures import Summary
from rooflane.eval.stats.summary import campaign_nulls, summarise
from rooflane.eval.stats.verdict import Verdict

if TYPE_CHECKING:
    from pandas import DataFrame


# The clocks of a timing that a frame holds; those in `ROUND_CLOCKS` have their times by round.
CLOCKS = ("event", "host", "device", "idle", "harness", "cold", "rotating")
ROUND_CLOCKS = ("event", "host")


@dataclass
class Run:
    """One evaluation on disk; `interrupted` is set while it was ended by Ctrl-C."""

    folder: Path
    meta: RunMeta
    interrupted: bool = False
    # Both are set while a campaign writes the run: what it wrote, and the null results stored before it began.
    written: WrittenFiles | None = None
    known_nulls: list[NullResult] | None = None

    def records(self) -> list[Record]:
        """Return the rows written so far."""
        return read_records(self.folder / RECORDS_FILE)

    def append(self, records: Sequence[Record]) -> bytes:
        """Write rows; return the bytes written."""
        data = append_records(self.folder / RECORDS_FILE, records)
        if self.written:
            self.written.add(data)
        return data

    def update(self, **fields: object) -> None:
        """Write the page again with new values of some fields, in one step."""
        self.meta = self.meta.model_copy(update=fields)
        text = self.meta.model_dump_json(indent=1) + "\n"
        replace_file(self.folder / RUN_FILE, text)
        if self.written:
            self.written.page(text)

    def watch(self) -> None:
        """Hold in memory what the run's files and the store of nulls contain, before any candidate runs."""
        self.written = WrittenFiles(self.folder)
        with suppress(EvaluationError):  # `finish` reports a store that cannot be read
            self.known_nulls = _stored()

    @property
    def sealed(self) -> bool:
        """Whether the run was finished: its files are bound by a digest."""
        return is_sealed(self.folder)

    def summary(self, stored: Sequence[NullResult] | None = None) -> Summary:
        """Return every figure of the report, computed from the rows.

        The floor comes from the nulls that were stored when the run was finished, so that a later report is the same;
        `stored` takes others in their place.
        """
        return summarise(self.meta, self.records(), self.stored_nulls() if stored is None else stored)

    def frame(self) -> DataFrame:
        """Return every timed call of the run, one row a call.

        Columns: shape, arm, kind, process, round, call, clock, ns, clean, status, verdict. `clock` is one of `CLOCKS`.
        `round` is missing for the clocks without rounds. `clean` is false in a block that was dropped for every arm.
        `status` is that of the arm in this process, `verdict` that of a candidate on the shape. An arm without times
        has no row.
        """
        import numpy
        import pandas

        summary = self.summary()
        rows, times = [], []
        for record in self.records():
            if record.timing is None:
                continue
            shape, process = record.shape_id, record.process
            cell = summary.row(shape).cells.get(record.arm)
            verdict = str(cell.verdict if cell else Verdict.NONE)
            dropped = summary.contamination.at(shape, process)
            for clock in CLOCKS:
                taken = getattr(record.timing, f"{clock}_ns")
                for index, part in enumerate(taken) if clock in ROUND_CLOCKS else ((None, taken),):
                    clean = index is None or index // 2 not in dropped
                    rows.append((shape, record.arm, record.kind, process, index, clock, clean, record.status, verdict))
                    times.append(numpy.asarray(part, dtype=int))
        names = ["shape", "arm", "kind", "process", "round", "clock", "clean", "status", "verdict"]
        frame = pandas.DataFrame(rows, columns=names).astype({"round": "Int64"})
        frame = frame.loc[frame.index.repeat([len(part) for part in times])].reset_index(drop=True)
        empty = numpy.empty(0, dtype=int)
        frame.insert(5, "call", numpy.concatenate([empty, *(numpy.arange(len(part)) for part in times)]))
        frame.insert(7, "ns", numpy.concatenate([empty, *times]))
        return frame

    def stored_nulls(self) -> list[NullResult]:
        """Return the nulls of earlier campaigns that this run's floor rests on."""
        path = self.folder / NULLS_FILE
        return read_nulls(path) if path.exists() else []

    def nulls(self) -> list[NullResult]:
        """Return this run's own nulls, as later campaigns may use them."""
        return campaign_nulls(self.meta, self.records(), self._process_s())

    def resume(self) -> None:
        """Remove the seal of a finished run so that it can continue; raises `EvaluationError` for a broken seal."""
        unseal(self.folder)

    def finish(self) -> str:
        """Copy the stored nulls that the floor rests on into the folder, store this run's nulls, seal the files.

        A run without a null leaves the store unchanged. Returns why the store could not be used, or an empty text. The
        files are sealed in both cases.
        """
        problem = ""
        own, path = self.nulls(), store_path()
        if own and not (self.folder / NULLS_FILE).exists():
            try:
                stored = _stored()
                if self.known_nulls is not None and stored[: len(self.known_nulls)] != self.known_nulls:
                    raise EvaluationError(
                        f"{path}: null results that were stored before this run changed while it was in progress, so "
                        "its own were not added and its floor rests on none; restore the file or remove it"
                    )
                # Not what was added meanwhile: a candidate may have done that.
                stored = stored if self.known_nulls is None else self.known_nulls
                append_nulls(self.folder / NULLS_FILE, matching(stored, own[0].key, self.meta.id))
                append_nulls(path, own)
            except EvaluationError as error:
                problem = str(error)
        seal(self.folder)
        return problem

    def _process_s(self) -> float | None:
        """Return the seconds one process took, from the first row's time to the last one's."""
        times = sorted(record.measured_at for record in self.records() if record.measured_at)
        if not times:
            return None
        start, end = datetime.fromisoformat(self.meta.started_at), datetime.fromisoformat(times[-1])
        return (end - start).total_seconds() / self.meta.settings["processes"]

    def resume_hint(self) -> str:
        """Return the line that names the command to continue the run."""
        count = len(self.records())
        rows = "row is" if count == 1 else "rows are"
        return f"interrupted; {count} {rows} kept. Continue with: rooflane eval --resume {self.folder}"


def _stored() -> list[NullResult]:
    """Return the null results of this user's store."""
    path = store_path()
    return read_nulls(path) if os.path.lexists(path) else []


def create_run(runs_dir: Path, meta: RunMeta) -> Run:
    """Make the folder of a new run and write its page."""
    folder = runs_dir / meta.id
    create_folder(folder, RUN_FILE, meta, "run")
    return Run(folder, meta)


def open_run(folder: str | Path) -> Run:
    """Return the run in a folder.

    Raises `EvaluationError` when there is none, when it is of another version, and when a finished run's files are
    not the ones it was sealed with.
    """
    verify_seal(Path(folder))
    return read_run(folder)


def read_run(folder: str | Path) -> Run:
    """Return the run in a folder without checking its seal."""
    folder = Path(folder)
    path = folder / RUN_FILE
    try:
        return Run(folder, parse_page(path, RunMeta, "run"))
    except (FileNotFoundError, NotADirectoryError):
        if (folder / SUBMISSION_FILE).is_file():
            raise EvaluationError(
                f"{folder}: a submission, no run; `rooflane submit --resume {folder}` shows it again"
            ) from None
        raise EvaluationError(
            f"{folder}: not a run, there is no {RUN_FILE} in it; name a folder that `rooflane eval` wrote"
        ) from None
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from None


def find_nulls(path: Path) -> list[NullResult]:
    """Return the null results of a store, of a run folder, or of a folder of run folders.

    Raises `EvaluationError` when nothing of that name exists, or when a line is no null result.
    """
    if not path.is_dir():
        return read_nulls(path)
    folders = [path] if (path / RUN_FILE).exists() else sorted(found.parent for found in path.glob(f"*/{RUN_FILE}"))
    if not folders:
        raise EvaluationError(f"{path}: holds no run; name a file of nulls, a run folder or a folder of runs")
    return [null for folder in folders for null in open_run(folder).nulls()]
