"""Record files: what is written is read back, torn ends are survived, anything else is refused by line."""

import pytest

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import append_records, read_records
from rooflane.eval.stats.run import RECORDS_FILE, RUN_FILE, open_run


def test_rows_come_back_as_they_were(tmp_path, tiny_shape, make_record):
    rows = [make_record(tiny_shape, process, arm) for process in range(2) for arm in ("eager", "mine")]
    append_records(tmp_path / "r.jsonl", rows[:3])
    append_records(tmp_path / "r.jsonl", rows[3:])
    assert read_records(tmp_path / "r.jsonl") == rows


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_last_line_is_dropped_and_the_next_row_does_not_join_it(tmp_path, tiny_shape, make_record, cut):
    path = tmp_path / "r.jsonl"
    first, second, third = (make_record(tiny_shape, process, "mine") for process in range(3))
    append_records(path, [first, second])
    data = path.read_bytes()
    path.write_bytes(data[: -1 - cut])
    assert read_records(path) == [first]
    append_records(path, [third])
    assert read_records(path) == [first, third]


def test_a_row_missing_only_its_newline_counts(tmp_path, tiny_shape, make_record):
    path = tmp_path / "r.jsonl"
    row = make_record(tiny_shape, 0, "mine")
    append_records(path, [row])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_records(path) == [row]


def test_the_later_of_two_rows_with_one_key_counts(tmp_path, tiny_shape, make_record):
    path = tmp_path / "r.jsonl"
    append_records(path, [make_record(tiny_shape, 0, "mine", (5, 5)), make_record(tiny_shape, 0, "mine", (9, 9))])
    (row,) = read_records(path)
    assert row.timing.event_ns[0][0] == 9


def test_a_line_that_is_no_record_is_refused_by_number(tmp_path, tiny_shape, make_record):
    path = tmp_path / "r.jsonl"
    append_records(path, [make_record(tiny_shape, 0, "mine")])
    with path.open("a") as file:
        file.write('{"schema_version": 1}\n')
    with pytest.raises(EvaluationError, match=r"r\.jsonl:2: not a record"):
        read_records(path)


def test_no_row_names_the_host(tmp_path, tiny_shape, make_record):
    import socket

    from rooflane.eval.record.environment import describe_environment

    facts = describe_environment("cpu")
    assert socket.gethostname() not in str(facts)
    assert {"torch", "python", "rooflane", "commit", "triton"} <= set(facts)


def test_opening_what_is_no_run_says_so(tmp_path, stored_run):
    submission = tmp_path / "submission"
    submission.mkdir()
    (submission / "submission.json").write_text("{}")
    with pytest.raises(EvaluationError, match="a submission, no run; `rooflane submit --resume"):
        open_run(submission)
    with pytest.raises(EvaluationError, match="not a run"):
        open_run(tmp_path)
    (stored_run.folder / RUN_FILE).write_text('{"id": 1}')
    with pytest.raises(EvaluationError, match="not a run of this version"):
        open_run(stored_run.folder)
    assert RECORDS_FILE == "records.jsonl"
