"""What is generated from records says what the records say."""

from __future__ import annotations

import json
import shutil
from statistics import median

import pytest

from rooflane.dispatch import load_profile
from rooflane.eval import open_run, render_readme_table, update_between_markers
from rooflane.families import get_family
from rooflane.shapes import load_shapes

GENERATED = {
    "README.md": "h200-published",
    "briefs/resident.md": "h200-resident",
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


def test_the_newest_record_passes_the_gate_wherever_it_was_timed_and_claims_no_verdict(root):
    run = open_run(root / "briefs" / "records" / "h200-resident")
    timed = [record for record in run.records() if record.arm == "dispatched" and record.timing]
    assert {record.shape_id for record in timed} == {str(number) for number in range(1, 14)}
    assert all(record.verification.gate.passed and not record.integrity for record in timed)
    (headline,) = run.summary().headlines
    assert headline.partial == 10 and headline.verdict == "none"


def test_the_seeds_record_holds_every_shape_the_resident_family_claims(root):
    worst = json.loads((root / "briefs" / "records" / "h200-seeds.json").read_text())["worst_use"]
    profile, family = load_profile("h200"), get_family("resident")
    shapes = [shape for name in ("published", "neighbours") for shape in load_shapes(root / "shapes" / f"{name}.csv")]
    claimed = [shape.id for shape in shapes if shape.dtype == "float32" and family.supports(shape, profile) is None]
    assert set(worst) == set(claimed)
    assert max(use for uses in worst.values() for use in uses.values()) < 1
