"""Checks that were not run: the run is incomplete, and the headline, the state and the problems say which."""

import pytest

from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.record.records import Record, Verification
from rooflane.eval.report.detail_tables import finding_table
from rooflane.eval.report.tables import headline_lines
from rooflane.eval.stats.summary import summarise
from rooflane.shapes import Shape

A, B = Shape("a", 2, 8, 16, 2, 16, 1), Shape("b", 1, 16, 16, 2, 16, 1)
MENDS = "; a longer `--time-budget` leaves more time for checks"
SPENT = "its time for checks was spent"
MISSED = [f"{name}: {SPENT}" for name in ("accuracy trial 5", "mask check 'holes'", "promise 'odd offset'", "one more")]


@pytest.fixture
def run(make_meta, full_rows):
    """Return a function that summarises a run in which some rows' verification is another."""

    def summary(changed, **verification):
        meta = make_meta([A, B])
        rows = [
            row.model_copy(update={"verification": Verification(**({"status": "ok", "trials": 5} | verification))})
            if (row.shape_id, row.arm, row.process) in changed
            else row
            for row in full_rows(meta, {"mine": 2.0})
        ]
        return summarise(meta, rows)

    return summary


def test_a_missed_check_makes_the_run_incomplete_and_is_named_everywhere(run):
    summary = run({("b", "mine", 0)}, missed=MISSED)
    assert summary.exit_code() is ExitCode.INCOMPLETE
    assert summary.exit_code("faster", accept_contract=True) is ExitCode.INCOMPLETE
    assert summary.state == "incomplete: 4 checks were not run, on shape b"
    named = "(accuracy trial 5, mask check 'holes', promise 'odd offset' and 1 more: its time for checks was spent)"
    assert summary.problems() == [f"shape b ({B.label()}): 4 checks were not run {named} of mine{MENDS}"]
    (headline,) = summary.headlines
    # The times are as good as ever; what they are worth is open.
    assert (headline.verdict, headline.ratio_verdict) == ("none", "faster")
    assert headline.why == f"4 checks were not run {named} (shape b)"
    assert "4 checks were not run" in headline_lines(summary)[0][0]
    assert [row[2] for row in finding_table(summary).rows] == [f"not run: {line}" for line in MISSED]


def test_one_check_reads_as_one(run):
    summary = run({("a", "mine", 0)}, missed=MISSED[:1])
    assert summary.state == "incomplete: 1 check was not run, on shape a"
    assert "1 check was not run (accuracy trial 5: its time for checks was spent) of mine" in summary.problems()[0]


def test_checks_of_several_shapes_and_processes_add_up(run):
    summary = run({("a", "mine", 0), ("a", "mine", 1), ("b", "mine", 0)}, missed=MISSED[:2])
    # The same check missed in two processes of one shape is one line of its cell.
    assert summary.state == "incomplete: 4 checks were not run, on shape a, b"
    assert len(summary.problems()) == 2
    assert summary.headlines[0].why.endswith("(shape a, b)")


@pytest.mark.parametrize(
    ("found", "code", "verdict"),
    [
        ({"status": "ok", "contract": ["an input updated in place is not seen"]}, ExitCode.CONTRACT, "contract"),
        ({"status": "ok"}, ExitCode.INCOMPLETE, "none"),
    ],
)
def test_what_was_seen_comes_before_what_was_not_looked_at(run, found, code, verdict):
    summary = run({("a", "mine", 0)}, missed=MISSED, **found)
    assert summary.exit_code() is code
    assert summary.headlines[0].verdict == verdict
    assert summary.exit_code(accept_contract=True) is ExitCode.INCOMPLETE


def test_a_wrong_output_comes_before_a_missed_check(make_meta, full_rows, make_record):
    meta = make_meta([A, B])
    rows = full_rows(meta, {"mine": 2.0})
    wrong = make_record(A, 0, "mine", None, status="incorrect", reason="wrong")
    missed = Verification(status="ok", missed=MISSED)
    rows = [wrong if row.key == wrong.key else row for row in rows]
    rows = [row.model_copy(update={"verification": missed}) if row.key == (0, "b", "mine") else row for row in rows]
    assert summarise(meta, rows).exit_code() is ExitCode.INCORRECT


def test_a_control_that_missed_a_check_is_context_and_no_gap(run):
    summary = run({("a", "sdpa", 0)}, missed=MISSED)
    assert summary.exit_code() is ExitCode.COMPLETE
    assert [row[2] for row in finding_table(summary).rows] == [f"not run: {line}" for line in MISSED]


def test_a_record_of_before_has_missed_nothing(make_record):
    text = make_record(A, 0, "mine").model_dump_json(exclude={"verification": {"missed"}})
    assert "missed" not in text
    assert Record.model_validate_json(text).verification.missed == []
