"""Acceptance 10: a report made anew is the same to the byte, and a changed sample breaks the seal."""

import json
import shutil

import numpy as np
import pytest

from rooflane.eval import EvaluationError, compare, open_run, render_markdown
from rooflane.eval.record.digest import DIGEST_FILE, SEALED_FILES, seal
from rooflane.eval.record.nulls import NULLS_FILE, append_nulls, read_nulls, store_path
from rooflane.eval.record.records import ANCHOR, COPY_PREFIX, EAGER, NOOP, RECORDS_FILE, RUN_FILE
from rooflane.eval.stats.run import create_run
from rooflane.eval.stats.summary import summarise
from rooflane.shapes import Shape

MINE = "mine"
ARMS = (EAGER, "identity", MINE, COPY_PREFIX + MINE, ANCHOR, NOOP)
KINDS = {EAGER: "baseline", "identity": "control", MINE: "candidate", COPY_PREFIX + MINE: "copy"}
SHAPES = [Shape(str(index), 2, 8 * (index + 1), 16, 2, 16, 1) for index in range(3)]


@pytest.fixture
def rows_from(make_record):
    """Return the function that makes whole rows from a campaign's drawn calls."""

    def make(calls):
        rows = []
        for (process, shape, arm), _ in np.ndenumerate(calls[..., 0, 0]):
            name = ARMS[arm]
            record = make_record(SHAPES[shape], process, name, kind=KINDS.get(name, name))
            event = np.rint(calls[process, shape, arm]).astype(int).tolist()
            rows.append(record.model_copy(update={"timing": record.timing.model_copy(update={"event_ns": event})}))
        return rows

    return make


@pytest.fixture
def meta(make_meta):
    extra = [COPY_PREFIX + MINE, ANCHOR, NOOP]
    made = make_meta(SHAPES, controls=("identity",))
    return made.model_copy(update={"extra_arms": extra})


@pytest.fixture
def finished(tmp_path, rng, draw, rows_from, meta):
    """A finished run on disk, its candidate 5% faster."""
    run = create_run(tmp_path / "runs", meta)
    run.append(rows_from(draw(rng, gain=0.05, processes=6, shapes=3, rounds=4)))
    assert run.finish() == ""
    return run


def test_two_dozen_whole_campaigns_are_judged_as_their_medians_are(rng, draw, judge, rows_from, meta):
    for index in range(24):
        calls = np.rint(draw(rng, gain=0.02 * (index % 3), processes=6, shapes=3, rounds=4, calls=4))
        (headline,) = summarise(meta, rows_from(calls)).headlines
        judged = judge(calls)
        assert (headline.verdict, headline.why) == (judged.judgement.verdict, judged.judgement.why)
        assert headline.geomean == judged.estimate.geomean
        assert headline.floor == judged.floors.geomean


def test_a_report_made_again_is_the_same_to_the_byte(finished, tmp_path):
    first = render_markdown(open_run(finished.folder).summary())
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished.folder, moved)
    # Later campaigns leave nulls in the store; the floor of a finished run does not follow them.
    own = finished.nulls()
    runs = [f"later {index}" for index in range(30)]
    append_nulls(store_path(), [null.model_copy(update={"run": run, "log": 0.3}) for run in runs for null in own])
    assert render_markdown(open_run(moved).summary()) == first
    assert "FASTER" in first


@pytest.mark.parametrize("file", [RECORDS_FILE, RUN_FILE])
def test_a_changed_sample_breaks_the_seal(finished, file):
    path = finished.folder / file
    text = path.read_text()
    digit = next(index for index, sign in enumerate(text) if sign.isdigit() and index > len(text) // 2)
    path.write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    for read in (open_run, lambda folder: compare(f"{folder}::mine", f"{folder}::eager")):
        with pytest.raises(EvaluationError) as refused:
            read(finished.folder)
        assert f"{file} changed after the run was finished" in str(refused.value)


def test_an_added_row_or_null_or_a_lost_file_breaks_the_seal(finished):
    records = finished.folder / RECORDS_FILE
    whole = records.read_bytes()
    records.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(EvaluationError, match="changed after"):
        open_run(finished.folder)
    records.write_bytes(whole)
    open_run(finished.folder)
    (finished.folder / NULLS_FILE).unlink()
    with pytest.raises(EvaluationError, match=f"{NULLS_FILE} changed after"):
        open_run(finished.folder)


@pytest.mark.parametrize("page", ["", "[]", '{"files": {}}', '{"algorithm": "sha256", "files": {"run.json": "0"}}'])
def test_a_seal_that_seals_nothing_is_no_seal(finished, page):
    (finished.folder / DIGEST_FILE).write_text(page)
    with pytest.raises(EvaluationError, match=DIGEST_FILE):
        open_run(finished.folder)


def test_a_run_goes_on_only_from_files_that_hold(finished):
    finished.resume()
    assert not open_run(finished.folder).sealed
    seal(finished.folder)
    with (finished.folder / RECORDS_FILE).open("a") as file:
        file.write("\n")
    with pytest.raises(EvaluationError, match="changed after"):
        finished.resume()


def test_the_seal_covers_every_file_a_figure_comes_from(finished):
    sealed = json.loads((finished.folder / DIGEST_FILE).read_text())["files"]
    assert set(sealed) == set(SEALED_FILES) == {path.name for path in finished.folder.iterdir()} - {DIGEST_FILE}


def test_a_finished_run_leaves_two_nulls_once(finished):
    mine = [null for null in read_nulls(store_path()) if null.run == finished.meta.id]
    assert {null.arm for null in mine} == {EAGER, MINE} and len(mine) == 2
    finished.finish()
    assert len([null for null in read_nulls(store_path()) if null.run == finished.meta.id]) == 2
    assert all(abs(null.log) < 0.02 and null.sd < 0.05 and len(null.shapes) == 3 for null in mine)


def test_nineteen_stored_nulls_make_the_floor_of_a_later_run(tmp_path, rng, draw, rows_from, meta, finished):
    own = finished.nulls()
    stored = [own[0].model_copy(update={"run": f"run {i}", "log": 0.001 * (i + 1)}) for i in range(19)]
    store_path().write_text("".join(null.model_dump_json() + "\n" for null in stored))
    run = create_run(tmp_path / "later", meta.model_copy(update={"id": "later"}))
    run.append(rows_from(draw(rng, gain=0.1, processes=6, shapes=3, rounds=4)))
    run.finish()
    (headline,) = open_run(run.folder).summary().headlines
    # Of 19 the largest is the 95th percentile, and the largest of all runs but one stands for it: exp(0.018) - 1.
    assert not headline.floor.provisional and headline.floor.value == pytest.approx(0.01816, abs=1e-5)
    assert "from 19 stored nulls" in headline.why
    # Another machine's nulls say nothing about this one.
    others = [null.model_copy(update={"machine": "another"}) for null in stored]
    assert open_run(run.folder).summary(others).headlines[0].floor.provisional
