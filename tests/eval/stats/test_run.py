"""A run as a frame: one row a timed call, and the report's times and speedups again from it."""

import numpy as np
import pytest

from rooflane.eval.stats.run import CLOCKS

COLUMNS = ["shape", "arm", "kind", "process", "round", "call", "clock", "ns", "clean", "status", "verdict"]


def calls(value):
    """Return how many numbers a timing's list holds, by round or not."""
    return sum(map(calls, value)) if value and isinstance(value[0], list) else len(value)


def test_the_frame_of_every_record_has_a_row_a_call_and_gives_the_reports_figures(recorded_runs):
    assert recorded_runs
    for run in recorded_runs.values():
        frame, summary = run.frame(), run.summary()
        timings = [record.timing for record in run.records() if record.timing]
        assert list(frame.columns) == COLUMNS
        assert len(frame) == sum(calls(getattr(timing, f"{clock}_ns")) for timing in timings for clock in CLOCKS)
        event = frame[(frame.clock == "event") & frame.clean & (frame.kind != "reference")]
        medians = event.groupby(["shape", "arm", "process", "round"]).ns.median()
        logs = np.log(medians).groupby(["shape", "arm", "process"]).mean()
        means = np.exp(logs.groupby(["shape", "arm"]).mean()) / 1e6
        verdicts = frame.groupby(["shape", "arm"]).verdict.unique()
        for row in summary.rows:
            for candidate in run.meta.candidates:
                cell = row.cells[candidate]
                if row.eager.event_ms is None or cell.base_ms is None:
                    continue
                assert list(verdicts[row.shape.id, candidate]) == [str(cell.verdict)]
                pair = logs[row.shape.id]["eager"] - logs[row.shape.id][candidate]
                assert np.exp(pair.mean()) == pytest.approx(cell.speedup.centre, rel=1e-9)
                assert means[row.shape.id, candidate] == pytest.approx(cell.event_ms.centre, rel=1e-9)
                assert means[row.shape.id, "eager"] == pytest.approx(cell.base_ms, rel=1e-9)


def test_an_arm_without_times_has_no_row_and_a_failed_process_its_status(stored_run, make_record):
    shape = stored_run.meta.shape_list()[0]
    stored_run.append([make_record(shape, 1, "mine", None, status="error", reason="because")])
    stored_run.append([make_record(shape, 2, "mine", (900, 900), status="incorrect", reason="wrong")])
    frame = stored_run.frame()
    mine = frame[(frame["shape"] == "a") & (frame.arm == "mine")]
    assert 1 not in set(mine.process) and set(mine[mine.process == 2].status) == {"incorrect"}
    assert list(mine[mine.process == 2].ns) == [900] * 6 and list(mine[mine.process == 2].call) == [0, 1, 2] * 2
