"""The store of null results: what is kept, what matches, and a store that is broken."""

import fcntl
import os

import pytest

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.nulls import NullResult, append_nulls, matching, read_nulls, store_path, stored_logs
from rooflane.eval.stats.run import find_nulls, open_run


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "state"))


def null(**changes):
    fields = {
        "machine": "GPU", "software": "torch 2", "processes": 8, "run": "r1", "arm": "eager", "measured_at": "2026",
        "log": 0.01, "sd": 0.01, "shapes": {"1x1": 0.01, "2x2": 0.02},
    }  # fmt: skip
    return NullResult(**(fields | changes))


def test_a_campaigns_arm_is_stored_once():
    append_nulls(store_path(), [null(), null(arm="mine")])
    append_nulls(store_path(), [null(log=0.5), null(run="r2")])
    assert [(found.run, found.arm, found.log) for found in read_nulls(store_path())] == [
        ("r1", "eager", 0.01),
        ("r1", "mine", 0.01),
        ("r2", "eager", 0.01),
    ]


def test_only_the_same_machine_software_and_processes_match_and_never_the_run_itself():
    nulls = [
        null(),
        null(run="r2", machine="other"),
        null(run="r3", software="torch 3"),
        null(run="r4", processes=3),
        null(run="r5"),
    ]
    assert [found.run for found in matching(nulls, null().key, "r5")] == ["r1"]
    many = [null(run=f"r{index}", measured_at=f"{index:04}") for index in range(300)]
    assert [found.run for found in matching(many, null().key, "")][0] == "r100", "the newest 200"


def test_a_mean_over_other_shapes_tells_nothing_but_its_shapes_do():
    nulls = [null(), null(run="r2", log=0.03, shapes={"1x1": 0.04})]
    means, shapes = stored_logs(nulls, {"a": "1x1", "b": "2x2"})
    assert means == [[0.01]]
    assert shapes == {"a": [[0.01], [0.04]], "b": [[0.02]]}


def test_the_nulls_of_a_run_stand_together_and_each_arm_counts_once():
    nulls = [null(), null(arm="mine", log=0.02), null(run="r2", log=0.03), null(log=0.04)]
    # A store that was copied together holds a run twice; the later line stands.
    assert stored_logs(nulls, {"a": "1x1", "b": "2x2"})[0] == [[0.04, 0.02], [0.03]]


def test_a_broken_store_names_its_line_and_a_finished_run_is_sealed_all_the_same(stored_run):
    append_nulls(store_path(), [null()])
    with store_path().open("a") as file:
        file.write('{"machine": "half a')
    with pytest.raises(EvaluationError, match=r"nulls\.jsonl:2: not a null result"):
        read_nulls(store_path())
    assert "nulls.jsonl:2" in stored_run.finish()
    assert open_run(stored_run.folder).sealed


def test_a_store_that_cannot_be_written_costs_no_run(stored_run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "file" / "below"))
    assert "ROOFLANE_STATE_DIR" in stored_run.finish()
    assert open_run(stored_run.folder).sealed


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["FIFO", "folder", "link"])
def test_a_store_that_is_no_regular_file_is_reported_and_not_waited_for(stored_run, tmp_path, kind):
    store_path().parent.mkdir(parents=True)
    if kind == "FIFO":
        os.mkfifo(store_path())
    elif kind == "folder":
        store_path().mkdir()
    else:
        (tmp_path / "elsewhere").write_text("")
        store_path().symlink_to(tmp_path / "elsewhere")
    said = stored_run.finish()
    assert f"it is a {kind} and must be a regular file" in said and "nulls.jsonl" in said
    assert open_run(stored_run.folder).sealed
    assert kind != "link" or (tmp_path / "elsewhere").read_text() == ""


def test_a_store_whose_lock_is_held_is_reported_and_not_waited_for(monkeypatch):
    monkeypatch.setattr("rooflane.eval.record.nulls.LOCK_WAIT_S", 0.1)
    append_nulls(store_path(), [null()])
    with store_path().open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EvaluationError, match="has held the file's lock for 0 s; end it"):
            append_nulls(store_path(), [null(run="r2")])
    assert len(read_nulls(store_path())) == 1


def test_nulls_that_come_into_the_store_while_a_run_goes_on_do_not_make_its_floor(stored_run):
    (own,) = stored_run.nulls()
    earlier = own.model_copy(update={"run": "earlier"})
    append_nulls(store_path(), [earlier])
    stored_run.watch()
    append_nulls(store_path(), [own.model_copy(update={"run": "planted", "log": 0.9})])
    assert stored_run.finish() == ""
    assert [null.run for null in stored_run.stored_nulls()] == ["earlier"]


def test_a_store_whose_older_lines_change_while_a_run_goes_on_is_told_and_not_used(stored_run):
    (own,) = stored_run.nulls()
    append_nulls(store_path(), [own.model_copy(update={"run": "earlier"})])
    stored_run.watch()
    store_path().write_text(store_path().read_text().replace('"log":', '"log":9'))
    assert "null results that were stored before this run changed" in stored_run.finish()
    assert stored_run.stored_nulls() == [] and len(read_nulls(store_path())) == 1


def test_nulls_of_a_folder_of_runs(stored_run, tmp_path):
    (found,) = find_nulls(stored_run.folder.parent)
    labels = {shape.label() for shape in stored_run.meta.shape_list()}
    assert (found.arm, found.processes, set(found.shapes)) == ("eager", 6, labels)
    assert found.log == pytest.approx(0) and found.sd == pytest.approx(0)
    with pytest.raises(EvaluationError, match="holds no run"):
        find_nulls(tmp_path)


def test_the_committed_records_have_a_null(recorded_runs):
    found = [null for run in recorded_runs.values() for null in run.nulls()]
    assert {null.machine for null in found} == {"NVIDIA H200"}
