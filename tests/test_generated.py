"""What is generated from records says what the records say."""

from __future__ import annotations

import shutil
from statistics import median

import pytest

from rooflane.eval import open_run, render_readme_table, update_between_markers

GENERATED = {
    "README.md": "h200-published",
    "briefs/resident.md": "h200-published",
    "briefs/graph_compile.md": "h200-lanes",
    "briefs/gemm_fp16.md": "h200-bf16",
    "briefs/sdpa_flash.md": "h200-half",
    "briefs/chunked.md": "h200-cap30",
}


@pytest.mark.parametrize("page", GENERATED)
def test_tables_stand_as_their_records_write_them(root, tmp_path, page):
    copy = tmp_path / "page.md"
    shutil.copy(root / page, copy)
    text = render_readme_table(open_run(root / "briefs" / "records" / GENERATED[page]).summary())
    assert not update_between_markers(copy, "table", text), f"write it anew with rooflane report ... --readme {page}"


@pytest.fixture(scope="module")
def published(root):
    return open_run(root / "briefs" / "records" / "h200-published")


def test_every_runnable_shape_passes_and_every_process_clears_the_known_best(published):
    summary = published.summary()
    (headline,) = summary.headlines
    assert summary.exit_code() == 0
    assert (headline.passed, headline.shapes) == (13, 13)
    assert len(headline.per_process) >= 3
    assert min(headline.per_process) >= 11.44, "the best published entry, on one RTX 5090"


def test_no_control_that_passes_the_gate_is_faster_in_any_process(published):
    times = {(r.process, r.shape_id, r.arm): r for r in published.records() if r.timing and r.shape_id != "14"}
    for (process, shape, arm), record in times.items():
        if record.kind == "control" and record.status == "ok":
            candidate = times[process, shape, "dispatched"]
            fast, free = (median(sum(row.timing.event_ns, [])) for row in (candidate, record))
            assert fast < free, (process, shape, arm)


def test_the_gate_was_passed_in_five_trials_and_at_ragged_padding(published):
    for record in published.records():
        if record.arm == "dispatched" and record.shape_id != "14":
            assert record.verification.trials == 5 and record.verification.gate.passed
            if record.process == 0:
                assert record.verification.ragged["padding 0.3"].passed


def test_the_oversize_shape_was_compared_in_full_and_its_memory_predicted(published):
    (record,) = [r for r in published.records() if (r.arm, r.shape_id, r.process) == ("dispatched", "14", 0)]
    assert record.verification.gate.passed
    assert record.measured_peak_bytes == pytest.approx(record.predicted_peak_bytes, rel=0.15)
