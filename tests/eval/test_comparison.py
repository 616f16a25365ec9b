"""Comparing by latency: paired in one run, Welch across two, and never silently over fewer shapes."""

import pytest

from rooflane.eval import EvaluationError, compare
from rooflane.eval.run import create_run


def test_arms_of_one_run_are_paired(stored_run):
    found = compare("mine", "sdpa", run=stored_run)
    assert found.method == "paired by process"
    assert [pair.ratio.centre for pair in found.pairs] == pytest.approx([1.6, 1.6])
    # Eager drifts 1% between processes; pairs do not see it.
    assert found.geomean.high / found.geomean.low == pytest.approx(1.0, abs=1e-4)
    assert found.verdict == "faster"
    assert compare(f"{stored_run.folder}::sdpa", f"{stored_run.folder}").verdict == "slower"


def test_two_runs_are_compared_by_welch(tmp_path, stored_run, full_rows):
    other = create_run(tmp_path / "more", stored_run.meta)
    other.append(full_rows(other.meta, {"mine": 4.0}))
    found = compare(str(other.folder), str(stored_run.folder))
    assert found.method == "Welch, two runs"
    assert found.geomean.centre == pytest.approx(2.0, rel=1e-4)
    assert found.geomean.low < 2 < found.geomean.high
    assert found.verdict == "faster"


def test_equal_arms_are_equivalent(stored_run):
    assert compare("identity", "identity", run=stored_run).verdict == "equivalent"


def test_a_shape_only_one_side_has_takes_the_mean_away(tmp_path, stored_run, make_record):
    other = create_run(tmp_path / "more", stored_run.meta)
    other.append([row for row in stored_run.records() if row.shape_id == "a"])
    found = compare(str(other.folder), str(stored_run.folder))
    assert set(found.left_out) == {"b"}
    assert found.geomean is None


def test_a_wrong_candidate_is_not_compared(stored_run, make_record):
    for shape in stored_run.meta.shape_list():
        stored_run.append([make_record(shape, 1, "mine", (1, 1), status="incorrect")])
    with pytest.raises(EvaluationError, match="no shape that both measured"):
        compare("mine", "sdpa", run=stored_run)


def test_an_unknown_arm_lists_those_there_are(stored_run):
    with pytest.raises(EvaluationError, match="has: eager, mine, identity, sdpa"):
        compare("mine", "other", run=stored_run)
