"""What a run's folder must hold while the run goes on: the digests are in the parent's memory, out of reach."""

import json
import os

import pytest

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.digest import WrittenFiles
from rooflane.eval.record.records import RECORDS_FILE
from rooflane.eval.stats.run import open_run
from rooflane.shapes import Shape

SHAPE = Shape("a", 2, 8, 16, 2, 16, 1)


def edit_a_row(folder):
    path = folder / RECORDS_FILE
    path.write_text(path.read_text().replace("1000000", "1000001", 1))


def cut_and_write_again(folder):
    """Rows of the run's own, one of them twice: every line is one that the parent wrote."""
    lines = (folder / RECORDS_FILE).read_text().splitlines(keepends=True)
    os.truncate(folder / RECORDS_FILE, 0)
    (folder / RECORDS_FILE).write_text("".join(lines[:-1] + lines[:1]))


def replace_the_file(folder):
    (folder / "other").write_text((folder / RECORDS_FILE).read_text() + "\n")
    os.replace(folder / "other", folder / RECORDS_FILE)


def remove_the_rows(folder):
    (folder / RECORDS_FILE).unlink()


def edit_the_page(folder):
    page = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(page | {"price_per_hour": 0.01}))


def plant_nulls(folder):
    (folder / "nulls.jsonl").write_text("")


def plant_a_digest(folder):
    (folder / "digest.json").write_text("{}")


EDITS = {
    edit_a_row: "records.jsonl", cut_and_write_again: "records.jsonl", replace_the_file: "records.jsonl",
    remove_the_rows: "records.jsonl", edit_the_page: "run.json", plant_nulls: "nulls.jsonl",
    plant_a_digest: "digest.json",
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_between_two_rows_is_found_at_the_end(stored_run, make_record, edit):
    stored_run.watch()
    stored_run.append([make_record(SHAPE, 0, "sdpa")])
    edit(stored_run.folder)
    stored_run.append([make_record(SHAPE, 1, "sdpa")])
    with pytest.raises(EvaluationError, match=f"{EDITS[edit]}: the file changed while the run was in progress"):
        stored_run.written.check()


@pytest.mark.parametrize("edit", [edit_a_row, cut_and_write_again, plant_nulls], ids=lambda edit: edit.__name__)
def test_without_the_digests_an_edit_is_accepted(stored_run, monkeypatch, edit):
    stored_run.watch()
    monkeypatch.setattr(WrittenFiles, "check", lambda self: None)
    edit(stored_run.folder)
    stored_run.written.check()
    stored_run.finish()
    assert open_run(stored_run.folder).records()


def test_a_runs_own_writing_is_no_edit(stored_run, make_record):
    stored_run.watch()
    stored_run.append([make_record(SHAPE, 0, "sdpa")])
    stored_run.update(spent_s={"other": 1.0})
    stored_run.append([make_record(SHAPE, 1, "sdpa")])
    stored_run.written.check()
    stored_run.finish()
    again = open_run(stored_run.folder)
    again.resume()
    again.watch()
    again.written.check()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["records.jsonl", "run.json", "digest.json"])
@pytest.mark.parametrize("kind", ["a FIFO", "a folder"])
def test_a_file_of_a_run_that_is_no_regular_file_is_one_paragraph(stored_run, make_record, name, kind):
    stored_run.finish()
    path = stored_run.folder / name
    path.unlink()
    os.mkfifo(path) if kind == "a FIFO" else path.mkdir()
    with pytest.raises(EvaluationError, match=f"{name}: cannot be read.*it is {kind} and must be a regular file"):
        open_run(stored_run.folder)
    (stored_run.folder / "digest.json").unlink() if name != "digest.json" else None
    if name == "records.jsonl":
        with pytest.raises(EvaluationError, match="no row can be read"):
            open_run(stored_run.folder).records()
        with pytest.raises(EvaluationError, match="no row can be written"):
            stored_run.append([make_record(SHAPE, 0, "sdpa")])
