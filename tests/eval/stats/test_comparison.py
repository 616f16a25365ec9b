"""Comparing by latency: paired in one run, Welch across two, and never silently over fewer shapes."""

import math

import pytest

from rooflane.eval import EvaluationError, compare
from rooflane.eval.record.nulls import NULLS_FILE, append_nulls
from rooflane.eval.stats.run import create_run
from rooflane.shapes import Shape


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


def test_shapes_that_share_an_id_alone_are_not_compared(tmp_path, make_meta, full_rows):
    runs = []
    for batch in (2, 4):
        meta = make_meta([Shape("a", batch, 8, 16, 2, 16, 1), Shape("b", 1, 16, 16, 2, 16, 1)])
        run = create_run(tmp_path / str(batch), meta)
        run.append(full_rows(meta, {"mine": 2.0}))
        runs.append(str(run.folder))
    found = compare(*runs)
    assert [pair.shape for pair in found.pairs] == ["b"]
    assert found.left_out == {"a": "it is 2x8x16 h2 f16 l1 causal in one run and 4x8x16 h2 f16 l1 causal in the other"}
    assert found.geomean is None and found.verdict == "none"


def test_runs_timed_in_different_ways_are_not_judged(tmp_path, stored_run, full_rows):
    def other(**settings):
        meta = stored_run.meta.model_copy(update={"settings": stored_run.meta.settings | settings})
        run = create_run(tmp_path / "-".join(settings), meta)
        run.append(full_rows(meta, {"mine": 4.0}))
        return compare(str(run.folder), str(stored_run.folder))

    found = other(inputs="fixed")
    assert found.geomean.low > 1 and found.verdict == "none"
    assert "fixed inputs, the other on fresh ones" in found.why
    assert all(pair.verdict == "none" for pair in found.pairs)
    found = other(budget_s=0.25)
    assert found.verdict == "faster"
    assert any("budget_s 0.25 and " in note for note in found.notes)


def test_a_wrong_candidate_is_not_compared(stored_run, make_record):
    for shape in stored_run.meta.shape_list():
        stored_run.append([make_record(shape, 1, "mine", (1, 1), status="incorrect")])
    with pytest.raises(EvaluationError, match="no shape that both measured"):
        compare("mine", "sdpa", run=stored_run)


def test_an_unknown_arm_lists_those_there_are(stored_run):
    with pytest.raises(EvaluationError, match="has: eager, mine, identity, sdpa"):
        compare("mine", "other", run=stored_run)


def test_holm_holds_over_the_shapes_and_both_floors_count(make_meta, full_rows, make_record, tmp_path):
    shapes = [Shape(str(index), 2, 8, 16, 2, 16, 1) for index in range(14)]
    meta = make_meta(shapes)
    rows = full_rows(meta, {"mine": 1.0, "sdpa": 1.0})
    # One shape of fourteen is faster with p about 0.02: alone it would count, among fourteen it does not.
    times = [960_000, 1_010_000, 950_000, 985_000, 1_005_000, 970_000]
    changed = {
        (process, "3", "mine"): make_record(shapes[3], process, "mine", (time,) * 2)
        for process, time in enumerate(times)
    }
    run = create_run(tmp_path / "runs", meta)
    run.append([changed.get(row.key, row) for row in rows])
    found = compare("mine", "eager", run=run)
    (pair,) = [pair for pair in found.pairs if pair.shape == "3"]
    assert pair.ratio.low > 1 and pair.holm_p > 0.05
    assert pair.verdict == "inconclusive" and "among all shapes" in pair.why


def test_a_floor_stops_a_difference_that_two_campaigns_cannot_tell(tmp_path, stored_run, make_record, full_rows):
    # The null of the second campaign strays by 6%: a gain of 4% is detected, and below the floor.
    rows = full_rows(stored_run.meta, {"mine": 2.08, "sdpa": 1.25})
    noisy = [0.94, 1.06, 1.05, 0.95, 1.0, 1.01]
    rows = [
        make_record(shape, row.process, "identity", (round(1e6 * noisy[row.process]),) * 2)
        if row.arm == "identity"
        else row
        for row in rows
        for shape in stored_run.meta.shape_list()
        if shape.id == row.shape_id
    ]
    other = create_run(tmp_path / "more", stored_run.meta)
    other.append(rows)
    found = compare(str(other.folder), str(stored_run.folder))
    assert found.geomean.low > 1
    assert found.verdict == "inconclusive" and "detected, below the floor" in found.why


def test_what_the_campaign_forbids_no_comparison_claims(stored_run, make_record, tmp_path):
    quick = create_run(
        tmp_path / "quick", stored_run.meta.model_copy(update={"settings": stored_run.meta.settings | {"quick": True}})
    )
    quick.append(stored_run.records())
    assert compare("mine", "sdpa", run=quick).verdict == "faster", "every process says 1.6x"
    assert compare("mine", "mine", run=quick).verdict == "none"
    shape = stored_run.meta.shape_list()[0]
    tampered = make_record(shape, 2, "mine", (9, 9), integrity=["the clock was replaced"])
    stored_run.append([tampered])
    found = compare("mine", "sdpa", run=stored_run)
    assert "evidence of manipulation" in found.left_out["a"]
    assert (found.geomean, found.verdict) == (None, "none")


def test_a_contract_stands_in_the_notes(stored_run, make_record):
    stored_run.append([make_record(stored_run.meta.shape_list()[0], 0, "mine", (500_000,) * 2, contract="overwrites")])
    assert "right only under a contract" in " ".join(compare("mine", "sdpa", run=stored_run).notes)


def test_a_shape_a_control_never_owed_takes_no_mean_away(make_meta, full_rows, make_record, tmp_path):
    a, huge = Shape("a", 2, 8, 16, 2, 16, 1), Shape("huge", 32, 100000, 1024, 16, 1024, 2)
    meta = make_meta([a, huge])
    rows = [row for row in full_rows(meta, {"mine": 2.0, "sdpa": 1.25}) if row.shape_id == "a"]
    for process in range(6):
        rows.append(make_record(huge, process, "eager", None, status="infeasible", reason="41 TB"))
        rows.append(make_record(huge, process, "mine", (9_000_000, 9_000_000)))
    run = create_run(tmp_path / "runs", meta)
    run.append(rows)
    found = compare("mine", "sdpa", run=run)
    assert (found.left_out, found.verdict) == ({}, "faster")
    assert "not planned on shape huge" in " ".join(found.notes)
    # Two campaigns of one candidate meet on the huge shape too, where no null ran; the floor comes from the others.
    other = create_run(tmp_path / "more", meta)
    other.append(rows)
    both = compare(str(run.folder), str(other.folder))
    assert [pair.shape for pair in both.pairs] == ["a", "huge"]
    assert both.floor is not None and both.geomean.centre == pytest.approx(1.0)


def test_nulls_that_both_runs_kept_count_once(tmp_path, stored_run, make_meta, full_rows):
    (null,) = stored_run.nulls()
    kept = [null.model_copy(update={"run": f"run {index}", "log": 0.004}) for index in range(18)]
    # One run strays. Counted from both sides it would be two that agree.
    kept.append(null.model_copy(update={"run": "strays", "log": 0.4}))
    other = create_run(tmp_path / "more", stored_run.meta.model_copy(update={"id": "other"}))
    other.append(full_rows(other.meta, {"mine": 4.0}))
    for run in (stored_run, other):
        append_nulls(run.folder / NULLS_FILE, kept)
    found = compare(str(other.folder), str(stored_run.folder))
    assert (found.floor.count, found.floor.provisional) == (19, False)
    assert found.floor.value == pytest.approx(math.expm1(0.004))


@pytest.mark.parametrize("process", [0, 3, 5])
def test_a_process_without_a_clean_block_of_a_shape_costs_two_runs_no_mean(tmp_path, stored_run, full_rows, process):
    state = {"blocks": [{"sm_mhz": 1980, "throttle": [], "other_processes": 1}]}
    other = create_run(tmp_path / "more", stored_run.meta.model_copy(update={"id": "other"}))
    other.append(
        row.model_copy(update={"telemetry": state}) if (row.shape_id, row.process) == ("a", process) else row
        for row in full_rows(other.meta, {"mine": 4.0})
    )
    found = compare(str(other.folder), str(stored_run.folder))
    assert found.geomean.centre == pytest.approx(2.0, rel=0.02) and found.verdict == "faster"
    assert found.geomean.count == 6
